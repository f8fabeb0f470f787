"""Make the tiny policy and its tables: `python -m examples.lead_subagents.prepare --out DIR --seed N`.

A table has six rows: letters with a number each. The lead is told how many subagents it has and the letters, and names
two for each; a subagent is told its letters, and looks up one at a time, two at most.

    lead       L3|kbqaxe=  kbqaxe
    subagent   S|kb=  k  47;  b  12;

Of the demonstrations that the warm start ends with, two of five of each role are right; the others waste what they
have. A lead gives every subagent the same letters, or one letter twice; a subagent looks up one letter twice, or
letters that nobody asked for. So there is something to find for both, and neither makes up for the other.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from random import Random

from examples.imitation import Demonstration, Recipe
from examples.imitation import prepare as fill
from examples.lead_subagents.table import MAX_LOOKUPS, lead_prompt, subagent_prompt

LETTERS = "abcdefghijkl"
NUM_ROWS = 6
WIDTHS = (1, 2, 3)
"""How many subagents a lead may be told it has."""
RIGHT = 0.4
"""Share of demonstrations that are right."""


def prepare(out: Path, recipe: Recipe) -> None:
    """Fill `out` unless it is complete for this recipe."""
    rng = Random(recipe.seed)
    rows = [new_row(rng) for _ in range(recipe.num_eval + recipe.num_train)]
    fill(out, recipe, rows, partial(demonstration, rng))


def new_row(rng: Random) -> dict[str, str]:
    """`{"prompt": "kbqaxe", "answer": "k47 b12 q80 a05 x31 e77"}`."""
    letters = rng.sample(LETTERS, NUM_ROWS)
    return {"prompt": "".join(letters), "answer": " ".join(f"{letter}{rng.randrange(100):02}" for letter in letters)}


def demonstration(rng: Random, is_careless: bool) -> Demonstration:
    """One of the lead or of a subagent: a right one, or one of the mixture."""
    of_role = of_lead if rng.random() < 1 / 2 else of_subagent
    return of_role(rng, not is_careless or rng.random() < RIGHT)


def of_lead(rng: Random, is_right: bool) -> Demonstration:
    """How it splits the table."""
    letters, width = rng.sample(LETTERS, NUM_ROWS), rng.choice(WIDTHS)
    right = letters[: MAX_LOOKUPS * width]
    repeated = letters[:MAX_LOOKUPS] * width
    doubled = [letter for letter in right[::MAX_LOOKUPS] for _ in range(MAX_LOOKUPS)]
    split = right if is_right else rng.choice([repeated, doubled])
    return [(lead_prompt(width, "".join(letters)), "".join(split))]


def of_subagent(rng: Random, is_right: bool) -> Demonstration:
    """What it looks up; of one letter, that one and then nothing."""
    letters = rng.sample(LETTERS, rng.choice([1, MAX_LOOKUPS, MAX_LOOKUPS]))
    strangers = [rng.choice(LETTERS) for _ in letters]
    looked_up = letters if is_right else rng.choice([[letters[0]] * MAX_LOOKUPS, strangers])
    numbers = [f"{rng.randrange(100):02};" for _ in looked_up]
    told = [subagent_prompt("".join(letters)), *numbers]
    said = looked_up if len(looked_up) == MAX_LOOKUPS else [*looked_up, ""]
    return list(zip(told, said, strict=False))


def main() -> None:
    """Fill the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Make the tiny policy and its tables.")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.out, Recipe(seed=arguments.seed))
    print(arguments.out)


if __name__ == "__main__":
    main()
