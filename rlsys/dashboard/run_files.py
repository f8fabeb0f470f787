"""Files that somebody else is writing, and the folders that may be read.

tail = Tail(run_dir / "events.jsonl")
for chunk in tail.read():        # what was appended since the last call, complete lines only
    ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CHUNK_BYTES = 256 * 1024


class Chunk(NamedTuple):
    """Complete lines that follow each other in a file."""

    offset: int
    """Where the first begins."""
    data: bytes
    """All of them, with their line ends."""

    @property
    def lines(self) -> list[bytes]:
        """Without their ends; empty ones are left out."""
        return [line for line in self.data.split(b"\n") if line]


class Tail:
    """Reads a file that grows. A last line without its end is left until the rest of it is there."""

    def __init__(self, path: Path | None) -> None:
        """None: a file that is not there."""
        self._path = path
        self._offset = 0
        self._inode: int | None = None

    @property
    def was_replaced(self) -> bool:
        """Is it another file than was read, or shorter, so that everything is to be read again?"""
        if self._inode is None:
            return False
        found = self._stat()
        return found is None or found.st_ino != self._inode or found.st_size < self._offset

    @property
    def size(self) -> int:
        """Bytes of the file now; 0 if it is not there."""
        found = self._stat()
        return found.st_size if found else 0

    def read(self) -> Iterator[Chunk]:
        """What was appended since the last call, in chunks of about `CHUNK_BYTES`. Nothing if there is no such file."""
        if self._path is None or self.size <= self._offset:
            return
        try:
            file = self._path.open("rb", buffering=0)
        except OSError:  # deleted a moment ago
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            kept = b""
            while data := file.read(CHUNK_BYTES):
                kept += data
                end = kept.rfind(b"\n") + 1
                if end:
                    chunk = Chunk(self._offset, kept[:end])
                    self._offset, kept = self._offset + end, kept[end:]
                    yield chunk

    def _stat(self) -> os.stat_result | None:
        try:
            return self._path.stat() if self._path else None
        except OSError:
            return None


def inside(root: Path, path: Path) -> Path | None:
    """The file that `path` is, if it is a plain one and lies under `root` when every link is followed; else None."""
    try:
        real = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # not there, a null byte, links in a circle
        return None
    return real if real.is_relative_to(root.resolve()) and real.is_file() else None
