"""What a signal does to a process that waits, and with which code the process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest

from rlsys.util.signals import Interruptible, signals_kept

WAITS = """
import asyncio, sys
from rlsys.util.signals import Interruptible

async def main():
    stopped = asyncio.Event()
    with Interruptible({stop}) as interruptible:
        print("waits", flush=True)
        await stopped.wait()
    print("stopped", file=sys.stderr)
    return 128 + interruptible.signal

sys.exit(asyncio.run(main()))
"""
ENDS, GOES_ON = "stopped.set", "lambda: print('goes on', flush=True)"


@contextmanager
def waiting(stop: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that waits in an `Interruptible`, started by `command`."""
    words = [*command, sys.executable, "-c", WAITS.format(stop=stop)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_with_its_exit_code(number: signal.Signals):
    with waiting(ENDS) as process:
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == 128 + number
    assert "press again to exit at once" in said


def test_a_signal_in_the_middle_of_a_message_stops():
    code = """
import asyncio, io, signal, sys
from rlsys.util.signals import Interruptible

class Interrupted(io.RawIOBase):
    def writable(self):
        return True

    def fileno(self):
        return 2

    def write(self, data):
        signal.raise_signal(signal.SIGINT)
        return len(data)

async def main():
    stopped = asyncio.Event()
    with Interruptible(stopped.set) as interruptible:
        print("a message", file=sys.stderr)
        await stopped.wait()
    return 128 + interruptible.signal

sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted()), line_buffering=True)
sys.exit(asyncio.run(main()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "press again to exit at once" in done.stderr


def test_the_second_signal_exits_at_once():
    with waiting(GOES_ON) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "goes on\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT


def test_nohup_is_respected():
    with waiting(ENDS, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


def test_a_closed_terminal_stops_without_another_error():
    ours, terminal = os.openpty()
    words = [sys.executable, "-c", WAITS.format(stop=ENDS)]
    with subprocess.Popen(["setsid", "--ctty", *words], stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        with os.fdopen(ours, "rb", buffering=0) as screen:
            assert screen.readline() == b"waits\r\n"
        assert process.wait() == 128 + signal.SIGHUP


@pytest.mark.parametrize("is_during", [True, False], ids=["while it starts", "after it started"])
def test_a_library_cannot_take_a_termination_away(is_during: bool):
    def library(number: int, frame: FrameType | None) -> None:
        sys.exit(number)

    async def terminated() -> int | None:
        stopped = asyncio.Event()
        with Interruptible(stopped.set) as interruptible:
            with suppress(SystemExit), signals_kept():
                signal.signal(signal.SIGTERM, library)
                if is_during:
                    signal.raise_signal(signal.SIGTERM)
            if not is_during:
                signal.raise_signal(signal.SIGTERM)
            await stopped.wait()
        return interruptible.signal

    assert asyncio.run(terminated()) == signal.SIGTERM


def test_a_termination_that_a_library_loses_stops_the_run():
    async def terminated() -> int | None:
        stopped = asyncio.Event()
        with Interruptible(stopped.set) as interruptible:
            with signals_kept():
                signal.signal(signal.SIGTERM, lambda number, frame: None)
                signal.raise_signal(signal.SIGTERM)
                assert interruptible.signal is None
            await stopped.wait()
        return interruptible.signal

    assert asyncio.run(terminated()) == signal.SIGTERM


def test_a_termination_before_a_library_starts_is_handled_once():
    async def terminated() -> int | None:
        stopped = asyncio.Event()
        with Interruptible(stopped.set) as interruptible:
            with signals_kept():
                signal.raise_signal(signal.SIGTERM)
                assert interruptible.signal == signal.SIGTERM
                signal.signal(signal.SIGTERM, lambda number, frame: None)
            await stopped.wait()
        return interruptible.signal

    assert asyncio.run(terminated()) == signal.SIGTERM, "a second one would have ended this process"


def test_a_hangup_while_a_library_starts_is_handled_after_it():
    async def hung_up() -> int | None:
        stopped = asyncio.Event()
        with Interruptible(stopped.set) as interruptible:
            with signals_kept():
                signal.raise_signal(signal.SIGHUP)
                assert interruptible.signal is None
            await stopped.wait()
        return interruptible.signal

    assert asyncio.run(hung_up()) == signal.SIGHUP
