"""Demo of `make demo`: make a tiny policy, train it on Ray to sort six digits, show its improvement."""

from __future__ import annotations

from pathlib import Path

from examples.demo import train_and_show
from examples.sort.prepare import Recipe, prepare


def warm_start(seed: int) -> tuple[Path, dict[str, float]]:
    """Return the folder of a seed, and the accuracy of its policy before training."""
    folder = Path(".cache/sort") / f"seed{seed}"
    return folder, prepare(folder, Recipe(seed=seed))


if __name__ == "__main__":
    train_and_show("sort", "sort six digits", 150, warm_start)
