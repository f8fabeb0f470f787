"""The tiny policy of `examples.sort` and its tasks, with a chat template, which conversations need.

python -m examples.openai_agent.prepare --out .cache/openai_agent/seed0 --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from examples.sort.prepare import Recipe
from examples.sort.prepare import prepare as prepare_sorter
from examples.sort.tokenizer import EOS, build_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
"""Template that joins messages as in the warm start: `385120>853210<eos>385120>`."""


def prepare(out: Path, recipe: Recipe) -> dict[str, float]:
    """Fill `out` unless it is complete; return the figures of the warm start."""
    out.mkdir(parents=True, exist_ok=True)
    figures = prepare_sorter(out, recipe)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out / "model")
    return figures


def main() -> None:
    """Fill the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Make the tiny policy with a chat template, and its tasks.")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    figures = prepare(arguments.out, Recipe(seed=arguments.seed))
    print(json.dumps({"out": os.fspath(arguments.out), **figures}))


if __name__ == "__main__":
    main()
