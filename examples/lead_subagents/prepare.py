"""Make the tiny policy and its tables: `python -m examples.lead_subagents.prepare --out DIR --seed N`.

A table has six rows: letters with a number each. The lead gets the number of subagents and the letters, and names two
letters for each; a subagent gets its letters, and looks up one at a time, two at most.

    lead       L3|kbqaxe=  kbqaxe
    subagent   S|kb=  k  47;  b  12;

At the end of the warm start, two of five demonstrations of each role are correct; the others waste lookups. A lead
gives every subagent the same letters, or one letter twice. A subagent looks up one letter twice, or letters outside its
task. So both roles can improve, and neither compensates for the other.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from examples.lead_subagents.table import MAX_LOOKUPS, lead_prompt, subagent_prompt
from examples.tiny_policy import Demonstration, Figures, WarmStart, fill, fill_from_command_line, once

LETTERS = "abcdefghijkl"
NUM_ROWS = 6
WIDTHS = (1, 2, 3)
"""Numbers of subagents that a lead may get."""
RIGHT = 0.4
"""Share of correct demonstrations."""


@once
def prepare(out: Path, recipe: WarmStart) -> Figures:
    """Fill `out` unless it is complete for this recipe."""
    rng = Random(recipe.seed)
    rows = [new_row(rng) for _ in range(recipe.num_eval + recipe.num_train)]
    return fill(out, recipe, rows, partial(demonstration, rng))


def new_row(rng: Random) -> dict[str, str]:
    """`{"prompt": "kbqaxe", "answer": "k47 b12 q80 a05 x31 e77"}`."""
    letters = rng.sample(LETTERS, NUM_ROWS)
    return {"prompt": "".join(letters), "answer": " ".join(f"{letter}{rng.randrange(100):02}" for letter in letters)}


def demonstration(rng: Random, is_careless: bool) -> Demonstration:
    """Draw a demonstration of the lead or of a subagent: a correct one, or one of the mixture."""
    of_role = of_lead if rng.random() < 1 / 2 else of_subagent
    return of_role(rng, not is_careless or rng.random() < RIGHT)


def of_lead(rng: Random, is_right: bool) -> Demonstration:
    """Lead's part: the split of the table."""
    letters, width = rng.sample(LETTERS, NUM_ROWS), rng.choice(WIDTHS)
    right = letters[: MAX_LOOKUPS * width]
    repeated = letters[:MAX_LOOKUPS] * width
    doubled = [letter for letter in right[::MAX_LOOKUPS] for _ in range(MAX_LOOKUPS)]
    split = right if is_right else rng.choice([repeated, doubled])
    return [(lead_prompt(width, "".join(letters)), "".join(split))]


def of_subagent(rng: Random, is_right: bool) -> Demonstration:
    """Subagent's part: its lookups; for one letter, that letter and then an empty reply."""
    letters = rng.sample(LETTERS, rng.choice([1, MAX_LOOKUPS, MAX_LOOKUPS]))
    strangers = [rng.choice(LETTERS) for _ in letters]
    looked_up = letters if is_right else rng.choice([[letters[0]] * MAX_LOOKUPS, strangers])
    numbers = [f"{rng.randrange(100):02};" for _ in looked_up]
    told = [subagent_prompt("".join(letters)), *numbers]
    said = looked_up if len(looked_up) == MAX_LOOKUPS else [*looked_up, ""]
    return list(zip(told, said, strict=False))


if __name__ == "__main__":
    fill_from_command_line(prepare, WarmStart(), __doc__)
