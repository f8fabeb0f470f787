"""Reward functions that a Python program gives as they are, such as those of a notebook's cells.

A configuration names one `given:NAME`. The function itself goes to the reward processes by value, and is not saved: a
run that is resumed must be given it again.
"""

from __future__ import annotations

from collections.abc import Callable

import cloudpickle

from rlsys.errors import ConfigError

PREFIX = "given:"
_given: dict[str, Callable[..., object]] = {}


def give(function: Callable[..., object]) -> str:
    """Register a function under its name, and return its name in a configuration. A later function of the same name
    replaces it. Raises `ConfigError` for a value that cannot be called, or has no name."""
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise ConfigError(
            f"reward: {function!r} is no function with a name: define it with `def`, or give the name of one, such as "
            "`exact` or `module:name`"
        )
    _given[name] = function
    return f"{PREFIX}{name}"


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
