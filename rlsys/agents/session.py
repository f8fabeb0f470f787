"""Live run of a workflow: its agents, their order, and its budget.

The budget is exact with any number of concurrent agents. Tokens are reserved before a reply is sampled, and unused ones
are returned. Equal shares make the limit of one agent independent of the speed of the others.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context as TaskContext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar

from pydantic import PositiveInt

from rlsys.agents.agent import Agent, AgentStopped, Context, Policy, messages_of
from rlsys.agents.environment import Environment
from rlsys.agents.tool_calls import Call
from rlsys.agents.tools import Toolbox, ToolResult
from rlsys.data.proposed_tasks import proposed_task
from rlsys.errors import ConfigError, ToolError, first_of
from rlsys.types import Episode, EpisodeSpan, Json, Message, Prompt, SpanKind, Task
from rlsys.util.seeds import environment_seed

T = TypeVar("T")
E = TypeVar("E", bound=Environment)

_SHOWN_CHARS, _SHOWN_MESSAGES = 1000, 20
"""Longest message in a transcript, and the number of messages."""
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and unpaired surrogates."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one episode. A `Workflow` is a budget: these are fields of every workflow."""

    max_turns: PositiveInt = 64
    """Turns of each agent; one more ends the episode as truncated."""
    max_episode_tokens: PositiveInt | None = None
    """Sampled tokens of an episode, over all agents; None: unlimited. The last turn is cut to fit. Agents that run in
    parallel get equal shares of the rest."""
    max_tool_calls: PositiveInt | None = None
    """Tool calls of an episode, over all agents; None: unlimited. More calls end the episode as truncated. Parallel
    agents get equal shares of the rest."""
    max_calls_per_turn: PositiveInt = 32
    """Tool calls of one reply that are run; the rest are refused, with a result that says so."""


@dataclass
class Purse:
    """Remaining part of a budget, or of a share; infinite if it is unlimited."""

    tokens: float
    calls: float
    num_sequential: int = 0
    """Tokens sampled one after the other from this purse. Of parallel shares, only the largest number counts."""

    def take_tokens(self, num: int) -> int:
        """Take up to `num` tokens, and return the number taken; 0 if none is left."""
        taken = int(min(num, self.tokens))
        self.tokens -= taken
        return taken

    def take_calls(self, num: int) -> bool:
        """Take all of `num` calls, or none if fewer are left. Returns True if taken."""
        if num > self.calls:
            return False
        self.calls -= num
        return True

    def divided(self, num: int) -> list[Purse]:
        """Move the remaining budget into `num` equal shares; the first shares get one more if it does not divide."""
        tokens, calls = _shares(self.tokens, num), _shares(self.calls, num)
        self._set(0, 0)
        return [Purse(*share) for share in zip(tokens, calls, strict=True)]

    def join(self, shares: Sequence[Purse]) -> None:
        """Take back the rest of the shares, and empty them."""
        self._set(sum(share.tokens for share in shares), sum(share.calls for share in shares))
        self.num_sequential += max(share.num_sequential for share in shares)
        for share in shares:
            share._set(0, 0)

    def _set(self, tokens: float, calls: float) -> None:
        self.tokens = self.tokens if self.tokens == math.inf else tokens
        self.calls = self.calls if self.calls == math.inf else calls


def _shares(amount: float, num: int) -> list[float]:
    if amount == math.inf:
        return [amount] * num
    each, over = divmod(amount, num)
    return [each + (number < over) for number in range(num)]


@dataclass(frozen=True)
class Said:
    """One line of a transcript."""

    agent: str
    role: str
    text: str


