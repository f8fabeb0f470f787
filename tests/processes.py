"""Processes that tests look at."""

from __future__ import annotations

import os
import runpy
import select
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests import stray_processes

SLOW_IMPORTS = ["tests.training", "tests.families", "examples.sort.prepare", "workers.rollout.rollout_pool"]


def forks_with_imports() -> ForkServerContext:
    """The context whose processes are forked from one that has imported what takes seconds to import."""
    context = get_context("forkserver")
    context.set_forkserver_preload(SLOW_IMPORTS)
    return context


def is_gone(pid: int) -> bool:
    """Does the process end within ten seconds?"""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


class Holders:
    """Processes that hold a named pipe open, whatever their numbers."""

    def __init__(self, folder: Path) -> None:
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)
        self._descriptor = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)

    def have_started(self) -> bool:
        """Does one of them write something within a minute?"""
        return self._shows(select.POLLIN, 60)

    def are_gone(self) -> bool:
        """Has there been one, and do all end within ten seconds?"""
        return self._shows(select.POLLHUP, 10)

    def _shows(self, event: int, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, event)
        return any(shown & event for _, shown in poll.poll(wait_s * 1000))

    def close(self) -> None:
        os.close(self._descriptor)


def stray(way: str, pipe: Path, *tail: str) -> tuple[str, ...]:
    """The command line of `tests.stray_processes`."""
    return (sys.executable, "-I", "-S", stray_processes.__file__, way, str(pipe), *tail)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_reset(client: socket.socket) -> bool:
    """Does the other side break the connection within twenty seconds, though this one reads nothing?"""
    poll = select.poll()
    poll.register(client, select.POLLHUP)
    return bool(poll.poll(20_000))


def requires_bubblewrap() -> bool:
    """True if bubblewrap is installed; a test is skipped without it, and fails if it is installed and refused."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bwrap; the package bubblewrap has it")
    return True


def run_module(name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """Do in this process as `python -m NAME ARGUMENTS`, with its output in `folder`/stdout and /stderr."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def is_open(port: int) -> bool:
    """Return True if a server listens at this port of 127.0.0.1."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
