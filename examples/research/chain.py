"""Workflow and reward of a search through a table, in rounds.

    question   a3                 follow the table three times, starting at a
    round 1    a3;|:      3a?a    report: 3 steps are left from a; look up a
    round 2    a3;3a|k:   2k?k    the table has k for a: 2 steps are left from k
    round 3    a3;2k|e:   1e?e
    round 4    a3;1e|x:   0x!x    none are left: the answer is x

Every round sees the question, the report of the round before, and the last result: nothing else is remembered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import PositiveInt

from rlsys.agents.workflow import BudgetSpent, Session, Workflow
from rlsys.types import Task
from rlsys.workflows.research import State

NOTHING = "-"
"""Result of a look-up without a key."""
_REPLY = re.compile(r"(?P<report>[^?!]*)(?P<action>[?!])(?P<key>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Chain(Workflow):
    """The workflow `research` in plain text. An episode ends with an answer, or a reply that is none."""

    max_rounds: PositiveInt = 8
    """Rounds of an episode."""

    async def run(self, session: Session) -> None:
        agent, state, table = session.agent("policy"), State(), str(session.task.info["table"])
        for _ in range(self.max_rounds):
            agent.rewrite(self.write(session.task, state))
            found = _REPLY.fullmatch(await agent.chat(None))
            if found is None or found["action"] == "!":
                return
            state = State(found["report"], looked_up(table, found["key"]))
        raise BudgetSpent(f"round {self.max_rounds}, the last (max_rounds), still looked up")

    def write(self, task: Task, state: State) -> str:
        """`a3;2k|e:`."""
        return f"{task.prompt};{state.report}|{state.last}:"


def looked_up(table: str, key: str) -> str:
    """Value of a key in a table such as `ak,ke,ex`; `-` for a key that it does not have."""
    return next((pair[1] for pair in table.split(",") if pair[0] == key), NOTHING)


def answered(completion: str, answer: str) -> float:
    """Reward function: 1.0 for a reply that ends with the answer."""
    return float(completion.endswith(f"!{answer}"))
