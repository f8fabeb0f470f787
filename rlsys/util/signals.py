"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first stops a run in order, the second ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self


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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        if number == signal.SIGHUP and self._has_terminal:  # which is gone: no later message may raise
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
        sys.stderr.write("\nrlsys: stopping; the current step is finished and saved; press again to exit at once\n")
        self._loop.call_soon_threadsafe(self.stop)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Let a library start processes, and keep this process's handling of signals.

    The processes never see SIGHUP: they outlive the terminal, until their parent has used them to save. A SIGHUP that
    arrives in the block is handled after it. A handler of SIGTERM that the block installs is replaced by the one before
    it; if it was called and raised `SystemExit`, as Ray's does, the signal is handled again first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}), signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
