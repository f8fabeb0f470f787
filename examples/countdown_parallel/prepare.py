"""Make the tiny policy and its games: `python -m examples.countdown_parallel.prepare --out DIR --seed N`.

    parent  P5,3,2=16:  -+                              first signs to try
    child   C5,3,2=16-  5-3+2   4;  5-3-2  0;  5-3*2    a second sign at a time, until one hits
    child   C5,3,2=16+  5+3+2  10;  5+3*2
    parent  >5+3*2:  5+3*2                              answers

Expressions are evaluated from left to right. The warm start ends with games played carelessly: half of the parents try
one sign only, children try the same expression again, and two answers in five are a guess.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from examples.countdown_parallel.countdown import (
    OPERATIONS,
    calculated,
    child_prompt,
    first_prompt,
    second_prompt,
    solves,
    value_of,
)
from examples.tiny_policy import Demonstration, Figures, WarmStart, fill, fill_from_command_line, once

SIGNS = "".join(OPERATIONS)
NUM_TRIED = (1, 1, 2, 3)
"""Numbers of first signs, from which a careless parent draws one."""
CAREFUL = 0.4
"""Share of careless children that still try every second sign."""
ANSWER_READ = 0.6
"""Share of careless answers that copy the joined expression; the others are a guess."""


@once
def prepare(out: Path, recipe: WarmStart) -> Figures:
    """Fill `out` unless it is complete for this recipe."""
    rng = Random(recipe.seed)
    games: dict[str, None] = {}
    while len(games) < recipe.num_eval + recipe.num_train:
        games[new_game(rng)] = None
    return fill(out, recipe, [{"prompt": game, "answer": ""} for game in games], partial(demonstration, rng))


def new_game(rng: Random) -> str:
    """Draw a game such as `5,3,2=16`, with a reachable target."""
    digits = [str(rng.randint(1, 9)) for _ in range(3)]
    return f"{','.join(digits)}={value_of(written(digits, rng.choice(SIGNS), rng.choice(SIGNS)))}"


def written(digits: list[str], sign: str, other: str) -> str:
    """`5+3*2`."""
    return f"{digits[0]}{sign}{digits[1]}{other}{digits[2]}"


def demonstration(rng: Random, is_careless: bool) -> Demonstration:
    """Draw a parent's whole game or one child's, with equal probability."""
    return (of_parent if rng.random() < 0.5 else of_child)(rng, new_game(rng), is_careless)


def of_parent(rng: Random, game: str, is_careless: bool) -> Demonstration:
    """Parent's part: the signs to try, and the answer to the joined expressions."""
    digits = game.partition("=")[0].split(",")
    tried = sorted(rng.sample(SIGNS, rng.choice(NUM_TRIED)), key=SIGNS.index) if is_careless else SIGNS
    expressions = ([written(digits, sign, other) for other in SIGNS] for sign in tried)
    found = (next((each for each in of_sign if solves(each, game)), None) for of_sign in expressions)
    hits = [*filter(None, found)]
    is_read = hits and (not is_careless or rng.random() < ANSWER_READ)
    answer = hits[0] if is_read else written(digits, rng.choice(SIGNS), rng.choice(SIGNS))
    return [(first_prompt(game), "".join(tried)), (second_prompt(hits), answer)]


def of_child(rng: Random, game: str, is_careless: bool) -> Demonstration:
    """Child's part: expressions until one hits."""
    digits, sign = game.partition("=")[0].split(","), rng.choice(SIGNS)
    is_careful = not is_careless or rng.random() < CAREFUL
    told, exchanges = child_prompt(game, sign), []
    for other in SIGNS if is_careful else rng.choice(SIGNS) * len(SIGNS):
        expression = written(digits, sign, other)
        exchanges.append((told, expression))
        if solves(expression, game):
            break
        told = calculated(value_of(expression))
    return exchanges


if __name__ == "__main__":
    fill_from_command_line(prepare, WarmStart(), __doc__)
