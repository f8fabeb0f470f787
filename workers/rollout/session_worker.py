"""The session worker: plays groups, and has every token that they sampled so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from rlsys.agents.workflow import Workflow, play_or_fail
from rlsys.batch.samples import meta_of, versions_of
from rlsys.errors import GroupExpired, first_of
from rlsys.routing.request_router import Claim, RequestRouter
from rlsys.routing.requests import Replica, WeightsWanted
from rlsys.types import Assignment, Busy, Episode, Group, GroupKey, RolloutReport, Score, VersionSpan
from rlsys.util.deadlines import PausedDeadline, remote
from workers.ray.call_stream import answer_in_chunks
from workers.ray.worker_process import Remote, place_of
from workers.rollout.early_ends import EpisodeJudge, GroupEnds
from workers.rollout.policy_text import PolicyText, RoutedPolicy
from workers.rollout.remote_replica import RemoteReplica
from workers.rollout.replica_worker import ReplicaWorker


@dataclass(frozen=True)
class GroupSessions:
    """Plays the sessions of groups."""

    workflow: Workflow
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name, see `Session`."""
    ends: GroupEnds | None = None
    """None: every episode is played to its end."""

    async def play(self, live: LiveGroup, worker: str) -> None:
        """Play all episodes of a group at once; `worker` is named in errors. Raises the first error of a session."""
        assignment = live.assignment
        task, seed, limit = assignment.task, assignment.seed, assignment.token_limit
        sessions = [
            self.workflow.session(task, live.policies, seed, e, self.bindings, limit) for e in range(assignment.size)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play_or_fail(self.workflow, session, worker)) for session in sessions]
                if self.ends is not None and len(tasks) > 1:
                    live.episodes, live.settled_reward = await self.ends.watch(assignment, tasks)
                    return
        except ExceptionGroup as errors:
            raise first_of(errors) from None
        live.episodes = tuple(task.result() for task in tasks)

    async def close(self) -> None:
        if self.ends is not None:
            await self.ends.close()


@dataclass(eq=False)
class LiveGroup:
    """The record of a group that is being played."""

    assignment: Assignment
    arrived_s: float
    policies: dict[str, RoutedPolicy] = field(default_factory=dict)
    """By policy name."""
    start_s: float = 0.0
    """Time at which it had its weights, on this machine's monotonic clock."""
    episodes: tuple[Episode, ...] = ()
    """Without those that were ended early."""
    settled_reward: float | None = None
    """See `Group.settled_reward`."""
    deadline: PausedDeadline | None = None
    """Set once it is played."""

    @property
    def key(self) -> GroupKey:
        return self.assignment.key

    @property
    def claims(self) -> list[Claim]:
        """The claims on the weights of all policies."""
        return [policy.claim for policy in self.policies.values()]


@dataclass(frozen=True, slots=True)
class PolicyRoad:
    """Text of one policy, and the router of its requests."""

    text: PolicyText
    router: RequestRouter


