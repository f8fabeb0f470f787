"""Environment that an agent acts on, for one episode: `reset`, `step`, and tools.

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
    """Result of one reply."""

    observation: Prompt
    """The agent's next prompt."""
    reward: float | None = None
    """Reward of this step; None if the environment gives none."""
    is_done: bool = False
    """True if the episode is over."""
    is_truncated: bool = False
    """True if the episode was cut short, for example by a limit on steps."""
    info: Mapping[str, Json] = field(default_factory=dict)


class Environment:
    """Base class of environments. Single use; exchanges messages, never tokens. Enter it with `Session.enter`.

    Raise `ToolError` for a failure that the policy did not cause: the episode then fails, and is left out of training.
    """

    tools: Toolbox = NO_TOOLS
    """Tools that the agent may call in this environment."""
    opening: Prompt = ""
    """The first prompt, as returned by `reset`; set by `Session.enter`."""

    async def reset(self, task: Task, seed: int) -> Prompt:
        """Start the episode, and return the agent's first prompt. All episodes of a group get the same seed."""
        raise NotImplementedError(f"{type(self).__name__} cannot begin: implement `reset`")

    async def step(self, reply: str) -> Step:
        """Apply the agent's reply."""
        raise NotImplementedError(f"{type(self).__name__} takes no replies: implement `step`")

    async def close(self) -> None:
        """Release all resources. Called once per episode, however it ended, even if `reset` raised."""
