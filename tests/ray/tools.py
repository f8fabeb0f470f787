"""A workflow whose tool answers when the test says so."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rlsys.agents.workflow import Session, SingleTurn, Workflow


class Asks(Workflow):
    """Two turns; between them it waits until the file that the task names is there."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat(session.task.prompt)
        answer = Path(str(session.task.info["answer"]))
        while not answer.exists():  # noqa: ASYNC110, ASYNC240  (a file announces itself to nobody)
            await asyncio.sleep(0.01)
        await agent.chat("2>")


class Blocks(SingleTurn):
    """Blocks the event loop in sessions of tasks that say so, as a synchronous client would."""

    async def run(self, session: Session) -> None:
        await session.agent("policy").chat(session.task.prompt)
        if session.task.info["block"] == "yes":
            time.sleep(3600)  # noqa: ASYNC251  (that is the fault)


class Talks(SingleTurn):
    """A single turn as code of a user, which is not light: a session worker plays it."""
