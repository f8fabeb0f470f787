"""Reading of folders that someone else may have made: regular files only, within bounds, line by line.

    for line in lines_of(run / "events.jsonl"):
        ...
    row = json.loads(read_regular(run / "step.json"))

A pipe, a device or a socket in place of a file would block a reader, or never end. A link is followed: readers that
must not leave a folder resolve it first, see `rlsys.dashboard.index.run_files.inside`. Errors are `OSError` with the
reason in `strerror`, like those of a file that cannot be opened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from stat import S_ISREG

MOST_BYTES = 16 * 2**20
"""Most bytes of a file that is read at once: JSON of this size takes about 20 times as much memory."""
MOST_LINE_BYTES = 4 * 2**20
"""Most bytes of a line of a file of events, metrics, samples or logs."""
_BUFFER_BYTES = 2**18


def open_regular(path: Path) -> FileIO:
    """Open a file to read it, without waiting. Raises `OSError`, also if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file whole. Raises `OSError`, also if it has more than `most_bytes`."""
    with open_regular(path) as file, BufferedReader(file) as buffered:
        data = buffered.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return data


def lines_of(path: Path, most_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file without line ends; of a line with more than `most_bytes`, nothing. Raises
    `OSError`."""
    with open_regular(path) as file, BufferedReader(file, _BUFFER_BYTES) as buffered:
        is_begun = True
        while part := buffered.readline(most_bytes + 1):
            has_end = part.endswith(b"\n")
            if is_begun and (has_end or len(part) <= most_bytes):
                yield part.removesuffix(b"\n")
            is_begun = has_end
