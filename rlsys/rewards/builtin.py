"""Ready-made reward functions, named in the configuration without a module: `reward.function: exact`."""

from __future__ import annotations


def exact(completion: str, answer: str) -> float:
    """1 if the completion is the answer, spaces around either aside; else 0."""
    return float(completion.strip() == answer.strip())


BUILTIN = {"exact": exact}
