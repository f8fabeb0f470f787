"""Folders of runs and their files. Only files inside the served folder are ever opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import orjson

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.run_files import inside
from rlsys.util.files import CONFIG
from rlsys.util.regular_files import read_regular

EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
EVALUATIONS = "evaluations"

_LOCK = "run.lock"
"""Names the process that writes to the folder, see `rlsys.launch.run_lock`."""
_MOST_LOCK_BYTES = 2**16
_DEPTH = 3
"""Depth of folders to search for runs."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk."""

    root: Path
    """Served folder, without links."""
    id: str

    @property
    def path(self) -> Path:
        return self.root / self.id

    @property
    def name(self) -> str:
        return self.path.name

    def file(self, *parts: str) -> Path | None:
        """Plain file in the run; None if it does not exist, or is outside the served folder."""
        return inside(self.root, self.path.joinpath(*parts))

    def folders(self, *parts: str) -> list[str]:
        """Names of the subfolders of a folder in the run; none of one that leads out of the served folder."""
        path = self.path.joinpath(*parts)
        return _folders(path) if Path(os.path.realpath(path)).is_relative_to(self.root) else []

    def files(self, *parts: str, ending: str) -> list[str]:
        """Names of the plain files of a folder in the run that end so, without links; see `folders`."""
        path = self.path.joinpath(*parts)
        try:
            if not Path(os.path.realpath(path)).is_relative_to(self.root):
                return []
            with os.scandir(path) as entries:
                names = [e.name for e in entries if e.name.endswith(ending) and e.is_file(follow_symlinks=False)]
        except OSError:
            return []
        return sorted(name for name in names if as_text(name) == name)

    @property
    def is_run(self) -> bool:
        """True if the folder has a file that runs write."""
        return any(self.file(name) for name in (EVENTS, METRICS, CONFIG))

    @property
    def policies(self) -> list[RunFolder]:
        """Runs of the policies, in a run of several."""
        ids = (str(PurePosixPath(self.id, "policies", name)) for name in _folders(self.path / "policies"))
        return [folder for run in ids if (folder := RunFolder(self.root, run)).is_run]

    @property
    def num_bytes(self) -> int:
        """Bytes written so far by the run and its policies; changes with every write."""
        own = sum(size_of(self.path / name) for name in (EVENTS, METRICS, CONFIG))
        return own + sum(policy.num_bytes for policy in self.policies)

    @property
    def gone_process(self) -> int | None:
        """Process id of the run, if it ran on this machine and exists no more; else None. Of a policy, that of its run.

        A run that another machine or container writes is never gone here.
        """
        folder = self.path.parent.parent if self.path.parent.name == "policies" else self.path
        path = inside(self.root, folder / _LOCK)
        try:
            owner = orjson.loads(read_regular(path, _MOST_LOCK_BYTES)) if path else {}
            pid, is_here = int(owner["pid"]), owner["host"] == socket.gethostname()
        except (OSError, ValueError, KeyError, TypeError):  # an older version, or it is being written
            return None
        return pid if is_here and not _is_alive(pid) else None

    @property
    def written_s(self) -> float:
        """Time of the last write to the run's own files, Unix seconds; 0 if there are none."""
        return max(_written_s(self.path / name) for name in (EVENTS, METRICS, CONFIG))


def find_run(root: Path, run: str) -> RunFolder:
    """Find a run by id. Raises `NoSuch` if it does not exist, or is outside `root`."""
    parts = PurePosixPath(run).parts
    if not run or "\0" in run or run.startswith("/") or ".." in parts:
        raise NoSuch(f"run {run!r:.200}: no such run; an id is a folder below the one that is served")
    folder = RunFolder(root, str(PurePosixPath(run)))
    try:
        is_below = folder.path.resolve().is_relative_to(root)
    except (OSError, ValueError, RuntimeError):
        is_below = False
    if not is_below or not folder.is_run:
        raise NoSuch(f"run {run!r:.200}: no such run in {root}; `/api/runs` lists those that there are")
    return folder


def all_runs(root: Path) -> Iterator[RunFolder]:
    """Every run in a folder, or the folder itself if it is a run. Policies of a run are also runs."""
    return _runs_in(RunFolder(root, "."), _DEPTH)


def _runs_in(folder: RunFolder, depth: int) -> Iterator[RunFolder]:
    if folder.is_run:
        yield folder
        yield from folder.policies
    elif depth:
        for name in _folders(folder.path):
            yield from _runs_in(RunFolder(folder.root, str(PurePosixPath(folder.id, name))), depth - 1)


def _folders(path: Path) -> list[str]:
    """Names of subfolders, except hidden ones, links, and names that are not UTF-8."""
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError:
        return []
    return sorted(name for name in names if as_text(name) == name)


def as_text(path: Path | str) -> str:
    """Path for an answer, with `\N{REPLACEMENT CHARACTER}` for each byte that is not text."""
    return os.fsencode(path).decode(errors="replace")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
