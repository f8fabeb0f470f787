"""Four nodes whose relays are killed at random: the ledger's law holds, and weights keep arriving."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from rlsys.data.task_file import load_tasks
from rlsys.data.task_source import TaskSource
from rlsys.loop.build_driver import build_driver
from rlsys.monitoring.events import Event, Events, GroupDropped, StepDone, WeightsPublished
from rlsys.testing import EventRecorder
from tests.jobs import config_of
from tests.ray_workers import workers_of
from workers.worker_set import WorkerSet

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NUM_STEPS = 12


@pytest.fixture(scope="module")
def four_nodes(forks: None) -> Iterator[Cluster]:
    """A local Ray cluster of four raylets, this process on the first."""
    import ray
    from ray.cluster_utils import Cluster

    memory = 150 << 20
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "object_store_memory": memory, "include_dashboard": False},
    )
    for _ in range(3):
        nodes.add_node(num_cpus=2, object_store_memory=memory)
    ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@dataclass
class Killer:
    """Kills one or two of the relays when a version has arrived, at every second one."""

    chance: random.Random
    num_killed: int = 0
    versions: list[int] = field(default_factory=list)

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, WeightsPublished) and event.version % 2 == 1:
            relays = workers_of("Relay")
            for relay in self.chance.sample(relays, min(len(relays), self.chance.randint(1, 2))):
                relay.kill()
                self.num_killed += 1
            self.versions.append(event.version)

    def close(self) -> None: ...


@pytest.mark.nightly
def test_every_task_is_trained_once_whatever_relays_die(four_nodes, model_path, data_path, tmp_path):
    keys = [f"run.steps={NUM_STEPS}", "rollout.replicas=3", "asynchrony.max_staleness=1", "checkpoint.every=0"]
    config = config_of(model_path, data_path, tmp_path, [*keys, "record.rollouts_every=0"])
    recorder, killer = EventRecorder(), Killer(random.Random(5))

    async def main() -> int:
        crew = WorkerSet.of(config)
        assert len(crew.lines["policy"].relays.members) == 4
        tasks = TaskSource(load_tasks(str(data_path), config.data.columns), config.run.seed)
        driver = build_driver(config, crew.workers(), tasks, Events([recorder, killer]))
        try:
            await crew.ready()
            return await driver.run(0)
        finally:
            await crew.close()

    assert asyncio.run(asyncio.wait_for(main(), 220)) == NUM_STEPS
    trained = [group for step in recorder.of(StepDone) for group in step.group_ids]
    assert sorted(trained) == list(range(NUM_STEPS * config.train.groups_per_step)), "each once, none passed over"
    assert recorder.of(GroupDropped) == []
    assert [event.version for event in recorder.of(WeightsPublished)] == list(range(NUM_STEPS + 1))
    assert killer.num_killed >= 6
