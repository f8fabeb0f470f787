"""Event loops of programs that have one already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


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
