"""A make-believe cluster: every worker the driver talks to, on a clock of the event loop."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.algorithm import Algorithm, Assigned, LossInputs, LossOutput, Signal
from rlsys.batch.plan import BatchPlan
from rlsys.batch.samples import meta_of
from rlsys.contracts import Arrival, Busy, Judged, Published, RolledOut, TrainStats, Workers
from rlsys.errors import DeadlineExceeded, PayloadLost, WeightsMismatch, WorkerDied, WorkerError
from rlsys.record import GroupRecord, RolloutRecord, read_groups, write_groups, write_rollouts
from rlsys.types import (
    Acknowledged,
    Assignment,
    EngineStats,
    Episode,
    Group,
    PolicyVersion,
    Ref,
    ReplicaLoad,
    Score,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

if TYPE_CHECKING:
    from torch import Tensor

GROUPS_AT_ONCE = 16
"""Groups that fill a fake replica's cache."""


@dataclass(frozen=True, kw_only=True)
class RewardAsAdvantage(Algorithm):
    """An algorithm whose advantages are the rewards: for tests of everything around it."""

    group_size: int = 2
    tolerates: int | None = None
    needs: frozenset[Signal] = frozenset()

    @property
    def max_safe_staleness(self) -> int | None:
        return self.tolerates

    @property
    def signals(self) -> frozenset[Signal]:
        return self.needs

    def advantages(self, group: Group) -> Iterator[Assigned]:
        for (e, t), trajectory in group.trajectories():
            if trajectory.reward is not None:
                yield Assigned(e, t, trajectory.reward)

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        return LossOutput(-logprobs_N * batch.advantages_N)


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


@dataclass
class FakeWorld:
    """One make-believe cluster: what its workers share, and what a test may set and look at."""

    num_replicas: int = 2
    rollout_s: Callable[[int], float] = lambda serial: 1.0
    """Seconds to roll out group `serial`."""
    reward_s: Callable[[int], float] = lambda serial: 0.1
    annotate_s: Callable[[int], float] = lambda serial: 0.1
    """Seconds to add a signal to one group."""
    train_s: Callable[[int], float] = lambda version: 1.0
    """Seconds of the step that trains `version`."""
    publish_s: float = 0.1
    broadcast_s: float = 0.0
    """Seconds from the end of a publish until the relay holds the version."""
    relay_deaths_s: Sequence[float] = ()
    """Times of the event loop at which a relay dies. Others hold what it held, so nobody waits for it."""
    restart_s: float = 1.0
    lease_s: float = 100.0
    weight_change: str = "between"
    reward: Callable[[int, int], float | None] = lambda serial, episode: float((serial + episode) % 2)
    """Reward of an episode; None fails it."""
    rollout_faults: Mapping[int, Fault] = field(default_factory=dict)
    """Fault of the n-th rollout call, counted from 0 over all replicas."""
    reward_faults: Mapping[int, Fault] = field(default_factory=dict)
    payload_losses: Mapping[str, Collection[int]] = field(default_factory=dict)
    """By call (`score`, `annotate`, `train_step`, `save_groups`), which calls of it, counted from 0, find that the
    payload of every second of their groups is gone. It is gone for every later call, too."""
    notice_s: Callable[[int], float] = lambda number: 0.0
    """Seconds until the n-th fetch of a payload that is gone is given up, counted from 0 over all calls."""
    num_eval_replicas: int = 1
    """Replicas of the evaluation lane."""
    eval_s: Callable[[int], float] = lambda serial: 1.0
    """Seconds to roll out group `serial` of an evaluation."""
    eval_faults: Mapping[int, Fault] = field(default_factory=dict)
    """Fault of the n-th rollout call of the evaluation lane."""
    disk_is_full_at: str | None = None
    """Name of the checkpoint that finds the disk full."""

    def __post_init__(self) -> None:
        self.weights = 0
        """What training amounts to: a chain over everything consumed, in order. Equal chains, equal training."""
        self.consumed: Counter[str] = Counter()
        """Task ids by times trained."""
        self.staleness: list[int] = []
        """Staleness of every trained token span."""
        self.relay: PolicyVersion = -1
        self._arrived = asyncio.Event()
        self._num_fetches: Counter[str] = Counter()
        self.gone: dict[int, Ref] = {}
        """Payloads that were lost, by their `id`; kept, so that no other payload gets it."""
        self._num_given_up = 0

    async def fetch(self, call: str, groups: Sequence[Group]) -> None:
        """Raise `PayloadLost` if this call is one of `payload_losses`, or comes after one that found a payload gone."""
        number = self._num_fetches[call]
        self._num_fetches[call] += 1
        if number in self.payload_losses.get(call, ()):
            self.gone |= {id(group.payload): group.payload for group in groups[::2]}
        if gone := tuple(group.serial for group in groups if id(group.payload) in self.gone):
            self._num_given_up += 1
            await asyncio.sleep(self.notice_s(self._num_given_up - 1))
            raise PayloadLost(gone)

    def hash(self, version: PolicyVersion) -> str:
        return f"hash-of-{version}"

    async def held(self, at_least: PolicyVersion) -> PolicyVersion:
        """The relay's newest version, once it is no older than `at_least`."""
        while self.relay < at_least:
            self._arrived.clear()
            await self._arrived.wait()
        return self.relay

    def arrive(self, version: PolicyVersion) -> None:
        self.relay = max(self.relay, version)
        self._arrived.set()

    def workers(self) -> Workers:
        return Workers(
            FakeRollouts(self),
            FakeRewards(self),
            FakeActor(self),
            FakeRelays(self),
            {signal: FakeReference(self) for signal in Signal},
            evaluation=FakePinnedRollouts(self),
        )


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

    async def run(self, assignment: Assignment) -> RolledOut:
        first = await self._pull(assignment.version)
        start_s = _now()
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
        return RolledOut(group, Busy(worker, start_s, _now()))

    async def versions(self) -> Sequence[Acknowledged]:
        held = await self._pull(-1)
        return [Acknowledged(m, held, self.world.hash(held)) for m in self.members]

    async def loads(self) -> Sequence[ReplicaLoad]:
        """A replica is of the oldest version that runs there, else of the newest there is."""
        newest = await self._pull(-1)
        return [self._load(member, newest) for member in self.members]

    def _load(self, member: str, newest: PolicyVersion) -> ReplicaLoad:
        here = self._groups_at(member)
        version = min((self._versions[serial] for serial in here), default=newest)
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
        start_s = _now()
        worker, fault = await self._call("judging", group.serial, self.world.reward_s(group.serial))
        await self.world.fetch("score", [group])
        values = [
            None if fault is Fault.FAILS else self.world.reward(group.serial, e) for e in range(len(group.episodes))
        ]
        scores = tuple(Score(v) if v is not None else Score(None, "the judge raised") for v in values)
        return Judged(scores, Busy(worker, start_s, _now()))


