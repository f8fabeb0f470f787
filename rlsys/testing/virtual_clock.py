"""Virtual clock, on which waiting takes no real time."""

from __future__ import annotations

import asyncio
import selectors
from asyncio import Future
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Selector that moves the clock to the next timer instead of waiting for it."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another: a deadlock")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` jumps to the next timer when nothing else is ready. Work in threads takes no time."""

    def __init__(self) -> None:
        self._selector_clock = _JumpingSelector()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: object) -> Future[T]:  # pyrefly: ignore[bad-override]
        """Run `func` at once: real seconds in a thread have no place on this clock."""

        async def run() -> T:
            return func(*args)

        return self.create_task(run())

    def jump(self, seconds: float) -> None:
        """Move the clock on without any event, as after a suspended process."""
        self._selector_clock.now_s += seconds


def run_virtual(work: Coroutine[object, object, T]) -> T:
    """Run on a virtual clock, like `asyncio.run`. A deadlock raises instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
