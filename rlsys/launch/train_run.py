"""One training job, from the command to its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from rlsys.config import Config
from rlsys.config.resource_plan import plan_of
from rlsys.errors import Interrupted
from rlsys.launch.dashboard_process import dashboard_beside
from rlsys.launch.preflight import (
    Data,
    check_run_dir,
    checkpoint_to_resume,
    local_cpus,
    look_up,
    prepare_imports,
    rooted,
    write_run_dir,
)
from rlsys.launch.tracker_setup import check_trackers, trackers_of
from rlsys.launch.train_result import FirstStep, Summary, TrainResult
from rlsys.loop.build_driver import build_driver
from rlsys.monitoring.events import (
    EngineChosen,
    Events,
    PhaseDone,
    RunEnded,
    RunStarted,
    WorkerFailed,
    WorkerRestarted,
)
from rlsys.monitoring.trackers.alert_sink import AlertSink
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.util.signals import Interruptible

if TYPE_CHECKING:
    from workers.worker_set import WorkerSet

LOOK_S = 2.0
"""Seconds between two looks at what replicas hold and do."""

Trains: TypeAlias = "Callable[[Data, Interruptible], Awaitable[None]]"
"""Starts the workers on the cluster there is, trains, ends them."""


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
        from rlsys.launch.train_policies import train_policies  # it needs this module

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

    with ends_told([(events, result)]):
        asyncio.run(train_in_cluster(config, events, trains))
    return result


@contextmanager
def ends_told(runs: Sequence[tuple[Events, TrainResult]]) -> Iterator[None]:
    """Tell each of these how the block ended, and close them."""

    def tell(reason: Literal["finished", "interrupted", "failed"], detail: str = "") -> None:
        for events, result in runs:
            events.emit(RunEnded(result.steps, reason, detail))

    try:
        yield
        tell("finished")
    except Interrupted:
        tell("interrupted")
        raise
    except KeyboardInterrupt:
        tell("interrupted")
        raise Interrupted("interrupted before the first step", signal.SIGINT) from None
    except BaseException as error:
        tell("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        for events, _ in runs:
            events.close()


async def train_in_cluster(config: Config, events: Events, trains: Trains) -> None:
    """Look everything up, join or start a cluster, train there."""
    from workers.ray import cluster as ray_cluster

    with phase(events, "load_data"):
        data = look_up(config)
    plan = plan_of(config)
    with phase(events, "start_ray"):
        cluster = ray_cluster.connect(config.ray.address, local_cpus(config, plan.num_cpus))
    this = asyncio.current_task()
    assert this is not None
    with Interruptible(this.cancel) as interruptible:
        try:
            ray_cluster.check_capacity(plan.num_cpus, plan.num_gpus)
            _link_logs(config.run_dir, ray_cluster.log_folder())
            await trains(data, interruptible)
        except asyncio.CancelledError:
            if interruptible.signal is None:
                raise
            raise Interrupted("interrupted before the first step", interruptible.signal) from None
        finally:
            cluster.close()


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

    crew = WorkerSet.of(config)
    try:
        await crew_ready(crew, events)
        driver = build_driver(config, crew.workers(), data.train, events, eval_sets=data.eval, look_s=LOOK_S)
        start = 0
        if checkpoint is not None:
            with phase(events, "load_checkpoint"):
                start = await driver.restore(checkpoint)
        events.emit(RunStarted(str(config.run_dir), start, config.run.steps))
        events.emit(PhaseDone("start_up", time.monotonic() - began))
        interruptible.stop = driver.stop
        reached = await driver.run(start)
    finally:
        await crew.close()
    is_cut = reached < config.run.steps or driver.evaluation.was_given_up
    if interruptible.signal is not None and is_cut:
        saved = f"after step {reached}, which is saved; go on with run.resume=auto"
        raise Interrupted(f"interrupted {saved if reached else 'before the first step'}", interruptible.signal)


async def crew_ready(crew: WorkerSet, events: Events) -> None:
    """Return once all workers are set up; tell what their pools meet with from then on."""
    with phase(events, "start_workers"):
        await crew.ready()
    for worker, choice in await crew.engines():
        events.emit(EngineChosen(worker, choice.engine, choice.reason))
    crew.watch(
        lambda error: events.emit(WorkerFailed(error.worker, error.phase, str(error))),
        lambda worker, seconds: events.emit(WorkerRestarted(worker, seconds)),
    )


@contextmanager
def phase(events: Events, name: str) -> Iterator[None]:
    """Tell how long the block took."""
    began = time.monotonic()
    yield
    events.emit(PhaseDone(name, time.monotonic() - began))


def _link_logs(run_dir: Path, session: Path) -> None:
    """Point `logs/ray` at what the workers print, where it is on this machine."""
    link = run_dir / "logs" / "ray"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(session)