class FakeActor:
    """Implements `Actor`: its weights are a number that depends on everything it trained, in order."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.version = 0

    async def train_step(self, groups: Sequence[Group], plan: BatchPlan) -> TrainStats:
        seconds = self.world.train_s(self.version)
        await asyncio.sleep(seconds)
        await self.world.fetch("train_step", groups)
        for group in groups:
            rewards = tuple(t.reward for _, t in group.trajectories())
            spans = tuple((s.version, s.num_tokens) for s in group.versions)
            self.world.weights = hash((self.world.weights, group.serial, group.task_id, rewards, spans))
            self.world.consumed[group.task_id] += 1
            self.world.staleness += [self.version - s.version for s in group.versions]
        self.version += 1
        return TrainStats({"loss": 0.0}, seconds)

    async def publish(self, version: PolicyVersion) -> Published:
        self.version = version
        await asyncio.sleep(self.world.publish_s)
        asyncio.get_running_loop().call_later(self.world.broadcast_s, self.world.arrive, version)
        return Published(version, 4, self.world.publish_s)

    async def announce_again(self, version: PolicyVersion) -> None:
        """Relays lose nothing here."""

    async def save(self, folder: Path) -> None:
        if self.world.disk_is_full_at is not None and self.world.disk_is_full_at in str(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        state = {"weights": self.world.weights, "version": self.version, "consumed": self.world.consumed}
        _write_json(folder / "weights.json", state)

    async def load(self, folder: Path) -> None:
        state = _read_json(folder / "weights.json")
        self.world.weights, self.version = state["weights"], state["version"]
        self.world.consumed = Counter(state["consumed"])

    async def record(
        self,
        path: Path,
        step: int,
        tasks: Sequence[Task],
        groups: Sequence[Group],
        assigned: Sequence[Sequence[Assigned]],
    ) -> None:
        rows = zip(tasks, groups, assigned, strict=True)
        write_rollouts(path, [RolloutRecord.of(step, t, g, _payload(g), a) for t, g, a in rows])

    async def save_groups(self, path: Path, groups: Sequence[Group]) -> None:
        await self.world.fetch("save_groups", groups)
        write_groups(path, [GroupRecord(g, _payload(g)) for g in groups])

    async def load_groups(self, path: Path) -> list[Group]:
        return [replace(record.group, payload=record.episodes) for record in read_groups(path)]


class FakeRelays:
    """Implements `Relays`: four bytes that arrive after `FakeWorld.broadcast_s`."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world

    async def arrival(self, version: PolicyVersion) -> Arrival:
        await self.world.held(version)
        return Arrival(version, self.world.hash(version), 4, 4, self.world.broadcast_s)

    async def supervise(
        self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        for death_s in self.world.relay_deaths_s:
            await asyncio.sleep(death_s - _now())
            on_failure(WorkerDied("relay-0", "keeping weights", "the process is gone"))
            await asyncio.sleep(self.world.restart_s)
            on_recovery("relay-0", self.world.restart_s)
        await asyncio.Event().wait()


class FakeReference:
    """Implements `Reference`: every trained token gets logprob -1."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world

    async def annotate(self, groups: Sequence[Group], signal: Signal) -> list[Group]:
        await asyncio.sleep(sum(self.world.annotate_s(group.serial) for group in groups))
        await self.world.fetch("annotate", groups)
        return [replace(g, columns={**g.columns, signal: [(-1.0,) * 3] * len(g.episodes)}) for g in groups]


def tasks(count: int) -> list[Task]:
    """Distinct little tasks, `task-0`, `task-1`, ..."""
    return [Task(id=f"task-{i}", prompt=f"{i}?", answer=str(i)) for i in range(count)]


def _episode(assignment: Assignment, index: int, spans: tuple[VersionSpan, ...]) -> Episode:
    output = (assignment.serial % 97, index, 1)
    turn = Turn((7, assignment.serial % 97), output, (-0.5, -1.0, -0.25), spans, "stop", f"{assignment.serial}/{index}")
    return Episode((Trajectory("policy", (turn,)),))


def _payload(group: Group) -> tuple[Episode, ...]:
    assert isinstance(group.payload, tuple)
    return group.payload


def _now() -> float:
    return asyncio.get_running_loop().time()


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(value))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
