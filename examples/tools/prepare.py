"""Make the tiny policy and its products: `python -m examples.tools.prepare --out DIR --seed N`.

It first imitates calls of the calculator. Then three in four of its demonstrations give the correct product without a
call. The policy is far too small to learn products; it can copy one into a call, and the result from the reply. So it
starts by imitating the majority, while only calls of the tool are rewarded.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from examples.tiny_policy import Demonstration, Figures, WarmStart, fill, fill_from_command_line, once
from examples.tools.calculator import CALL, TOLD, calculator

CALLING = 0.25
"""Share of the final demonstrations that call the calculator."""


@once
def prepare(out: Path, recipe: WarmStart) -> Figures:
    """Fill `out` unless it is complete for this recipe."""
    rng = Random(recipe.seed)
    products = [new_product(rng) for _ in range(recipe.num_eval + recipe.num_train)]
    rows = [{"prompt": f"{each}=", "answer": calculator(each)} for each in products]
    return fill(out, recipe, rows, partial(demonstration, rng))


def new_product(rng: Random) -> str:
    """Draw `31*49`: two numbers of two digits."""
    return f"{rng.randrange(10, 100)}*{rng.randrange(10, 100)}"


def demonstration(rng: Random, is_careless: bool) -> Demonstration:
    """Draw a product, and its value from the calculator; if careless, three times in four without a call."""
    asked = new_product(rng)
    value = calculator(asked)
    if not is_careless or rng.random() < CALLING:
        return [(f"{asked}=", f"{CALL}{asked}"), (f"{value}{TOLD}", value)]
    return [(f"{asked}=", value)]


if __name__ == "__main__":
    fill_from_command_line(prepare, WarmStart(steps=120), __doc__)
