"""Make the tiny policy and its tasks: `python -m examples.segments.prepare --out DIR --seed N`.

    851230:  512308,  123058,  120358,  ;  012358       passes of bubble sort, the end of the thought, the answer

Each pass moves the largest digit that is out of place to its end. The warm start ends with careless demonstrations: any
number of passes, and an answer that is only one pass better than the last of them, so that it is right only if the
thought has come close.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from examples.tiny_policy import Demonstration, Figures, WarmStart, fill, fill_from_command_line, once

NUM_DIGITS = 6
CAREFUL = 0.1
"""Share of demonstrations at the end of the warm start that think to the end."""


@once
def prepare(out: Path, recipe: WarmStart) -> Figures:
    """Fill `out` unless it is complete for this recipe."""
    rng = Random(recipe.seed)
    prompts: dict[str, None] = {}
    while len(prompts) < recipe.num_eval + recipe.num_train:
        prompts[new_prompt(rng)] = None
    rows = [{"prompt": f"{digits}:", "answer": "".join(sorted(digits))} for digits in prompts]
    return fill(out, recipe, rows, partial(demonstration, rng))


def new_prompt(rng: Random) -> str:
    """Draw six different digits."""
    return "".join(rng.sample("0123456789", NUM_DIGITS))


def bubbled(digits: str) -> str:
    """Return the digits after one pass of bubble sort: `851230` gives `512308`."""
    row = list(digits)
    for i in range(len(row) - 1):
        if row[i] > row[i + 1]:
            row[i], row[i + 1] = row[i + 1], row[i]
    return "".join(row)


def passes(digits: str) -> list[str]:
    """Return the digits after each pass, until they are in order; none if they are."""
    found = []
    while digits != (digits := bubbled(digits)):
        found.append(digits)
    return found


def demonstration(rng: Random, is_careless: bool) -> Demonstration:
    """Draw a thought and its answer as one reply."""
    digits = new_prompt(rng)
    thought = passes(digits)
    if is_careless and rng.random() > CAREFUL:
        thought = thought[: rng.randint(0, len(thought))]
        answer = bubbled(thought[-1] if thought else digits)
    else:
        answer = "".join(sorted(digits))
    return [(f"{digits}:", "".join(f"{one}," for one in thought) + f";{answer}")]


if __name__ == "__main__":
    fill_from_command_line(prepare, WarmStart(steps=600), __doc__)
