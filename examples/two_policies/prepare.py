"""Make two tiny policies: `python -m examples.two_policies.prepare --out DIR --seed N`.

Both are warm-started on a mixture, so that each can improve. The solver sorts half of its tasks correctly, a quarter in
descending order, and copies a quarter. Of the proposer's tasks a quarter has six different digits, half one digit six
times, which every solver gets right, and a quarter is no task.

Writes into DIR: `proposer/` and `solver/` (safetensors, tokenizer), and `train.jsonl`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch

from examples.imitation import Demonstration, Demonstrator, Recipe, imitate
from examples.sort.prepare import new_model
from examples.sort.tokenizer import build_tokenizer
from examples.two_policies.play import NUM_DIGITS

DIGITS = "0123456789"
ASKED = "6?"
"""Prompt of the proposer."""
NUM_TASKS = 4096


def prepare(out: Path, seed: int) -> None:
    """Fill `out` unless it is complete for this seed."""
    mark = out / "prepared.json"
    if mark.exists() and json.loads(mark.read_text()) == {"seed": seed}:
        return
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rng = Random(seed)
    write_policy(out / "proposer", lambda _: proposal(rng), Recipe(seed=seed, steps=60))
    write_policy(out / "solver", lambda _: solution(rng), Recipe(seed=seed, steps=250))
    rows = ({"id": f"ask-{i}", "prompt": ASKED} for i in range(NUM_TASKS))
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mark.write_text(json.dumps({"seed": seed}))


def write_policy(folder: Path, demonstrate: Demonstrator, recipe: Recipe) -> None:
    """Train a tiny policy on these demonstrations, and save it with its tokenizer."""
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, recipe.seed)
    imitate(model, tokenizer, demonstrate, recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def proposal(rng: Random) -> Demonstration:
    """Draw a demonstration of the proposer."""
    kind = rng.random()
    if kind < 0.25:
        said = "".join(rng.sample(DIGITS, NUM_DIGITS))
    elif kind < 0.75:
        said = rng.choice(DIGITS) * NUM_DIGITS
    else:
        said = rng.choice(DIGITS) * rng.randrange(1, NUM_DIGITS)
    return [(ASKED, said)]


def solution(rng: Random) -> Demonstration:
    """Draw a demonstration of the solver."""
    digits = [rng.choice(DIGITS) for _ in range(NUM_DIGITS)]
    right = sorted(digits)
    said = rng.choice([right, right, right[::-1], digits])
    return [("".join(digits) + ">", "".join(said))]


def main() -> None:
    """Fill the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Make two tiny policies and what they are asked.")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.seed)
    print(arguments.out)


if __name__ == "__main__":
    main()
