"""Sessions of groups: played in the replica that samples for them, or in a host apart from every engine.

A host is a process of its own, on any node, with workflows, tools and environments, and the tokenizer. It asks the
replica of a group for tokens, turn by turn, so that nothing it computes takes time of an engine (SRL, arXiv:2306.16688,
has such workers for environments). All else about a group stays at its replica: weights, budgets of versions, moves,
what is kept of an earlier attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Self

from rlsys.agents.agent import Policy, Tell
from rlsys.agents.workflow import Workflow, play_or_fail
from rlsys.errors import DeadlineExceeded, WorkerDied, WorkerError, first_of
from rlsys.types import Assignment, Turn
from rlsys.util.deadlines import remote
from workers.rollout.early_ends import GroupEnds, PlayedGroup
from workers.rollout.group_route import PolicySpeech, PolicyText, Ticket

if TYPE_CHECKING:
    from workers.rollout.rollout_worker import RolloutSpec, RolloutWorker

REST_S = 10.0
"""Seconds for which a host that failed is not used."""


@dataclass(frozen=True)
class GroupSessions:
    """Plays the sessions of groups."""

    workflow: Workflow
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name, see `Session`."""
    ends: GroupEnds | None = None
    """None: every episode is played to its end."""

    async def play(self, worker: str, assignment: Assignment, policies: Mapping[str, Policy]) -> PlayedGroup:
        """Play all episodes of a group at once; `worker` is named in errors. Raises the first error of a session."""
        task, seed, limit = assignment.task, assignment.seed, assignment.token_limit
        sessions = [
            self.workflow.session(task, policies, seed, e, self.bindings, limit) for e in range(assignment.size)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play_or_fail(self.workflow, session, worker)) for session in sessions]
                if self.ends is not None and len(tasks) > 1:
                    return await self.ends.watch(assignment, tasks)
        except ExceptionGroup as errors:
            raise first_of(errors) from None
        return PlayedGroup(tuple(task.result() for task in tasks))

    async def close(self) -> None:
        if self.ends is not None:
            await self.ends.close()


@dataclass
class HostedPolicy(PolicySpeech):
    """Implements `Policy` in a host: a replica samples for it."""

    replica: RolloutWorker
    """Replica of the group, possibly in another process."""
    policy: str
    """Name of the policy."""

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        """See `Policy.sample`. `tell` gets nothing before the end, because a text would take a call each time. If the
        session is cancelled, the replica samples no further."""
        try:
            return await self.replica.sample_turn(self.ticket, self.policy, prompt_ids, seed, max_new_tokens, stop)
        except asyncio.CancelledError:
            with suppress(WorkerError):  # a replica that is gone samples no further either
                await self.replica.cancel_turn(self.ticket, self.policy, seed)
            raise

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        return await self.replica.recite_turn(self.ticket, self.policy, prompt_ids, reply)


class SessionHost:
    """Plays the sessions of groups in a process of its own, for the replicas that sample their tokens."""

    def __init__(self, name: str, sessions: GroupSessions, speech: Mapping[str, PolicyText]) -> None:
        """`speech` is by policy name."""
        self.name, self._sessions, self._speech = name, sessions, speech

    @classmethod
    def load(cls, name: str, spec: RolloutSpec) -> Self:
        """Load the tokenizers of all policies."""
        spec.resources.claim()
        speech = {policy: spec.speech_of(policy) for policy in spec.generators}
        return cls(name, spec.sessions(name), speech)

    @remote("playing group {assignment.group_id}", patience=inf)
    async def play(self, replica: RolloutWorker, ticket: Ticket, assignment: Assignment) -> PlayedGroup:
        """Play the sessions of a group for which `replica` samples. Raises the first error of a session."""
        policies = {name: HostedPolicy(ticket, speech, replica, name) for name, speech in self._speech.items()}
        return await self._sessions.play(self.name, assignment, policies)

    async def close(self) -> None:
        await self._sessions.close()


class SessionHosts:
    """Hosts as one replica sees them: each group goes to the one with the fewest groups of this replica."""

    def __init__(self, hosts: Sequence[SessionHost], place: int = 0) -> None:
        """`place` is that of the replica among all; the first groups of different replicas go to different hosts."""
        self._hosts = [*hosts[place % len(hosts) :], *hosts[: place % len(hosts)]] if hosts else []
        self._running: Counter[str] = Counter()
        self._rests_until: dict[str, float] = {}

    def choose(self) -> SessionHost | None:
        """Return the host for a group. None if there is none, or all have failed a moment ago: then the replica plays
        the sessions itself."""
        now = time.monotonic()
        fit = [host for host in self._hosts if self._rests_until.get(host.name, 0.0) <= now]
        return min(fit, key=lambda host: self._running[host.name], default=None)

    async def play(
        self, host: SessionHost, replica: RolloutWorker, ticket: Ticket, assignment: Assignment
    ) -> PlayedGroup:
        """Let a host play a group. Raises `WorkerDied` if it dies, and then does not choose it for a while."""
        self._running[host.name] += 1
        try:
            return await host.play(replica, ticket, assignment)
        except (WorkerDied, DeadlineExceeded) as error:
            if error.worker == host.name:
                self._rests_until[host.name] = time.monotonic() + REST_S
            raise
        finally:
            self._running[host.name] -= 1
