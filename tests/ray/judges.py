"""Reward functions and workflows of the tests, good and bad."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.agents.workflow import Session, Workflow

UNPICKLED_BY = Path(tempfile.gettempdir()) / f"rlsys-test-unpickled-by-{os.getuid()}"
"""Process ids of everyone who unpickled a payload of `Marked`."""


def digits(completion: str) -> float:
    """Share of digits: a random model has some, so that there is something to learn."""
    return sum(c.isdigit() for c in completion) / 8


def raises(completion: str) -> float:
    raise ValueError("this judge is broken")


def hangs_on_first_episode(completion: str, task_id: str) -> float:
    time.sleep(60)
    return 0.0


def nan(completion: str) -> float:
    return float("nan")


class MarkedText(str):
    """A text that leaves the process id of everyone who unpickles it in `UNPICKLED_BY`."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (str(self),)


def _unpickled(text: str) -> MarkedText:
    with UNPICKLED_BY.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return MarkedText(text)


class Marked(Workflow):
    """A single turn whose text, part of the payload only, marks its readers."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat(session.task.prompt)
        agent.turns[-1] = replace(agent.turns[-1], text=MarkedText(agent.turns[-1].text))


@dataclass(frozen=True, kw_only=True)
class Hangs(Workflow):
    """A single turn that hangs for ever once the file `gate` exists; the file `gate.hung` tells that it does."""

    gate: Path

    async def run(self, session: Session) -> None:
        if self.gate.exists():
            self.gate.with_suffix(".hung").touch()
            await asyncio.Event().wait()
        await session.agent("policy").chat(session.task.prompt)
