"""A driver on fake workers, for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rlsys.algorithm import Signal
from rlsys.checkpoint import Checkpoints
from rlsys.data.source import TaskSource
from rlsys.driver import BatchShape, Driver
from rlsys.events import Event, Events, StepDone
from rlsys.failures import FailurePolicy
from rlsys.ledger import Ledger
from rlsys.queue import StreamingQueue
from rlsys.testing import FakeWorld, RewardAsAdvantage, tasks
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
    no_progress_s: float = 10_000.0,
    signals: frozenset[Signal] = frozenset(),
    recorder: Recorder | None = None,
) -> Driver:
    """A run of `steps` steps over `NUM_TASKS` tasks; checkpoints go under `folder`."""
    workers = world.workers()
    algorithm = RewardAsAdvantage(needs=signals)
    return Driver(
        workers=workers,
        algorithm=algorithm,
        queue=StreamingQueue(groups_per_step, max_staleness, window, 0, steps * groups_per_step, signals),
        ledger=Ledger(TaskSource(tasks(NUM_TASKS), seed=0), algorithm.group_size, seed=0, lease_s=world.lease_s),
        weights=WeightSync(workers.actor, workers.relays, transfer_s=60.0, max_age=max_staleness + window),
        failures=FailurePolicy(max_attempts, max_failed_groups),
        checkpoints=Checkpoints(folder, every=checkpoint_every, keep_last=100),
        events=Events([recorder] if recorder else []),
        shape=BatchShape(num_ranks=1, max_tokens=1000),
        steps=steps,
        no_progress_s=no_progress_s,
        rollouts_folder=folder / "rollouts",
        rollouts_every=0,
    )
