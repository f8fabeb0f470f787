"""Everything around the driver of a run: the cluster, the set-up of its workers, and the end of its events."""

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
from rlsys.launch.preflight import Data, local_cpus, look_up
from rlsys.launch.train_result import TrainResult
from rlsys.monitoring.events import EngineChosen, Events, PhaseDone, RunEnded, WorkerFailed, WorkerRestarted
from rlsys.util.signals import Interruptible

if TYPE_CHECKING:
    from workers.worker_set import WorkerSet

LOOK_S = 2.0
"""Seconds between two looks at what replicas hold and do."""

Trains: TypeAlias = "Callable[[Data, Interruptible], Awaitable[None]]"
"""Starts the workers on the cluster there is, trains, ends them."""


@contextmanager
def run_end_emitted(runs: Sequence[tuple[Events, TrainResult]]) -> Iterator[None]:
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


async def set_up_workers(workers: WorkerSet, events: Events) -> None:
    """Return once all workers are set up; tell what their pools meet with from then on."""
    with phase(events, "start_workers"):
        await workers.ready()
    for worker, choice in await workers.engines():
        events.emit(EngineChosen(worker, choice.engine, choice.reason))
    workers.watch(
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
