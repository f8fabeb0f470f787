"""How a reward function is found and called: a plain function of one episode, whose arguments are picked by name.

    def reward(completion: str, answer: str, level: str = "easy") -> float: ...

What it may ask for: `completion` (text of the last turn of the root agent), `prompt`, `answer`, `info`, `task_id`, and
any column of the row. It returns a finite number, or None if it does not apply. Everything else is a failure with a
reason, never a reward of 0.
"""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import SupportsFloat

from rlsys.errors import ConfigError
from rlsys.rewards.builtin import BUILTIN
from rlsys.types import Score, Task

ALWAYS = ("completion", "prompt", "answer", "info", "task_id")
"""Names every reward function can ask for, whatever the columns of the row."""


@dataclass(frozen=True)
class RewardFunction:
    """A function, and the arguments it wants."""

    spec: str
    """Where it was found, e.g. `exact` or `rewards.py:judge`."""
    function: Callable[..., object]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool
    """Has `**columns`: it is given everything there is."""

    @classmethod
    def load(cls, spec: str) -> RewardFunction:
        """Find `exact`, `module:name` or `path/file.py:name`.

        Raises `ConfigError` if there is no such function, or if it cannot be called by names.
        """
        function = _found(spec)
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"reward {spec!r} is an async function: give a plain one, it has a process of its own")
        parameters = inspect.signature(function).parameters.values()
        unnamed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
        if unnamed:
            raise ConfigError(f"reward {spec!r}: arguments are passed by name, which {', '.join(unnamed)} cannot be")
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        return cls(
            spec=spec,
            function=function,
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def check(self, columns: Iterable[str]) -> None:
        """Raises `ConfigError` if an argument without a default is neither always there nor one of these columns."""
        available = [*ALWAYS, *columns]
        missing = [name for name in self.required if name not in available]
        if missing:
            raise ConfigError(
                f"reward {self.spec!r} asks for {', '.join(missing)}, which no row has; "
                f"available are {', '.join(dict.fromkeys(available))}"
            )

    def score(self, task: Task, completion: str) -> Score:
        """Judge one completion. Whatever the function raises is a score without a value that says where."""
        given: Mapping[str, object] = {
            **task.info,
            "completion": completion,
            "prompt": task.prompt,
            "answer": task.answer,
            "info": task.info,
            "task_id": task.id,
        }
        missing = [name for name in self.required if name not in given]
        if missing:
            return Score(None, f"the row of task {task.id} has no {', '.join(missing)}")
        if not self.takes_all:
            given = {name: given[name] for name in (*self.required, *self.optional) if name in given}
        try:
            return score_of(self.function(**given))
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the boundary to user code)
            return Score(None, f"raised {_described(error, through=1)}")


def score_of(value: object) -> Score:
    """The score a returned value stands for: any finite number, NumPy's and one-element tensors included."""
    if value is None:
        return Score(None, "not applicable")
    if not isinstance(value, SupportsFloat):
        return Score(None, f"returned {_shown(value)}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return Score(None, f"returned {_shown(value)}, not a number")
    return Score(number) if math.isfinite(number) else Score(None, f"returned {number}")


def _found(spec: str) -> Callable[..., object]:
    if spec in BUILTIN:
        return BUILTIN[spec]
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"reward {spec!r}: give {', '.join(BUILTIN)}, `module:name` or `path/file.py:name`")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else import_module(place)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward {spec!r}: cannot import {place}: {_described(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise ConfigError(f"reward {spec!r}: {place} has no function {name}; it has {', '.join(functions) or 'none'}")
    return function


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file (looked in {Path.cwd()})")
    name = f"rlsys_reward_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _described(error: BaseException, *, through: int = -1) -> str:
    """What was raised and where: `ValueError: no digits at rewards.py:12`.

    The place is the innermost line; with `through`, the line of that frame (0 is the outermost) is named before it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = dict.fromkeys(f"{f.filename}:{f.lineno}" for f in [*frames[through:][:1], frames[-1]])
    return f"{type(error).__name__}: {error} at {', in '.join(places)}"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
