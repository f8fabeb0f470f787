"""A driver on fake workers, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rlsys.algorithm import Algorithm, Signal, version_after
from rlsys.checkpoint import Checkpoints
from rlsys.contracts import Workers
from rlsys.curation import Curation
from rlsys.data.source import TaskSource
from rlsys.driver import Driver
from rlsys.events import Event, Events, StepDone
from rlsys.failures import FailurePolicy
from rlsys.learner import BatchShape
from rlsys.ledger import Ledger
from rlsys.queue import StreamingQueue
from rlsys.stepmetrics import Progress
from rlsys.testing import FakeWorld, RewardAsAdvantage, now, tasks
from rlsys.weights import WeightSync

E = TypeVar("E", bound=Event)

NUM_TASKS = 7


@dataclass
class Recorder:
    """A sink that keeps every event."""

    events: list[Event] = field(default_factory=list)

    def handle(self, event: Event, time_s: float) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def of(self, kind: type[E]) -> list[E]:
        return [e for e in self.events if isinstance(e, kind)]


@dataclass
class StopAfter:
    """A user who presses Ctrl-C during a step."""

    driver: Driver
    step: int

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, StepDone) and event.step == self.step:
            self.driver.stop()

    def close(self) -> None:
        pass


def latencies(seed: int, longest_s: float) -> Callable[[int], float]:
    """Heavy-tailed seconds, a pure function of (seed, number)."""
    return lambda number: random.Random(seed * 1_000_003 + number).paretovariate(1.1) % longest_s


def driver_on(
    world: FakeWorld,
    folder: Path,
    *,
    steps: int = 6,
    groups_per_step: int = 3,
    max_staleness: int = 0,
    window: int = 1,
    checkpoint_every: int = 0,
    max_attempts: int = 3,
    max_failed_groups: int = 4,
    max_no_signal_groups: int = 50,
    num_updates: int = 1,
    no_progress_s: float = 10_000.0,
    signals: frozenset[Signal] = frozenset(),
    algorithm: Algorithm | None = None,
    recorder: Recorder | None = None,
    workers: Workers | None = None,
    curation: Curation | None = None,
    progress: Progress | None = None,
) -> Driver:
    """A run of `steps` steps over `NUM_TASKS` tasks; checkpoints go under `folder`, events have virtual times."""
    workers = workers or world.workers()
    algorithm = algorithm or RewardAsAdvantage(needs=signals)
    streamed = frozenset(signal for signal in algorithm.signals if signal.made == "stream")
    num_groups = steps * groups_per_step
    synchronous_until = version_after(algorithm, world.synchronous_steps, start=0, end=steps)
    return Driver(
        workers=workers,
        algorithm=algorithm,
        queue=StreamingQueue(groups_per_step, max_staleness, window, 0, num_groups, streamed, synchronous_until),
        ledger=Ledger(
            TaskSource(tasks(NUM_TASKS), seed=0),
            algorithm.group_size,
            seed=0,
            lease_s=world.lease_s,
            curation=curation or Curation(),
        ),
        weights=WeightSync(workers.actor, workers.relays, transfer_s=60.0, max_age=max_staleness + window),
        failures=FailurePolicy(max_attempts, max_failed_groups, max_no_signal_groups),
        checkpoints=Checkpoints(folder, every=checkpoint_every, keep_last=100),
        events=Events([recorder] if recorder else [], clock=now),
        shape=BatchShape(num_ranks=2, max_tokens=1000, num_updates=num_updates),
        steps=steps,
        no_progress_s=no_progress_s,
        run_dir=folder,
        config="run: {name: fake}\n",
        rollouts_every=0,
        progress=progress or Progress(),
    )
