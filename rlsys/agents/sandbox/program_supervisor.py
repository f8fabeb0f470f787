"""The launcher of `rlsys.agents.sandbox.programs`: runs a program, and ends its process group once it or the parent has
ended.

    python -I -S supervised.py PARENT PROGRAM [ARGUMENT ...]

It ends with the program's exit code, 128 + the signal's number if one killed it; SIGTERM ends it earlier. The group is
killed before its leader is reaped: until then its number is nobody else's. Nothing of `rlsys` is imported here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, command: list[str]) -> int:
    """The exit code.

    Waits for the program to end, or for SIGTERM, which the kernel sends when the parent ends.
    """
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by this interpreter
    try:
        program = os.posix_spawnp(command[0], command, os.environ, setpgroup=0, setsigmask=(), setsigdef=ignored)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")
    while signal.sigwait(signals) == signal.SIGCHLD and not _has_ended(program):
        pass  # it was only stopped
    os.killpg(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    return code if code >= 0 else 128 - code


def _has_ended(program: int) -> bool:
    return os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
