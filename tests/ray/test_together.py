"""One logical GPU for a whole run: its workers take turns, and the weights are those of a run with devices for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pytest

from rlsys.contracts import Tenant
from rlsys.data.task_file import load_tasks
from rlsys.data.task_source import TaskSource
from rlsys.errors import WorkerError
from rlsys.loop.build_driver import build_driver
from rlsys.monitoring.events import EvalDone, Events, RolledBack, StepDone, WeightsPublished, WorkerRestarted
from rlsys.testing import EventRecorder
from tests.jobs import config_of
from tests.ray_workers import kill_worker
from workers.ray.cluster import LOGICAL_GPUS
from workers.worker_set import WorkerSet

Run: TypeAlias = Callable[..., EventRecorder]
SPLIT = ["asynchrony.max_staleness=0", "record.rollouts_every=0", "eval.every=2", "eval.limit=8"]
TOGETHER = [
    *SPLIT,
    "placement.together=[actor,rollout,reference]",
    *(f"resources.{role}.gpus=1" for role in ("actor", "rollout", "reference")),
]
KINDS = {"actor": "ActorRank", "rollout": "RolloutWorker", "reference": "ReferenceWorker"}


@dataclass
class Interrupted:
    """A tenant whose worker is killed right before its call number `at`."""

    tenant: Tenant
    role: str
    call: str
    at: int
    num_calls: int = 0

    async def sleep(self) -> None:
        self._note("sleep")
        await self.tenant.sleep()

    async def wake(self) -> None:
        self._note("wake")
        await self.tenant.wake()

    def _note(self, call: str) -> None:
        self.num_calls += call == self.call
        if call == self.call and self.num_calls == self.at:
            kill_worker(KINDS[self.role])


@pytest.fixture
def run(gpu_nodes, monkeypatch, model_path: Path, data_path: Path, tmp_path: Path) -> Run:
    monkeypatch.setenv(LOGICAL_GPUS, "1")
    gpu_nodes(1)

    def trained(name: str, *keys: str, role: str = "", call: str = "", at: int = 2) -> EventRecorder:
        """What a run told; a worker of this role is killed right before it sleeps or wakes."""
        files = [f"run.name={name}", f"eval.data={{held_out: {data_path}}}"]
        config = config_of(model_path, data_path, tmp_path, [*files, *keys])
        recorder, failures = EventRecorder(), list[WorkerError]()

        async def main() -> None:
            crew = WorkerSet.of(config)
            workers = crew.workers()
            if role:
                dying = Interrupted(workers.tenants[role], role, call, at)
                workers = replace(workers, tenants={**workers.tenants, role: dying})
            tasks = load_tasks(str(data_path), config.data.columns)
            source, events = TaskSource(tasks, config.run.seed), Events([recorder])
            driver = build_driver(config, workers, source, events, eval_sets={"held_out": tasks[:8]})
            crew.watch(failures.append, lambda worker, seconds: events.emit(WorkerRestarted(worker, seconds)))
            try:
                await crew.ready()
                assert await driver.run(0) == driver.end
            finally:
                await crew.close()

        asyncio.run(asyncio.wait_for(main(), 200))
        assert [failure.worker.split(".")[0] for failure in failures] == ["rollout-0"] * (role == "rollout"), failures
        return recorder

    return trained


def last_hash(recorder: EventRecorder) -> str:
    return max(recorder.of(WeightsPublished), key=lambda event: event.version).hash


def test_one_device_in_turns_gives_the_weights_and_evaluations_of_devices_for_each(run: Run):
    split, together = run("split", *SPLIT), run("together", *TOGETHER)
    hashes = [[event.hash for event in told.of(WeightsPublished)] for told in (split, together)]
    assert hashes[0] == hashes[1]
    scores = [[(e.step, e.metrics["eval/held_out/mean"]) for e in told.of(EvalDone)] for told in (split, together)]
    assert scores[0] == scores[1]
    assert [step for step, _ in scores[0]] == [0, 2, 4]
    assert all(event.metrics["time/hand_over"] > 0 for event in together.of(StepDone))
    assert not any("time/hand_over" in event.metrics for event in split.of(StepDone))


@pytest.mark.parametrize(
    ("role", "call"),
    [
        ("actor", "sleep"),
        ("rollout", "sleep"),
        pytest.param("actor", "wake", marks=pytest.mark.nightly),
        pytest.param("rollout", "wake", marks=pytest.mark.nightly),
        pytest.param("reference", "sleep", marks=pytest.mark.nightly),
        pytest.param("reference", "wake", marks=pytest.mark.nightly),
    ],
)
def test_a_death_in_a_hand_over_changes_no_weight(run: Run, role: str, call: str):
    keys = [*TOGETHER, "algorithm.kl_coef=0.1", "eval.every=0"]
    calm, told = run("calm", *keys), run("killed", *keys, role=role, call=call)
    assert last_hash(told) == last_hash(calm)
    assert len(told.of(RolledBack)) == (role == "actor")
    assert [event.worker.split("-")[0] for event in told.of(WorkerRestarted)] == [role]
