"""Fake pools: rollout replicas and reward workers that take the time a `FakeWorld` says, and fail where it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from rlsys.batch.samples import meta_of, versions_of
from rlsys.contracts import Busy, Judged, RolledOut
from rlsys.curation import Graft, with_episode
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied
from rlsys.types import (
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
    from rlsys.testing.world import FakeWorld

GROUPS_AT_ONCE = 16
"""Groups that fill a fake replica's cache."""


class Fault(Enum):
    """What goes wrong in one call of a fake worker."""

    DIES = "dies"
    """The worker is gone; calls fail until it is restarted."""
    HANGS = "hangs"
    """No answer within the lease."""
    WRONG_WEIGHTS = "wrong weights"
    """The rollout acknowledges a hash that was never published."""
    FAILS = "fails"
    """The judge raises on every episode of the group."""


class _FakePool:
    """Named members that a fault takes down and `restart` brings back."""

    def __init__(self, world: FakeWorld, kind: str, size: int, faults: Mapping[int, Fault]) -> None:
        self.world, self._kind, self._faults = world, kind, faults
        self.members = [f"{kind}-{i}" for i in range(size)]
        self.num_calls = 0
        self.restarted: list[str] = []
        self._recovering: list[asyncio.Task[None]] = []
        self._given: dict[int, str] = {}

    def whereabouts(self) -> Mapping[int, str]:
        return dict(self._given)

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a member in the background, nothing to do if somebody does; waits only if none is alive."""
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
        await asyncio.sleep(self.world.restart_s)
        self.members.append(f"{worker}+")
        on_recovery(worker, self.world.restart_s)

    async def _call(self, phase: str, serial: int, seconds: float) -> tuple[str, Fault | None]:
        await self._any_alive()
        worker = self.members[self.num_calls % len(self.members)]
        fault = self._faults.get(self.num_calls)
        self.num_calls += 1
        self._given[serial] = worker
        try:
            return worker, await self._work(worker, f"{phase} group {serial}", seconds, fault)
        finally:
            self._given.pop(serial, None)

    async def _work(self, worker: str, phase: str, seconds: float, fault: Fault | None) -> Fault | None:
        if fault is Fault.HANGS:
            await asyncio.sleep(self.world.lease_s)
            raise DeadlineExceeded(worker, phase, f"no answer within {self.world.lease_s:g} s")
        await asyncio.sleep(seconds)
        if fault is Fault.DIES:
            raise WorkerDied(worker, phase, "the process is gone")
        return fault


class FakeRollouts(_FakePool):
    """Implements `Rollouts`: two episodes of three tokens, sampled from whatever version the relay holds."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world, "rollout", world.num_replicas, world.rollout_faults)
        self._rollout_s = world.rollout_s
        self._versions: dict[int, PolicyVersion] = {}
        """By serial of a group that runs: the version it began on."""
        self._hosts: dict[int, str] = {}
        """By serial of a group that was moved: who goes on with it."""
        self._told: dict[str, PolicyVersion] = {}
        """By member: the newest version that it said it took in."""

    async def run(self, assignment: Assignment) -> RolledOut:
        asked_s = now()
        first = await self._pull(assignment.version)
        start_s = now()
        self._versions[assignment.serial] = first
        try:
            worker, fault = await self._call("rolling out", assignment.serial, self._rollout_s(assignment.serial))
        finally:
            self._versions.pop(assignment.serial, None)
            self._hosts.pop(assignment.serial, None)
        last = await self._pull(first) if self.world.weight_change == "inflight" else first
        spans = (VersionSpan(first, 3),) if first == last else (VersionSpan(first, 2), VersionSpan(last, 1))
        episodes = tuple(_episode(assignment, e, spans) for e in range(assignment.size))
        wrong = "wrong-" if fault is Fault.WRONG_WEIGHTS else ""
        group = Group(
            serial=assignment.serial,
            task_id=assignment.task.id,
            permit_version=assignment.version,
            replica=worker,
            episodes=meta_of(episodes),
            versions=tuple(VersionSpan(s.version, s.num_tokens * assignment.size) for s in spans),
            weights=tuple(Acknowledged(worker, s.version, wrong + self.world.hash(s.version)) for s in spans),
            payload=episodes,
        )
        pulls = (Busy(worker, asked_s, start_s),) if first > self._told.get(worker, -1) else ()
        self._told[worker] = max(first, self._told.get(worker, -1))
        return RolledOut(group, Busy(worker, start_s, now()), pulls=pulls)

    async def versions(self) -> Sequence[Acknowledged]:
        held = await self._pull(-1)
        return [Acknowledged(m, held, self.world.hash(held)) for m in self.members]

    async def loads(self) -> Sequence[ReplicaLoad]:
        """A replica is of the oldest version that runs there, else of the newest there is."""
        newest = await self._pull(-1)
        return [self._load(member, newest) for member in self.members]

    def _load(self, member: str, newest: PolicyVersion) -> ReplicaLoad:
        here = self._groups_at(member)
        version = min((self._versions.get(serial, newest) for serial in here), default=newest)
        return ReplicaLoad(member, version, EngineStats(len(here), 0, min(1.0, len(here) / GROUPS_AT_ONCE), 0))

    def _groups_at(self, member: str) -> list[int]:
        return [serial for serial, owner in self._given.items() if self._hosts.get(serial, owner) == member]

    async def move(self, source: str, to: str) -> int:
        loads = {load.replica: load for load in await self.loads()}
        if source == to or not {source, to} <= loads.keys() or loads[source].version != loads[to].version:
            return 0
        moving = self._groups_at(source)
        self._hosts.update(dict.fromkeys(moving, to))
        return len(moving)

    async def _pull(self, at_least: PolicyVersion) -> PolicyVersion:
        return await self.world.held(at_least)


