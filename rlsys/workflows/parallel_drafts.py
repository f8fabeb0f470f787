"""Workflow of drafts in parallel, and an answer from what they found.

    round t:    drafts      the task, and the notes so far      in parallel, unaware of each other
                notes       all drafts of the round, or what a distiller made of them
    answer      the task and the last notes

With one round it is ParaThinker's (arXiv:2509.04475): paths of thought, and a summary that reads all of them. With
several rounds and a distiller it is PDR, parallel-distill-refine (arXiv:2510.01123): the notes stay small, so that the
context does not grow with the number of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveInt

from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.types import Prompt
from rlsys.util.number_ranges import Count
from rlsys.workflows.tool_use import opening_messages

DRAFT = "Think about the task on your own, and say what you find. You may be given notes from earlier attempts."
DISTILL = (
    "You are given several attempts at a task. Write short notes of what is right, what is wrong and what is open."
)
ANSWER = "Answer the task. You are given notes from several attempts; check them before you rely on them."


@dataclass(frozen=True, kw_only=True)
class ParallelDrafts(Workflow):
    """Agents `draft` attempt the task in parallel, and the root agent answers from their notes.

    A draft that is stopped is left out of the notes, and the episode goes on. `Session.num_sequential` counts the
    longest draft of each round, its distiller and the answer.
    """

    num_drafts: Count = 4
    """Drafts of a round."""
    num_rounds: Count = 1
    """Rounds before the answer."""
    distills: bool = False
    """True if an agent `distiller` writes the notes of a round; otherwise they are the drafts, one after the other."""
    max_note_chars: PositiveInt = 20_000
    """Longest notes, in characters; the rest is cut."""
    draft_system: str = DRAFT
    """System message of every draft."""
    distill_system: str = DISTILL
    """System message of the distiller."""
    answer_system: str = ANSWER
    """System message of the root agent."""

    async def run(self, session: Session) -> None:
        root, notes = session.agent("policy"), ""
        for _ in range(self.num_rounds):
            notes = (await self.take_notes(session, root, notes))[: self.max_note_chars]
        await root.chat(self.write(session, self.answer_system, notes))

    async def take_notes(self, session: Session, root: Agent, before: str) -> str:
        """Run one round; returns its notes."""
        prompt = self.write(session, self.draft_system, before)
        drafts = [session.agent("draft", parent=root) for _ in range(self.num_drafts)]
        texts = await session.gather(*(draft.chat(prompt) for draft in drafts))
        attempts = "\n\n".join(f"Attempt {i}: {text}" for i, text in enumerate(texts, 1) if isinstance(text, str))
        if not self.distills:
            return attempts
        return await session.agent("distiller", parent=root).chat(self.write(session, self.distill_system, attempts))

    def write(self, session: Session, system: str, notes: str) -> Prompt:
        """Write the prompt of an agent."""
        return opening_messages(system, session.task.prompt, f"\n\nNotes:\n{notes}" if notes else "")
