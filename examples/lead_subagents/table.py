"""Workflow and reward of filling a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsys.agents.workflow import Agent, Session
from rlsys.workflows.lead_subagents import LeadSubagents

MAX_LOOKUPS = 2
"""Letters that one subagent may look up: three subagents are needed for six."""
UNKNOWN = "??"
"""Reply for a letter that is not in the table."""


@dataclass(frozen=True, kw_only=True)
class TableFilling(LeadSubagents):
    """Workflow in which a lead splits the letters among `max_subagents` subagents. Each looks up its letters, and all
    rows found form the table. Every agent's reward is the item-F1 of the episode."""

    max_subagents: int = 3

    async def run(self, session: Session) -> None:
        lead = session.agent("lead")
        said = await lead.chat(lead_prompt(self.max_subagents, str(session.task.prompt)))
        pairs = [said[i : i + MAX_LOOKUPS] for i in range(0, len(said), MAX_LOOKUPS)]
        parts = await self.delegate(session, lead, pairs)
        rows = [row.rpartition("=") for part in parts for row in part.splitlines() if "=" in row]
        session.reward(item_f1({letter: number for letter, _, number in rows}, table_of(session)))

    async def work(self, session: Session, subagent: Agent, task: str) -> str:
        """Look up letters until the reply is empty; return rows like `k=47`."""
        table, rows, told = table_of(session), [], subagent_prompt(task)
        while len(rows) < MAX_LOOKUPS and (letter := await subagent.chat(told)):
            number = table.get(letter, UNKNOWN)
            rows.append(f"{letter}={number}")
            told = f"{number};"
        return "\n".join(rows)


def lead_prompt(width: int, letters: str) -> str:
    """`L3|kbqaxe=`."""
    return f"L{width}|{letters}="


def subagent_prompt(letters: str) -> str:
    """`S|kb=`."""
    return f"S|{letters}="


def table_of(session: Session) -> Mapping[str, str]:
    """Number by letter, from an answer like `k47 b12`."""
    return {row[0]: row[1:] for row in (session.task.answer or "").split()}


def item_f1(found: Mapping[str, str], table: Mapping[str, str]) -> float:
    """Harmonic mean of the share of found rows that are correct, and the share of the table's rows that are found."""
    num_right = sum(table.get(letter) == number for letter, number in found.items())
    return 2 * num_right / (len(found) + len(table))