class FakePinnedRollouts(FakeRollouts):
    """Implements `PinnedRollouts`: samples from the version it was told to hold."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        _FakePool.__init__(self, world, "eval", world.num_eval_replicas, world.eval_faults)
        self._rollout_s = world.eval_s
        self._pinned: PolicyVersion = -1

    async def hold(self, version: PolicyVersion) -> None:
        newest = await self.world.held(version)
        if newest != version:
            raise WeightsMismatch("relay", f"pinning version {version}", f"version {newest} has taken its place")
        self._pinned = version

    async def _pull(self, at_least: PolicyVersion) -> PolicyVersion:
        return self._pinned


class FakeRewards(_FakePool):
    """Implements `Rewards` by `FakeWorld.reward`."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world, "reward", 1, world.reward_faults)

    async def score(self, task: Task, group: Group) -> Judged:
        start_s = now()
        worker, fault = await self._call("judging", group.serial, self.world.reward_s(group.serial))
        await self.world.fetch("score", [group])
        values = [
            None if fault is Fault.FAILS else self.world.reward(group.serial, e) for e in range(len(group.episodes))
        ]
        scores = tuple(Score(v) if v is not None else Score(None, "the judge raised") for v in values)
        return Judged(scores, Busy(worker, start_s, now()))

    async def graft(self, graft: Graft) -> Group:
        group, donor = graft.group, graft.donor
        await self._call("grafting into", group.serial, 0.0)
        await self.world.fetch("graft", [donor, group])
        assert isinstance(group.payload, tuple) and isinstance(donor.payload, tuple)
        episodes = with_episode(group.payload, graft.episode, donor.payload[graft.donor_episode])
        return graft.applied(episodes, versions_of(episodes, group.policy))


def _episode(assignment: Assignment, index: int, spans: tuple[VersionSpan, ...]) -> Episode:
    output = (assignment.serial % 97, index, 1)
    turn = Turn((7, assignment.serial % 97), output, (-0.5, -1.0, -0.25), spans, "stop", f"{assignment.serial}/{index}")
    return Episode((Trajectory("policy", (turn,)),))


def now() -> float:
    """Seconds of the event loop."""
    return asyncio.get_running_loop().time()
