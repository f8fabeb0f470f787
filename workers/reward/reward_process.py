"""Limits of a reward process, and the end of its children.

A reward process runs a user's functions. It ends with its worker, and everything that it started ends with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

from rlsys.util.descendants import end_descendants_with_this

_SET_PDEATHSIG = 1  # linux/prctl.h
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
    end_descendants_with_this()
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        sys.exit("the worker of this reward process is gone")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()


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
