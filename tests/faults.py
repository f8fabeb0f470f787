"""Runs of the real `Driver` on make-believe workers, with one thing that goes wrong in each, or nothing.

    alerts = alerts_of(FAULTS["a replica is frozen most of the time"], tmp_path / "run")
    alerts[0].alert, alerts[0].step, alerts[0].sentence

The alerts are those that the run itself raises and writes into its files.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import exp
from pathlib import Path
from random import Random
from typing import Any

from rlsys.algorithm import Column
from rlsys.contracts import Busy, GroupScores, Saving, TrainedGroup, Workers
from rlsys.data.task_source import TaskSource
from rlsys.errors import EndpointDown
from rlsys.loop.build_driver import WITHOUT_REPACKING, build_driver
from rlsys.monitoring.alerts import AlertSink
from rlsys.monitoring.events import AlertRaised, Events, RunStarted
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.testing import (
    EventRecorder,
    FakeActor,
    FakeRewards,
    FakeRollouts,
    FakeWorld,
    RewardAsAdvantage,
    now,
    run_virtual,
)
from rlsys.testing.fake_run import fake_config
from rlsys.testing.world_state import Fault as FakeFault
from rlsys.testing.world_state import Spans
from rlsys.types import (
    OK,
    POLICY,
    TRUNCATED,
    Assignment,
    EngineStats,
    Episode,
    EpisodeSpan,
    Group,
    ReplicaLoad,
    Score,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

BEGIN_S = 1_767_225_600.0
"""1 January 2026."""
HELD_OUT = "held_out"
"""The evaluation of every run: 12 tasks, every 5 steps."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A run to watch: how its workers behave. The defaults are those of a run that learns as it should."""

    seed: int = 0
    steps: int = 24
    groups: int = 6
    max_staleness: int = 1
    replicas: int = 3
    sources: Sequence[str] = ("",)
    rollout_s: Callable[[Random], float] = lambda noise: 1.0 + noise.random()
    train_s: float = 0.6
    score: Callable[[Task, int, Random], float | None] = lambda task, version, noise: float(
        noise.random() < min(0.9, 0.3 + 0.02 * version)
    )
    """Reward of an episode sampled at a version; None: the function raised."""
    length: Callable[[int, Random], int] = lambda version, noise: round(40 + 0.3 * version + noise.gauss(0, 6))
    is_cut: Callable[[Random], bool] = lambda noise: noise.random() < 0.04
    tools_s: Callable[[int, Random], Mapping[str, float]] = lambda version, noise: {}
    metrics: Callable[[int, Random], Mapping[str, float]] = lambda version, noise: {}
    """Metrics of the step from a version, besides ordinary ones."""
    workers: Callable[[FakeWorld], Mapping[str, Any]] = lambda world: {}
    """Workers that replace those of the world."""
    world: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the `FakeWorld`."""
    needs: frozenset[Column] = frozenset()
    """Columns that annotators add to groups."""


def alerts_of(watched: Watched, folder: Path) -> list[AlertRaised]:
    """Run it to its end in `folder`, and return the alerts that it raised."""
    return run_virtual(_run(watched, folder))


async def _run(watched: Watched, folder: Path) -> list[AlertRaised]:
    recorder = EventRecorder()
    events = Events([JsonlSink(folder), recorder], clock=lambda: BEGIN_S + now())
    events.attach(AlertSink(events, {}))
    sections = {
        "run": {"steps": watched.steps},
        "algorithm": RewardAsAdvantage(group_size=4, needs=watched.needs),
        "rollout": {"replicas": watched.replicas, "max_new_tokens": 1000},
        "train": {"groups_per_step": watched.groups},
        "asynchrony": {"max_staleness": watched.max_staleness},
        "limits": {"group_s": 1e9, "no_progress_s": 1e9},
        "checkpoint": {"every": 10, "every_s": 0},
        "record": {"rollouts_every": 1},
        "eval": {"every": 5, "data": {HELD_OUT: "held_out.jsonl"}},
    }
    config = fake_config(folder, sections)
    (folder / "config.resolved.yaml").write_text(config.to_yaml())
    world = _world(watched)
    tasks = [
        Task(id=f"{source or 'task'}-{i}", prompt=f"{i}?", source=source)
        for i in range(20)
        for source in watched.sources
    ]
    held_out = [Task(id=f"held-out-{i}", prompt=f"{i}?", source=HELD_OUT) for i in range(12)]
    workers: Workers = replace(world.workers(), **watched.workers(world))
    source = TaskSource(tasks, seed=watched.seed)
    driver = build_driver(
        config, workers, source, events, eval_sets={HELD_OUT: held_out}, look_s=2.0, constants=WITHOUT_REPACKING
    )
    events.emit(RunStarted(str(folder), 0, watched.steps, watched.max_staleness))
    run = asyncio.create_task(driver.run(0))
    # A run with a stuck group never ends.
    await asyncio.wait([run], timeout=300)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    events.close()
    return recorder.of(AlertRaised)


def _world(watched: Watched) -> FakeWorld:
    def noise_of(*what: object) -> Random:
        return Random("/".join(map(str, (watched.seed, *what))))

    def judge(task: Task, group: Group) -> list[Score]:
        version = group.versions[-1].version if group.versions else 0
        values = [
            watched.score(task, version, noise_of(group.group_id, e, "score")) for e in range(len(group.episodes))
        ]
        return [Score(None, "ZeroDivisionError: division by zero") if v is None else Score(v) for v in values]

    async def play(assignment: Assignment, index: int, spans: Spans, worker: str) -> Episode:
        noise, version = noise_of(assignment.group_id, index, "play"), spans[0].version
        num = max(1, watched.length(version, noise))
        turn = Turn((7,), (1,) * num, (-0.5,) * num, (VersionSpan(version, num),), "stop", "")
        outcome = TRUNCATED if watched.is_cut(noise) else OK
        root = Trajectory(POLICY, (turn,), outcome, policy=POLICY)
        spans_of = [
            EpisodeSpan("environment", "step", 0, 0.0, seconds)
            if name == "environment"
            else EpisodeSpan("tool", name, 0, 0.0, seconds)
            for name, seconds in watched.tools_s(version, noise).items()
        ]
        return Episode((root,), len(spans_of), spans=tuple(spans_of))

    def steer(version: int, num_updates: int, staleness: float) -> Mapping[str, float]:
        noise = noise_of(version, "steer")
        ordinary = {
            "policy/entropy": 0.9 * exp(-version / 60) + noise.gauss(0, 0.02),
            "policy/kl_ref": 0.002 * version,
            "optim/grad_norm": abs(noise.gauss(0.4, 0.1)),
            "sampler/ratio_p99": 1.2 + 0.05 * noise.random(),
            "sampler/mismatch_kl": 0.002 * noise.random(),
            "gac/cosine": noise.gauss(0, 0.1),
        }
        return {**ordinary, **watched.metrics(version, noise)}

    return FakeWorld(
        num_replicas=watched.replicas,
        rollout_s=lambda group_id: watched.rollout_s(noise_of(group_id, "rollout")),
        train_s=lambda version: watched.train_s,
        judge=judge,
        play=play,
        steer=steer,
        **watched.world,
    )


class _SlowReplica(FakeRollouts):
    """`rollout-1` is frozen for 91 % of the time."""

    async def _work(self, worker: str, phase: str, seconds: float) -> FakeFault | None:
        return await super()._work(worker, phase, seconds * (11 if worker == "rollout-1" else 1))


class _StaleReplica(FakeRollouts):
    """`rollout-2` hangs while it takes in the weights after version 3, and gets no groups."""

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        if self.world.relay > 3 and "rollout-2" in self.members:
            self.members.remove("rollout-2")
            self._on_leave("rollout-2")
        return await super().run(assignment)

    async def loads(self) -> Sequence[ReplicaLoad]:
        stuck = ReplicaLoad("rollout-2", 3, EngineStats(0, 0, 0.0, 0), is_loading=True)
        others = await super().loads()
        return others if "rollout-2" in self.members else [*others, stuck]


class _StuckTask(FakeRollouts):
    """The first group of `task-7` is rolled out for ever, on a replica of its own choice."""

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        if assignment.task.id == "task-7":
            await asyncio.sleep(1e9)
        return await super().run(assignment)


class _AwayJudge(FakeRewards):
    """Its server is away for 8 s after step 10."""

    back_s = 0.0

    async def score(self, task: Task, group: Group) -> GroupScores:
        if self.world.relay >= 10:
            self.back_s = self.back_s or now() + 8.0
            if now() < self.back_s:
                raise EndpointDown("http://judge:8000", "connection refused")
        return await super().score(task, group)


class _FullDisk(FakeActor):
    """The disk is full when the rollouts of step 10 are written."""

    def record(self, path: Path, step: int, trained: Sequence[TrainedGroup]) -> Saving[None]:
        recording = super().record(path, step, trained)
        return _Refused(recording, path) if step == 10 else recording


@dataclass(frozen=True)
class _Refused:
    """A file that does not fit on the disk."""

    recording: Saving[None]
    path: Path

    async def take_copy(self) -> None:
        await self.recording.take_copy()

    async def write_copy(self) -> None:
        await self.recording.write_copy()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _some_fail(share: float, source: str | None = None) -> Callable[[Task, int, Random], float | None]:
    """A reward function that raises on a share of the samples, or of those of one source."""
    return lambda task, version, noise: (
        None if (source is None or task.source == source) and noise.random() < share else float(noise.random() < 0.5)
    )


@dataclass(frozen=True)
class PlantedFault:
    """Something that goes wrong in a run from a step on, and the alert that must tell it."""

    watched: Watched
    alert: str
    names: str
    """Name that the alert must contain: of a worker, a task, a source, an evaluation, a metric or a key."""
    begins: int
    within: int
    """Steps from its begin to the alert, at most."""
    others: frozenset[str] = frozenset()
    """Alerts that may be raised, too, because the fault causes what they are for."""
    within_s: float = 0.0
    """Seconds from the start of the run to the alert, at most, where no more steps are done; 0: see `within`."""

    @property
    def delay(self) -> str:
        """The delay as the documentation states it."""
        if self.within_s:
            return f"{self.within_s:.0f} s"
        return f"{self.within} step{'s' if self.within > 1 else ''}" if self.within else "at once"


FAULTS: Mapping[str, PlantedFault] = {
    "the reward function raises on 48 % of samples": PlantedFault(
        Watched(score=_some_fail(0.48)), "failed_samples", "ZeroDivisionError", 1, 2, frozenset({"failed_evaluation"})
    ),
    "a replica is frozen 91 % of the time": PlantedFault(
        Watched(steps=60, workers=lambda world: {"rollouts": _SlowReplica(world)}, max_staleness=4),
        "slow_worker",
        "rollout-1",
        1,
        10,
    ),
    "every answer is cut at the token limit": PlantedFault(
        Watched(is_cut=lambda noise: True), "truncation", "rollout.max_new_tokens", 1, 4
    ),
    "a learning rate destroys the policy": PlantedFault(
        Watched(score=lambda task, version, noise: float(noise.random() < (0.6 if version < 6 else 0.0))),
        "reward_drop",
        "train.lr",
        6,
        8,
        frozenset({"constant_reward", "evaluation_drop"}),
    ),
    "all rewards are equal": PlantedFault(
        Watched(score=lambda task, version, noise: 0.0),
        "constant_reward",
        "reward.fn",
        1,
        2,
        frozenset({"equal_groups"}),
    ),
    "entropy collapses": PlantedFault(
        Watched(metrics=lambda version, noise: {"policy/entropy": 0.9 * exp(-1.2 * max(0, version - 10)) + 0.01}),
        "entropy_collapse",
        "clip_high",
        10,
        8,
    ),
    "answers explode in length": PlantedFault(
        Watched(length=lambda version, noise: min(600, 40 + 60 * max(0, version - 10))),
        "length_explosion",
        "reward.fn: overlong",
        10,
        8,
    ),
    "the policy earns by length": PlantedFault(
        Watched(
            steps=70,
            length=lambda version, noise: round(60 + 2 * max(0, version - 20)),
            score=lambda task, version, noise: 0.2 + 0.01 * max(0, version - 20) + noise.gauss(0, 0.02),
        ),
        "reward_length",
        "completions",
        20,
        30,
    ),
    "a replica keeps old weights": PlantedFault(
        Watched(steps=60, workers=lambda world: {"rollouts": _StaleReplica(world)}), "stale_replica", "rollout-2", 4, 25
    ),
    "a task never ends": PlantedFault(
        Watched(steps=100, workers=lambda world: {"rollouts": _StuckTask(world)}, max_staleness=8),
        "stuck_group",
        "task-7",
        1,
        2,
        frozenset({"no_progress"}),
        within_s=75,
    ),
    "the disk is full": PlantedFault(
        Watched(workers=lambda world: {"actor": _FullDisk(world)}), "file_not_written", "No space left on device", 10, 1
    ),
    "a judge does not answer": PlantedFault(
        Watched(workers=lambda world: {"rewards": _AwayJudge(world)}), "endpoint_down", "http://judge:8000", 10, 1
    ),
    "a tool becomes slow": PlantedFault(
        Watched(
            tools_s=lambda version, noise: {"search": (6.0 if version > 10 else 0.5) + noise.random(), "sum": 0.1},
        ),
        "slow_tool",
        "`search`",
        10,
        8,
    ),
    "one source of data is bad": PlantedFault(
        Watched(sources=("sums", "proofs"), score=_some_fail(0.6, "proofs")), "failed_samples", "`proofs`", 1, 4
    ),
    "the evaluation fails": PlantedFault(
        Watched(score=_some_fail(0.5, HELD_OUT)), "failed_evaluation", f"`{HELD_OUT}`", 0, 0
    ),
    "the actor is killed": PlantedFault(
        Watched(world={"training_deaths": {"actor-0 train_step": {12}}}), "worker_failed", "actor-0", 12, 1
    ),
}

HEALTHY: Mapping[str, Watched] = {
    "synchronous": Watched(seed=1, steps=40, max_staleness=0),
    "four versions behind": Watched(seed=2, steps=60, max_staleness=4, replicas=5),
    "answers of very different lengths": Watched(
        seed=3,
        steps=40,
        max_staleness=2,
        rollout_s=lambda noise: min(40.0, noise.lognormvariate(0, 1)),
        length=lambda version, noise: min(900, round(noise.lognormvariate(4, 0.9))),
        is_cut=lambda noise: noise.random() < 0.2,
    ),
    "two sources, one of them hard": Watched(
        seed=4,
        steps=40,
        sources=("sums", "proofs"),
        score=lambda task, version, noise: float(noise.random() < (0.7 if task.source == "sums" else 0.06)),
    ),
    "tools and a reward with parts": Watched(
        seed=5,
        steps=40,
        tools_s=lambda version, noise: {"search": noise.lognormvariate(0, 0.5), "sum": 0.1},
        score=lambda task, version, noise: min(1.0, max(-1.0, noise.gauss(-0.4 + 0.02 * version, 0.3))),
    ),
    "tasks that become solved": Watched(
        seed=6, steps=60, score=lambda task, version, noise: float(noise.random() < min(0.9, 0.5 + 0.02 * version))
    ),
}
"""Runs in which nothing goes wrong, of several shapes."""


class _TwoJudges(FakeRewards):
    """Two reward workers, of which `reward-1` is five times as slow."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self.members = ["reward-0", "reward-1"]
        self._next = cycle(self.members)
        self._free = {worker: asyncio.Lock() for worker in self.members}

    async def score(self, task: Task, group: Group) -> GroupScores:
        worker = next(self._next)
        async with self._free[worker]:
            start_s = now()
            await self._work(worker, "scoring", 0.5 if worker == "reward-1" else 0.1)
            return GroupScores(self.world.scores(task, group), Busy(worker, start_s, now()))


