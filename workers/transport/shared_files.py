"""Weights in shared memory of one machine: ranks write them once, and every process maps the same bytes.

A version of a rank is a file in /dev/shm. Processes that use it have a shared lock on it, and the kernel drops a lock
with its process. A rank writes the next version into a file of its own that no process has locked, so no reader is
overwritten. Beside that, a rank owns its files while it lives: it holds a second lock on each, of another kind, from
before the file has its name. A rank that needs one more file removes the files that have neither an owner nor a reader:
what a killed run left behind goes with the next.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from rlsys.errors import WorkerDied, WorkerError
from rlsys.types import PolicyVersion, Ref
from workers.ray.cluster_keeper import MARK
from workers.ray.shared_memory import SHM, WEIGHTS

FOLDER = Path(SHM)
REMEDY = "make /dev/shm larger (docker run --shm-size), or remove files there that no process uses"


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes `start` to `end` of a file."""

    path: str
    start: int
    end: int
    lock: mmap.mmap | None = field(default=None, compare=False, repr=False)
    """Keeps the bytes while this process has the reference. It does not travel with the reference."""

    def __reduce__(self) -> tuple[object, ...]:
        return SharedBytes, (self.path, self.start, self.end)


@dataclass(slots=True)
class _Own:
    """A file that this process writes into."""

    path: Path
    descriptor: int
    data: np.ndarray


class SharedMemoryTransport:
    """Implements `WeightTransport`: a reference is a part of a file, and locks say who uses it."""

    place, sends = "this machine", False

    def __init__(self, run: str, folder: Path = FOLDER) -> None:
        """`run` is in the names of the files, see `remove_segments`."""
        self._run, self._folder = run, folder
        self._own: list[_Own] = []
        self._numbers = count()
        self._mapped: WeakValueDictionary[str, mmap.mmap] = WeakValueDictionary()

    def memory(self, version: PolicyVersion, num_bytes: int, *, pin: bool) -> np.ndarray:
        """See `WeightTransport.memory`. Page-locking ran on one GPU."""
        path = self._path(version)
        free = [own for own in self._own if len(own.data) == num_bytes and _lock_to_write(own.descriptor)]
        for own in free[2:]:  # of readers that kept more versions than others
            self._own.remove(own)
            own.path.unlink(missing_ok=True)
            os.close(own.descriptor)
        for own in free[1:2]:  # a spare, which nobody removes as an orphan
            fcntl.flock(own.descriptor, fcntl.LOCK_SH)
        if free:
            free[0].path = free[0].path.rename(path)  # a late reader does not take it for the old version
            return free[0].data
        self._own.append(own := self._create_file(path, version, num_bytes))
        if pin and num_bytes:
            import torch

            runtime = torch.cuda.cudart()
            assert runtime is not None, "pinned memory is for a GPU"
            runtime.cudaHostRegister(own.data.ctypes.data, num_bytes, 0)
        return own.data

    def share(self, memory: np.ndarray, start: int, end: int) -> Ref:
        (own,) = (own for own in self._own if own.data is memory)
        fcntl.flock(own.descriptor, fcntl.LOCK_SH)
        return self.keep_bytes(SharedBytes(str(own.path), start, end))

    def put(self, data: np.ndarray) -> Ref:
        memory = self.memory(0, len(data), pin=False)
        memory[:] = data
        return self.share(memory, 0, len(data))

    def keep_bytes(self, ref: Ref) -> Ref:
        assert isinstance(ref, SharedBytes)
        return replace(ref, lock=self._map_locked(ref.path, "shared memory", "keeping weights"))

    async def fetch(self, ref: Ref, source: str, phase: str) -> np.ndarray:
        assert isinstance(ref, SharedBytes)
        whole = np.frombuffer(self._map_locked(ref.path, source, phase), np.uint8)
        if ref.end > len(whole):
            raise WorkerDied(source, phase, f"{ref.path} is shorter than the {ref.end} bytes that were published")
        return whole[ref.start : ref.end]

    def _map_locked(self, path: str, source: str, phase: str) -> mmap.mmap:
        """Map a file that is not written any more, with a lock that lasts as long as the mapping."""
        mapped = self._mapped.get(path)
        if mapped is None:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if not os.path.samestat(os.fstat(descriptor), os.stat(path)):  # noqa: PTH116
                        raise FileNotFoundError(path)
                    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)  # the mapping has a copy, and with it the lock
            except (OSError, ValueError) as error:
                raise WorkerDied(source, phase, f"{path} is not here, or in use for a newer version") from error
            self._mapped[path] = mapped
        return mapped

    def _path(self, version: PolicyVersion) -> Path:
        mark = os.environ.get(MARK, "cluster")  # by which the keeper of a local cluster finds the files too
        return self._folder / f"{WEIGHTS}{mark}-{self._run}-{os.getpid()}-{next(self._numbers)}-v{version}"

    def _create_file(self, path: Path, version: PolicyVersion, num_bytes: int) -> _Own:
        for orphan in _orphans(self._folder):
            orphan.unlink(missing_ok=True)
        unnamed = path.with_name(f".{path.name}")  # `_orphans` does not see it before it is owned
        descriptor = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _lock_owned(descriptor, fcntl.F_WRLCK)
            unnamed.rename(path)
            if num_bytes:
                os.posix_fallocate(descriptor, 0, num_bytes)  # else a write into a full /dev/shm ends the process
            data = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8) if num_bytes else np.empty(0, np.uint8)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            unnamed.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            free = shutil.disk_usage(self._folder).free
            detail = f"no room for {num_bytes} bytes in {self._folder}, of which {free} are free: {REMEDY}"
            raise WorkerError(f"process {os.getpid()}", f"storing version {version}", detail) from error
        return _Own(path, descriptor, data)


def _lock_to_write(descriptor: int) -> bool:
    """Lock a file of this process for writing, if no process reads it. Returns False if one does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # the kernel drops the lock that it could not convert
        return False
    return True


def _lock_owned(descriptor: int, kind: int) -> None:
    """Lock a file for as long as the descriptor or a mapping of it is open: to write by its owner, to read by others.

    Raises `BlockingIOError` if it has an owner. The lock is apart from those of `flock`, whose conversion from one kind
    to the other leaves a moment without any.
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("@hhqqi", kind, os.SEEK_SET, 0, 0, 0))


def _orphans(folder: Path) -> Iterator[Path]:
    """Files of processes that have ended, which no process reads."""
    for path in folder.glob(f"{WEIGHTS}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it has gone, or is another user's
            continue
        try:
            _lock_owned(descriptor, fcntl.F_RDLCK)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(descriptor)


def remove_segments(run: str, folder: Path = FOLDER) -> None:
    """Remove the files of all processes of a run that ends."""
    for path in folder.glob(f"{WEIGHTS}*-{run}-*"):
        path.unlink(missing_ok=True)
