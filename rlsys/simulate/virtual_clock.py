"""A clock that needs no waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for the next timer, moves the clock to it."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another: a deadlock")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` jumps to the next timer whenever nothing else is ready."""

    def __init__(self) -> None:
        self._selector_clock = _JumpingSelector()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now_s

    def jump(self, seconds: float) -> None:
        """Let the clock be later by so much with nothing having happened: what a process sees that was suspended."""
        self._selector_clock.now_s += seconds


def run_virtual(work: Coroutine[object, object, T]) -> T:
    """Like `asyncio.run`, on a virtual clock. A deadlock raises instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
