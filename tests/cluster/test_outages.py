"""Cables that are pulled for a while: nothing is lost, and nobody waits who need not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.lab import Lab
from tests.cluster.outages import cut_off


@pytest.fixture(scope="module")
def lab(open_lab: Callable[..., Lab]) -> Lab:
    """Three hosts with a shared disk: room for all workers on the first, for a replica on the second, none on the
    third."""
    built = open_lab(3, has_shared_disk=True)
    built.start_ray(num_cpus=(4, 2, 0))
    return built


def test_no_step_waits_for_a_host_with_a_relay_alone(lab: Lab) -> None:
    cut = cut_off(lab, 3, 10.0, ["rollout.replicas=2"])
    assert cut.code is None and cut.num_meanwhile > 0, cut
    assert cut.longest_s <= cut.calm_longest_s + 2.0, cut


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_replica_behind_a_short_cut_keeps_its_place(lab: Lab) -> None:
    cut = cut_off(lab, 2, 10.0, ["rollout.replicas=2", "resources.rollout.cpus=2"])
    assert cut.code is None and cut.num_meanwhile > 0, cut
    assert ["its node is cut off" in failure for failure in cut.failures] == [True], cut


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_driver_rides_out_a_short_cut(lab: Lab) -> None:
    cut = cut_off(lab, 2, 10.0, ["rollout.replicas=2"], driver=2)
    assert cut.code is None, cut
    assert all("its node is cut off" in failure for failure in cut.failures), cut


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_driver_behind_a_long_cut_saves_and_ends_by_name(lab: Lab) -> None:
    cut = cut_off(lab, 2, 70.0, ["rollout.replicas=2"], driver=2)
    assert cut.code == 1, cut
    assert "is saved; go on with run.resume=auto" in cut.ends_with, cut
