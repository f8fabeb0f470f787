"""How the CPU time of a piece of work grows with its size: the same on a slow machine and on a busy one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def growth(work: Callable[[int], object], small: int, large: int) -> float:
    """How many times the CPU time of `work(small)` is taken by `work(large)`; of each, the least of two turns."""
    turns = [(cpu_s(work, small), cpu_s(work, large)) for _ in range(2)]
    least_small_s, least_large_s = map(min, zip(*turns, strict=True))
    return least_large_s / least_small_s


def cpu_s(work: Callable[[Any], object], value: object) -> float:
    """Seconds of CPU time that this process spends in `work(value)`."""
    begin_s = time.process_time()
    work(value)
    return time.process_time() - begin_s
