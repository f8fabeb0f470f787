"""Demo of `make demo`: make a tiny policy, train it on Ray to sort six digits, show its improvement."""

from __future__ import annotations

from examples.demo import train_and_show
from examples.sort.prepare import prepare_seed

if __name__ == "__main__":
    train_and_show("sort", "sort six digits", 150, prepare_seed)
