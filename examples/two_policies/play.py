"""A proposer writes six digits, and solvers sort them.

proposer   6?        385120
solvers    385120>   012358   385120   853210   012358    side by side
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlsys.agents.workflow import Agent
from rlsys.types import Prompt, Task
from rlsys.workflows.self_play import SelfPlay

NUM_DIGITS = 6


def is_sorted(task: str, reply: str) -> float:
    """Return 1 for the digits of the task in ascending order, else 0."""
    return float(reply == "".join(sorted(task)))


@dataclass(frozen=True, kw_only=True)
class Digits(SelfPlay):
    """Self-play in plain text."""

    judge: str = "examples.two_policies.play:is_sorted"

    def ask(self, task: Task) -> Prompt:
        return task.prompt

    def read(self, reply: str) -> str | None:
        return reply if re.fullmatch(rf"\d{{{NUM_DIGITS}}}", reply) else None

    async def solve(self, solver: Agent, task: str) -> str:
        return await solver.chat(f"{task}>")
