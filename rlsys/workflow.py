"""The workflow door: who speaks when on a task, in ordinary async Python.

A workflow's author sees messages and text, never a token, a mask, a logprob or a version, and cannot forget to record
one:
`Agent.chat` is the only road to the policy, and it records every turn.

    class Retry(Workflow):
        async def run(self, session: Session) -> None:
            solver = session.agent("solver")
            answer = await solver.chat(session.task.prompt)
            if "?" in answer:
                await solver.chat("Decide.")
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, TypeAlias

from rlsys.errors import ConfigError, TaskTooLong
from rlsys.seeds import request_seed
from rlsys.types import OK, TRUNCATED, Episode, Message, Prompt, Task, Trajectory, Turn, failed


class ContextFull(Exception):
    """A conversation outgrew `data.max_prompt_tokens`. Ends the episode where it stands; what was said is trained."""


class Policy(Protocol):
    """The one seam between a session and an engine."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of plain text, or of messages in the chat template with the assistant's turn opened."""
        ...

    def extend(self, ids: tuple[int, ...], said: tuple[Message, ...], new: tuple[Message, ...]) -> tuple[int, ...]:
        """Prompt ids of the next turn. `ids` are the tokens of `said`, whose last message is the policy's own.

        Starts with `ids` wherever the chat template allows, so that nothing the policy said is tokenized again.
        """
        ...

    async def sample(self, prompt_ids: tuple[int, ...], seed: int) -> Turn:
        """One completion, with its logprobs and versions."""
        ...

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        """A completion that is given, with the logprobs that its tokens have now, and the version these are of."""
        ...


Speaks: TypeAlias = "Callable[[tuple[int, ...]], Awaitable[Turn]]"
"""From the prompt ids of a turn to the turn."""


@dataclass
class Agent:
    """A named speaker in a session. Made by `Session.agent`."""

    name: str
    index: int
    parent: int | None
    _session: Session
    _said: tuple[Message, ...] = ()
    _ids: tuple[int, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    is_full: bool = False
    """Did a later turn no longer fit the context? The trajectory is then truncated."""

    async def chat(self, prompt: Prompt) -> str:
        """Say `prompt` (text, or messages) after all that was said so far; returns the policy's reply.

        Raises `ContextFull` if the conversation no longer fits; the episode then ends, truncated, unless it is caught.
        """
        return await self._exchange(prompt, self._sampled)

    async def recite(self, prompt: Prompt, reply: str) -> None:
        """The same with a reply that is given: it is recorded as the policy's own, and nothing is sampled."""
        await self._exchange(prompt, lambda prompt_ids: self._session.policy.recite(prompt_ids, reply))

    async def _exchange(self, prompt: Prompt, speak: Speaks) -> str:
        policy = self._session.policy
        if isinstance(prompt, str) and not self._said:
            return (await self._turn(self._ids + policy.encode(prompt), speak)).text
        if self.turns and not self._said:
            raise ValueError(f"agent {self.name!r} began with plain text and cannot go on with messages")
        new: tuple[Message, ...] = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        said = (*self._said, *new)
        ids = policy.extend(self._ids, self._said, new) if self.turns else policy.encode(said)
        turn = await self._turn(ids, speak)
        self._said = (*said, Message(role="assistant", content=turn.text))
        return turn.text

    async def _turn(self, prompt_ids: tuple[int, ...], speak: Speaks) -> Turn:
        try:
            turn = await speak(prompt_ids)
        except TaskTooLong as error:
            if not self.turns:
                raise
            self.is_full = True
            raise ContextFull(f"{self.name}, turn {len(self.turns) + 1}: {error}") from None
        self.turns.append(turn)
        self._ids = prompt_ids + turn.output_ids
        return turn

    async def _sampled(self, prompt_ids: tuple[int, ...]) -> Turn:
        session, key = self._session, self.index << 20 | len(self.turns)
        return await session.policy.sample(prompt_ids, request_seed(session.seed, session.episode_index, key))

    def trajectory(self) -> Trajectory:
        """All this agent said, for training. With a reward that is not a finite number it failed."""
        cut = self.is_full or (bool(self.turns) and self.turns[-1].finish == "length")
        outcome = TRUNCATED if cut else OK
        if self.reward is not None and not math.isfinite(self.reward):
            outcome = failed(f"the workflow gave agent {self.name!r} the reward {self.reward}")
        return Trajectory(self.name, tuple(self.turns), outcome, self.reward, self.parent)


@dataclass
class Session:
    """One live run of a workflow on a task: hands out agents and records everything."""

    task: Task
    policy: Policy
    seed: int
    """Sampling seed of the group."""
    episode_index: int
    agents: list[Agent] = field(default_factory=list)

    def agent(self, name: str, *, system: str | None = None, parent: Agent | None = None) -> Agent:
        """A new speaker with a context of its own, opened by the system message if one is given."""
        said = () if system is None else (Message(role="system", content=system),)
        agent = Agent(name, len(self.agents), parent.index if parent else None, self, said)
        self.agents.append(agent)
        return agent

    def reward(self, value: float, agent: Agent | None = None) -> None:
        """Judge the episode here (or one agent of it); the reward worker then leaves it alone."""
        (agent or self.agents[0]).reward = float(value)

    def episode(self) -> Episode:
        """What was recorded. Raises `ValueError` if nobody was there to speak."""
        if not self.agents:
            raise ValueError("the workflow made no agent: call session.agent(...) in it")
        return Episode(tuple(agent.trajectory() for agent in self.agents))


class Workflow:
    """Base of every workflow: implement `run`. One instance serves many sessions at once, so keep state in locals."""

    async def run(self, session: Session) -> None:
        """Play one episode: make agents, chat. Whatever it raises ends the run at its own line."""
        raise NotImplementedError(f"{type(self).__name__} plays nothing: implement `run`")

    def check(self, tasks: Sequence[Task], *, group_size: int, temperature: float) -> None:
        """Raise `ConfigError` or `DataError` for what it cannot play, before anything starts.

        `tasks` are those of training, in the order of the file; `group_size` and `temperature` are
        `algorithm.group_size` and `rollout.temperature`.
        """

    def in_evaluation(self) -> Workflow:
        """Who speaks when the policy is measured: the same."""
        return self


class SingleTurn(Workflow):
    """One agent, one answer to the task's prompt."""

    async def run(self, session: Session) -> None:
        await session.agent("policy").chat(session.task.prompt)


BUILTIN = {"single_turn": "rlsys.workflow:SingleTurn", "recorded": "rlsys.recorded:Recorded"}
"""Workflows that have a name of their own."""


def load_workflow(spec: str) -> Workflow:
    """A built-in by its name, or `module:Class`. Raises `ConfigError` naming what was not found."""
    module, _, name = BUILTIN.get(spec, spec).partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rollout.workflow: cannot load {spec!r}: {error}; give {', '.join(BUILTIN)} or `module:Class`"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Workflow)):
        raise ConfigError(f"rollout.workflow: {spec!r} is not a subclass of rlsys.workflow.Workflow")
    return found()
