"""Workflow and reward of a game of Countdown."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlsys.agents.workflow import Agent, Session
from rlsys.workflows.spawn_join import SpawnJoin

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_TRIES = len(OPERATIONS)
"""Expressions that one child may try."""
_EXPRESSION = re.compile(r"(\d)([-+*])(\d)([-+*])(\d)")


@dataclass(frozen=True, kw_only=True)
class Countdown(SpawnJoin):
    """Workflow of a parent, which gets three digits and a target and selects the first signs to try, one child each. A
    child tries second signs, gets each value from a calculator, and joins the expression that hits; the parent answers.
    All are rewarded if the value of the answer is the target: see `solved`."""

    max_children: int = 3

    async def solve(self, session: Session, parent: Agent) -> None:
        game = str(session.task.prompt)
        signs = await parent.chat(first_prompt(game))
        joined = await self.spawn(session, parent, [child_prompt(game, sign) for sign in signs])
        hits = [expression for expression in joined if value_of(expression) is not None]
        await parent.chat(second_prompt(hits))

    async def explore(self, child: Agent, context: str) -> str | None:
        """Return the first tried expression whose value is the target."""
        target, told = target_in(context), context
        for _ in range(MAX_TRIES):
            expression = await child.chat(told)
            value = value_of(expression)
            if value is not None and value == target:
                return expression
            told = calculated(value)
        return None


def first_prompt(game: str) -> str:
    """`P5,3,2=16:`."""
    return f"P{game}:"


def child_prompt(game: str, sign: str) -> str:
    """`C5,3,2=16+`."""
    return f"C{game}{sign}"


def calculated(value: int | None) -> str:
    """Reply of the calculator: `10;`, or `?;` for an invalid expression."""
    return f"{'?' if value is None else value};"


def second_prompt(hits: list[str]) -> str:
    """`>5+3*2:`."""
    return f">{'|'.join(hits)}:"


def target_in(context: str) -> int:
    """16 of `C5,3,2=16+`."""
    found = re.search(r"=(-?\d+)", context)
    return int(found[1]) if found else 0


def value_of(expression: str) -> int | None:
    """16 of `5+3*2`, from left to right. None for an invalid expression of three digits."""
    found = _EXPRESSION.fullmatch(expression)
    if not found:
        return None
    first, sign, second, other, third = found.groups()
    return OPERATIONS[other](OPERATIONS[sign](int(first), int(second)), int(third))


def solved(completion: str, prompt: str) -> float:
    """Reward function: 1.0 if the parent's answer solves the game."""
    return solves(completion, prompt)


def solves(expression: str, game: str) -> float:
    """Return 1.0 if the expression uses each digit of a game like `5,3,2=16` once and hits its target, else 0.0."""
    digits, _, target = game.partition("=")
    uses_them = sorted(re.findall(r"\d", expression)) == sorted(digits.split(","))
    return float(uses_them and value_of(expression) == int(target))
