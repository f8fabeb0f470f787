"""A rank of the actor is killed, and the reference: the run ends on the weights of a run in which nobody dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlsys.data.task_file import load_tasks
from rlsys.data.task_source import TaskSource
from rlsys.loop.build_driver import build_driver
from rlsys.monitoring.events import Event, Events, RolledBack, WeightsPublished, WorkerRestarted
from rlsys.testing import EventRecorder
from tests.jobs import config_of
from tests.processes import kill_worker
from workers.worker_set import WorkerSet

KEYS = ["train.mesh.shard=2", "algorithm.kl_coef=0.1", "asynchrony.max_staleness=0", "record.rollouts_every=0"]


@dataclass
class Killer:
    """Kills a process when the weights of a version have arrived."""

    kinds: Mapping[int, str]
    """Kind of process by version."""
    killed: list[str] = field(default_factory=list)

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, WeightsPublished) and (kind := self.kinds.get(event.version)) and kind not in self.killed:
            self.killed.append(kind)
            kill_worker(kind)

    def close(self) -> None: ...


@pytest.fixture
def run(cluster, model_path, data_path, tmp_path) -> Callable[..., tuple[int, EventRecorder]]:
    def trained(name: str, kinds: Mapping[int, str], *keys: str) -> tuple[int, EventRecorder]:
        """The version that a run reached under these kills, and what it told."""
        config = config_of(model_path, data_path, tmp_path, [f"run.name={name}", *KEYS, *keys])
        recorder = EventRecorder()

        async def main() -> int:
            crew = WorkerSet.of(config)
            tasks = TaskSource(load_tasks(str(data_path), config.data.columns), config.run.seed)
            driver = build_driver(config, crew.workers(), tasks, Events([recorder, Killer(kinds)]))
            try:
                await crew.ready()
                return await driver.run(0)
            finally:
                await crew.close()

        return asyncio.run(asyncio.wait_for(main(), 200)), recorder

    return trained


def hash_of(recorder: EventRecorder, version: int) -> str:
    (event,) = (event for event in recorder.of(WeightsPublished) if event.version == version)
    return event.hash


def test_a_killed_rank_changes_no_weight(run: Callable[..., tuple[int, EventRecorder]], tmp_path: Path):
    reached, calm = run("calm", {})
    assert reached == 4
    reached, recorder = run("killed", {1: "ReferenceWorker", 3: "ActorRank"}, "checkpoint.every=2")
    (back,) = recorder.of(RolledBack)
    assert (back.restored, back.num_lost) == (2, 2)
    assert reached == back.total_steps == 6
    assert hash_of(recorder, 6) == hash_of(calm, 4)
    assert hash_of(recorder, 4) == hash_of(calm, 2), "the restored weights"
    versions = [event.version for event in recorder.of(WeightsPublished)]
    assert versions == sorted(set(versions))
    assert [event.worker.split("-")[0] for event in recorder.of(WorkerRestarted)] == ["reference", "actor"]
    assert not (tmp_path / "killed" / "checkpoints" / "step_000004").exists(), "nothing is saved but steps"


def test_an_actor_killed_before_any_checkpoint_begins_anew(run: Callable[..., tuple[int, EventRecorder]]):
    reached, recorder = run("young", {1: "ActorRank"}, "checkpoint.every=0", "run.steps=2", "train.mesh.shard=1")
    (back,) = recorder.of(RolledBack)
    assert (back.version, back.restored, reached) == (2, 0, 4)
    assert hash_of(recorder, 2) == hash_of(recorder, 0)
    assert hash_of(recorder, 3) == hash_of(recorder, 1)
