"""Bubblewrap (`bwrap`), which gives a program namespaces of its own, where it is installed and the kernel allows them.

The program sees no user, process, network or file of the machine but the paths that it may read, and has a folder in
memory (tmpfs) of a limited size. Bubblewrap ends with the process that started it, and every process in it with it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup-try")
_TRIAL_S = 10.0


class BubblewrapUnusable(Exception):
    """Bubblewrap is not installed, or does not work here; the message says why."""


def find(readable: tuple[str, ...]) -> str:
    """Path of a `bwrap` that can start the interpreter, whose paths are `readable`. Raises `BubblewrapUnusable`."""
    program = shutil.which("bwrap")
    if program is None:
        raise BubblewrapUnusable("bubblewrap: no `bwrap` on the PATH; install the package bubblewrap")
    if problem := _problem(program, readable):
        raise BubblewrapUnusable(f"bubblewrap: {program} does not work here: {problem}")
    return program


@functools.cache
def _problem(program: str, readable: tuple[str, ...]) -> str:
    """Try it once in this process, with every option that a program gets; empty if it works."""
    with Path(os.devnull).open("rb") as nothing:
        number = nothing.fileno()
        wrapped = command(program, folder="/tmp/rlsys-trial/home", main=number, readable=readable, num_bytes=1 << 20)
        trial = [*wrapped, sys.executable, "-I", "-S", "-c", ""]
        try:
            ran = subprocess.run(trial, pass_fds=[number], capture_output=True, timeout=_TRIAL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return "" if ran.returncode == 0 else ran.stderr.decode(errors="replace").strip() or f"exit code {ran.returncode}"


def command(program: str, *, folder: str, main: int, readable: Iterable[str], num_bytes: int) -> list[str]:
    """Build the command line, without what it starts.

    `folder` becomes an empty folder in memory of at most `num_bytes`, with the contents of the descriptor `main` as
    `main.py`. `readable` paths are bound where they are, and where their symbolic links lead. Others do not exist.
    """
    given = [path for path in readable if os.path.exists(path)]  # noqa: PTH110
    paths = dict.fromkeys(name for path in given for name in (path, os.path.realpath(path)))
    options = [
        *(("--unshare-" + name,) for name in _NAMESPACES),
        ("--die-with-parent",),
        *(("--ro-bind", path, path) for path in paths),
        *(("--dev-bind", path, path) for path in DEVICES),
        ("--size", str(num_bytes), "--tmpfs", folder),
        ("--file", str(main), f"{folder}/main.py"),
        ("--remount-ro", "/"),
        ("--chdir", folder),
    ]
    return [program, *(word for option in options for word in option)]
