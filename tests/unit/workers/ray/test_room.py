"""What a cluster has too little of."""

from __future__ import annotations

from workers.ray.cluster import Resources, caution_about_idle_gpus, short_of

RUN = [Resources(num_cpus=2.0), Resources(num_cpus=1.0, num_gpus=1.0), Resources(num_cpus=1.0)]


def test_a_cluster_with_exactly_enough_is_not_short():
    assert short_of(RUN, {"CPU": 4.0, "GPU": 1.0}) == set()


def test_a_cluster_is_short_of_what_all_need_together():
    assert short_of(RUN, {"CPU": 3.0, "GPU": 1.0}) == {"CPU"}
    assert short_of(RUN, {}) == {"CPU", "GPU"}


def test_a_run_without_gpus_on_a_cluster_with_some_gets_a_caution():
    assert caution_about_idle_gpus(0.0, {"CPU": 8.0, "GPU": 4.0}).startswith("the cluster has 4 GPUs, and no worker")
    assert caution_about_idle_gpus(1.0, {"GPU": 4.0}) == caution_about_idle_gpus(0.0, {"CPU": 8.0}) == ""