class SessionWorker:
    """Plays groups; a request router for each policy has replicas sample their tokens."""

    def __init__(
        self,
        name: str,
        sessions: GroupSessions,
        roads: Mapping[str, PolicyRoad],
        *,
        group_s: float,
        judge: EpisodeJudge | None = None,
        local: Mapping[str, Replica] | None = None,
    ) -> None:
        """`roads` are by policy name. A group may wait for tokens for `group_s`. With a `judge`, groups are scored
        here. `local` are replicas of this process, which is a member of the pool of replicas itself."""
        self.name, self._sessions, self._roads = name, sessions, roads
        self._group_s, self._judge, self._local = group_s, judge, local or {}
        self._live: set[LiveGroup] = set()
        self._are_asleep = False
        """True while all replicas sleep."""
        self._numbers = count(1)
        self._remote: dict[tuple[str, str], RemoteReplica] = {}
        """By policy, and name of the replica."""
        for policy, replica in self._local.items():
            roads[policy].router.meet([replica])

    # -------------------------------------------------------------------------------------------------- for the driver

    def run_each(self, assignments: Sequence[Assignment]) -> AsyncIterator[object]:
        """Play groups; see `answer_in_chunks`."""
        return answer_in_chunks(assignments, self.run)

    async def run(self, assignment: Assignment) -> tuple[tuple[Group, ...], tuple[Episode, ...]]:
        """Play one group. Returns the view of each trained policy without the payload, and the payload.

        Raises `GroupExpired`, the first error of a session, and the loss of a replica that its router cannot mend, also
        one that a workflow handled: its episodes must not be trained.
        """
        live = LiveGroup(assignment, time.monotonic())
        self._live.add(live)
        try:
            await self._claim(live)
            live.start_s = time.monotonic()
            await self._play(live)
            scores = await self._judge.score(assignment.task, live.episodes) if self._judge else None
        finally:
            self._live.discard(live)
            for name, policy in live.policies.items():
                self._roads[name].router.release(policy.claim)
        return self._views(live, scores), live.episodes

    @remote("connecting to its replicas")
    def meet(
        self,
        replicas: Sequence[Remote[ReplicaWorker]],
        stuck: Sequence[str] = (),
        cut_off: Sequence[str] = (),
        *,
        are_asleep: bool = False,
    ) -> None:
        """Use these replicas from now. Those in `stuck` make no progress: others are preferred. Requests at those that
        are `cut_off` go on elsewhere. While all of them sleep, the deadlines of groups stand still."""
        self._are_asleep = are_asleep
        for deadline in [live.deadline for live in self._live if live.deadline is not None]:
            deadline.hold(is_held=are_asleep)
        first = place_of(self.name) % max(1, len(replicas))  # session workers choose differently among equal replicas
        near = sorted([*replicas[first:], *replicas[:first]], key=lambda each: each.name != self.name)
        for policy, road in self._roads.items():
            road.router.meet([self._replica(policy, each) for each in near], stuck)
        live = {each.name for each in replicas}
        for key in [key for key in self._remote if key[1] not in live]:
            self._remote.pop(key).close()
        for key, replica in self._remote.items():
            if key[1] in cut_off:
                replica.give_up()

    @remote("moving groups from {source} to {to}", patience=3)
    async def move(self, policy: str, source: str, to: str) -> int:
        """See `RequestRouter.move`."""
        return await self._roads[policy].router.move(source, to)

    @remote("answering a ping")
    def ping(self) -> None:
        """Return: the event loop is not blocked."""

    async def close(self) -> None:
        for road in self._roads.values():
            road.router.close()
        for replica in self._remote.values():
            replica.close()
        await self._sessions.close()
        if self._judge is not None:
            await self._judge.close()

    # ---------------------------------------------------------------------------------------------------------- groups

    async def _claim(self, live: LiveGroup) -> None:
        """Claim the weights of all policies, at the same moment.

        With several policies, a group takes all its holds or none: it waits for one version after the other without a
        hold, then tries to hold all at once. Ends because every change is for a published version, running groups never
        wait for one that waits here, and while it waits each policy publishes at most as many versions as the bound on
        staleness allows.
        """
        assignment = live.assignment
        wanted = {name: WeightsWanted(assignment.version_of(name)) for name in self._roads}
        if len(wanted) == 1:
            ((name, version),) = wanted.items()
            live.policies[name] = self._policy(live, name, await self._roads[name].router.claim(version, live.key[0]))
            return
        while True:
            for name, version in wanted.items():
                self._roads[name].router.release(await self._roads[name].router.claim(version, live.key[0]))
            claims: dict[str, Claim] = {}
            for name, version in wanted.items():
                if (claim := await self._roads[name].router.try_claim(version, live.key[0])) is None:
                    break
                claims[name] = claim
            if len(claims) == len(wanted):
                live.policies = {name: self._policy(live, name, claim) for name, claim in claims.items()}
                return
            for name, claim in claims.items():
                self._roads[name].router.release(claim)

    def _policy(self, live: LiveGroup, name: str, claim: Claim) -> RoutedPolicy:
        group_id, attempt = live.key
        road = self._roads[name]
        prefix = f"{self.name}/{group_id}.{attempt}/{next(self._numbers)}"  # evaluations repeat group ids
        return RoutedPolicy.of(road.text, road.router, claim, prefix)

    async def _play(self, live: LiveGroup) -> None:
        playing = asyncio.ensure_future(self._sessions.play(live, self.name))
        deadline = live.deadline = PausedDeadline(self._group_s, playing.cancel)
        deadline.hold(is_held=self._are_asleep)
        for claim in live.claims:
            claim.waiting = deadline
        try:
            await asyncio.wait([playing])
        finally:
            playing.cancel()
        await asyncio.wait([playing])
        failure = next((policy.failure for policy in live.policies.values() if policy.failure), None)
        if failure is not None:
            raise failure
        if playing.cancelled() and deadline.is_over:
            raise GroupExpired(
                f"group {live.key.group_id} waited for tokens for more than {self._group_s:g} s and is issued again; "
                "raise limits.group_s, or lower rollout.max_new_tokens or the turns of its workflow"
            )
        playing.result()

    def _views(self, live: LiveGroup, scores: tuple[Score, ...] | None) -> tuple[Group, ...]:
        assignment = live.assignment
        trained = list(assignment.versions or self._roads)  # all trained policies, or the only one
        first, *others = (self._view(live, name, scores) for name in trained)
        return (first, *others)

    def _view(self, live: LiveGroup, policy: str, scores: tuple[Score, ...] | None) -> Group:
        """View of the group for one policy."""
        assignment, claims = live.assignment, live.claims
        tokens_at = sum((claim.tokens_at for claim in claims), type(claims[0].tokens_at)())
        replica = max(tokens_at, key=lambda name: tokens_at[name], default=self.name)
        versions = versions_of(live.episodes, policy)
        return Group(
            key=assignment.key,
            task_id=assignment.task.id,
            source=assignment.task.source,
            permit_version=assignment.version_of(policy),
            replica=replica,
            episodes=meta_of(live.episodes),
            versions=versions,
            weights=_of(live.policies[policy].claim, versions),
            payload=None,
            policy=policy,
            settled_reward=live.settled_reward,
            num_ended_early=assignment.size - len(live.episodes),
            scores=scores,
            report=RolloutReport(
                busy=Busy(replica, live.start_s, time.monotonic()),
                waited_s=live.start_s - live.arrived_s,
                pulls=tuple(
                    replace(pull, policy=name) for name, of in live.policies.items() for pull in of.claim.pulls
                ),
                stats=claims[0].stats,
            ),
        )

    def _replica(self, policy: str, worker: Remote[ReplicaWorker]) -> Replica:
        if worker.name == self.name and policy in self._local:
            return self._local[policy]
        key = (policy, worker.name)
        if key not in self._remote:
            self._remote[key] = RemoteReplica(worker, policy, self.name)
        return self._remote[key]


def _of(claim: Claim, versions: Sequence[VersionSpan]) -> tuple:
    """The acknowledgements of these versions."""
    held = {span.version for span in versions}
    return tuple(a for a in claim.vouched if a.version in held)
