"""A program that leaves a process behind, for tests: `python -I -S stray_processes.py WAY PIPE [TAIL]`.

The program and the process hold the named pipe PIPE open, so that `Holders` of `tests.processes` sees their end. With
the TAIL `hang` the program does not end by itself; with `orphan`, it also kills its parent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable


def daemonise() -> None:
    os.setsid()
    if os.fork():
        os._exit(0)


def ignore_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)


def become_another_program() -> None:
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "600"], {})


def daemonise_after_the_programs_end() -> None:
    """Return to the program at once, and become a daemon once the program has ended."""
    os.setsid()
    ended = os.pidfd_open(os.getppid())
    os.close(STARTED[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    select.select([ended], [], [])
    daemonise()


def become_a_child_again_and_again() -> None:
    """Be another process every moment, for a minute."""
    os.setsid()
    os.close(STARTED[1])
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if os.fork():
            os._exit(0)
    sys.exit()


WAYS: dict[str, Callable[[], None]] = {
    "a daemon": daemonise,
    "a child": lambda: None,
    "a group of its own": lambda: os.setpgid(0, 0),
    "a session of its own": os.setsid,
    "ignored signals": ignore_signals,
    "another program without an environment": become_another_program,
    "a daemon after the program's end": daemonise_after_the_programs_end,
    "another process every moment": become_a_child_again_and_again,
}
STARTED = os.pipe()
"""Its second end is closed once the process to stay has prepared itself."""


def main(way: str, pipe: str, tail: str = "") -> None:
    held = os.open(pipe, os.O_WRONLY)
    os.set_inheritable(held, True)
    if not os.fork():
        WAYS[way]()
        os.closerange(STARTED[1], STARTED[1] + 1)  # some ways have closed it
        stay()
    os.close(STARTED[1])
    os.read(STARTED[0], 1)
    os.write(held, b"x")
    if tail == "orphan":
        os.kill(os.getppid(), signal.SIGKILL)
    if tail:
        stay()


def stay() -> None:
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
