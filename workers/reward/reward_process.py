"""Limits of a reward process, and the end of its children.

A reward process runs a user's functions. It ends with its worker, and everything that it started ends with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import re
import resource
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path

_SET_PDEATHSIG = 1  # linux/prctl.h
_RLIMIT_LOCKS = 10  # asm-generic/resource.h
_SWEEPS = 100
"""Most searches for children. One that finds no more is the last; a fork bomb makes more between two."""
_FEWEST_LOCKS = 1 << 32
_MINUTE_S = 60.0
_REST_S = 1.0
_DISCARDED = b"\n[more output of reward functions is discarded for up to a minute]\n"


def confine(memory_mb: int, output: Connection) -> None:
    """Limit this process, which the worker has just started, and its children.

    `memory_mb` limits the writable private memory of each of them (`RLIMIT_DATA`), so that address space reserved by
    CUDA or by mapped models does not count. Their output goes to `output`. They write no core dumps: the crash of a
    large process would take longer than the deadline of a call, and would be reported as a hang.
    """
    for kind, most in ((resource.RLIMIT_DATA, memory_mb << 20), (resource.RLIMIT_CORE, 0)):
        held = resource.getrlimit(kind)[1]
        most = most if held == resource.RLIM_INFINITY else min(most, held)
        resource.setrlimit(kind, (most, most))
    _end_children_with_this()
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        sys.exit("the worker of this reward process is gone")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()


def _end_children_with_this() -> None:
    """Start a keeper, which waits for the end of this process and then kills its children.

    Children are the members of its process group, and processes with its mark: a random value of `RLIMIT_LOCKS`, a
    limit that Linux has had no use for since 2.4. Every descendant inherits it, also in a session of its own, with
    another environment, or after the end of its parent. The keeper is a member of the group, so that the group's number
    cannot be reused. It is no child of this process, whose functions may wait for all of theirs.
    """
    os.setpgid(0, 0)
    held = resource.getrlimit(_RLIMIT_LOCKS)[1]
    most = 1 << 62 if held == resource.RLIM_INFINITY else held
    if most < _FEWEST_LOCKS:
        sys.exit(f"reward processes mark their children by the limit of file locks, and {most} is too low: ulimit -x")
    mark = random.SystemRandom().randrange(most // 2, most)
    ended = os.pidfd_open(os.getpid())
    if between := os.fork():
        os.waitpid(between, 0)
        os.close(ended)
        resource.setrlimit(_RLIMIT_LOCKS, (mark, mark))
    elif os.fork():
        os._exit(0)
    else:
        try:
            os.closerange(0, ended)
            os.closerange(ended + 1, 1 << 20)
            select.select([ended], [], [])
            killed: set[int] = set()
            for _ in range(_SWEEPS):
                found = _kill_marked(mark)
                if found <= killed:  # those that are left have not been reaped yet
                    break
                killed |= found
        finally:
            os.killpg(0, signal.SIGKILL)


def _kill_marked(mark: int) -> set[int]:
    """Kill every process with the mark, and return their numbers."""
    found = set()
    line = re.compile(rf"^Max file locks +{mark} +{mark} ", re.MULTILINE)
    for limits in Path("/proc").glob("[0-9]*/limits"):
        with suppress(OSError):  # it has ended
            if line.search(limits.read_text()):
                os.kill(int(limits.parent.name), signal.SIGKILL)
                found.add(int(limits.parent.name))
    return found


class LimitedOutput:
    """Output of all reward processes of a worker: goes to the worker's stderr, at most some bytes a minute."""

    def __init__(self, context: SpawnContext, bytes_per_minute: int) -> None:
        """Start the thread that forwards the output."""
        self._read, self.write = context.Pipe(duplex=False)
        """`write` is an argument of every reward process."""
        self._thread = threading.Thread(
            target=self._forward, args=(bytes_per_minute,), name="reward-output", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the pipe, and wait for the rest of the output, at most a second. Idempotent."""
        self.write.close()
        self._thread.join(_REST_S)

    def _forward(self, bytes_per_minute: int) -> None:
        """Forward output, and discard what is too much.

        Waits for output of the processes; unblocked for good when none of them, nor the worker, has the pipe any more.
        """
        since_s, left = time.monotonic(), bytes_per_minute
        with self._read:
            while data := os.read(self._read.fileno(), 1 << 16):
                if time.monotonic() - since_s >= _MINUTE_S:
                    since_s, left = time.monotonic(), bytes_per_minute
                if left:
                    is_flood = len(data) >= left
                    os.write(2, data[:left] + (_DISCARDED if is_flood else b""))
                    left -= min(left, len(data))
