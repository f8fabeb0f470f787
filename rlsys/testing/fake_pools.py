"""Pools of rollout replicas and reward workers whose latencies and faults a `FakeWorld` defines.

A fake is a simulated worker: `SimReplica` adds the model of an engine to `FakeReplica`, and the other classes serve
the simulator as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rlsys.batch.samples import meta_of, versions_of
from rlsys.contracts import GroupScores, Replacement, with_episode
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied
from rlsys.routing.request_router import ReplicaWork, cheapest
from rlsys.testing.world_state import JUDGE_RAISED, Fault, Spans, WorldState
from rlsys.types import (
    Acknowledged,
    Assignment,
    Busy,
    EngineStats,
    EpisodeMeta,
    Group,
    PolicyVersion,
    Pull,
    Ref,
    ReplicaLoad,
    RolloutReport,
    Score,
    Task,
    VersionSpan,
)
from rlsys.util.deadlines import ROUNDING_S

GROUPS_AT_ONCE = 16
"""Number of groups that fills the cache of a fake replica."""


class FakePool:
    """Pool of named members. A fault removes a member and `restart` replaces it: `rollout-0` by `rollout-0.1`.

    While the pool sleeps, no time of its work passes, and no member is set up.
    """

    role = ""
    """Role in `FakeWorld.together`."""

    def __init__(self, world: WorldState, kind: str, size: int, faults: Mapping[int, Fault]) -> None:
        self.world, self._faults = world, faults
        self.members = [f"{kind}-{i}" for i in range(size)]
        self.num_calls = 0
        self.restarted: list[str] = []
        self._recovering: list[asyncio.Task[None]] = []
        self._is_awake, self._is_asleep = asyncio.Event(), asyncio.Event()
        (self._is_asleep if self.role in world.together else self._is_awake).set()

    async def sleep(self) -> None:
        self._is_awake.clear()
        self._is_asleep.set()
        self._lose_one("sleep")
        await self.world.move(self.role, is_awake=False)

    async def wake(self) -> None:
        self._lose_one("wake")
        await self.world.move(self.role, is_awake=True)
        self._is_asleep.clear()
        self._is_awake.set()

    def _lose_one(self, call: str) -> None:
        """Let the first member die, if `FakeWorld.training_deaths` has this call, as in `rollout sleep`."""
        if self.members and self.world.dies(self.role, call):
            self._recovering.append(asyncio.create_task(self.restart(self.members[0], lambda name, seconds: None)))

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a member in the background, unless that has begun. Waits only if no member is alive."""
        if worker in self.members:
            self.members.remove(worker)
            self._on_leave(worker)
            self.restarted.append(worker)
            self._recovering.append(asyncio.create_task(self._recover(worker, on_recovery)))
        await self._any_alive()

    async def _any_alive(self) -> None:
        while not self.members:
            under_way = [task for task in self._recovering if not task.done()]
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)

    async def _recover(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        began_s = now()
        await self.compute(self.world.restart_s)
        stem, _, generation = worker.partition(".")
        successor = f"{stem}.{int(generation or 0) + 1}"
        await self._install(worker, successor)
        self.members.append(successor)
        on_recovery(worker, now() - began_s)

    def _on_leave(self, worker: str) -> None:
        """Give no more work to `worker`."""

    async def _install(self, worker: str, successor: str) -> None:
        """Prepare `successor` to replace `worker`."""

    async def _work(self, worker: str, phase: str, seconds: float) -> Fault | None:
        fault = self._faults.get(self.num_calls)
        self.num_calls += 1
        if fault is Fault.HANGS:
            await asyncio.sleep(self.world.group_s)
            raise DeadlineExceeded(worker, phase, f"no answer within {self.world.group_s:g} s")
        await self.compute(seconds)
        if fault is Fault.DIES or (self.role in self.world.together and worker not in self.members):
            raise WorkerDied(worker, phase, "the process is gone")
        return fault

    async def compute(self, seconds: float) -> None:
        """Return once the pool was awake for `seconds`."""
        if self.role not in self.world.together:
            await asyncio.sleep(seconds)
            return
        while seconds > ROUNDING_S:
            await self._is_awake.wait()
            began_s = now()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._is_asleep.wait()
            seconds -= now() - began_s


@dataclass(eq=False)
class FakePlay:
    """A group from its assignment to its last token."""

    assignment: Assignment
    home: Any
    """Replica to which it was assigned."""
    version: PolicyVersion | None = None
    """Version at its start."""

    def __post_init__(self) -> None:
        self.host = self.home
        """Replica that samples it, which may change."""


class FakeReplica(ReplicaWork):
    """Replica that takes `rollout_s` of its pool for a group, and pulls weights in no time."""

    def __init__(self, pool: FakeRollouts, place: int, name: str) -> None:
        super().__init__()
        self.pool, self.place, self.name = pool, place, name
        self.is_dead = False
        self._plays: dict[Any, None] = {}
        """Groups sampled here, including groups moved in and excluding groups moved away."""
        self._told: PolicyVersion = -1
        """Newest version whose pull was reported."""

    @property
    def version(self) -> PolicyVersion:
        """Loaded version; -1 before the first pull."""
        return self.pool.held

    async def ensure_version(self, version: PolicyVersion) -> None:
        """Do nothing: weights are pulled when a group requires newer ones."""

    def new_play(self, assignment: Assignment) -> FakePlay:
        """Return the play of a group that `run` is to roll out."""
        return FakePlay(assignment, self)

    async def run(self, play: FakePlay) -> tuple[Group, ...]:
        """Roll out one group on weights no older than it requires. Raises `WorkerDied` or `DeadlineExceeded`."""
        asked_s, pool, assignment = now(), self.pool, play.assignment
        group_id, first = assignment.group_id, await pool.take_in(assignment)
        start_s, play.version = now(), first
        self._plays[play] = None
        try:
            fault = await pool._work(self.name, f"rolling out group {group_id}", pool.rollout_s(group_id))
        finally:
            del play.host._plays[play]
        spans = pool.spans(first)
        episodes = tuple([await pool.world.play(assignment, e, spans, self.name) for e in range(assignment.size)])
        wrong = "wrong-" if fault is Fault.WRONG_WEIGHTS else ""
        group = self._view(assignment, meta_of(episodes), versions_of(episodes), spans, episodes, wrong)
        pulls = (Pull(self.name, asked_s, start_s, first),) if first > self._told else ()
        self._told = max(first, self._told)
        report = RolloutReport(Busy(self.name, start_s, now()), waited_s=start_s - asked_s, pulls=pulls)
        return (replace(group, report=report),)

    def load(self) -> ReplicaLoad:
        """Return the current load: with running groups, the version is the oldest one at their starts."""
        version = min((play.version for play in self._plays), default=self.version)
        num_groups = len(self._plays)
        return ReplicaLoad(self.name, version, EngineStats(num_groups, 0, min(1.0, num_groups / GROUPS_AT_ONCE), 0))

    def move_to(self, other: FakeReplica) -> list[Any]:
        """Move all groups sampled here to `other`, and return them; none if its version differs or either is loading
        weights."""
        source, to = self.load(), other.load()
        if source.version != to.version or source.is_loading or to.is_loading:
            return []
        plays, self._plays = self._plays, {}
        for play in plays:
            play.host = other
        other._plays |= plays
        return list(plays)

    def _view(
        self,
        assignment: Assignment,
        episodes: tuple[EpisodeMeta, ...],
        versions: Spans,
        held: Spans,
        payload: Ref,
        wrong: str = "",
    ) -> Group:
        """Describe a group. `held` has the versions that the replica acknowledges."""
        return Group(
            key=assignment.key,
            task_id=assignment.task.id,
            source=assignment.task.source,
            permit_version=assignment.version,
            replica=self.name,
            episodes=episodes,
            versions=versions,
            weights=tuple(Acknowledged(self.name, s.version, wrong + self.pool.world.hash(s.version)) for s in held),
            payload=payload,
        )


class FakeRollouts(FakePool):
    """Implement `Rollouts`: a group goes where the least is to do. Episodes are those of `FakeWorld.play`."""

    role = "rollout"

    def __init__(
        self,
        world: WorldState,
        kind: str = "rollout",
        size: int | None = None,
        faults: Mapping[int, Fault] | None = None,
        rollout_s: Callable[[int], float] | None = None,
    ) -> None:
        """Arguments that are not given default to the world's values."""
        faults = world.rollout_faults if faults is None else faults
        super().__init__(world, kind, size or world.num_replicas, faults)
        self.rollout_s = rollout_s or world.rollout_s
        self.held: PolicyVersion = -1
        """Version loaded in the replicas; -1 before the first pull."""
        self.replicas = [self._replica(place, name) for place, name in enumerate(self.members)]
        self.ended: list[Any] = []
        """Replicas that were replaced."""
        self.num_moved = 0
        """Number of moved groups."""
        self.running: dict[Any, None] = {}
        """Plays of all assigned groups."""

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        await self._any_alive()
        weight = self._weight(assignment)
        replica = cheapest(self._live() or self.replicas, weight)
        assert replica is not None, "a fake replica has room for all"
        replica.add(weight)
        self.running[play := replica.new_play(assignment)] = None
        try:
            return await replica.run(play)
        except WorkerDied as error:
            self._on_leave(error.worker)
            raise
        finally:
            del self.running[play]
            play.host.remove(weight)

    def placements(self) -> Mapping[int, str]:
        return {play.assignment.group_id: play.home.name for play in self.running}

    async def loads(self) -> Sequence[ReplicaLoad]:
        return [replica.load() for replica in self._live()]

    async def drain(self, source: str, to: str) -> int:
        live = {replica.name: replica for replica in self._live()}
        giver, taker = live.get(source), live.get(to)
        if giver is None or taker is None or giver is taker:
            return 0
        plays = giver.move_to(taker)
        for play in plays:
            giver.remove(self._weight(play.assignment))
            taker.add(self._weight(play.assignment))
        self.num_moved += len(plays)
        return len(plays)

    # ------------------------------------------------------------------------------------------------ what replicas do

    async def take_in(self, assignment: Assignment) -> PolicyVersion:
        """Return the version at the start of a group: the loaded one, or the relay's newest if that is too old."""
        if self.held < assignment.version:
            self.held = await self.world.wait_for_version(assignment.version)
        return self.held

    def spans(self, first: PolicyVersion) -> Spans:
        """Return the versions of the three sampled tokens of an episode that began on version `first`."""
        last = self.held if self.world.weight_change == "inflight" else first
        return (VersionSpan(first, 3),) if first == last else (VersionSpan(first, 2), VersionSpan(last, 1))

    def _weight(self, assignment: Assignment) -> int:
        return assignment.size

    # ------------------------------------------------------------------------------------------------------- replacing

    def _replica(self, place: int, name: str) -> FakeReplica:
        return FakeReplica(self, place, name)

    def _live(self) -> list[FakeReplica]:
        return [replica for replica in self.replicas if replica.name in self.members and not replica.is_dead]

    async def _install(self, worker: str, successor: str) -> None:
        place = next(replica.place for replica in self.replicas if replica.name == worker)
        replica = self._replica(place, successor)
        await replica.ensure_version(max(r.version for r in self.replicas))
        self.ended.append(self.replicas[place])
        self.replicas[place] = replica


class FakePinnedRollouts(FakeRollouts):
    """Implement `PinnedRollouts`: sample from the version given to `pin`."""

    role = "evaluation"

    def __init__(self, world: WorldState) -> None:
        super().__init__(world, "eval", world.num_eval_replicas, world.eval_faults, world.eval_s)

    async def pin(self, version: PolicyVersion) -> None:
        newest = await self.world.wait_for_version(version)
        if newest != version:
            raise WeightsMismatch("relay", f"pinning version {version}", f"version {newest} has taken its place")
        self.held = version

    async def take_in(self, assignment: Assignment) -> PolicyVersion:
        return self.held


class FakeRewards(FakePool):
    """Implement `Rewards` by `FakeWorld.scores`."""

    def __init__(self, world: WorldState) -> None:
        super().__init__(world, "reward", 1, world.reward_faults)

    async def score(self, task: Task, group: Group) -> GroupScores:
        start_s = now()
        worker, fault = await self._call("scoring", group.group_id, self.world.reward_s(group.group_id))
        await self.world.fetch("score", [group])
        failed = (Score(None, JUDGE_RAISED),) * len(group.episodes)
        return GroupScores(
            failed if fault is Fault.FAILS else self.world.scores(task, group), Busy(worker, start_s, now())
        )

    async def _call(self, phase: str, group_id: int, seconds: float) -> tuple[str, Fault | None]:
        await self._any_alive()
        return self.members[0], await self._work(self.members[0], f"{phase} group {group_id}", seconds)

    async def replace_episode(self, replacement: Replacement) -> Group:
        group, donor, place = replacement.group, replacement.donor, replacement.episode
        await self._call("replacing an episode of", group.group_id, 0.0)
        await self.world.fetch("replace", [donor, group])
        assert isinstance(group.payload, tuple) and isinstance(donor.payload, tuple)
        episodes = with_episode(group.payload, place, donor.payload[replacement.donor_episode])
        own = (*group.payload[:place], *group.payload[place + 1 :])
        return replacement.build_group(episodes, versions_of(own, group.policy))


def now() -> float:
    """Return the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()
