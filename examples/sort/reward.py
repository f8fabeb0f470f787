"""What a right answer is worth."""

from __future__ import annotations


def exact_sort(completion: str, answer: str) -> float:
    """1.0 if the completion is the digits in order and nothing else, `012358`; else 0.0."""
    return float(completion == answer)
