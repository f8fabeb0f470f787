"""Files: atomic writes, flushing to disk, and the distinction of paths from hub names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

CONFIG = "config.resolved.yaml"
"""File in a run's folder with every key of its configuration."""


def flush(folder: Path, files: Iterable[Path]) -> None:
    """Flush some files of a folder, and the folder's entry list, to disk. Ranks flush the files they write."""
    for path in [*(f for f in files if f.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_atomically(path: Path, text: str, *, is_private: bool = False) -> None:
    """Write a file so that it is complete whenever it exists. A private one can be read by its owner only."""
    partial = path.with_suffix(".tmp")
    partial.unlink(missing_ok=True)
    partial.touch(0o600 if is_private else 0o666)
    partial.write_text(text)
    partial.replace(path)


def free_gb(path: Path) -> float | None:
    """Return the free space of the disk of a path, or of its nearest folder that exists, in GB; None if it cannot be
    read."""
    try:
        return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free / 1e9
    except OSError:
        return None


def can_be_hub_name(path: str) -> bool:
    """Return True if `path` has the form `name` or `org/name` of the hub; it is one if no such folder exists."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~"))
