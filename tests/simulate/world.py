"""A driver on fake workers, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlsys.algorithm import Algorithm, Column
from rlsys.config.curation_section import CurationSection
from rlsys.contracts import Workers
from rlsys.loop.build_driver import Constants
from rlsys.loop.checkpoint_files import find_latest
from rlsys.loop.driver import Driver
from rlsys.monitoring.events import Event, StepDone
from rlsys.stabilizer import StabilizerPlugin
from rlsys.testing import EventRecorder, FakeRun, FakeWorld, RewardAsAdvantage, tasks
from rlsys.testing.fake_run import start_of
from rlsys.types import PolicyVersion
from rlsys.util.deadlines import Progress

NUM_TASKS = 7


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


@dataclass(frozen=True, kw_only=True)
class Synchronous(StabilizerPlugin):
    """Must see so many steps without staleness."""

    steps: int

    @property
    def synchronous_steps(self) -> int:
        return self.steps


async def go_on(driver: Driver) -> PolicyVersion:
    """Run from the newest checkpoint on, which there must be."""
    assert find_latest(driver.saver.checkpoints.folder) is not None
    return await driver.run(await start_of(driver))


def latencies(seed: int, longest_s: float) -> Callable[[int], float]:
    """Heavy-tailed seconds, a pure function of (seed, number)."""
    return lambda number: random.Random(seed * 1_000_003 + number).paretovariate(1.1) % longest_s


CONSTANTS = Constants(repack_s=0, transfer_s=60.0)


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
    failed_share: float = 0.5,
    max_zero_advantage_groups: int = 50,
    num_updates: int = 1,
    no_progress_s: float = 10_000.0,
    columns: frozenset[Column] = frozenset(),
    algorithm: Algorithm | None = None,
    synchronous_steps: int = 0,
    recorder: EventRecorder | None = None,
    workers: Workers | None = None,
    curation: CurationSection | None = None,
    progress: Progress | None = None,
    constants: Constants = CONSTANTS,
) -> Driver:
    """A run of `steps` steps over `NUM_TASKS` tasks in `folder`; events have virtual times."""
    run = FakeRun(
        folder,
        world,
        tasks=tasks(NUM_TASKS),
        recorder=recorder,
        workers=workers,
        progress=progress,
        constants=constants,
        run={"steps": steps},
        algorithm=algorithm or RewardAsAdvantage(needs=columns),
        stabilizer=Synchronous(steps=synchronous_steps),
        data={"max_prompt_tokens": 500},
        train={
            "groups_per_step": groups_per_step,
            "updates_per_step": num_updates,
            "mesh": {"shard": 2},
            "micro_batch_tokens": 1000,
        },
        asynchrony={"max_staleness": max_staleness, "window": window},
        checkpoint={"every": checkpoint_every, "keep_last": 100},
        curation=(curation or CurationSection()).model_dump(),
        limits={
            "group_s": world.group_s,
            "no_progress_s": no_progress_s,
            "max_attempts": max_attempts,
            "failed_share": failed_share,
            "max_zero_advantage_groups": max_zero_advantage_groups,
        },
    )
    return run.driver
