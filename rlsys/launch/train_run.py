"""One training job, from the command to its end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rlsys.config import Config
from rlsys.errors import Interrupted
from rlsys.launch.cluster_run import LOOK_S, phase, run_end_emitted, set_up_workers, train_in_cluster
from rlsys.launch.dashboard_process import dashboard_beside
from rlsys.launch.preflight import (
    Data,
    check_run_dir,
    checkpoint_to_resume,
    prepare_imports,
    rooted,
    write_run_dir,
)
from rlsys.launch.tracker_setup import check_trackers, trackers_of
from rlsys.launch.train_policies import train_policies
from rlsys.launch.train_result import FirstStep, Summary, TrainResult
from rlsys.loop.build_driver import build_driver
from rlsys.monitoring.events import (
    Events,
    PhaseDone,
    RunStarted,
)
from rlsys.monitoring.trackers.alert_sink import AlertSink
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.util.signals import Interruptible


def train(config: Config, *, progress: bool = True) -> TrainResult:
    """Run one training job, of one policy or several, to its end and return what it came to.

    `progress` shows it on stderr. Ctrl-C once finishes the step, saves, and raises `Interrupted`; twice exits at once.
    Raises the `RlsysError` that ended the run, after writing it to the run directory.
    """
    began = time.monotonic()
    prepare_imports()
    config = rooted(config)
    check_run_dir(config)
    check_trackers(config)
    if config.policies:
        return train_policies(config, began, progress=progress)
    checkpoint = checkpoint_to_resume(config)
    write_run_dir(config, checkpoint)
    with dashboard_beside(config):
        return _train_one(config, checkpoint, began, progress=progress)


def _train_one(config: Config, checkpoint: Path | None, began: float, *, progress: bool) -> TrainResult:
    result = TrainResult(str(config.run_dir))
    sinks = [JsonlSink(config.run_dir), Summary(result), *([ConsoleSink(config.run.steps)] if progress else [])]
    events = Events(sinks)
    events.attach(FirstStep(events, began))
    for tracker in trackers_of(config):
        events.attach(tracker)
    events.attach(AlertSink(events, config.alerts))

    async def trains(data: Data, interruptible: Interruptible) -> None:
        await _train_on_cluster(config, data, checkpoint, events, began, interruptible)

    with run_end_emitted([(events, result)]):
        asyncio.run(train_in_cluster(config, events, trains))
    return result


async def _train_on_cluster(
    config: Config,
    data: Data,
    checkpoint: Path | None,
    events: Events,
    began: float,
    interruptible: Interruptible,
) -> None:
    """Start the workers, train, end them. Raises `Interrupted` if the user stopped any of it."""
    from workers.worker_set import WorkerSet

    workers = WorkerSet.of(config)
    try:
        await set_up_workers(workers, events)
        driver = build_driver(config, workers.workers(), data.train, events, eval_sets=data.eval, look_s=LOOK_S)
        start = 0
        if checkpoint is not None:
            with phase(events, "load_checkpoint"):
                start = await driver.restore(checkpoint)
        events.emit(RunStarted(str(config.run_dir), start, config.run.steps))
        events.emit(PhaseDone("start_up", time.monotonic() - began))
        interruptible.stop = driver.stop
        reached = await driver.run(start)
    finally:
        await workers.close()
    is_cut = reached < config.run.steps or (driver.evaluation is not None and driver.evaluation.was_given_up)
    if interruptible.signal is not None and is_cut:
        saved = f"after step {reached}, which is saved; go on with run.resume=auto"
        raise Interrupted(f"interrupted {saved if reached else 'before the first step'}", interruptible.signal)
