"""Make the tiny policy and its questions: `python -m examples.research.prepare --out DIR --seed N`.

The warm start ends with careless research: three rounds in ten look up the last key again, which gains nothing, and
one answer in five is a guess. Reports are always right.
"""

from __future__ import annotations

import string
from functools import partial
from pathlib import Path
from random import Random

from examples.research.chain import looked_up
from examples.tiny_policy import Demonstration, Figures, WarmStart, fill, fill_from_command_line, once

LETTERS = string.ascii_lowercase[:12]
STEPS = (1, 2, 3)
"""Numbers of steps of a question."""
AGAIN, GUESSED = 0.3, 0.2
"""Shares of careless rounds that look up the last key again, and of answers that are a guess."""


@once
def prepare(out: Path, recipe: WarmStart) -> Figures:
    """Fill `out` unless it is complete for this recipe."""
    rng = Random(recipe.seed)
    rows = [new_row(rng) for _ in range(recipe.num_eval + recipe.num_train)]
    return fill(out, recipe, rows, partial(demonstration, rng))


def new_row(rng: Random) -> dict[str, str]:
    """Draw a question with its table and its answer."""
    values = rng.sample(LETTERS, len(LETTERS))
    table = ",".join(f"{key}{value}" for key, value in zip(LETTERS, values, strict=True))
    start, steps = rng.choice(LETTERS), rng.choice(STEPS)
    answer = start
    for _ in range(steps):
        answer = looked_up(table, answer)
    return {"prompt": f"{start}{steps}", "answer": answer, "table": table}


def demonstration(rng: Random, is_careless: bool) -> Demonstration:
    """Draw one round of a right research; if careless, as the module says."""
    row = new_row(rng)
    question, table = row["prompt"], row["table"]
    key, left = question[0], int(question[1])
    report = last = ""
    for _ in range(rng.randint(0, left)):
        report, last = f"{left}{key}", looked_up(table, key)
        key, left = last, left - 1
    prompt = f"{question};{report}|{last}:"
    if is_careless and last and rng.random() < AGAIN:
        return [(prompt, f"{report}?{report[1]}")]
    if left:
        return [(prompt, f"{left}{key}?{key}")]
    answer = rng.choice(LETTERS) if is_careless and rng.random() < GUESSED else key
    return [(prompt, f"0{key}!{answer}")]


if __name__ == "__main__":
    fill_from_command_line(prepare, WarmStart(), __doc__)
