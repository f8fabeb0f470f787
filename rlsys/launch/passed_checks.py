"""Checks that passed before, and the tasks that they left out: a second start with the same model, tasks and settings
does not import what they need.

Only checks that passed are remembered, by a hash of what they read, in `checks` under `XDG_CACHE_HOME`/rlsys, or
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

CHECKS = 2
"""Number of the checks: the next one whenever they find more than before."""
MOST = 200
"""Checks that are remembered, the newest ones."""
_READ = {"model", "reference", "critic", "rollout", "data", "train", "algorithm"}
"""Sections that the checks read."""


class PassedChecks:
    """The remembered checks of one model in one start."""

    def __init__(
        self,
        config: Config,
        parts: Iterable[tuple[str, Sequence[Task]]],
        folder: Path | None = None,
        *,
        is_trained: bool = True,
    ) -> None:
        """`parts` are the tasks to check, by the key of their data; a model that `is_trained` is checked for more.
        `folder`: where to remember; by default, see the module."""
        self._path: Path | None = None
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            if digest := _digest(config, parts, is_trained=is_trained):
                self._path = (folder or cache / "rlsys" / "checks") / digest
        except (OSError, RuntimeError):
            return  # a file of the model that cannot be read, or no home: check again

    @property
    def is_known(self) -> bool:
        """True if these checks have passed before."""
        return self.too_long is not None

    @property
    def too_long(self) -> frozenset[str] | None:
        """Ids of the tasks that were found too long when the checks passed; None if they have not."""
        try:
            return frozenset(orjson.loads(self._path.read_bytes())) if self._path is not None else None
        except (OSError, orjson.JSONDecodeError):
            return None

    def remember(self, too_long: Iterable[str] = ()) -> None:
        """Remember that they passed, and which tasks are too long, if the folder can be written."""
        if self._path is None:
            return
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(orjson.dumps([*too_long]))
            for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-MOST]:
                old.unlink()
        except OSError:
            return  # the next start checks again


def _digest(config: Config, parts: Iterable[tuple[str, Sequence[Task]]], *, is_trained: bool) -> str | None:
    """Return a hash of what the checks read; None if a model is not in a folder. Raises `OSError`."""
    folders = [config.model.path, config.reference.path, config.critic.path]
    models = [Path(folder) for folder in folders if folder is not None]
    if not all(folder.is_dir() for folder in models):
        return None
    files = ((path, path.stat()) for folder in models for path in sorted(folder.rglob("*")))
    sections = config.model_dump(mode="json", include=_READ)
    sections["rollout"]["chat"] = config.rollout.chat.with_text().model_dump(mode="json")
    read = {
        "versions": [CHECKS, version("rlsys"), version("transformers")],
        "is_trained": is_trained,
        "plugins": [config.rollout.workflow.opens_with_prompt, sorted(config.algorithm.columns), config.has_reference],
        "sections": sections,
        "files": [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files],
        "tasks": [(key, [_read_of(task) for task in tasks]) for key, tasks in parts],
    }
    return sha256(orjson.dumps(read, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)).hexdigest()


def _read_of(task: Task) -> tuple[object, ...]:
    return task.id, task.prompt, task.system, task.template_kwargs, task.tools