@dataclass
class Session:
    """One live run of a workflow on a task: creates agents and records every turn."""

    task: Task
    policies: Mapping[str, Policy]
    """Policies by name; a run with a single policy calls it `policy`."""
    seed: int
    """Sampling seed of the group."""
    episode_index: int = 0
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name. An unlisted agent uses the policy of the same name, or the only policy."""
    budget: Budget = Budget()
    agents: list[Agent] = field(default_factory=list)
    """Agents in order of creation; the first is the root."""
    log: list[Said] = field(default_factory=list)
    """All messages, in order."""
    token_limit: int | None = None
    """Most tokens of this episode, if that is less than `budget.max_episode_tokens`."""
    proposals: list[Mapping[str, Json]] = field(default_factory=list)
    """See `propose`."""
    num_sampled: int = 0
    """Tokens sampled so far, over all agents."""
    num_tool_calls: int = 0
    """Tool calls so far, over all agents."""
    _num_entered: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of environments entered so far, by the path of their agent."""
    is_over: bool = False
    """True once no agent may be asked any more."""
    _spans: list[EpisodeSpan] = field(default_factory=list)
    """With the index of the agent in place of that of the trajectory."""

    def __post_init__(self) -> None:
        self._began_s, self._began = time.time(), time.monotonic()
        tokens = min(self.budget.max_episode_tokens or math.inf, self.token_limit or math.inf)
        self._purse = Purse(tokens, self.budget.max_tool_calls or math.inf)

    def agent(self, name: str, *, system: str | None = None, parent: Agent | None = None) -> Agent:
        """Create an agent with a new context, opened by the system message if one is given.

        Seeds depend on the agent's number among its parent's children; without a `parent` it counts as the root's
        child. Where agents are created concurrently, give each its parent, so that seeds do not depend on timing.
        """
        said = () if system is None else (Message(role="system", content=system),)
        agent = self.add(name, parent, self._policy_of(name), Context(said))
        if system is not None:
            self.note(agent, "system", system)
        return agent

    def reward(self, value: float, agent: Agent | None = None) -> None:
        """Set the reward of the episode, or of one agent, instead of the reward functions. Raises `ValueError` before
        the first agent is created."""
        if agent is None and not self.agents:
            raise ValueError("there is no agent to reward: call session.agent(...) first")
        (agent or self.agents[0]).reward = float(value)

    def propose(self, row: Mapping[str, Json]) -> None:
        """Propose a task for the run, as a row of data such as `{"prompt": "17 * 23", "answer": "391"}`.

        It joins the source of data that has `proposed: true`, once the group of this episode is trained; without such a
        source it is ignored. Raises `DataError` for a row that is no task.
        """
        proposed_task(row)
        self.proposals.append(dict(row))

    async def gather(self, *work: Awaitable[T]) -> list[T | AgentStopped | ToolError]:
        """Run subagents in parallel. Returns each result in order, or the `AgentStopped` or `ToolError` that ended it.

        Each gets an equal share of the remaining tokens and tool calls. Any other error is raised unchanged, and the
        other subagents are cancelled.
        """
        return await self._side_by_side([_settled(each) for each in work])

    @asynccontextmanager
    async def enter(self, environment: E, agent: Agent | None = None) -> AsyncIterator[E]:
        """Reset an environment for this episode, and close it at the end. `environment.opening` is its first prompt.

        The seed depends on the number of environments that `agent` entered before. Give `agent` where several agents
        enter environments concurrently; without it, the environment counts as the root's.
        """
        path = agent.path if agent else ()
        number = self._num_entered.get(path, 0)
        self._num_entered[path] = number + 1
        try:
            with self.timed("environment", "reset", agent):
                environment.opening = await environment.reset(self.task, environment_seed(self.seed, number, *path))
            yield environment
        finally:
            with self.timed("environment", "close", agent):
                await environment.close()

    @contextmanager
    def timed(self, kind: SpanKind, name: str, agent: Agent | None = None) -> Iterator[None]:
        """Record how long the block takes, for the timeline of the episode; see `EpisodeSpan`. Without `agent`, it
        counts as the root's.

            with session.timed("environment", "step", agent):
                step = await world.step(reply)
        """
        start_s = self.age_s
        try:
            yield
        finally:
            self.note_time(kind, name, start_s, agent)

    @property
    def has_replies(self) -> bool:
        """True once the policy has replied to an agent of this session."""
        return any(agent.turns for agent in self.agents)

    def episode(self) -> Episode:
        """Return the recorded episode, each agent before its children. Raises `ValueError` if there is no agent."""
        if not self.agents:
            raise ValueError("the workflow made no agent: call session.agent(...) in it")
        agents = sorted(self.agents, key=lambda agent: agent.path)
        places = {agent.index: place for place, agent in enumerate(agents)}
        parents = [None if agent.parent is None else places[agent.parent] for agent in agents]
        trajectories = tuple(map(Agent.trajectory, agents, parents))
        spans = sorted(self._spans, key=attrgetter("start_s"))
        return Episode(
            trajectories,
            self.num_tool_calls,
            self.num_sequential,
            tuple(self.proposals),
            began_s=self._began_s,
            spans=tuple(replace(span, trajectory=places[span.trajectory]) for span in spans),
        )

    def transcript(self) -> str:
        """Return the last messages as text for people, long messages cut."""
        shown = self.log[-_SHOWN_MESSAGES:]
        lines = [shown_line(line, _SHOWN_CHARS) for line in shown]
        left_out = len(self.log) - len(shown)
        return "\n".join([f"... {left_out} messages before", *lines] if left_out else lines)

    # ------------------------------------------------------------------------------------------------------ inside

    def add(self, name: str, parent: Agent | None, policy: str, context: Context) -> Agent:
        """Create an agent with this context."""
        above = parent or (self.agents[0] if self.agents else None)
        path: tuple[int, ...] = ()
        if above is not None:
            above.num_children += 1
            path = (*above.path, above.num_children)
        agent = Agent(name, len(self.agents), parent.index if parent else None, policy, path, self, context)
        self.agents.append(agent)
        return agent

    @property
    def age_s(self) -> float:
        """Seconds since the start of the session."""
        return time.monotonic() - self._began

    def note_time(
        self, kind: SpanKind, name: str, start_s: float, agent: Agent | None, seconds: float | None = None
    ) -> None:
        """Record what began at the age `start_s`, and took `seconds` or ends now."""
        took_s = self.age_s - start_s if seconds is None else seconds
        index = agent.index if agent else 0
        self._spans.append(EpisodeSpan(kind, name, index, round(start_s, 6), round(took_s, 6)))

    @property
    def purse(self) -> Purse:
        """Remaining budget of the current task: the whole rest, or a share of it under `gather`."""
        share = _SHARE.get()
        return share[1] if share is not None and share[0] is self else self._purse

    @property
    def num_sequential(self) -> int:
        """Tokens on the longest chain in which each token had to wait for the one before. Work under `gather` and the
        calls of one reply count as parallel; all else counts as sequential."""
        return self._purse.num_sequential

    def note(self, agent: Agent, role: str, prompt: Prompt) -> None:
        """Add a prompt to the transcript; `role` applies to plain text."""
        who = f"{agent.name}#{agent.number}" if agent.path else agent.name
        self.log += [Said(who, message["role"], message["content"]) for message in messages_of(prompt, role)]

    async def run_calls(self, calls: Sequence[Call], tools: Toolbox) -> list[ToolResult]:
        """Run calls in parallel, each with a share of the remaining budget, since a call may run agents."""
        if len(calls) < 2:
            return await tools.run(calls)
        results = await self._side_by_side([tools.run([call]) for call in calls])
        return [result for (result,) in results]

    async def close(self) -> None:
        """Refuse further requests, and cancel the tasks with a request in progress.

        Waits for those requests; unblocked as the policy ends them.
        """
        self.is_over = True
        if requests := [agent.request for agent in self.agents if agent.request]:
            for task, _ in requests:
                task.cancel()
            await asyncio.wait([ended for _, ended in requests])

    async def _side_by_side(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run work in parallel, each with a share of the remaining budget, and return the results in order. The first
        error cancels the rest, and is raised as is."""
        if not work:
            return []
        purse = self.purse
        shares = purse.divided(len(work))
        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(work, shares, strict=True)
                tasks = [group.create_task(each, context=self._sharing(share)) for each, share in pairs]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            purse.join(shares)
        return [task.result() for task in tasks]

    def _sharing(self, share: Purse) -> TaskContext:
        context = copy_context()
        context.run(_SHARE.set, (self, share))
        return context

    def _policy_of(self, agent: str) -> str:
        name = self.bindings.get(agent, agent)
        if name in self.policies:
            return name
        if agent not in self.bindings and len(self.policies) == 1:
            return next(iter(self.policies))
        raise ConfigError(
            f"agents: {agent!r} is bound to no policy; bind it to one of {', '.join(self.policies)}, or name it so"
        )


_SHARE: ContextVar[tuple[Session, Purse] | None] = ContextVar("share", default=None)
"""The current task's share and its session, since a task may outlive its session or serve several sessions."""


async def _settled(work: Awaitable[T]) -> T | AgentStopped | ToolError:
    try:
        return await work
    except (AgentStopped, ToolError) as error:
        return error


def shown_line(said: Said, most: int | None = None) -> str:
    """Format a transcript line for a terminal. Control characters are escaped, and further lines are indented, so that
    a model's text cannot imitate another line. Text beyond `most` characters is cut."""
    text = _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), said.text[:most])
    text = text.replace("\n", "\n    ")
    cut = f"... ({len(said.text)} characters)" if len(said.text) > len(said.text[:most]) else ""
    return f"[{said.agent}] {said.role}: {text}{cut}"
