"""The world that an agent acts on: `reset`, `step`, and tools, for one episode.

class Guess(Environment):
    async def reset(self, task: Task, seed: int) -> Prompt:
        self.secret = Random(seed).randint(1, 100)
        return "Guess a number from 1 to 100."

    async def step(self, reply: str) -> Step:
        is_right = reply.strip() == str(self.secret)
        return Step("Right." if is_right else "Wrong.", reward=float(is_right), is_done=is_right)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlsys.agents.tools import NO_TOOLS, Toolbox
from rlsys.types import Json, Prompt, Task


@dataclass(frozen=True)
class Step:
    """What an environment answers to a reply."""

    observation: Prompt
    """What the agent is told next."""
    reward: float | None = None
    """Of this step; None where the environment gives none."""
    is_done: bool = False
    """Is the episode over?"""
    is_truncated: bool = False
    """Was it cut short, by a limit on steps for instance?"""
    info: Mapping[str, Json] = field(default_factory=dict)


class Environment:
    """Base of every environment. Single use; speaks messages, never tokens. Enter it with `Session.enter`.

    Raise `ToolError` for what is not the policy's fault: the episode then fails, and is left out of training.
    """

    tools: Toolbox = NO_TOOLS
    """What an agent may call in it."""
    opening: Prompt = ""
    """What `reset` returned; set by `Session.enter`."""

    async def reset(self, task: Task, seed: int) -> Prompt:
        """Begin: what the agent is told first. The seed is the same for all episodes of a group."""
        raise NotImplementedError(f"{type(self).__name__} cannot begin: implement `reset`")

    async def step(self, reply: str) -> Step:
        """What the agent's reply does."""
        raise NotImplementedError(f"{type(self).__name__} takes no replies: implement `step`")

    async def close(self) -> None:
        """Let go of what it holds. Called once, however the episode ended, also if `reset` raised."""
