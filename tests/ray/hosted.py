"""Workflows that tell in which process they run."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from rlsys.agents.workflow import Session, Workflow


@dataclass(frozen=True, kw_only=True)
class TellsProcess(Workflow):
    """One turn; the reward is the id of the process. With `flag`, the process is killed once: then that file exists."""

    flag: str = ""

    async def run(self, session: Session) -> None:
        await session.agent("policy").chat(session.task.prompt)
        if self.flag:
            die_once(Path(self.flag))
        session.reward(float(os.getpid()))


def die_once(flag: Path) -> None:
    """Kill this process, unless the file exists; create it."""
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
