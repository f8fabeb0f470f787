"""What a cluster has too little of."""

from __future__ import annotations

import pytest

from rlsys.config.placement_plan import NodeRoom, Role
from rlsys.errors import ConfigError
from workers.ray.cluster import Resources, caution_about_idle_gpus, short_of
from workers.ray.placement import check_fits

RUN = [Resources(num_cpus=2.0), Resources(num_cpus=1.0, num_gpus=1.0), Resources(num_cpus=1.0)]


def test_a_cluster_with_exactly_enough_is_not_short():
    assert short_of(RUN, {"CPU": 4.0, "GPU": 1.0}) == set()


def test_a_cluster_is_short_of_what_all_need_together():
    assert short_of(RUN, {"CPU": 3.0, "GPU": 1.0}) == {"CPU"}
    assert short_of(RUN, {}) == {"CPU", "GPU"}


def test_a_run_without_gpus_on_a_cluster_with_some_gets_a_caution():
    assert caution_about_idle_gpus(0.0, {"CPU": 8.0, "GPU": 4.0}).startswith("the cluster has 4 GPUs, and no worker")
    assert caution_about_idle_gpus(1.0, {"GPU": 4.0}) == caution_about_idle_gpus(0.0, {"CPU": 8.0}) == ""


ROLES = [Role("rollout", 2, 1.0, 2.0), Role("actor rank", 4, 1.0, 1.0), Role("evaluation", 0, 1.0, 64.0)]


def test_a_run_that_fits_on_the_nodes_of_a_cluster_is_not_refused():
    check_fits(ROLES, [NodeRoom("10.0.0.1", 4.0, 4.0), NodeRoom("10.0.0.2", 4.0, 4.0)])


def test_a_worker_that_no_node_has_room_for_is_named_with_what_each_node_has():
    nodes = [NodeRoom(f"10.0.0.{i}", 1.0, 1.0) for i in range(8)]
    with pytest.raises(ConfigError) as raised:
        check_fits(ROLES, nodes)
    first, *table = str(raised.value).splitlines()
    assert first.startswith("a worker of the role rollout needs 1 CPUs and 2 GPUs, and no node has them")
    assert table == [f"  10.0.0.{i}: 1 CPUs, 1 GPUs" for i in range(8)]


def test_ranks_on_parts_of_gpus_need_a_gpu_each():
    roles = [Role("actor rank", 4, 1.0, 0.5, block=1), Role("rollout", 4, 1.0, 0.5)]
    check_fits(roles, [NodeRoom("10.0.0.1", 8.0, 4.0)])
    with pytest.raises(ConfigError, match="the run needs 4 GPUs and the cluster has 3"):
        check_fits(roles, [NodeRoom("10.0.0.1", 8.0, 3.0)])


def test_everything_that_is_missing_is_named_at_once():
    with pytest.raises(ConfigError) as raised:
        check_fits(ROLES, [NodeRoom("10.0.0.1", 4.0, 1.0)])
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        "the run needs 6 CPUs and the cluster has 4",
        "the run needs 8 GPUs and the cluster has 1",
        "a worker of the role rollout needs 1 CPUs and 2 GPUs, and no node has them",
    ]
