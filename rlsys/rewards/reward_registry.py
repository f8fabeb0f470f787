"""Lookup of reward functions by name: a ready-made one, `module:name` or `path/file.py:name`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

from rlsys.errors import ConfigError
from rlsys.util.importing import import_from_here


class ReadyMade(NamedTuple):
    """Location of a ready-made function, and its optional package."""

    module: str
    name: str
    package: str = ""
    extra: str = ""
    """Extra of rlsys that installs the package."""


JUDGE = "llm_judge"
JUDGE_TIMEOUT_S = 50.0
"""Default deadline of a request of `llm_judge`, seconds."""
SERVER = "http"
SERVER_TIMEOUT_S = 30.0
"""Default deadline of a request of `http`, seconds."""

_file_folders: list[str] = []
"""Folders of the files that were imported, which are at the end of the search path; that of the last one first."""

BUILTIN: Mapping[str, ReadyMade] = {
    "exact": ReadyMade("rlsys.rewards.text_rewards", "exact"),
    "zero": ReadyMade("rlsys.rewards.text_rewards", "zero"),
    "regex": ReadyMade("rlsys.rewards.text_rewards", "Regex"),
    "format": ReadyMade("rlsys.rewards.text_rewards", "Format"),
    "overlong": ReadyMade("rlsys.rewards.length_rewards", "Overlong"),
    "parallel": ReadyMade("rlsys.rewards.length_rewards", "Parallel"),
    "target_length": ReadyMade("rlsys.rewards.length_rewards", "TargetLength"),
    "math": ReadyMade("rlsys.rewards.math_reward", "math", "math-verify", "math"),
    "verl": ReadyMade("rlsys.rewards.verl_rewards", "verl", "math-verify", "math"),
    JUDGE: ReadyMade("rlsys.rewards.llm_judge", "LlmJudge", "openai", "judge"),
    SERVER: ReadyMade("rlsys.rewards.reward_server", "RewardServer"),
    "reasoning_gym": ReadyMade("rlsys.rewards.reasoning_gym_reward", "ReasoningGymReward", "reasoning-gym", "gym"),
}
"""Reward functions that a configuration names without a module: `reward.fn: exact`. Imported on first use."""


def find(spec: str) -> Callable[..., object]:
    """Find the function or class that `spec` names.

    Raises `ConfigError` if it does not exist, or if a ready-made function lacks its package.
    """
    if ready := BUILTIN.get(spec):
        try:
            return getattr(importlib.import_module(ready.module), ready.name)
        except ImportError as error:
            remedy = f"pip install {ready.package} (extra `{ready.extra}`)"
            raise ConfigError(f"reward {spec!r}: {error}; {remedy}") from error
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name):
        close = difflib.get_close_matches(spec, BUILTIN, n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise ConfigError(f"reward {spec!r}: {hint}give {', '.join(BUILTIN)}, `module:name` or `path/file.py:name`")
    import_from_here()
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward {spec!r}: cannot import {place}: {describe_error(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise ConfigError(f"reward {spec!r}: {place} has no function {name}; it has {', '.join(functions) or 'none'}")
    return function


def describe_error(error: BaseException, *, through: int = -1) -> str:
    """Describe an exception and its place: `ValueError: no digits at rewards.py:12`.

    The place is the innermost frame, or the faulty line for a `SyntaxError`; frames of the import system do not count.
    With `through`, the line of that frame (0 is the outermost) precedes it.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_import(f.filename)]
    places = [f"{f.filename}:{f.lineno}" for f in [*frames[through:][:1], *frames[-1:]]]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (an error of the user's own class)
        text = "its text cannot be had"
    if isinstance(error, SyntaxError) and error.filename:
        text, places = error.msg, [*places[:-1], f"{error.filename}:{error.lineno}"]
    return f"{type(error).__name__}: {text}" + (f" at {', in '.join(dict.fromkeys(places))}" if places else "")


def _is_import(file: str) -> bool:
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file (looked in {Path.cwd()})")
    file = path.resolve()
    name = f"rlsys_reward_{path.stem}_{xxh3_64_hexdigest(bytes(file))}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    _search_folder_of(file)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _search_folder_of(file: Path) -> None:
    """Append the folder of a file to the search path, before the folders of files that were imported earlier.

    A module of an earlier folder gives its name to a neighbour of this file with the same name.
    """
    folder = str(file.parent)
    others = [other for other in _file_folders if other != folder]
    sys.path[:] = [place for place in sys.path if place not in _file_folders] + [folder, *others]
    _file_folders[:] = [folder, *others]
    for neighbour in file.parent.glob("*.py"):
        known = getattr(sys.modules.get(neighbour.stem), "__file__", None)
        if known is not None and str(Path(known).parent) in others:
            del sys.modules[neighbour.stem]
