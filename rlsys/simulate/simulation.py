"""Simulation of a run: the real driver with simulated workers on the virtual clock."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rlsys.contracts import Tenant, Workers
from rlsys.data.task_source import TaskSource
from rlsys.loop.build_driver import build_driver
from rlsys.loop.device_leases import ACTOR, ROLLOUT
from rlsys.monitoring.events import Event, Events, StepDone
from rlsys.simulate.profile import Profile
from rlsys.simulate.sim_cluster import SimCluster
from rlsys.simulate.sim_engine import Used
from rlsys.simulate.sim_replica import SimRollouts
from rlsys.testing.fake_pools import FakeRewards, now
from rlsys.testing.fake_training import FakeActor, FakeRelays
from rlsys.testing.fake_world import tasks
from rlsys.testing.virtual_clock import run_virtual
from rlsys.types import Group

NUM_TASKS = 1024
"""Number of distinct tasks; the cost of a group depends only on its id."""


@dataclass(frozen=True, slots=True)
class Report:
    """Means over the measured steps, after the pipe was full."""

    steps: int
    measured: int
    """Number of measured steps: the last ones, to which all figures below refer."""
    tokens_per_s: float
    """Trained tokens per second."""
    samples_per_s: float
    generated_tokens_per_s: float
    """Sampled tokens per second, over all replicas."""
    step_s: float
    train_s: float
    """Compute time of the trainer per step, in seconds."""
    rollouts_idle: float
    """Share of the replicas' time without a running request."""
    trainer_idle: float
    """Share of the trainer's time without computation."""
    weights_exposed_s: float
    """Seconds per step that a replica was halted for weights, mean over replicas."""
    publish_stall_s: float
    """Seconds per step that the trainer was halted by a publish."""
    broadcast_s: float
    """Mean seconds until a version reached every relay."""
    freshness_s: float | None
    """Mean seconds from a publish until the last replica samples from it, `weights/freshness_s`; None if no step had
    it."""
    kv_used: float
    """Mean share of the cache in use, over the time with a running request."""
    cached_share: float
    """Share of the context that was cached when a request began."""
    environments_busy: float
    """Mean number of working environments; one that waits for its next turn does not count."""
    moved_groups: float
    """Groups moved by repacking, per step."""
    staleness: Mapping[str, float]
    """Share of the trained tokens, by staleness."""
    staleness_max: int
    staleness_bound: int
    dropped: int
    """Groups dropped since the simulation began."""
    wall_s: float
    """Wall time of the simulation itself, in seconds; not part of its outcome."""

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of a trained token."""
        return sum(int(versions) * share for versions, share in self.staleness.items())

    def as_json(self) -> dict[str, Any]:
        """Convert to a line of JSON: equal for equal profiles, so without `wall_s`."""
        found = {key: value for key, value in asdict(self).items() if key != "wall_s"}
        return {**found, "staleness_mean": self.staleness_mean}


class _Mark(NamedTuple):
    """All counters at one moment."""

    time_s: float
    used: Used
    num_trained: int
    num_moved: int
    num_dropped: int


@dataclass
class Simulation:
    """One run of the real driver. After `run`, its workers can be inspected."""

    profile: Profile
    steps: int
    incidents: Sequence[tuple[float, Callable[[Simulation], object]]] = ()
    """Calls at a time in seconds, e.g. the death of a replica."""

    def __post_init__(self) -> None:
        self._num_measured = self.steps - self.steps // 4
        """Number of measured steps: the report leaves out the first quarter, in which the pipe fills."""
        self.marks = [_Mark(0.0, Used(), 0, 0, 0)]
        """One mark before the first step, and one after each."""
        self._freshness_s: list[float | None] = []
        """`weights/freshness_s` of each step."""

    def run(self) -> Report:
        """Run to the end. Raises what the driver raises."""
        began, thresholds = time.monotonic(), gc.get_threshold()
        gc.set_threshold(1_000_000, *thresholds[1:])  # a simulation creates many long-lived objects and few cycles
        try:
            with TemporaryDirectory(prefix="rlsys-simulate-") as folder:
                run_virtual(self._run(Path(folder)))
        finally:
            gc.set_threshold(*thresholds)
        self.report = self._report(time.monotonic() - began)
        return self.report

    async def _run(self, folder: Path) -> None:
        profile = self.profile
        self.world = SimCluster(profile)
        self.rollouts, self.actor = SimRollouts(self.world), FakeActor(self.world)
        roles: dict[str, Tenant] = {ACTOR: self.actor, ROLLOUT: self.rollouts}
        tenants = {role: roles[role] for role in profile.together}
        relays = FakeRelays(self.world)
        workers = Workers(self.rollouts, FakeRewards(self.world), self.actor, relays, tenants=tenants)
        # The pipe stays full to the end: the run has one more pipe of steps, and is stopped early.
        config = profile.config(folder, self.steps + profile.max_staleness + 1)
        self.driver = build_driver(
            config,
            workers,
            TaskSource(tasks(NUM_TASKS), seed=profile.seed),
            Events([self], now),
            constants=profile.constants,
        )
        for seconds, happens in self.incidents:
            asyncio.get_running_loop().call_later(seconds, happens, self)
        await self.driver.run(0)

    @property
    def trained_groups(self) -> list[Group]:
        """All trained groups, in order."""
        return [group for _, group in self.world.trained]

    def handle(self, event: Event, time_s: float) -> None:
        """Receive the driver's events: mark the end of each step, and stop after the last one."""
        if not isinstance(event, StepDone):
            return
        self.marks.append(self._mark())
        self._freshness_s.append(event.metrics.get("weights/freshness_s"))
        if event.step == self.steps:
            self.driver.stop()

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def _mark(self) -> _Mark:
        num_dropped = self.driver.queue.dropped.total()
        return _Mark(now(), self.rollouts.total_use(), len(self.world.trained), self.rollouts.num_moved, num_dropped)

    def _report(self, wall_s: float) -> Report:
        first, last = self.marks[self.steps - self._num_measured], self.marks[self.steps]
        seconds, used, num_steps = last.time_s - first.time_s, last.used - first.used, self._num_measured
        trained = self.world.trained[first.num_trained : last.num_trained]
        steps = [[group for _, group in of_step] for _, of_step in groupby(trained, key=itemgetter(0))]
        behind: Counter[int] = Counter()
        for version, group in trained:
            for span in group.versions:
                behind[version - span.version] += span.num_tokens
        num_tokens, replica_s = sum(group.num_trained for _, group in trained), seconds * self.profile.num_replicas
        train_s = fmean(map(self.profile.train_s, steps))
        freshness_s = [took_s for took_s in self._freshness_s[-num_steps:] if took_s is not None]
        return Report(
            steps=self.steps,
            measured=num_steps,
            tokens_per_s=num_tokens / seconds,
            samples_per_s=sum(len(group.episodes) for _, group in trained) / seconds,
            generated_tokens_per_s=used.num_tokens / seconds,
            step_s=seconds / num_steps,
            train_s=train_s,
            rollouts_idle=1 - used.busy_s / replica_s,
            trainer_idle=1 - train_s * num_steps / seconds,
            weights_exposed_s=used.exposed_s / self.profile.num_replicas / num_steps,
            publish_stall_s=fmean(self.actor.stall_s),
            broadcast_s=fmean(self.world.arrived_s.values()),
            freshness_s=fmean(freshness_s) if freshness_s else None,
            kv_used=used.cache_s / used.busy_s,
            cached_share=used.num_cached / ((used.num_cached + used.num_prefilled) or 1),
            environments_busy=used.environment_s / seconds,
            moved_groups=(last.num_moved - first.num_moved) / num_steps,
            staleness={str(versions): behind[versions] / num_tokens for versions in sorted(behind)},
            staleness_max=max(behind),
            staleness_bound=self.driver.queue.bound.versions,
            dropped=last.num_dropped,
            wall_s=wall_s,
        )
