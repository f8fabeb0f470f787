"""The keeper of a local cluster: a process of its own that leaves nothing of the cluster behind.

    python -I -S workers/ray/cluster_keeper.py MARK

It imports nothing of ours, so that it is small. Every process of the cluster has `MARK` in its environment, and so has
what they start. The keeper waits for the end of its standard input, whose writer is the process that started the
cluster: that process ends the cluster by closing it, or has ended, perhaps by SIGKILL. Lines that it wrote before are
patterns of files and folders to remove.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "RLSYS_CLUSTER"
"""Environment variable with the mark of the cluster."""
GRACE_S = 3.0
"""Seconds in which processes of the cluster may end by themselves: they notice that the raylet is gone."""
LOOK_S = 0.1


def marked_processes(mark: str) -> Iterator[int]:
    """Live processes with this mark in their environment, except this one."""
    wanted = f"{MARK}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environment.parent.name)
        with suppress(OSError):  # it has ended, or is another user's
            if pid != os.getpid() and wanted in environment.read_bytes().split(b"\0"):
                yield pid


def end_cluster(mark: str) -> None:
    """Return once no process has the mark. It kills those that do not end by themselves.

    Waits for the ends of processes that are no children of this one, and cannot notify it.
    """
    until_s = time.monotonic() + GRACE_S
    while pids := list(marked_processes(mark)):
        if time.monotonic() > until_s:
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def main() -> None:
    """Keep the cluster until its user ends."""
    patterns = sys.stdin.read().splitlines()
    end_cluster(sys.argv[1])
    for pattern in map(Path, patterns):
        for path in pattern.parent.glob(pattern.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
