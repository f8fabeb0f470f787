"""One training job of several policies: a driver, a run directory and a line on the screen for each that is trained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import Config
from rlsys.errors import Interrupted
from rlsys.launch.cluster_run import LOOK_S, phase, run_end_emitted, set_up_workers, train_in_cluster
from rlsys.launch.dashboard_process import dashboard_beside
from rlsys.launch.preflight import Data, checkpoint_to_resume, write_run_dir
from rlsys.launch.tracker_setup import trackers_of
from rlsys.launch.train_result import FirstStep, Summary, TrainResult
from rlsys.loop.build_driver import build_driver
from rlsys.loop.driver import Driver
from rlsys.loop.multi_policy import Joint, JointRewards, JointRollouts, train_jointly
from rlsys.monitoring.events import Events, PhaseDone, RunStarted
from rlsys.monitoring.trackers.alert_sink import AlertSink
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.types import PolicyVersion
from rlsys.util.deadlines import Progress
from rlsys.util.signals import Interruptible


@dataclass(frozen=True)
class PolicyRun:
    """The part of one trained policy: what is its own."""

    config: Config
    checkpoint: Path | None
    """Checkpoint to resume from; None: start anew."""
    events: Events
    result: TrainResult

    @classmethod
    def of(cls, policy: str, config: Config, checkpoint: Path | None, began: float, *, progress: bool) -> PolicyRun:
        """Make its run directory, and all that writes there."""
        write_run_dir(config, checkpoint)
        result = TrainResult(str(config.run_dir))
        console = [ConsoleSink(config.run.steps, policy=policy)] if progress else []
        events = Events([JsonlSink(config.run_dir), Summary(result), *console])
        events.attach(FirstStep(events, began))
        for tracker in trackers_of(config):
            events.attach(tracker)
        events.attach(AlertSink(events, config.alerts))
        return cls(config, checkpoint, events, result)


def train_policies(config: Config, began: float, *, progress: bool) -> TrainResult:
    """Run one training job of several policies; see `rlsys.launch.train`. `began`: when the command was given.

    `RUN/policies/NAME` is the run directory of a policy, as a run of it alone would have; what they share, the workers,
    is told in `RUN/events.jsonl`.
    """
    owns = config.trained
    checkpoints = {name: checkpoint_to_resume(own) for name, own in owns.items()}  # before anything is written
    write_run_dir(config)
    with dashboard_beside(config):
        return _train_all(config, owns, checkpoints, began, progress=progress)


def _train_all(
    config: Config, owns: Mapping[str, Config], checkpoints: Mapping[str, Path | None], began: float, *, progress: bool
) -> TrainResult:
    runs = {name: PolicyRun.of(name, own, checkpoints[name], began, progress=progress) for name, own in owns.items()}
    result = TrainResult(str(config.run_dir), policies={name: run.result for name, run in runs.items()})
    shared = Events([JsonlSink(config.run_dir), Summary(result), *([ConsoleSink(0)] if progress else [])])

    async def trains(data: Data, interruptible: Interruptible) -> None:
        await _train_on_cluster(config, data, runs, shared, began, interruptible)
        result.steps = min(run.result.steps for run in runs.values())

    with run_end_emitted([*((run.events, run.result) for run in runs.values()), (shared, result)]):
        asyncio.run(train_in_cluster(config, shared, trains))
    return result


async def _train_on_cluster(
    config: Config,
    data: Data,
    runs: Mapping[str, PolicyRun],
    shared: Events,
    began: float,
    interruptible: Interruptible,
) -> None:
    """Start the workers, train all policies, end the workers. Raises `Interrupted` if the user stopped any of it."""
    from workers.worker_set import WorkerSet

    workers = WorkerSet.of(config)
    try:
        await set_up_workers(workers, shared)
        joint, progress = Joint(workers.rollouts, workers.rewards), Progress()
        drivers: dict[str, Driver] = {}
        for name, run in runs.items():
            own = workers.lines[name].workers(JointRollouts(joint, name), JointRewards(joint, name))
            tasks = copy(data.train)  # the tasks are shared, the place in them is not
            drivers[name] = build_driver(run.config, own, tasks, run.events, progress=progress, look_s=LOOK_S)
        starts = await _restored(runs, drivers)
        for name, run in runs.items():
            run.events.emit(RunStarted(str(run.config.run_dir), starts[name], run.config.run.steps))
        shared.emit(PhaseDone("start_up", time.monotonic() - began))
        interruptible.stop = lambda: [driver.stop() for driver in drivers.values()]
        reached = await train_jointly(joint, drivers, starts)
    finally:
        await workers.close()
    if interruptible.signal is not None and any(reached[name] < run.config.run.steps for name, run in runs.items()):
        steps = ", ".join(f"{name} after step {step}" for name, step in reached.items())
        raise Interrupted(f"interrupted: {steps}; all is saved, go on with run.resume=auto", interruptible.signal)


async def _restored(runs: Mapping[str, PolicyRun], drivers: Mapping[str, Driver]) -> dict[str, PolicyVersion]:
    """The version that each policy goes on from: that of its own newest checkpoint, whichever steps those of the others
    are of."""
    starts = dict.fromkeys(runs, 0)
    for name, run in runs.items():
        if run.checkpoint is not None:
            with phase(run.events, "load_checkpoint"):
                starts[name] = await drivers[name].restore(run.checkpoint)
    return starts
