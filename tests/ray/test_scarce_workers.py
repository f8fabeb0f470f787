"""A node is lost with the only reward worker, and rollout replicas fill all others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray._private.state

from rlsys.errors import WorkerError
from tests.jobs import config_of
from workers.reward.reward_worker import RewardPool
from workers.worker_set import WorkerSet, start_fixed_rollouts, start_rewards

KEYS = ["resources.rollout.cpus=4", "resources.reward.cpus=4", "eval.replicas=2"]
"""One worker fills one node."""


@pytest.mark.nightly
def test_a_replica_gives_way_to_the_only_reward_worker(three_nodes, model_path: Path, data_path: Path, tmp_path: Path):
    config = config_of(model_path, data_path, tmp_path, KEYS)
    told: list[str] = []
    back = asyncio.Event()

    def failed(error: WorkerError) -> None:
        told.append(f"{error.worker} {error.phase}")

    def recovered(worker: str, seconds: float) -> None:
        told.append(f"{worker} is back")
        back.set()

    async def main() -> None:
        rollouts = start_fixed_rollouts(config, str(model_path))
        await rollouts.ready()
        rewards = start_rewards(config)
        assert isinstance(rewards, RewardPool)
        crew = WorkerSet({}, rollouts, rewards)
        crew.watch(failed, recovered)
        await rewards.ready()
        reward: Any = ray._private.state.actors(rewards.members[0].worker.actor._actor_id.hex())
        home = reward["Address"]["NodeID"]
        (node,) = (node for node in three_nodes.list_all_nodes() if node.node_id == home)
        three_nodes.remove_node(node)
        await back.wait()
        assert len(rollouts._live()) == 1
        await crew.close()

    asyncio.run(asyncio.wait_for(main(), 200))
    assert told[1:] == ["reward-0.1 waiting for resources", "eval-1 yielding its resources", "reward-0 is back"]
