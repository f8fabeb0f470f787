"""Handling of Ctrl-C: the first stops a run in order, the second ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Interruptible:
    """Context in which the first SIGINT or SIGTERM calls `stop`, and the next one exits at once, with 128 + signal.

    Does nothing outside the main thread, where Python delivers no signals.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        self.stop = stop
        """Called on the first signal, in the event loop; may be replaced inside the block."""
        self.signal: int | None = None
        """The first signal seen."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        sys.stderr.write("\nrlsys: stopping; the current step is finished and saved; press again to exit at once\n")
        self._loop.call_soon_threadsafe(self.stop)
