"""Event loops of programs that have one already, and work that runs in one together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(work: Iterable[Awaitable[T]]) -> list[T]:
    """Do all of some work concurrently, and return the results in order. Raises the first error.

    After an error, or a cancellation of the caller, the rest of the work is cancelled, and has ended on return.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_to_end(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end: in this thread, or in another one if this one has a running loop, as a notebook's.

    The calling thread waits; unblocked by the end of the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    with ThreadPoolExecutor(1, "rlsys") as thread:
        return thread.submit(lambda: asyncio.run(make())).result()
