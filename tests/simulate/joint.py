"""Several drivers on the same fake replicas, for the tests of `rlsys.loop.multi_policy`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlsys.batch.samples import meta_of, versions_of
from rlsys.contracts import Workers
from rlsys.loop.driver import Driver
from rlsys.loop.multi_policy import Joint, JointRewards, JointRollouts, train_jointly
from rlsys.monitoring.events import Event, GroupDropped, GroupReissued, StepDone, WorkerFailed
from rlsys.testing import EventRecorder, FakeActor, FakeRelays, FakeRewards, FakeRollouts, FakeWorld, run_virtual
from rlsys.testing.fake_run import start_of
from rlsys.testing.world_state import fixed_trajectory
from rlsys.types import POLICY, Acknowledged, Assignment, Episode, Group, PolicyVersion, ReplicaLoad, VersionSpan
from rlsys.util.deadlines import Progress
from tests.simulate.schedules import DEADLY_TO_ACTORS, MACHINE_FAULTS, Choosy, heavy_tailed, most_failures
from tests.simulate.world import driver_on

STEPS = 8


class FakeJointRollouts(FakeRollouts):
    """Implements `SharedRollouts`: two episodes in which every policy samples three tokens. The first policy samples
    the root, the others subagents with a reward. Latencies and faults are those of the first policy's world."""

    def __init__(self, worlds: Mapping[str, FakeWorld], speaks: Callable[[str, int], bool]) -> None:
        """`speaks(policy, group_id)`: true if the policy samples in this group. The first policy always does."""
        self._root, *_ = worlds
        super().__init__(worlds[self._root])
        self.worlds, self.loaded, self.speaks = worlds, dict.fromkeys(worlds, -1), speaks
        self.assignments: list[Assignment] = []
        """All assignments, in order."""
        self._begun: dict[int, dict[str, PolicyVersion]] = {}
        """By group: what was loaded at its start."""

    async def loads(self, policy: str = POLICY) -> Sequence[ReplicaLoad]:
        return [replace(load, version=self.loaded[policy]) for load in await super().loads()]

    async def drain(self, source: str, to: str, policy: str = POLICY) -> int:
        """Move nothing: these replicas sample a group as a whole."""
        return 0

    async def take_in(self, assignment: Assignment) -> PolicyVersion:
        self.assignments.append(assignment)
        for name, world in self.worlds.items():
            if self.loaded[name] < (asked := assignment.version_of(name)):
                self.loaded[name] = await world.wait_for_version(asked)
        self._begun[assignment.group_id] = dict(self.loaded)
        self.held = self.loaded[self._root]
        return self.held

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        (group,) = await super().run(assignment)
        begun = self._begun[assignment.group_id]
        episodes = tuple(self._episode(assignment.group_id, e, begun) for e in range(assignment.size))
        return tuple(self._view_of(group, assignment, episodes, name, begun[name]) for name in begun)

    def _episode(self, group_id: int, index: int, begun: Mapping[str, PolicyVersion]) -> Episode:
        speakers = [name for name in begun if name == self._root or self.speaks(name, group_id)]
        root, *others = (fixed_trajectory(n, group_id, index, (VersionSpan(begun[n], 3),), f"{n}!") for n in speakers)
        reward = float((group_id + index) % 2)
        return Episode((root, *(replace(other, reward=reward, parent=0) for other in others)))

    def _view_of(
        self, group: Group, assignment: Assignment, episodes: tuple[Episode, ...], policy: str, version: PolicyVersion
    ) -> Group:
        wrong = "wrong-" if group.weights[0].hash.startswith("wrong-") else ""
        return replace(
            group,
            policy=policy,
            permit_version=assignment.version_of(policy),
            episodes=meta_of(episodes),
            versions=versions_of(episodes, policy),
            weights=(Acknowledged(group.replica, version, wrong + self.world.hash(version)),),
            payload=episodes,
        )


class Diary(EventRecorder):
    """What became of the groups of one policy."""

    @property
    def dropped(self) -> list[tuple[int, str]]:
        """Serial and reason."""
        return [(event.group_id, event.reason) for event in self.of(GroupDropped)]

    @property
    def reissued(self) -> list[int]:
        return [event.group_id for event in self.of(GroupReissued)]

    @property
    def failed(self) -> list[str]:
        """Workers."""
        return [event.worker for event in self.of(WorkerFailed)]


