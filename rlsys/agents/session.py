"""Live run of a workflow: its agents and their order, its environments, and the episode that it becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from rlsys.agents.agent import Agent, AgentStopped, Context, Policy
from rlsys.agents.environment import Environment
from rlsys.agents.session_budget import SessionRecord
from rlsys.data.proposed_tasks import proposed_task
from rlsys.errors import ConfigError, ToolError
from rlsys.types import Episode, Json, Message
from rlsys.util.seeds import environment_seed

T = TypeVar("T")
E = TypeVar("E", bound=Environment)


@dataclass
class Session(SessionRecord):
    """One live run of a workflow on a task: creates agents and records every turn."""

    policies: Mapping[str, Policy]
    """Policies by name; a run with a single policy calls it `policy`."""
    _: KW_ONLY
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name. An unlisted agent uses the policy of the same name, or the only policy."""
    agents: list[Agent] = field(default_factory=list)
    """Agents in order of creation; the first is the root."""
    proposals: list[Mapping[str, Json]] = field(default_factory=list)
    """See `propose`."""
    _num_entered: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of environments entered so far, by the path of their agent."""

    def agent(self, name: str, *, system: str | None = None, parent: Agent | None = None) -> Agent:
        """Create an agent with a new context, opened by the system message if one is given.

        Seeds depend on the agent's number among its parent's children; without a `parent` it counts as the root's
        child. Where agents are created concurrently, give each its parent, so that seeds do not depend on timing.
        """
        messages = () if system is None else (Message(role="system", content=system),)
        agent = self.add(name, parent, self._policy_of(name), Context(messages))
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

        It joins the source of data that has `path: proposed`, once the group of this episode is trained; without such a
        source it is ignored. Raises `DataError` for a row that is no task.
        """
        proposed_task(row)
        self.proposals.append(dict(row))

    async def gather(self, *work: Awaitable[T]) -> list[T | AgentStopped | ToolError]:
        """Run subagents in parallel. Returns each result in order, or the `AgentStopped` or `ToolError` that ended it.

        Each gets an equal share of the remaining tokens and tool calls. Any other error is raised unchanged, and the
        other subagents are cancelled.
        """
        return await self._side_by_side([_result_or_error(each) for each in work])

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
            with self.record_span("environment", "reset", agent):
                environment.opening = await environment.reset(self.task, environment_seed(self.seed, number, *path))
            yield environment
        finally:
            with self.record_span("environment", "close", agent):
                await environment.close()

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

    # ------------------------------------------------------------------------------------------------------ inside

    def add(self, name: str, parent: Agent | None, policy: str, context: Context) -> Agent:
        """Create an agent with this context."""
        above = parent or (self.agents[0] if self.agents else None)
        path: tuple[int, ...] = ()
        if above is not None:
            above.num_children += 1
            path = (*above.path, above.num_children)
        number, place = len(self.agents), parent.index if parent else None
        agent = Agent(name, number, place, policy, path, self, self.policies[policy], self.add, context)
        self.agents.append(agent)
        return agent

    async def close(self) -> None:
        """Refuse further requests, and cancel the tasks with a request in progress.

        Waits for those requests; unblocked as the policy ends them.
        """
        self.is_over = True
        if requests := [agent.request for agent in self.agents if agent.request]:
            for task, _ in requests:
                task.cancel()
            await asyncio.wait([ended for _, ended in requests])

    def _policy_of(self, agent: str) -> str:
        name = self.bindings.get(agent, agent)
        if name in self.policies:
            return name
        if agent not in self.bindings and len(self.policies) == 1:
            return next(iter(self.policies))
        raise ConfigError(
            f"agents: {agent!r} is bound to no policy; bind it to one of {', '.join(self.policies)}, or name it so"
        )


async def _result_or_error(work: Awaitable[T]) -> T | AgentStopped | ToolError:
    try:
        return await work
    except (AgentStopped, ToolError) as error:
        return error
