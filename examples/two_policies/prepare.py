"""Make two tiny policies: `python -m examples.two_policies.prepare --out DIR --seed N`.

Both are warm-started on a mixture, so that each can improve. The solver sorts half of its tasks correctly, a quarter in
descending order, and copies a quarter. Of the proposer's tasks a quarter has six different digits, half one digit six
times, which every solver gets right, and a quarter is no task.

Writes into DIR: `proposer/` and `solver/` (safetensors, tokenizer), and `train.jsonl`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from examples import tiny_policy
from examples.tiny_policy import Demonstration, Figures, WarmStart, save_imitator
from examples.two_policies.play import NUM_DIGITS

DIGITS = "0123456789"
ASKED = "6?"
"""Prompt of the proposer."""


@tiny_policy.once
def prepare(out: Path, recipe: WarmStart) -> Figures:
    """Fill `out` unless it is complete for this recipe; each policy has a number of steps of its own."""
    rng = Random(recipe.seed)
    losses = {
        "proposer_loss": save_imitator(out / "proposer", lambda _: proposal(rng), replace(recipe, steps=60)),
        "solver_loss": save_imitator(out / "solver", lambda _: solution(rng), replace(recipe, steps=250)),
    }
    tiny_policy.write_rows(out / "train.jsonl", ({"id": f"ask-{i}", "prompt": ASKED} for i in range(recipe.num_train)))
    return losses


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


if __name__ == "__main__":
    tiny_policy.fill_from_command_line(prepare, WarmStart(), __doc__)
