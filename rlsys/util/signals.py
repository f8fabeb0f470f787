"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first stops a run in order, the second ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socketpair
from types import FrameType, TracebackType
from typing import Self

STOPPING = b"\nrlsys: stopping; the current step is finished and saved; press again to exit at once\n"


class Interruptible:
    """Context in which the first SIGINT, SIGTERM or SIGHUP calls `stop`, and the next one exits at once, with
    128 + signal.

    SIGHUP, the end of the terminal, stays ignored where it was, as under `nohup`. Does nothing outside the main thread,
    where Python delivers no signals.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        self.stop = stop
        """Called on the first signal, in the event loop; may be replaced inside the block."""
        self.signal: int | None = None
        """The first signal seen."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._has_terminal = sys.stderr.isatty()
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGINT, signal.SIGTERM] if is_main else []
        if is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def interrupt(self) -> None:
        """Stop as on the first SIGINT. Thread-safe."""
        if self.signal is None:
            self.signal = signal.SIGINT
            self._loop.call_soon_threadsafe(self.stop)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        if number == signal.SIGHUP and self._has_terminal:  # which is gone: no later message may raise
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
        self._loop.call_soon_threadsafe(self.stop)
        with suppress(OSError):  # the terminal is gone
            os.write(sys.stderr.fileno(), STOPPING)  # `sys.stderr` may be in the middle of a write, and takes no other


@contextmanager
def signals_kept() -> Iterator[None]:
    """Let a library start processes, and keep this process's handling of signals.

    The processes never see SIGHUP: they outlive the terminal, until their parent has used them to save. A SIGHUP that
    arrives in the block is handled after it. A handler of SIGTERM that the block installs is replaced by the one before
    it. A SIGTERM that came to the block's handler is handled again: Ray's raises `SystemExit`, which is lost if Python
    happens to run a callback whose exceptions it ignores.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    num_handled = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal num_handled
        num_handled += 1
        handler(number, frame)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    reader, writer = socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)  # gets every signal, as a byte
        signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.set_wakeup_fd(before)
            with suppress(BlockingIOError):
                if reader.recv(4096).count(signal.SIGTERM) > num_handled:
                    signal.raise_signal(signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
