"""Launcher of `rlsys.sandbox.programs`: runs a program, and kills its process group when it or the parent ends.

    python -I -S program_launcher.py PARENT PROGRAM [ARGUMENT ...]

The exit code is the program's, or 128 + the number of the signal that killed it; SIGTERM ends the launcher earlier.
The group is killed before its leader is reaped, so that the group's number cannot be reused yet. This module imports
nothing of `rlsys`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, command: list[str]) -> int:
    """Run the program, and return its exit code.

    Waits for the program to end; unblocked also by SIGTERM, which the kernel sends when the parent ends.
    """
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by this interpreter; the program gets the defaults
    try:
        program = os.posix_spawnp(command[0], command, os.environ, setpgroup=0, setsigmask=(), setsigdef=ignored)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while signal.sigwait(signals) == signal.SIGCHLD and os.waitid(os.P_PID, program, how) is None:
        pass  # stopped, not ended
    os.killpg(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
