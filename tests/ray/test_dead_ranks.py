"""A rank of the actor is killed, and the reference: the run ends on the weights of a run in which nobody dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from rlsys.data.task_file import load_tasks
from rlsys.data.task_source import TaskSource
from rlsys.errors import RunAborted
from rlsys.loop.build_driver import build_driver
from rlsys.monitoring.events import Event, Events, RolledBack, WeightsPublished, WorkerFailed, WorkerRestarted
from rlsys.testing import EventRecorder
from tests.jobs import config_of
from tests.ray_workers import kill_worker
from workers.ray import vitals
from workers.worker_set import WorkerSet

Kill: TypeAlias = Callable[[], None]
KEYS = ["train.mesh.shard=2", "algorithm.kl_coef=0.1", "asynchrony.max_staleness=0", "record.rollouts_every=0"]


@dataclass
class Killer:
    """Kills a process when the weights of a version have arrived."""

    kills: Mapping[int, Kill]

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, WeightsPublished) and event.version in self.kills:
            self.kills[event.version]()

    def close(self) -> None: ...


@pytest.fixture
def run(cluster, model_path, data_path, tmp_path) -> Callable[..., tuple[int, EventRecorder]]:
    def trained(name: str, kills: Mapping[int, Kill], *keys: str) -> tuple[int, EventRecorder]:
        """The version that a run reached under these kills, and what it told."""
        config = config_of(model_path, data_path, tmp_path, [f"run.name={name}", *KEYS, *keys])
        recorder = EventRecorder()

        async def main() -> int:
            crew = WorkerSet.of(config)
            tasks = TaskSource(load_tasks(str(data_path), config.data.columns), config.run.seed)
            driver = build_driver(config, crew.workers(), tasks, Events([recorder, Killer(kills)]))
            try:
                await crew.ready()
                return await driver.run(0)
            finally:
                await crew.close()

        with vitals.of_run(config.run_dir):  # as in a run: the end of a rank is described before its death is raised
            return asyncio.run(asyncio.wait_for(main(), 200)), recorder

    return trained


KILLS = {1: partial(kill_worker, "ReferenceWorker"), 3: partial(kill_worker, "ActorRank")}


def hash_of(recorder: EventRecorder, version: int) -> str:
    (event,) = (event for event in recorder.of(WeightsPublished) if event.version == version)
    return event.hash


def test_a_killed_rank_changes_no_weight(run: Callable[..., tuple[int, EventRecorder]], tmp_path: Path):
    reached, calm = run("calm", {})
    assert reached == 4
    reached, recorder = run("killed", KILLS, "checkpoint.every=2")
    (back,) = recorder.of(RolledBack)
    assert (back.restored, back.num_lost) == (2, 2)
    assert reached == back.total_steps == 6
    assert hash_of(recorder, 6) == hash_of(calm, 4)
    assert hash_of(recorder, 4) == hash_of(calm, 2), "the restored weights"
    versions = [event.version for event in recorder.of(WeightsPublished)]
    assert versions == sorted(set(versions))
    assert [event.worker.split("-")[0] for event in recorder.of(WorkerRestarted)] == ["reference", "actor"]
    assert not (tmp_path / "killed" / "checkpoints" / "step_000004").exists(), "nothing is saved but steps"


def test_a_rank_killed_inside_a_collective_is_replaced(run: Callable[..., tuple[int, EventRecorder]], tmp_path: Path):
    order = tmp_path / "order"
    deadly = ["algorithm.type=tests.ray.deadly:Deadly", f"algorithm.order={order}", "algorithm.kl_coef=0"]
    reached, recorder = run("inside", {3: partial(os.mkfifo, order)}, "checkpoint.every=2", *deadly)
    (failed,), (back,) = recorder.of(WorkerFailed), recorder.of(RolledBack)
    assert failed.worker == "actor-1"
    assert reached == back.total_steps == 4 + back.num_lost
    assert hash_of(recorder, back.version) == hash_of(recorder, back.restored)


@pytest.mark.nightly
def test_a_collective_that_fails_without_a_dead_rank_is_taken_for_a_death(
    run: Callable[..., tuple[int, EventRecorder]], tmp_path: Path
):
    order = tmp_path / "order"
    parting = ["algorithm.type=tests.ray.deadly:Parting", f"algorithm.order={order}", "algorithm.kl_coef=0"]
    reached, recorder = run("parted", {3: partial(os.mkfifo, order)}, "checkpoint.every=2", *parting)
    (failed,), (back,) = recorder.of(WorkerFailed), recorder.of(RolledBack)
    assert "no rank is dead" in failed.detail
    assert reached == back.total_steps == 4 + back.num_lost
    assert hash_of(recorder, back.version) == hash_of(recorder, back.restored)


@pytest.mark.nightly
def test_a_collective_that_fails_twice_ends_the_run(run: Callable[..., tuple[int, EventRecorder]], tmp_path: Path):
    order = tmp_path / "order"
    os.mkfifo(order)
    parting = ["algorithm.type=tests.ray.deadly:Parting", f"algorithm.order={order}", "algorithm.stays=true"]
    with pytest.raises(RunAborted, match="no rank is dead"):
        run("parted", {}, *parting, "algorithm.kl_coef=0")


@pytest.mark.nightly
def test_an_actor_killed_before_any_checkpoint_begins_anew(run: Callable[..., tuple[int, EventRecorder]]):
    kills = {1: partial(kill_worker, "ActorRank")}
    reached, recorder = run("young", kills, "checkpoint.every=0", "run.steps=2", "train.mesh.shard=1")
    (back,) = recorder.of(RolledBack)
    assert (back.version, back.restored, reached) == (2, 0, 4)
    assert hash_of(recorder, 2) == hash_of(recorder, 0)
    assert hash_of(recorder, 3) == hash_of(recorder, 1)
