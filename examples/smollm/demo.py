"""Demo of `make demo-llm`: train SmolLM2-135M-Instruct on Ray to name the largest of three numbers."""

from __future__ import annotations

from pathlib import Path

from examples.demo import train_and_show
from examples.smollm.prepare import Recipe, prepare

if __name__ == "__main__":
    folder = Path(".cache/smollm")  # the same for every seed
    train_and_show("smollm", "SmolLM2-135M, largest of three", 50, lambda _: (folder, prepare(folder, Recipe())))