@dataclass
class StopAll:
    """A user who presses Ctrl-C once one policy has done so many steps in this session."""

    drivers: Mapping[str, Driver]
    left: int

    def handle(self, event: Event, time_s: float) -> None:
        self.left -= isinstance(event, StepDone)
        if self.left == 0:
            for driver in self.drivers.values():
                driver.stop()

    def close(self) -> None: ...


@dataclass
class Session:
    """One process of a run of several policies: each with a world, so a relay line and an actor, of its own."""

    worlds: Mapping[str, FakeWorld]
    folder: Path
    limits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By policy: arguments of `driver_on`."""
    speaks: Callable[[str, int], bool] = lambda policy, group_id: True
    rewards: FakeWorld | None = None
    """Whose judges they share; None: those of the first world."""

    def __post_init__(self) -> None:
        first = next(iter(self.worlds.values()))
        self.pool = FakeJointRollouts(self.worlds, self.speaks)
        self.judges = FakeRewards(self.rewards or first)
        self.joint = Joint(self.pool, self.judges)
        progress = Progress()
        self.diaries = {name: Diary() for name in self.worlds}
        self.drivers: dict[str, Driver] = {}
        for name, world in self.worlds.items():
            shared = JointRollouts(self.joint, name), JointRewards(self.joint, name)
            workers = Workers(*shared, FakeActor(world), FakeRelays(world))
            options: dict[str, Any] = {"steps": STEPS, "progress": progress, **self.limits.get(name, {})}
            options["recorder"] = self.diaries[name]
            self.drivers[name] = driver_on(world, self.folder / name, workers=workers, **options)

    def run(self, *, stop: tuple[str, int] | None = None) -> dict[str, PolicyVersion]:
        """Go on from the checkpoints there are; `stop` all once a policy has done so many steps."""
        if stop is not None:
            self.drivers[stop[0]].events.attach(StopAll(self.drivers, stop[1]))
        return run_virtual(self._run())

    async def _run(self) -> dict[str, PolicyVersion]:
        starts = {name: await start_of(driver) for name, driver in self.drivers.items()}
        return await train_jointly(self.joint, self.drivers, starts)


def random_session(
    chance: random.Random, folder: Path, limits: Mapping[str, Mapping[str, Any]], *, dies: bool = False
) -> Session:
    """Two policies under latencies with long tails, and faults of all that they share and of what is theirs; `dies`:
    of their actors too."""
    worlds = {name: _world(chance) for name in limits}
    for world in worlds.values() if dies else ():
        calls = chance.sample(DEADLY_TO_ACTORS, chance.randint(0, 2))
        world.training_deaths = {call: {chance.randint(1, 9)} for call in calls}
    most = sum(most_failures(world) for world in worlds.values()) + 1
    limits = {name: {**own, "max_attempts": most} for name, own in limits.items()}
    quiet = chance.choice((0, 0, 4))
    return Session(worlds, folder, limits, lambda policy, group_id: not quiet or group_id % quiet != 0)


def random_limits(chance: random.Random) -> dict[str, dict[str, Any]]:
    """Of two policies, which need have nothing in common."""
    return {
        name: {
            "steps": chance.randint(1, STEPS),
            "groups_per_step": chance.randint(1, 4),
            "max_staleness": chance.choice((0, 0, 1, 2, 4)),
            "window": chance.choice((1, 1, 2, 5)),
            "checkpoint_every": chance.choice((0, 3)),
            "algorithm": Choosy(is_choosy=chance.random() < 0.4, empties=chance.choice((0, 0, 7))),
        }
        for name in ("proposer", "solver")
    }


def _world(chance: random.Random) -> FakeWorld:
    return FakeWorld(
        num_replicas=chance.randint(1, 4),
        rollout_s=heavy_tailed(chance, 40.0),
        reward_s=heavy_tailed(chance, 5.0),
        train_s=heavy_tailed(chance, 8.0),
        broadcast_s=chance.choice((0.0, 0.7, 5.0)),
        rollout_faults={chance.randrange(60): chance.choice(MACHINE_FAULTS) for _ in range(chance.randint(0, 4))},
        reward_faults={chance.randrange(60): chance.choice(MACHINE_FAULTS[:2]) for _ in range(chance.randint(0, 3))},
        notice_s=heavy_tailed(chance, chance.choice((5.0, 200.0))),
        payload_losses={
            call: {chance.randrange(12) for _ in range(chance.randint(0, 2))}
            for call in ("score", "fetch", "save_groups")
        },
    )
