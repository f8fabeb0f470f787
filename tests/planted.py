"""A run with four faults in it, written by the real `Driver` on make-believe workers: what a dashboard must show.

    planted_run(tmp_path / "planted")                                     # killed after step 70 of 200: no last event
    planted_run(tmp_path / "now", begin_s=time.time() - LENGTH_S)         # as one that goes on

The clock is virtual, so that minutes of a run take a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from random import Random
from typing import Any

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan
from rlsys.config import Config
from rlsys.contracts import GroupScores, TrainStats
from rlsys.data.task_source import TaskSource
from rlsys.loop.build_driver import WITHOUT_REPACKING, build_driver
from rlsys.loop.driver import Driver
from rlsys.monitoring.alerts import AlertSink
from rlsys.monitoring.events import EngineChosen, Event, Events, PhaseDone, RunStarted, StepDone
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.testing import FakeActor, FakeRewards, FakeRollouts, FakeWorld, RewardAsAdvantage, now, run_virtual
from rlsys.testing.fake_run import fake_config
from rlsys.types import Assignment, EngineStats, Group, Ref, ReplicaLoad, Task

STALE_REPLICA, STALE_VERSION = "rollout-2", 3
"""Takes in no weights after this version."""
STUCK_TASK = "task-101"
"""Its groups are rolled out for ever."""
BOTTLENECK = "reward"
"""Of these there is one, and it judges one group at a time, slowly."""
COLLAPSE_STEP = 24
"""Step in which entropy begins to fall, within three steps to nearly nothing."""
NUM_STEPS, TOTAL_STEPS = 70, 200
"""Steps done when the run is killed, and those it was to do."""

LENGTH_S = 227.0
"""What the run takes, rounded down."""
BEGIN_S = 1_767_225_600.0
"""1 January 2026."""

_GROUPS_PER_STEP, _MAX_STALENESS, _WINDOW, _NUM_TASKS = 4, 2, 192, 150

_SECTIONS: dict[str, Any] = {
    "run": {"steps": TOTAL_STEPS},
    "model": {"path": "models/make-believe"},
    "algorithm": RewardAsAdvantage(group_size=4),
    "rollout": {"replicas": 4},
    "reward": {"workers": 1},
    "train": {"groups_per_step": _GROUPS_PER_STEP},
    "asynchrony": {"max_staleness": _MAX_STALENESS, "window": _WINDOW},
    "limits": {"group_s": 1e9, "no_progress_s": 1e9, "max_zero_advantage_groups": 50},
    "checkpoint": {"every": 0, "every_s": 0},
    "record": {"rollouts_every": 1},
}


def planted_run(folder: Path, begin_s: float = BEGIN_S) -> Path:
    """Write it, and answer its folder."""
    run_virtual(_killed(folder, begin_s))
    return folder


async def _killed(folder: Path, begin_s: float) -> None:
    """Run until the step at which it is killed."""
    done = asyncio.Event()
    events = Events([JsonlSink(folder)], clock=lambda: begin_s + now())
    events.attach(AlertSink(events, {}))
    events.attach(_At(NUM_STEPS, done))
    config = fake_config(folder, _SECTIONS)
    (folder / "config.resolved.yaml").write_text(config.to_yaml())
    driver = _driver(config, events)
    events.emit(PhaseDone("load_data", 0.1))
    await asyncio.sleep(2.0)
    events.emit(PhaseDone("start_workers", 2.0))
    for replica in range(4):
        events.emit(EngineChosen(f"rollout-{replica}", "local", "make-believe"))
    events.emit(RunStarted(str(folder), 0, TOTAL_STEPS, _MAX_STALENESS))
    run = asyncio.create_task(driver.run(0))
    async with asyncio.timeout(2 * LENGTH_S):
        await done.wait()
    run.cancel()
    with suppress(asyncio.CancelledError):
        await run


@dataclass
class _At:
    """A sink that tells when a step is done."""

    step: int
    done: asyncio.Event

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, StepDone) and event.step == self.step:
            self.done.set()

    def close(self) -> None: ...


def _driver(config: Config, events: Events) -> Driver:
    world = FakeWorld(
        num_replicas=4,
        rollout_s=lambda group_id: 0.8 + Random(group_id).random(),
        train_s=lambda version: 0.1,
        reward=lambda group_id, episode: float(
            Random(group_id * 7 + episode).random() < min(0.6, 0.2 + group_id / 300)
        ),
    )
    workers = replace(
        world.workers(), rollouts=_Rollouts(world), rewards=_SlowRewards(world), actor=_CollapsingActor(world)
    )
    return build_driver(
        config, workers, TaskSource(_tasks(), seed=0, shuffle=False), events, look_s=2.0, constants=WITHOUT_REPACKING
    )


def _tasks() -> list[Task]:
    return [Task(id=f"task-{i}", prompt=f"How much is {i} plus zero?", answer=str(i)) for i in range(_NUM_TASKS)]


class _Rollouts(FakeRollouts):
    """One replica hangs while it takes in weights, and one task is never done with."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self._stuck: dict[int, str] = {}

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        if self.world.relay > STALE_VERSION and STALE_REPLICA in self.members:
            self.members.remove(STALE_REPLICA)  # it is given nothing while it loads
            self._on_leave(STALE_REPLICA)
        if assignment.task.id == STUCK_TASK:
            self._stuck[assignment.group_id] = worker = self.members[self.num_calls % len(self.members)]
            await self._work(worker, f"rolling out group {assignment.group_id}", 1e9)
        return await super().run(assignment)

    def placements(self) -> Mapping[int, str]:
        return {**super().placements(), **self._stuck}

    async def loads(self) -> Sequence[ReplicaLoad]:
        others = await super().loads()
        stuck = ReplicaLoad(STALE_REPLICA, STALE_VERSION, EngineStats(0, 0, 0.0, 0), is_loading=True)
        return others if STALE_REPLICA in self.members else [*others, stuck]


class _SlowRewards(FakeRewards):
    """Judges one group at a time."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        world.reward_s = lambda group_id: 0.8
        self._free = asyncio.Lock()

    async def score(self, task: Task, group: Group) -> GroupScores:
        async with self._free:
            return await super().score(task, group)


class _CollapsingActor(FakeActor):
    """Reports what a real one does."""

    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        stats = await super().train_step(plan, columns)
        noise = Random(self.version).random()
        fallen = max(0, self.version - COLLAPSE_STEP + 1)
        metrics = {
            "policy/entropy": (0.9 + 0.06 * noise) * exp(-1.2 * fallen) + 0.01,
            "policy/kl_ref": 0.01 + 0.004 * fallen,
            "optim/grad_norm": 0.5 + 0.1 * noise,
            "sampler/ratio_p99": 1.1 + 0.05 * noise,
            "sampler/mismatch_kl": 0.001 * noise,
            "gac/cosine": 0.04 * (noise - 0.5),
        }
        return TrainStats({**stats.metrics, **metrics}, stats.train_s)
