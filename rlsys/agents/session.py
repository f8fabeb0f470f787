"""A live run of a workflow: its agents, the order they are in, and what it may cost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context as TaskContext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlsys.agents.agent import Agent, AgentStopped, BudgetSpent, Context, ContextFull, Policy, Reply
from rlsys.agents.budget import Budget, Purse
from rlsys.agents.environment import Environment
from rlsys.agents.tools import Call, Toolbox, ToolResult
from rlsys.errors import ConfigError, ToolError, first_of
from rlsys.types import POLICY, Episode, Message, Prompt, Task, Trajectory, failed
from rlsys.util.seeds import environment_seed

__all__ = [
    "POLICY",
    "Agent",
    "AgentStopped",
    "Budget",
    "BudgetSpent",
    "Context",
    "ContextFull",
    "Policy",
    "Reply",
    "Said",
    "Session",
    "settled_episode",
    "shown_line",
]

T = TypeVar("T")
E = TypeVar("E", bound=Environment)

_SHOWN_CHARS = 1000
"""Of one message in a transcript."""
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and halves of surrogate pairs."""


@dataclass(frozen=True)
class Said:
    """One line of a transcript."""

    agent: str
    role: str
    text: str


@dataclass
class Session:
    """One live run of a workflow on a task: hands out agents and records everything."""

    task: Task
    policies: Mapping[str, Policy]
    """By name; a run of one policy calls it `policy`."""
    seed: int
    """Sampling seed of the group."""
    episode_index: int = 0
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name; an agent that is not in it speaks with the policy of its own name, or the only one."""
    budget: Budget = field(default_factory=Budget)
    agents: list[Agent] = field(default_factory=list)
    """In the order in which they were made; the first is the root."""
    log: list[Said] = field(default_factory=list)
    """All that was said, in order."""
    num_sampled: int = 0
    """Tokens sampled so far, by all agents."""
    num_tool_calls: int = 0
    """Calls of tools so far, by all agents."""
    _num_entered: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Environments, by the path of the agent they were entered for."""
    _speaking: dict[asyncio.Task[Any], asyncio.Future[None]] = field(default_factory=dict)
    """The tasks in which an agent is asked something, and what is done when it has ended."""
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._purse = Purse(self.budget.max_tokens, self.budget.max_tool_calls)

    def agent(self, name: str, *, system: str | None = None, parent: Agent | None = None) -> Agent:
        """A new speaker with a context of its own, opened by the system message if one is given.

        `parent` is the agent it works for. Its seeds depend on its number among those of its parent: one without a
        parent is counted as the root's. So where agents are made side by side, give each the parent it is made by.
        """
        said = () if system is None else (Message(role="system", content=system),)
        agent = self.add(name, parent, self._policy_of(name), Context(said))
        if system is not None:
            self.note(agent, "system", system)
        return agent

    def reward(self, value: float, agent: Agent | None = None) -> None:
        """Judge the episode here (or one agent of it); the reward worker then leaves it alone. Raises `ValueError`
        before there is an agent."""
        if agent is None and not self.agents:
            raise ValueError("nobody is there to be rewarded: call session.agent(...) first")
        (agent or self.agents[0]).reward = float(value)

    async def gather(self, *work: Awaitable[T]) -> list[T | AgentStopped | ToolError]:
        """Run subagents in parallel: what each returned, in order, or the `AgentStopped` or `ToolError` that ended it.
        What is left of the episode's tokens and tool calls is divided equally among them until all have ended.

        Anything else is a bug, or a failure of a worker: it is raised as it is, and the others are cancelled.
        """
        return await self._side_by_side([_settled(each) for each in work])

    @asynccontextmanager
    async def enter(self, environment: E, agent: Agent | None = None) -> AsyncIterator[E]:
        """The environment, reset for this episode (`environment.opening` is what it says first); closed at the end.

        Its seed is that of the n-th environment of `agent`. Give the agent where several enter environments side by
        side; the root's are counted with those of none.
        """
        path = agent.path if agent else ()
        number = self._num_entered.get(path, 0)
        self._num_entered[path] = number + 1
        try:
            environment.opening = await environment.reset(self.task, environment_seed(self.seed, number, *path))
            yield environment
        finally:
            await environment.close()

    def episode(self) -> Episode:
        """What was recorded, each agent before its children. Raises `ValueError` if nobody was there to speak."""
        if not self.agents:
            raise ValueError("the workflow made no agent: call session.agent(...) in it")
        agents = sorted(self.agents, key=lambda agent: agent.path)
        places = {agent.index: place for place, agent in enumerate(agents)}
        parents = [None if agent.parent is None else places[agent.parent] for agent in agents]
        trajectories = tuple(map(Agent.trajectory, agents, parents))
        return Episode(trajectories, self.num_tool_calls, self.num_sequential)

    def transcript(self, last: int | None = None) -> str:
        """Who said what, for people: the last messages, long ones cut."""
        shown = self.log if last is None else self.log[-last:]
        lines = [shown_line(line, _SHOWN_CHARS) for line in shown]
        left_out = len(self.log) - len(shown)
        return "\n".join([f"... {left_out} messages before", *lines] if left_out else lines)

    # ------------------------------------------------------------------------------------------------------ inside

    def add(self, name: str, parent: Agent | None, policy: str, context: Context) -> Agent:
        """A speaker with this context."""
        above = parent or (self.agents[0] if self.agents else None)
        path: tuple[int, ...] = ()
        if above is not None:
            above.num_children += 1
            path = (*above.path, above.num_children)
        agent = Agent(name, len(self.agents), parent.index if parent else None, policy, path, self, context)
        self.agents.append(agent)
        return agent

    @property
    def purse(self) -> Purse:
        """What may still be spent where this is asked: all that is left, or a share of it, see `gather`."""
        share = _SHARE.get()
        return share[1] if share is not None and share[0] is self else self._purse

    @property
    def num_sequential(self) -> int:
        """Tokens sampled so far on the longest chain in which each had to wait for the one before. What `gather` runs,
        and the calls of one reply, are side by side; all else counts as one after the other."""
        return self._purse.num_sequential

    def note(self, agent: Agent, role: str, prompt: Prompt) -> None:
        """Write what was said down for the transcript; `role` is that of plain text."""
        who = f"{agent.name}#{agent.number}" if agent.path else agent.name
        messages = (Message(role=role, content=prompt),) if isinstance(prompt, str) else prompt
        self.log += [Said(who, message["role"], message["content"]) for message in messages]

    def count_tool_calls(self, num: int, agent: Agent) -> None:
        """Raises `BudgetSpent` if there are no `num` calls left."""
        if not self.purse.take_calls(num):
            agent.is_cut = True
            most = self.budget.max_tool_calls
            what = f"more than the {most} tool calls of the episode (max_tool_calls), or its share of them"
            raise BudgetSpent(f"{agent.name} asked for {what}")
        self.num_tool_calls += num

    async def run_calls(self, calls: Sequence[Call], tools: Toolbox) -> list[ToolResult]:
        """The results of calls, run in parallel, each with its share of what is left: a call may be that of agents."""
        if len(calls) < 2:
            return await tools.run(calls)
        results = await self._side_by_side([tools.run([call]) for call in calls])
        return [result for (result,) in results]

    @contextmanager
    def speaking(self, agent: Agent) -> Iterator[None]:
        """While an agent is asked something, so that `close` may end it. Raises `RuntimeError` after `close`."""
        if self._is_over:
            raise RuntimeError(f"agent {agent.name!r} is asked after its session ended: await all work in `run`")
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        ended = self._speaking[task] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._speaking[task]
            ended.set_result(None)

    async def close(self) -> None:
        """No agent is asked any more: the tasks in which one still is are cancelled.

        Waits for what they ask to end, which ends as the policy lets it go.
        """
        self._is_over = True
        if speaking := dict(self._speaking):
            for task in speaking:
                task.cancel()
            await asyncio.wait(speaking.values())

    async def _side_by_side(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """What each returns, in order. The first error of any is raised as it is, and ends the others.

        Each has an equal share of what is left of the budget, and what it did not spend comes back at the end.
        """
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
"""Of the task that asks. A task may outlive its session or serve several, so that a share says whose it is."""


async def _settled(work: Awaitable[T]) -> T | AgentStopped | ToolError:
    try:
        return await work
    except (AgentStopped, ToolError) as error:
        return error


def shown_line(said: Said, most: int | None = None) -> str:
    """A line of a transcript for a terminal, to which a model's text may do nothing: control characters are spelled
    out, and further lines are indented, so that none passes for somebody else's. Text beyond `most` characters is cut.
    """
    text = _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), said.text[:most])
    text = text.replace("\n", "\n    ")
    cut = f"... ({len(said.text)} characters)" if len(said.text) > len(said.text[:most]) else ""
    return f"[{said.agent}] {said.role}: {text}{cut}"


async def settled_episode(session: Session, work: Awaitable[None]) -> Episode:
    """What an episode came to whose workflow is `work`: truncated where an agent was stopped, failed by a `ToolError`,
    also where several ended a task group. What still speaks then is cancelled.

    Raises whatever else the workflow raises.
    """
    ended: BaseException | None = None
    try:
        await work
    except (AgentStopped, ToolError) as error:
        ended = error
    except ExceptionGroup as errors:
        stops, others = errors.split((AgentStopped, ToolError))
        if others is not None:
            raise others from None
        broken = stops.subgroup(ToolError) if stops else None
        ended = first_of(broken or errors)
    finally:
        await session.close()
    if isinstance(ended, ToolError):
        if not session.agents:
            return Episode((Trajectory(POLICY, (), failed(str(ended))),))
        session.agents[0].fail(str(ended))
    elif ended is not None and session.agents:
        session.agents[0].is_cut = True
    return session.episode()
