"""Place of the indexes: one private folder of the user, `~/.cache/rlsys/indexes`, or that below `XDG_CACHE_HOME`.

An index is a program to SQLite: triggers, views and journals of a foreign one run, block, or delete files. So indexes
are made here alone, and none is opened in the folder of a run. The name of an index comes from the path and the
identity (device and inode) of the run's folder: another folder at that path gets another index.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from stat import S_IMODE, S_ISDIR

_UNUSED_S = 30 * 86_400.0
"""Seconds without an update after which an index is deleted."""
_ENDING = ".sqlite"


def index_path(run: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the index of a run, in the folder of indexes, which is made if needed.

    Raises `OSError` if the run is gone, or there can be no private folder.
    """
    found = run.stat()
    key = b"\0".join([os.fsencode(run.resolve()), b"%d" % found.st_dev, b"%d" % found.st_ino])
    return _private_folder(environ) / f"{blake2b(key, digest_size=16).hexdigest()}{_ENDING}"


def mark_used(index: Path) -> None:
    """Note that an index is in use. The first time, delete those that were not for 30 days."""
    if index.exists():
        os.utime(index)
        return
    for path in index.parent.glob(f"*{_ENDING}*"):
        with suppress(OSError):  # another process deletes it too
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # the user is not known here
        return Path("/")


def _private_folder(environ: Mapping[str, str]) -> Path:
    folder = Path(environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "rlsys" / "indexes"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # as the home of a user without one, in a container
        folder = Path(tempfile.gettempdir(), f"rlsys-indexes-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{folder} is a link, or belongs to another user: remove it")
    if S_IMODE(found.st_mode) & 0o077:
        raise OSError(f"others can read or change {folder}: `chmod 700 {folder}`")
    return folder
