"""Places of workers: what belongs on one node or device, and what a cluster cannot hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.placement_plan import NodeRoom, PlacementPlan, Role, can_hold
from rlsys.config.resource_plan import plan_of
from tests.jobs import config_of

EIGHT = [NodeRoom("10.0.0.1", 64.0, 8.0)]
FOUR_OF_TWO = [NodeRoom(f"10.0.0.{i}", 16.0, 2.0) for i in range(4)]


def actor(count: int, gpus: float = 1.0, *, block: int = 1, num_copies: int = 1) -> Role:
    return Role("actor rank", count, 1.0, gpus, block=block, num_copies=num_copies)


def rollouts(count: int, gpus: float = 1.0) -> Role:
    return Role("rollout", count, 1.0, gpus)


def in_turns(role: Role) -> Role:
    """One of two roles that share devices."""
    return replace(role, num_gpus=role.num_gpus / 2, num_cpus=0.5, is_shared=True)


def sizes(plan: PlacementPlan) -> list[tuple[int, float]]:
    return [(bundle.count, bundle.num_gpus) for bundle in plan.bundles]


def problems(roles: list[Role], nodes: list[NodeRoom]) -> list[str]:
    return list(PlacementPlan.of(roles, nodes).problems(nodes, is_short=False))


def test_ranks_of_one_batch_share_a_bundle():
    plan = PlacementPlan.of([rollouts(2), actor(4, block=2)], FOUR_OF_TWO)
    assert sizes(plan) == [(2, 2.0), (2, 2.0), (1, 1.0), (1, 1.0)]
    assert plan.teams == (("PACK", range(2)),)
    assert [plan.team_of("actor rank", rank) for rank in range(4)] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    assert plan.team_of("rollout", 0) is None, "Ray places it where it likes"


def test_a_copy_that_fits_on_a_node_is_placed_whole_and_the_copies_apart():
    assert PlacementPlan.of([actor(4, num_copies=2)], FOUR_OF_TWO).teams == (("SPREAD", range(2)),)
    assert PlacementPlan.of([actor(8, num_copies=2)], FOUR_OF_TWO).teams == (("PACK", range(8)),), "4 fit on none"


def test_ranks_with_a_part_of_a_gpu_have_a_gpu_each_and_replicas_the_rest():
    plan = PlacementPlan.of([rollouts(10, 0.5), actor(8, 0.5)], EIGHT)
    assert sizes(plan) == [(1, 1.0)] * 8 + [(1, 0.5)] * 2
    assert [plan.team_of("rollout", i) for i in range(8)] == [(0, i) for i in range(8)]
    assert plan.team_of("rollout", 8) is None, "no rest is left for it"
    assert not problems([rollouts(8, 0.5), actor(8, 0.5)], EIGHT)
    assert problems([rollouts(9, 0.5), actor(8, 0.5)], EIGHT)


def test_ranks_of_a_critic_have_the_rest_of_the_actors_gpus_each_of_another():
    critic = Role("critic rank", 4, 1.0, 0.3, block=1)
    plan = PlacementPlan.of([actor(4, 0.4), critic, rollouts(4, 0.3)], EIGHT)
    assert sizes(plan) == [(1, 1.0)] * 4 and [bundle.num_cpus for bundle in plan.bundles] == [3.0] * 4
    assert [plan.places["critic rank", rank] for rank in range(4)] == [0, 1, 2, 3]
    assert sorted(plan.places["rollout", i] for i in range(4)) == [0, 1, 2, 3]


def test_a_gpu_is_shared_only_by_workers_with_the_same_labels():
    role = Role("rollout", 1, 1.0, 0.5, labels={"accelerator": "h100"})
    assert len(PlacementPlan.of([actor(1, 0.5), role], EIGHT).bundles) == 2


def test_workers_that_need_labels_are_reserved_before_all_others():
    plan = PlacementPlan.of([actor(2), Role("rollout", 2, 1.0, 1.0, labels={"accelerator": "h100"})], EIGHT)
    assert plan.teams == (("SPREAD", range(2, 4)), ("PACK", range(2)))
    assert plan.team_of("rollout", 1) == (0, 1)
    assert plan.team_of("rollout", 2) is None, "it joined later"


def test_peers_that_no_node_can_hold_are_refused_by_name():
    (problem,) = problems([actor(4, block=4)], FOUR_OF_TWO)
    assert problem.startswith("4 workers of the role actor rank, which belong on one node, need 4 CPUs and 4 GPUs, and")
    assert problem.endswith("or tensor and context (train.mesh)")


def test_a_label_that_no_node_has_is_named():
    role = Role("rollout", 2, 1.0, 1.0, labels={"accelerator": "h100"})
    (problem,) = problems([role], EIGHT)
    assert "no node with accelerator=h100 has them" in problem and "labels" in problem
    assert not problems([role], [NodeRoom("10.0.0.2", 8.0, 2.0, {"accelerator": "h100"})])


def test_enough_in_all_but_on_no_node_is_refused():
    two_of_three = [NodeRoom(f"10.0.0.{i}", 16.0, 3.0) for i in range(2)]
    (problem,) = problems([rollouts(3, 2.0)], two_of_three)
    assert problem.startswith("the nodes have enough together, but not so")


@pytest.mark.parametrize(("gpus", "holds"), [([0.6, 0.6], True), ([0.6, 0.6, 0.6], False), ([0.6, 0.6, 0.4], True)])
def test_a_part_of_a_gpu_is_of_one_gpu(gpus: list[float], holds: bool):
    roles = [Role(f"rollout of {i}", 1, 1.0, part) for i, part in enumerate(gpus)]
    assert can_hold(PlacementPlan.of(roles, EIGHT).bundles, [NodeRoom("10.0.0.1", 8.0, 2.0)]) == holds


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4)), min_size=1, max_size=3),
)
def test_a_run_is_refused_exactly_if_no_arrangement_of_its_workers_fits(
    workers: list[tuple[int, int]], shapes: list[tuple[int, int]]
):
    roles = [Role(f"{i}", 1, float(cpus), float(gpus)) for i, (cpus, gpus) in enumerate(workers)]
    nodes = [NodeRoom(f"{i}", float(cpus), float(gpus)) for i, (cpus, gpus) in enumerate(shapes)]

    def fits(choice: tuple[int, ...]) -> bool:
        chosen = [[worker for worker, at in zip(workers, choice, strict=True) if at == i] for i in range(len(shapes))]
        return all(
            sum(cpus for cpus, _ in there) <= shape[0] and sum(gpus for _, gpus in there) <= shape[1]
            for there, shape in zip(chosen, shapes, strict=True)
        )

    any_fits = any(map(fits, product(range(len(shapes)), repeat=len(workers))))
    assert can_hold(PlacementPlan.of(roles, nodes).bundles, nodes) == any_fits


def test_a_large_run_is_looked_at_in_moments():
    nodes = [NodeRoom(f"10.0.{i}.1", 64.0, 8.0) for i in range(128)]
    assert not problems([actor(512, block=8), rollouts(512)], nodes)


@pytest.mark.parametrize("gpus", [0.0, 1.0])
def test_workers_that_take_turns_share_the_bundle_of_a_rank(gpus: float):
    reward = Role("reward", 1, 1.0, gpus)
    plan = PlacementPlan.of([in_turns(rollouts(3, gpus)), in_turns(actor(4, gpus)), reward], EIGHT)
    assert [plan.places["rollout", i] for i in range(3)] == [plan.places["actor rank", i] for i in range(3)]
    assert [(b.num_cpus, b.num_gpus) for b in plan.bundles] == [(1.0, gpus)] * 3 + [(0.5, gpus), (1.0, gpus)]


def test_more_workers_than_ranks_begin_with_the_first_device_again():
    plan = PlacementPlan.of([in_turns(rollouts(3, 0.0)), in_turns(actor(2, 0.0))], EIGHT)
    assert [plan.places["rollout", i] for i in range(3)] == [0, 1, 0]


def test_ranks_of_actor_and_critic_take_turns_too():
    critic = replace(in_turns(actor(4)), name="critic rank")
    plan = PlacementPlan.of([in_turns(actor(4)), critic], FOUR_OF_TWO)
    assert [plan.places["critic rank", i] for i in range(4)] == [plan.places["actor rank", i] for i in range(4)]
    assert sizes(plan) == [(1, 1.0)] * 4


def test_the_plan_of_a_configuration_has_its_mesh(tmp_path: Path):
    mesh = ("train.mesh.shard=2", "train.mesh.tensor=2", "train.mesh.replicate=2")
    config = config_of(tmp_path, tmp_path / "tasks.jsonl", tmp_path, [*mesh, "resources.actor.labels={gpu: h100}"])
    (role,) = [role for role in plan_of(config).roles if role.name == "actor rank"]
    assert (role.count, role.block, role.num_copies, role.labels) == (8, 2, 2, {"gpu": "h100"})
