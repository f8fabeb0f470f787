"""Checks that passed before: a second start with the same model, tasks and settings does not import what they need.

Only checks that passed are remembered, by a hash of all that they read, in `checks` under `XDG_CACHE_HOME`/rlsys, or
`~/.cache/rlsys`. A model of the hub is checked at each start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import orjson

from rlsys.config import Config
from rlsys.types import Task

MOST = 200
"""Checks that are remembered, the newest ones."""
_READ = ("model", "reference", "critic", "rollout", "data", "train", "algorithm")
"""Sections that the checks read."""


class PassedChecks:
    """The remembered checks of one start."""

    def __init__(self, config: Config, parts: Iterable[tuple[str, Sequence[Task]]], folder: Path | None = None) -> None:
        """`parts` are the tasks to check, by the key of their data. `folder`: where to remember, instead of there."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder or cache / "rlsys" / "checks"
        self._name = _digest(config, parts)

    @property
    def is_known(self) -> bool:
        """True if these checks have passed before."""
        return self._name is not None and (self._folder / self._name).is_file()

    def remember(self) -> None:
        """Remember that they passed, if the folder can be written."""
        if self._name is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / self._name).touch()
            for old in sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-MOST]:
                old.unlink()
        except OSError:
            return  # the next start checks again


def _digest(config: Config, parts: Iterable[tuple[str, Sequence[Task]]]) -> str | None:
    """Return a hash of everything that the checks read; None if a model is not in a folder."""
    folders = [config.model.path, config.reference.path, config.critic.path]
    models = [Path(folder) for folder in folders if folder is not None]
    if not all(folder.is_dir() for folder in models):
        return None
    files = ((path, path.stat()) for folder in models for path in sorted(folder.iterdir()))
    sections = config.model_dump(mode="json", include=set(_READ))
    sections["rollout"]["chat"] = config.rollout.chat.with_text().model_dump(mode="json")
    read = {
        "versions": [version("rlsys"), version("transformers")],
        "sections": sections,
        "files": [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files],
        "tasks": [
            (key, [(task.id, task.prompt, task.system, task.template_kwargs) for task in tasks]) for key, tasks in parts
        ],
    }
    return sha256(orjson.dumps(read, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)).hexdigest()
