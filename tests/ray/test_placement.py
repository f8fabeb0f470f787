"""Where workers land on clusters with logical GPUs: nodes and devices as planned."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import ray
from ray.util.placement_group import placement_group_table

from rlsys.config.placement_plan import Role
from rlsys.errors import ConfigError
from tests.jobs import config_of, write_model
from workers.ray.cluster import Resources
from workers.ray.placement import Reservations, check_fits, live_nodes
from workers.ray.worker_process import Raylet, Remote, start
from workers.reward.reward_worker import RewardPool
from workers.worker_set import WorkerSet

GpuNodes: TypeAlias = Callable[..., None]


class Whereabouts:
    """A worker that tells its node and its GPUs."""

    def tell(self) -> tuple[str, tuple[str, ...]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), tuple(context.get_accelerator_ids()["GPU"])


def actor(count: int, gpus: float = 1.0, *, block: int = 1, num_copies: int = 1) -> Role:
    return Role("actor rank", count, 0.5, gpus, block=block, num_copies=num_copies)


def rollouts(count: int, gpus: float = 1.0, **labels: str) -> Role:
    return Role("rollout", count, 0.5, gpus, labels)


def in_turns(role: Role) -> Role:
    """One of two roles that share devices."""
    return replace(role, num_gpus=0.5, is_shared=True)


def landed(*roles: Role) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Node and GPUs of each worker of these roles, once all have started."""
    check_fits(roles, live_nodes())
    placement = Reservations.of(roles)

    def worker(role: Role, i: int) -> Remote[Whereabouts]:
        resources = Resources(role.num_cpus, role.num_gpus, labels=tuple(role.labels.items()))
        how = {"bundle": placement.of_role(role.name)(i), "spreads": not role.block}
        return start(Whereabouts, f"{role.name}-{i}", Whereabouts, resources, 60.0, **how)

    async def where(workers: Sequence[Remote[Whereabouts]]) -> list[tuple[str, tuple[str, ...]]]:
        await asyncio.gather(*(each.setup() for each in workers))
        return await asyncio.gather(*(each.call(Whereabouts.tell) for each in workers))

    async def main() -> dict[str, list[tuple[str, tuple[str, ...]]]]:
        crews = {role.name: [worker(role, i) for i in range(role.count)] for role in roles}
        return dict(zip(crews, await asyncio.gather(*map(where, crews.values())), strict=True))

    try:
        return asyncio.run(asyncio.wait_for(main(), 200))
    finally:
        placement.close()


def test_ranks_and_replicas_on_halves_of_gpus_share_each_gpu_one_to_one(gpu_nodes: GpuNodes):
    gpu_nodes(2)
    found = landed(actor(2, 0.5), rollouts(2, 0.5))
    assert Counter(found["actor rank"]) == Counter(found["rollout"])
    assert set(Counter(found["actor rank"]).values()) == {1}, "no two ranks on one GPU"


@pytest.mark.nightly
def test_peers_land_on_one_node_copies_apart_and_replicas_spread(gpu_nodes: GpuNodes):
    gpu_nodes(2, 2, 2, 2)
    peers = landed(actor(4, block=2), rollouts(2))
    copies = landed(actor(4, num_copies=2))
    with pytest.raises(ConfigError, match="4 workers of the role actor rank, which belong on one node"):
        landed(actor(4, block=4))
    first, second, third, fourth = (node for node, _ in peers["actor rank"])
    assert first == second and third == fourth
    assert len({node for node, _ in peers["rollout"]}) == 2
    first, second, third, fourth = (node for node, _ in copies["actor rank"])
    assert first == second != third == fourth


@pytest.mark.nightly
def test_workers_land_on_nodes_with_their_labels(gpu_nodes: GpuNodes):
    gpu_nodes(1, 1, 1, labels={2: {"accelerator": "new"}})
    found = landed(actor(2, 0.5), rollouts(2, 0.5, accelerator="new"))
    (there,) = (node["NodeID"] for node in ray.nodes() if node["Labels"].get("accelerator"))
    assert {node for node, _ in found["rollout"]} == {there}


@pytest.mark.nightly
def test_the_workers_of_a_run_land_as_planned(gpu_nodes: GpuNodes, model_path: Path, data_path: Path, tmp_path: Path):
    keys = [
        "train.mesh.tensor=2",
        "resources.actor.cpus=3",
        "rollout.replicas=2",
        "resources.reward.labels={for: judges}",
    ]
    model_path = write_model(tmp_path / "model", num_key_value_heads=2)
    config = config_of(model_path, data_path, tmp_path, keys)

    async def main() -> list[list[Raylet]]:
        crew = WorkerSet.of(config)
        try:
            await crew.ready()
            (line,) = crew.lines.values()
            assert isinstance(crew.rewards, RewardPool)
            judges = crew.rewards.processes
            assert all(judge.bundle for judge in judges), "what is reserved for them is what they take"
            crews = line.actor.processes, crew.rollouts.processes, judges
            return [await asyncio.gather(*(each.raylet() for each in workers)) for workers in crews]
        finally:
            await crew.close()

    gpu_nodes(0, 0, labels={1: {"for": "judges"}})
    ranks, replicas, (judge,) = asyncio.run(asyncio.wait_for(main(), 200))
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    assert (len(ranks), len(set(ranks)), len(set(replicas))) == (2, 1, 2)
    (there,) = (node["NodeManagerPort"] for node in ray.nodes() if node["Labels"].get("for"))
    assert judge[1] == there


@pytest.mark.parametrize("gpus", [(4,), (2, 2), (1, 1, 2)])
def test_workers_that_take_turns_have_the_device_of_the_rank_of_their_number(gpu_nodes: GpuNodes, gpus):
    gpu_nodes(*gpus)
    found = landed(in_turns(actor(4)), in_turns(rollouts(4)))
    assert found["rollout"] == found["actor rank"]
    assert len(set(found["rollout"])) == 4


def test_fewer_replicas_than_ranks_have_the_first_devices(gpu_nodes: GpuNodes):
    gpu_nodes(4)
    found = landed(in_turns(actor(4)), in_turns(rollouts(2)))
    assert found["rollout"] == found["actor rank"][:2]


def test_too_few_devices_for_turns_are_refused(gpu_nodes: GpuNodes):
    gpu_nodes(2)
    with pytest.raises(ConfigError, match="the run needs 4 GPUs and the cluster has 2"):
        landed(in_turns(actor(4)), in_turns(rollouts(4)))
