"""One agent that plays an environment until it is over."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, TypeVar

from pydantic import JsonValue, PositiveFloat

from rlsys.agents.agent import messages_of
from rlsys.agents.environment import Environment, Step
from rlsys.agents.environments import make
from rlsys.agents.session import Agent, Session
from rlsys.agents.workflow import Workflow
from rlsys.errors import RlsysError, ToolError
from rlsys.types import Prompt, Task

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EnvironmentPlay(Workflow):
    """One agent and a world: it is told what it sees, replies, and is told what came of it, until the episode is over.

    The world is made anew for every episode and always closed. Its seed comes from the task's group, so that all
    episodes of a group play the same. If it has tools, the agent calls them as it likes between its replies, and
    all that is said are messages, which need a chat template.

    An environment that raises, hangs or gives a reward that is no number fails the episode, with the reason: it is left
    out of training. Out of turns or context, the agent keeps the reward it has so far, 0 where there was none, and is
    truncated.
    """

    environment: str
    """`gymnasium:ID`, `reasoning_gym:TASK`, `openenv:URL`, `mcp:COMMAND` or `mcp:URL`, or `module:Name` of your own
    subclass of `rlsys.agents.environment.Environment`. The prompt of a task is what the agent is told first."""
    args: dict[str, JsonValue] = field(default_factory=dict)
    """What the environment is made with, by name."""
    reward: Literal["sum", "last", "task"] = "sum"
    """The sum of the rewards of all steps, or the last of them; `task`: what `reward.fn` makes of the agent's last
    reply, which also judges an episode that is done and had no reward in any step."""
    step_timeout_s: PositiveFloat = 60.0
    """Deadline of one step of the environment, and of its reset and its end, seconds; that of a tool is its own."""
    system: str | None = None
    """What the agent's context opens with; None: the task's prompt."""

    def made(self) -> Environment:
        """The environment of one episode. Raises `ConfigError`."""
        return make(self.environment, self.args)

    def check(self, tasks: Sequence[Task], *, group_size: int, temperature: float) -> None:
        """Raises `ConfigError` if there is no such environment, or its package is not installed.

        One is made for it and closed again, in a thread, since the caller may have an event loop of its own.
        """
        world = Watched(self.made(), self.environment, self.step_timeout_s)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, world.close()).result()

    async def run(self, session: Session) -> None:
        async with session.enter(Watched(self.made(), self.environment, self.step_timeout_s)) as world:
            agent = session.agent("policy", system=self.system)
            prompt, total, is_scored = world.opening, 0.0, False
            if len(world.tools):  # which plain text would not offer
                prompt = messages_of(prompt)
            if self.reward != "task":
                session.reward(total)
            while True:
                step = await world.step(await _reply(agent, prompt, world))
                if step.reward is not None and self.reward != "task":
                    total, is_scored = step.reward + (total if self.reward == "sum" else 0.0), True
                    session.reward(total)
                if step.is_done and not is_scored:
                    agent.reward = None
                if step.is_done or step.is_truncated:
                    agent.is_cut = agent.is_cut or (step.is_truncated and not step.is_done)
                    return
                prompt = step.observation


async def _reply(agent: Agent, prompt: Prompt, world: Environment) -> str:
    return await (agent.use(prompt, world.tools) if len(world.tools) else agent.chat(prompt))


class Watched(Environment):
    """An environment under a deadline, whose failures are `ToolError`s that name it and the place."""

    def __init__(self, inner: Environment, name: str, timeout_s: float) -> None:
        self.inner, self.name, self.timeout_s = inner, name, timeout_s

    async def reset(self, task: Task, seed: int) -> Prompt:
        opening = await self._within("reset", self.inner.reset(task, seed))
        self.tools = self.inner.tools
        return opening

    async def step(self, reply: str) -> Step:
        step = await self._within("step", self.inner.step(reply))
        if step.reward is not None and not isfinite(step.reward):
            raise ToolError(f"environment {self.name!r}: step gave the reward {step.reward}")
        return step

    async def close(self) -> None:
        await self._within("close", self.inner.close())

    async def _within(self, what: str, work: Awaitable[T]) -> T:
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                return await work
        except RlsysError:
            raise
        except Exception as error:
            if deadline.expired():
                problem = f"took longer than its {self.timeout_s:g} s (step_timeout_s)"
            else:
                place = traceback.extract_tb(error.__traceback__)[-1]
                problem = f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            raise ToolError(f"environment {self.name!r}: {what} {problem}") from error
