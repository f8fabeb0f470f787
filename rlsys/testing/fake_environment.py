"""Fake environment for tests of workflows."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from rlsys.agents.environment import Environment, Step, join_observation
from rlsys.types import Prompt, Task


@dataclass
class FakeEnvironment(Environment):
    """Number to guess: `higher` or `lower` after each guess, 1.0 for the right one, cut short after `tries`.

    A reply that is not a number gets `not a number` and costs a try.
    """

    most: int = 10
    tries: int = 20
    secret: int = 0
    num_closed: int = field(default=0)
    """Number of calls of `close`."""

    async def reset(self, task: Task, seed: int) -> Prompt:
        self.secret = Random(seed).randint(1, self.most)
        return join_observation(task.prompt, f"a number from 1 to {self.most}")

    async def step(self, reply: str) -> Step:
        self.tries -= 1
        if not reply.strip().isdecimal():
            return Step("not a number", is_truncated=self.tries == 0)
        guess = int(reply)
        if guess == self.secret:
            return Step("right", reward=1.0, is_done=True)
        return Step("higher" if guess < self.secret else "lower", reward=0.0, is_truncated=self.tries == 0)

    async def close(self) -> None:
        self.num_closed += 1
