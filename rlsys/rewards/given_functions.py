"""Reward functions that a Python program gives as they are, such as those of a notebook's cells.

A configuration names one `given:NAME`. The function itself goes to the reward processes by value, and is not saved: a
run that is resumed must be given it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import cloudpickle

from rlsys.errors import ConfigError

PREFIX = "given:"
_given: dict[str, Callable[..., object]] = {}


def give(function: Callable[..., object], taken: Collection[str] = ()) -> str:
    """Register a function, a lambda, a partial, a method or an instance, and return its name in a configuration, which
    is none of `taken`. A later function of the same name replaces it. Raises `ConfigError` for a value that cannot be
    called."""
    if not callable(function):
        raise ConfigError(
            f"reward: {function!r} is no function: give one, or the name of one, such as `exact` or `module:name`"
        )
    base = _name_of(function)
    names = (base, *(f"{base}_{number}" for number in range(2, len(taken) + 3)))
    name = next(name for name in names if f"{PREFIX}{name}" not in taken)
    _given[name] = function
    return f"{PREFIX}{name}"


def _name_of(function: Callable[..., object]) -> str:
    """Return the name of what is called: of a function, of that of a partial, of the class of an instance."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "reward"


def code_of(spec: str) -> bytes | None:
    """Return a given function by value; None for one that other processes find by its name.

    Raises `ConfigError` if this program was not given it, or if it cannot be sent.
    """
    if not spec.startswith(PREFIX):
        return None
    name = spec.removeprefix(PREFIX)
    if name not in _given:
        raise ConfigError(
            f"reward.fn: {spec} was a function of a Python program, which is not saved: give it again, as in "
            f"`rlsys.train(config, reward={name})`, or set reward.fn to `module:name`"
        )
    try:
        return cloudpickle.dumps(_given[name])
    except Exception as error:
        text = f"reward {name}: it cannot be sent to other processes: {type(error).__name__}: {error}"
        raise ConfigError(f"{text}; open files, locks and connections inside the function") from error