class _OneJudge(FakeRewards):
    """One reward worker, which scores one group at a time, slowly."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self._free = asyncio.Lock()

    async def score(self, task: Task, group: Group) -> GroupScores:
        async with self._free:
            start_s = now()
            worker, _ = await self._call("scoring", group.group_id, 0.6)
            return GroupScores(self.world.scores(task, group), Busy(worker, start_s, now()))


class _SlowRecorder(FakeActor):
    """Handing rollouts to the recorder takes long."""

    async def copy_columns(self) -> None:
        await asyncio.sleep(3.0)
        await super().copy_columns()


@dataclass(frozen=True)
class PlantedCause:
    """Planted cause, and the words that the page must have for it."""

    watched: Watched
    who: str
    worker: str
    """Worker that must be named; empty: none."""
    says: Sequence[str]
    """Texts that its sentence must have."""


_QUICK = {"reward_s": lambda group_id: 0.01, "publish_s": 0.01}

CAUSES: Mapping[str, PlantedCause] = {
    "replicas": PlantedCause(
        Watched(max_staleness=2, rollout_s=lambda noise: 4.0, train_s=0.3, world=_QUICK),
        "rollout",
        "rollout-",
        ["rollout.replicas"],
    ),
    "one slow replica": PlantedCause(
        Watched(max_staleness=2, steps=40, workers=lambda world: {"rollouts": _SlowReplica(world)}, world=_QUICK),
        "straggler",
        "rollout-1",
        ["rollout-1 takes 1", "times as long per token"],
    ),
    "the reward worker": PlantedCause(
        Watched(max_staleness=2, train_s=0.3, workers=lambda world: {"rewards": _OneJudge(world)}),
        "reward",
        "reward-0",
        ["reward.workers", "(reward-0)"],
    ),
    "one slow reward worker": PlantedCause(
        Watched(max_staleness=2, train_s=0.2, steps=40, workers=lambda world: {"rewards": _TwoJudges(world)}),
        "straggler",
        "reward-1",
        ["reward-1 takes 5.0 times as long per episode"],
    ),
    "a few long groups": PlantedCause(
        Watched(
            max_staleness=8,
            steps=40,
            replicas=8,
            train_s=0.3,
            rollout_s=lambda noise: 40.0 if noise.random() < 0.04 else 0.5,
            world=_QUICK,
        ),
        "order",
        "",
        ["asynchrony.window", "others are ready"],
    ),
    "tools": PlantedCause(
        Watched(
            max_staleness=2,
            train_s=0.2,
            rollout_s=lambda noise: 4.0,
            tools_s=lambda version, noise: {"search": 3.0, "sum": 0.1},
            world=_QUICK,
        ),
        "environment",
        "",
        ["the tool `search`", "rollout.slots"],
    ),
    "the environment": PlantedCause(
        Watched(
            max_staleness=2,
            train_s=0.2,
            rollout_s=lambda noise: 4.0,
            tools_s=lambda version, noise: {"environment": 3.5},
            world=_QUICK,
        ),
        "environment",
        "",
        ["on the environment"],
    ),
    "lockstep": PlantedCause(
        Watched(max_staleness=0, rollout_s=lambda noise: 1.0, train_s=1.0, world=_QUICK),
        "lockstep",
        "",
        ["asynchrony.max_staleness=1", "take turns"],
    ),
    "training": PlantedCause(
        Watched(max_staleness=2, rollout_s=lambda noise: 0.3, train_s=3.0, world=_QUICK),
        "trainer",
        "",
        ["“train” alone", "train.mesh.shard"],
    ),
    "publishing": PlantedCause(
        Watched(max_staleness=2, rollout_s=lambda noise: 0.3, train_s=0.2, world={**_QUICK, "publish_s": 3.0}),
        "trainer",
        "",
        ["“publish” alone"],
    ),
    "recording": PlantedCause(
        Watched(
            max_staleness=2,
            rollout_s=lambda noise: 0.3,
            train_s=0.2,
            world=_QUICK,
            workers=lambda world: {"actor": _SlowRecorder(world)},
        ),
        "trainer",
        "",
        ["record.rollouts_every"],
    ),
    "the annotator": PlantedCause(
        Watched(
            max_staleness=2,
            rollout_s=lambda noise: 0.3,
            train_s=0.2,
            needs=frozenset({Column.REFERENCE_LOGPROBS}),
            world={**_QUICK, "annotate_s": lambda group_id: 0.5},
        ),
        "annotate",
        "",
        ["resources.reference.threads"],
    ),
    "the hand-over of weights": PlantedCause(
        Watched(max_staleness=0, rollout_s=lambda noise: 0.2, train_s=0.2, world={**_QUICK, "broadcast_s": 4.0}),
        "weights",
        "",
        ["publishing and pulling"],
    ),
    "the evaluation": PlantedCause(
        Watched(
            max_staleness=2,
            rollout_s=lambda noise: 0.2,
            train_s=0.2,
            world={**_QUICK, "eval_s": lambda group_id: 20.0},
        ),
        "evaluation",
        "",
        ["eval.every"],
    ),
    "nobody": PlantedCause(
        Watched(max_staleness=4, rollout_s=lambda noise: 1.3, replicas=1, train_s=1.0, world=_QUICK),
        "balanced",
        "",
        ["Nobody waits much"],
    ),
}
"""Causes that can hold a run up, each planted in a run."""
