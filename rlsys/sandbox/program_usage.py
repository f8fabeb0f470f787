"""Counts of what a running program uses, as the process that started it can see them."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: `struct ucred` of unix(7)
_ENDED = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of `/proc/PID` of a process that has ended or is ending: the kernel then gives its private files to root."""


@dataclass
class LauncherReport:
    """The line that the launcher writes before the program starts, and its process id as this process sees it."""

    receiver: socket.socket
    line: str = ""
    pid: int | None = None

    @classmethod
    def pair(cls) -> tuple[LauncherReport, socket.socket]:
        """Make a report, and the end that the launcher inherits."""
        receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        receiver.setblocking(False)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel adds the sender's process id
        return cls(receiver), sender

    def look(self) -> None:
        """Receive the line if it has come."""
        if self.line:
            return
        try:
            text, extra, _, _ = self.receiver.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        if text:
            self.line, self.pid = text.decode(), _CREDENTIALS.unpack(extra[0][2])[0]


@dataclass
class StoredFiles:
    """The files of a program in its folder: counted by their names, or by the file system that is the program's alone.

    A file system of its own also counts files that are deleted but open or mapped, and those below folders that are
    renamed all the time.
    """

    folder: str
    most: int
    """Entries after which counting by names stops."""
    is_apart: bool
    """True if the folder is a file system of the program's namespace."""
    _root: int | None = field(default=None, init=False)

    def close(self) -> None:
        if self._root is not None:
            os.close(self._root)

    def count(self, pid: int) -> tuple[int, int]:
        """Number of entries and of bytes."""
        if not self.is_apart:
            return _counted_by_name(self.folder, self.most)
        if self._root is None:
            try:
                self._root = os.open(f"/proc/{pid}/root{self.folder}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except _ENDED:
                return 0, 0
        system = os.fstatvfs(self._root)
        return system.f_files - system.f_ffree - 1, (system.f_blocks - system.f_bfree) * system.f_frsize


@dataclass
class WrittenBytes:
    """Bytes that a program has written by system calls, or, if more, to disks by these and through mapped memory.

    The file with the counts stays open, because only root can open it once the program's main thread has ended.
    Other threads may go on writing then.
    """

    _counts: int | None = field(default=None, init=False)
    _last: int = field(default=0, init=False)

    def close(self) -> None:
        if self._counts is not None:
            os.close(self._counts)

    def count(self, pid: int) -> int:
        """Number of bytes; that of the last look if the program has ended, or is ending."""
        try:
            if self._counts is None:
                self._counts = os.open(f"/proc/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)
            lines = os.pread(self._counts, 4096, 0).decode().splitlines()  # `wchar: 12`, see proc(5)
        except _ENDED:
            return self._last
        counts = {name: int(count) for name, _, count in (line.partition(": ") for line in lines)}
        self._last = max(counts["wchar"], counts["write_bytes"])
        return self._last


def num_threads(pid: int) -> int:
    """Threads of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()  # `PID (NAME) STATE ...`, see proc(5)
    except _ENDED:
        return 0
    return int(status.rpartition(")")[2].split()[17])


def _counted_by_name(folder: str, most: int) -> tuple[int, int]:
    """Count entries and bytes beneath a folder that may change meanwhile. Stops after `most` entries, and counts a
    folder that cannot be read as more."""
    num_files, num_bytes, folders = 0, 0, [folder]
    while folders and num_files <= most:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in itertools.islice(entries, most + 1 - num_files):
                    num_files += 1
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                return most + 1, num_bytes
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # removed or replaced meanwhile
                raise
    return num_files, num_bytes
