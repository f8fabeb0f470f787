"""Pools of rollout replicas and reward workers whose latencies and faults a `FakeWorld` defines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from rlsys.batch.samples import meta_of, versions_of
from rlsys.contracts import Busy, Graft, GroupScores, RolledOut, with_episode
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied
from rlsys.types import (
    POLICY,
    Acknowledged,
    Assignment,
    EngineStats,
    Episode,
    Group,
    PolicyVersion,
    ReplicaLoad,
    Score,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

if TYPE_CHECKING:
    from rlsys.simulate.fake_world import FakeWorld

GROUPS_AT_ONCE = 16
"""Number of groups that fills the cache of a fake replica."""
JUDGE_RAISED = "the judge raised"
Spans = tuple[VersionSpan, ...]


class Fault(Enum):
    """Fault of one call of a fake worker."""

    DIES = "dies"
    """The worker dies; calls fail until it is restarted."""
    HANGS = "hangs"
    """The call does not return within the lease."""
    WRONG_WEIGHTS = "wrong weights"
    """The rollout acknowledges a hash that was never published."""
    FAILS = "fails"
    """The reward function raises on every episode of the group."""


class FakePool:
    """Pool of named members. A fault removes a member and `restart` replaces it: `rollout-0` by `rollout-0.1`."""

    def __init__(self, world: FakeWorld, kind: str, size: int, faults: Mapping[int, Fault]) -> None:
        self.world, self._faults = world, faults
        self.members = [f"{kind}-{i}" for i in range(size)]
        self.num_calls = 0
        self.restarted: list[str] = []
        self._recovering: list[asyncio.Task[None]] = []
        self._given: dict[int, str] = {}

    def placements(self) -> Mapping[int, str]:
        return dict(self._given)

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a member in the background, unless that has begun. Waits only if no member is alive."""
        if worker in self.members:
            self.members.remove(worker)
            self.restarted.append(worker)
            self._recovering.append(asyncio.create_task(self._recover(worker, on_recovery)))
        await self._any_alive()

    async def _any_alive(self) -> None:
        while not self.members:
            under_way = [task for task in self._recovering if not task.done()]
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)

    async def _recover(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        began_s = now()
        await asyncio.sleep(self.world.restart_s)
        stem, _, generation = worker.partition(".")
        successor = f"{stem}.{int(generation or 0) + 1}"
        await self._install(worker, successor)
        self.members.append(successor)
        on_recovery(worker, now() - began_s)

    async def _install(self, worker: str, successor: str) -> None:
        """Prepare `successor` to replace `worker`."""

    async def _call(self, phase: str, group_id: int, seconds: float) -> tuple[str, Fault | None]:
        await self._any_alive()
        worker = self.members[self.num_calls % len(self.members)]
        fault = self._faults.get(self.num_calls)
        self.num_calls += 1
        self._given[group_id] = worker
        try:
            return worker, await self._work(worker, f"{phase} group {group_id}", seconds, fault)
        finally:
            self._given.pop(group_id, None)

    async def _work(self, worker: str, phase: str, seconds: float, fault: Fault | None) -> Fault | None:
        if fault is Fault.HANGS:
            await asyncio.sleep(self.world.lease_s)
            raise DeadlineExceeded(worker, phase, f"no answer within {self.world.lease_s:g} s")
        await asyncio.sleep(seconds)
        if fault is Fault.DIES:
            raise WorkerDied(worker, phase, "the process is gone")
        return fault


class FakeRollouts(FakePool):
    """Implement `Rollouts`: episodes from `FakeWorld.play`, sampled from the relay's newest version."""

    def __init__(
        self,
        world: FakeWorld,
        kind: str = "rollout",
        size: int | None = None,
        faults: Mapping[int, Fault] | None = None,
        rollout_s: Callable[[int], float] | None = None,
    ) -> None:
        """Arguments that are not given default to the world's values."""
        faults = world.rollout_faults if faults is None else faults
        super().__init__(world, kind, size or world.num_replicas, faults)
        self._rollout_s = rollout_s or world.rollout_s
        self._versions: dict[int, PolicyVersion] = {}
        """By id of a running group: the version at its start."""
        self._hosts: dict[int, str] = {}
        """By id of a moved group: the member that continues it."""
        self._told: dict[str, PolicyVersion] = {}
        """By member: the newest version whose pull was reported."""

    async def run(self, assignment: Assignment) -> RolledOut:
        asked_s = now()
        held = await self._take_in(assignment)
        start_s, group_id = now(), assignment.group_id
        self._versions[group_id] = first = next(iter(held.values()))
        try:
            worker, fault = await self._call("rolling out", group_id, self._rollout_s(group_id))
        finally:
            self._versions.pop(group_id, None)
            self._hosts.pop(group_id, None)
        spans = {policy: await self._spans(version) for policy, version in held.items()}
        episodes = tuple([await self._episode(assignment, e, spans, worker) for e in range(assignment.size)])
        wrong = "wrong-" if fault is Fault.WRONG_WEIGHTS else ""
        views = [self._view(policy, assignment, episodes, worker, wrong, of) for policy, of in spans.items()]
        pulls = (Busy(worker, asked_s, start_s),) if first > self._told.get(worker, -1) else ()
        self._told[worker] = max(first, self._told.get(worker, -1))
        return RolledOut(views[0], Busy(worker, start_s, now()), others=tuple(views[1:]), pulls=pulls)

    async def versions(self) -> Sequence[Acknowledged]:
        held = await self._pull(-1)
        return [Acknowledged(m, held, self.world.hash(held)) for m in self.members]

    async def loads(self) -> Sequence[ReplicaLoad]:
        """A replica reports the oldest version of its running groups, else the newest version."""
        newest = await self._pull(-1)
        return [self._load(member, newest) for member in self.members]

    async def move(self, source: str, to: str) -> int:
        loads = {load.replica: load for load in await self.loads()}
        if source == to or not {source, to} <= loads.keys() or loads[source].version != loads[to].version:
            return 0
        moving = self._groups_at(source)
        self._hosts.update(dict.fromkeys(moving, to))
        return len(moving)

    def _load(self, member: str, newest: PolicyVersion) -> ReplicaLoad:
        here = self._groups_at(member)
        version = min((self._versions.get(group_id, newest) for group_id in here), default=newest)
        return ReplicaLoad(member, version, EngineStats(len(here), 0, min(1.0, len(here) / GROUPS_AT_ONCE), 0))

    def _groups_at(self, member: str) -> list[int]:
        return [group_id for group_id, owner in self._given.items() if self._hosts.get(group_id, owner) == member]

    async def _pull(self, at_least: PolicyVersion) -> PolicyVersion:
        return await self.world.held(at_least)

    async def _take_in(self, assignment: Assignment) -> Mapping[str, PolicyVersion]:
        """Return the version at the start of the group, by policy."""
        return {POLICY: await self._pull(assignment.version)}

    async def _spans(self, first: PolicyVersion) -> Spans:
        """Return the versions of the three sampled tokens."""
        last = await self._pull(first) if self.world.weight_change == "inflight" else first
        return (VersionSpan(first, 3),) if first == last else (VersionSpan(first, 2), VersionSpan(last, 1))

    async def _episode(self, assignment: Assignment, index: int, spans: Mapping[str, Spans], worker: str) -> Episode:
        return await self.world.play(assignment, index, spans[POLICY], worker)

    def _view(
        self, policy: str, assignment: Assignment, episodes: tuple[Episode, ...], worker: str, wrong: str, spans: Spans
    ) -> Group:
        return Group(
            group_id=assignment.group_id,
            task_id=assignment.task.id,
            permit_version=assignment.version_of(policy),
            replica=worker,
            episodes=meta_of(episodes),
            versions=versions_of(episodes, policy),
            weights=tuple(Acknowledged(worker, s.version, wrong + self.world.hash(s.version)) for s in spans),
            payload=episodes,
            policy=policy,
        )


class FakePinnedRollouts(FakeRollouts):
    """Implement `PinnedRollouts`: sample from the version given to `pin`."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world, "eval", world.num_eval_replicas, world.eval_faults, world.eval_s)
        self._pinned: PolicyVersion = -1

    async def pin(self, version: PolicyVersion) -> None:
        newest = await self.world.held(version)
        if newest != version:
            raise WeightsMismatch("relay", f"pinning version {version}", f"version {newest} has taken its place")
        self._pinned = version

    async def _pull(self, at_least: PolicyVersion) -> PolicyVersion:
        return self._pinned


class FakeJointRollouts(FakeRollouts):
    """Implement `SharedRollouts`: two episodes in which every policy samples three tokens. A policy's weights change
    only when a group requires newer ones, and then to its relay's newest version. The first policy samples the root,
    the others subagents with a reward. Latencies and faults are those of the first policy's world."""

    def __init__(
        self,
        worlds: Mapping[str, FakeWorld],
        speaks: Callable[[str, int], bool] = lambda policy, group_id: True,
    ) -> None:
        """`speaks(policy, group_id)`: true if the policy samples in this group. The first policy always does."""
        self.worlds, self.speaks = worlds, speaks
        self._root, *_ = worlds
        super().__init__(worlds[self._root])
        self.assignments: list[Assignment] = []
        """All assignments, in order."""
        self.held: dict[str, PolicyVersion] = dict.fromkeys(worlds, -1)
        """By policy: the version loaded in the replicas."""

    async def versions(self, policy: str = POLICY) -> Sequence[Acknowledged]:
        world, held = self.worlds[policy], self.held[policy]
        return [Acknowledged(m, held, world.hash(held)) for m in self.members]

    async def loads(self, policy: str = POLICY) -> Sequence[ReplicaLoad]:
        return [replace(load, version=self.held[policy]) for load in await super().loads()]

    async def _take_in(self, assignment: Assignment) -> Mapping[str, PolicyVersion]:
        self.assignments.append(assignment)
        for name, world in self.worlds.items():
            if self.held[name] < (asked := assignment.version_of(name)):
                self.held[name] = await world.held(asked)
        return dict(self.held)

    async def _spans(self, first: PolicyVersion) -> Spans:
        return (VersionSpan(first, 3),)

    async def _episode(self, assignment: Assignment, index: int, spans: Mapping[str, Spans], worker: str) -> Episode:
        group_id = assignment.group_id
        speakers = [name for name in spans if name == self._root or self.speaks(name, group_id)]
        root, *others = (said(name, group_id, index, spans[name], f"{name}!") for name in speakers)
        reward = float((group_id + index) % 2)
        return Episode((root, *(replace(other, reward=reward, parent=0) for other in others)))


class FakeRewards(FakePool):
    """Implement `Rewards` by `FakeWorld.scores`."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world, "reward", 1, world.reward_faults)

    async def score(self, task: Task, group: Group) -> GroupScores:
        start_s = now()
        worker, fault = await self._call("scoring", group.group_id, self.world.reward_s(group.group_id))
        await self.world.fetch("score", [group])
        failed = (Score(None, JUDGE_RAISED),) * len(group.episodes)
        return GroupScores(
            failed if fault is Fault.FAILS else self.world.scores(task, group), Busy(worker, start_s, now())
        )

    async def graft(self, graft: Graft) -> Group:
        group, donor = graft.group, graft.donor
        await self._call("grafting into", group.group_id, 0.0)
        await self.world.fetch("graft", [donor, group])
        assert isinstance(group.payload, tuple) and isinstance(donor.payload, tuple)
        episodes = with_episode(group.payload, graft.episode, donor.payload[graft.donor_episode])
        return graft.applied(episodes, versions_of(episodes, group.policy))


def said(policy: str, group_id: int, episode: int, spans: Spans, text: str) -> Trajectory:
    """Return three tokens of a policy, the same for the same group and episode."""
    turn = Turn((7, group_id % 97), (group_id % 97, episode, 1), (-0.5, -1.0, -0.25), spans, "stop", text)
    return Trajectory(policy, (turn,), policy=policy)


def now() -> float:
    """Return the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()
