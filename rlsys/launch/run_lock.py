"""One run directory, one run."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rlsys.errors import ConfigError

LOCK = "run.lock"


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of an existing run directory during the block.

    The kernel releases the lock when this process ends in any way. On a network file system the lock reaches as far as
    that file system's `flock` does: other machines may not see it. Raises `ConfigError` naming the process that has it.
    """
    try:
        file = (run_dir / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {run_dir}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.name: another run writes to {run_dir}{_owner(file)}; stop it, or choose another run.name"
            ) from None
        file.truncate(0)
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        file.flush()
        yield


def _owner(file: TextIO) -> str:
    file.seek(0)
    try:
        owner = json.load(file)
        return f": process {owner['pid']:d} on {owner['host']!r}"
    except (ValueError, KeyError, TypeError):  # it is about to write its name
        return ""
