"""Reward of an answer."""

from __future__ import annotations


def exact_sort(completion: str, answer: str) -> float:
    """Return 1.0 if the completion is exactly the digits in order, `012358`, else 0.0."""
    return float(completion == answer)
