"""The end of all processes that a process started, in whatever session, group or environment.

    end_descendants_with_this()                      # those of this process end with it
    subprocess.Popen(launcher_command(["server"]))   # the server's end with the server, or with this process

As a program, this module is the launcher of `launcher_command`:

    python -I -S descendants.py PARENT PROGRAM [ARGUMENT ...]

It runs a program, and kills everything that the program started when the program or the parent ends. The exit code is
the program's, or 128 + the number of the signal that killed it; SIGTERM ends the launcher earlier.

Descendants are known by a mark: a random value of `RLIMIT_LOCKS`, a limit that Linux has had no use for since 2.4.
Every process inherits it, also in a session of its own, with another environment, or after the end of its parent. A
process escapes if it changes this limit, becomes another user, or is another process in another group every moment.
This module imports nothing of `rlsys`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys

_SET_PDEATHSIG = 1  # linux/prctl.h
_RLIMIT_LOCKS = 10  # asm-generic/resource.h
_FEWEST_LOCKS = 1 << 32
_SWEEPS, _QUIET_SWEEPS = 100, 2
"""Most searches for descendants, as a fork bomb makes more between two; and how many in a row have to find no new one.
A single one may miss a process that replaces itself by a child."""


def launcher_command(program: list[str]) -> list[str]:
    """Build the command line that runs `program` with its arguments under the launcher, as a child of this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


def end_descendants_with_this(*, is_child: bool = False) -> int:
    """Start a keeper, which waits for the end of this process and then kills its descendants. Returns their mark.

    The keeper also kills the group of this process, of which it is a member so that the group's number cannot be
    reused. It is no child of this process, whose functions may wait for all of theirs, unless `is_child`. It has the
    mark too, and not that of a launcher which started this process: it outlives such a launcher's end until its own
    work is done.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    held = resource.getrlimit(_RLIMIT_LOCKS)[1]
    most = 1 << 62 if held == resource.RLIM_INFINITY else held
    if most < _FEWEST_LOCKS:
        sys.exit(f"descendants are known by their limit of file locks, and {most} is too low: see `ulimit -x`")
    mark = most // 2 + int.from_bytes(os.urandom(8)) % (most // 2)
    resource.setrlimit(_RLIMIT_LOCKS, (mark, mark))
    ended = os.pidfd_open(os.getpid())
    if first := os.fork():
        if not is_child:
            os.waitpid(first, 0)
        os.close(ended)
    elif not is_child and os.fork():
        os._exit(0)
    else:
        try:
            os.closerange(0, ended)
            os.closerange(ended + 1, 1 << 20)
            select.select([ended], [], [])
            _kill_all_marked(mark)
        finally:
            os.killpg(0, signal.SIGKILL)
    return mark


def _kill_all_marked(mark: int) -> None:
    """Kill every process with the mark but this one, and those that they start meanwhile."""
    killed: set[int] = set()
    num_quiet = 0
    for _ in range(_SWEEPS):
        found = _kill_marked(mark)
        num_quiet = num_quiet + 1 if found <= killed else 0  # killed ones may not have been reaped yet
        if num_quiet == _QUIET_SWEEPS:
            break
        killed |= found


def _kill_marked(mark: int) -> set[int]:
    """Kill the processes that have the mark now, with their groups, and return their numbers.

    The kernel kills a group at once, so that no member can become another process meanwhile. All processes of a group
    have the same mark, since each that chooses a mark has a group of its own.
    """
    found = set()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):  # noqa: PTH208  (pathlib takes long to import)
        try:
            group = os.getpgid(pid)
            if pid != os.getpid() and _has_mark(pid, mark):
                found.add(pid)
                os.kill(-group if group != os.getpgrp() else pid, signal.SIGKILL)
        except OSError:
            continue  # it has ended
    return found


def _has_mark(pid: int, mark: int) -> bool:
    with open(f"/proc/{pid}/limits") as limits:  # noqa: PTH123  (as above)
        text = limits.read()  # `Max file locks   SOFT   HARD   locks`, see proc(5)
    return text.partition("\nMax file locks")[2].split(maxsplit=2)[:2] == [str(mark)] * 2


def main(parent: int, program: list[str]) -> int:
    """Run the program, and return its exit code.

    Waits for the program to end; unblocked also by SIGTERM, which the kernel sends when the parent ends. The keeper is
    for the case that the launcher itself is killed.
    """
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    mark = end_descendants_with_this(is_child=True)
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by this interpreter; the program gets the defaults
    try:
        pid = os.posix_spawnp(program[0], program, os.environ, setpgroup=0, setsigmask=(), setsigdef=ignored)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while signal.sigwait(signals) == signal.SIGCHLD and os.waitid(os.P_PID, pid, how) is None:
        pass  # stopped, not ended
    for number in (pid, -pid):  # its group too; the program is not reaped yet, so that the numbers cannot be reused
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has left its group
    _kill_all_marked(mark)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.waitpid(-1, 0)  # the keeper, which has the mark too; in a container without an init no other process reaps it
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
