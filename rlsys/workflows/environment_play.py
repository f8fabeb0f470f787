"""Workflow of one agent that plays an environment until the episode is over."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, TypeVar

from pydantic import JsonValue

from rlsys.agents.environment import Environment, Step, make
from rlsys.agents.session_budget import messages_of
from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import RlsysError, ToolError
from rlsys.types import Distribution, Prompt, Task
from rlsys.util.number_ranges import Seconds

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EnvironmentPlay(Workflow):
    """One agent plays an environment: it gets an observation, replies, and gets the next, until the episode is over.

    Each episode has a new environment, which is always closed. Its seed comes from the task's group, so that all
    episodes of a group play the same. If it has tools, the agent may call them between its replies, and prompts
    become messages, which need a chat template.

    An environment that raises, times out or returns a reward that is not finite fails the episode, which is left out of
    training. If the agent runs out of turns or context, it keeps its reward so far (0 without any), and is truncated.
    """

    environment: str
    """`gymnasium:ID`, `reasoning_gym:TASK`, `openenv:URL`, `mcp:COMMAND` or `mcp:URL`, or `module:Name` of your
    subclass of `rlsys.agents.environment.Environment`. The prompt of a task begins the agent's first prompt."""
    args: dict[str, JsonValue] = field(default_factory=dict)
    """Arguments of the environment, by name."""
    reward: Literal["sum", "last", "task"] = "sum"
    """`sum` of the rewards of all steps, or the `last` of them; `task`: the value of `reward.fn` for the agent's last
    reply. `reward.fn` also scores an episode that is done without a reward in any step."""
    step_timeout_s: Seconds = 60.0
    """Deadline of one step, reset or close of the environment, seconds. Tools have separate deadlines."""
    system: str | None = None
    """System message of the agent; None: the context opens with the task's prompt."""

    def make_environment(self) -> Environment:
        """Create the environment of one episode. Raises `ConfigError`."""
        return make(self.environment, self.args)

    def check(self, tasks: Sequence[Task], *, group_size: int, distribution: Distribution) -> None:
        """Raise `ConfigError` if the environment does not exist, or its package is not installed.

        Creates and closes one environment, in a thread, since the caller may already run an event loop.
        """
        world = Watched(self.make_environment(), self.environment, self.step_timeout_s)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, world.close()).result()

    async def run(self, session: Session) -> None:
        async with session.enter(Watched(self.make_environment(), self.environment, self.step_timeout_s)) as world:
            agent = session.agent("policy", system=self.system)
            prompt, total, is_scored = world.opening, 0.0, False
            if len(world.tools):  # which plain text cannot offer
                prompt = messages_of(prompt)
            if self.reward != "task":
                session.reward(total)
            while True:
                reply = await (agent.use(prompt, world.tools) if len(world.tools) else agent.chat(prompt))
                with session.record_span("environment", "step", agent):
                    step = await world.step(reply)
                if step.reward is not None and self.reward != "task":
                    total, is_scored = step.reward + (total if self.reward == "sum" else 0.0), True
                    session.reward(total)
                if step.is_done and not is_scored:
                    agent.reward = None
                if step.is_done or step.is_truncated:
                    agent.is_cut = agent.is_cut or (step.is_truncated and not step.is_done)
                    return
                prompt = step.observation


class Watched(Environment):
    """Environment under a deadline; its failures become `ToolError`s with its name and the source line."""

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
