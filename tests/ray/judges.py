"""Reward functions of the tests, good and bad."""

from __future__ import annotations

import time


def digits(completion: str) -> float:
    """Share of digits: a random model has some, so that there is something to learn."""
    return sum(c.isdigit() for c in completion) / 8


def raises(completion: str) -> float:
    raise ValueError("this judge is broken")


def hangs_on_first_episode(completion: str, task_id: str) -> float:
    time.sleep(60)
    return 0.0


def nan(completion: str) -> float:
    return float("nan")
