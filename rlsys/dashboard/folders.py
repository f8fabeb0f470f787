"""Which folders are runs, and their files: nothing outside the folder that is served is ever opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.run_files import inside

EVENTS, METRICS, CONFIG = "events.jsonl", "metrics.jsonl", "config.resolved.yaml"

_DEPTH = 3
"""Runs are looked for so many folders deep."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk."""

    root: Path
    """The folder that is served, without links."""
    id: str
    """See `RunSummary.id`."""

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.root / self.id

    @property
    def name(self) -> str:
        """The last part of its folder."""
        return self.path.name

    def file(self, *parts: str) -> Path | None:
        """A plain file in it; None if there is none, or it leads out of the folder that is served."""
        return inside(self.root, self.path.joinpath(*parts))

    @property
    def is_run(self) -> bool:
        """Has it a file that runs write?"""
        return any(self.file(name) for name in (EVENTS, METRICS, CONFIG))

    @property
    def policies(self) -> list[RunFolder]:
        """The runs of its policies, in a run of several."""
        ids = (str(PurePosixPath(self.id, "policies", name)) for name in _folders(self.path / "policies"))
        return [folder for run in ids if (folder := RunFolder(self.root, run)).is_run]

    @property
    def num_bytes(self) -> int:
        """That it and its policies wrote so far: changes whenever one of them writes."""
        own = sum(size_of(self.path / name) for name in (EVENTS, METRICS, CONFIG))
        return own + sum(policy.num_bytes for policy in self.policies)

    @property
    def written_s(self) -> float:
        """When one of its own files was last written, Unix seconds; 0 if there is none."""
        return max(_written_s(self.path / name) for name in (EVENTS, METRICS, CONFIG))


def find_run(root: Path, run: str) -> RunFolder:
    """The run of this id. Raises `NoSuch` if there is none, or it leads out of `root`."""
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
    """Every run in a folder, which may be one itself; the policies of a run are runs of their own."""
    return _runs_in(RunFolder(root, "."), _DEPTH)


def _runs_in(folder: RunFolder, depth: int) -> Iterator[RunFolder]:
    if folder.is_run:
        yield folder
        yield from folder.policies
    elif depth:
        for name in _folders(folder.path):
            yield from _runs_in(RunFolder(folder.root, str(PurePosixPath(folder.id, name))), depth - 1)


def _folders(path: Path) -> list[str]:
    """Names of the folders in a folder; hidden ones, links, and names that are no text in UTF-8 left out."""
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError:
        return []
    return sorted(name for name in names if as_text(name) == name)


def as_text(path: Path | str) -> str:
    """A path for an answer, `\N{REPLACEMENT CHARACTER}` for each byte that is no text."""
    return os.fsencode(path).decode(errors="replace")


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
