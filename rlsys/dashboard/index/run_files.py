"""Files that another process is writing, and the folders that may be read. Only regular files are opened.

tail = Tail(run_dir / "events.jsonl")
for chunk in tail.read():        # lines appended since the last call, complete lines only
    ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlsys.util.regular_files import MOST_LINE_BYTES, open_regular

CHUNK_BYTES = 256 * 1024


class FileChunk(NamedTuple):
    """Consecutive complete lines of a file, or a part of a line that has more than `MOST_LINE_BYTES`."""

    offset: int
    """Offset of the first line in the file."""
    data: bytes
    """The lines with their line ends."""

    @property
    def lines(self) -> list[bytes]:
        """The lines without line ends; empty lines are omitted."""
        return [line for line in self.data.split(b"\n") if line]


class Tail:
    """Reader of a growing file. A last line without its end is read once it is complete."""

    def __init__(self, path: Path | None, offset: int = 0) -> None:
        """`path` None: the file does not exist. `offset`: of the first line to read."""
        self._path = path
        self._offset = offset
        self._inode: int | None = None

    @property
    def was_replaced(self) -> bool:
        """True if the file was replaced or is shorter than before, so it must be read again."""
        if self._inode is None:
            return False
        found = self._stat()
        return found is None or found.st_ino != self._inode or found.st_size < self._offset

    @property
    def size(self) -> int:
        """Current size in bytes; 0 if the file does not exist."""
        found = self._stat()
        return found.st_size if found else 0

    def read(self) -> Iterator[FileChunk]:
        """Read the lines appended since the last call, in chunks of about `CHUNK_BYTES`. Empty without a file."""
        if self._path is None or self.size <= self._offset:
            return
        try:
            file = open_regular(self._path)
        except OSError:  # deleted just now, or no regular file
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            kept = b""
            while data := file.read(CHUNK_BYTES):
                kept += data
                end = kept.rfind(b"\n") + 1 or len(kept) * (len(kept) > MOST_LINE_BYTES)
                if end:
                    chunk = FileChunk(self._offset, kept[:end])
                    self._offset, kept = self._offset + end, kept[end:]
                    yield chunk

    def _stat(self) -> os.stat_result | None:
        try:
            return self._path.stat() if self._path else None
        except OSError:
            return None


def inside(root: Path, path: Path) -> Path | None:
    """Resolve `path` with all links; None unless it is a plain file under `root`."""
    try:
        real = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # missing, a null byte, circular links
        return None
    return real if real.is_relative_to(root.resolve()) and real.is_file() else None
