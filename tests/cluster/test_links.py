"""Runs on hosts that have only a network, and no shared memory, in common."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cluster.lab import Lab
from tests.cluster.lab_runs import LabRun


@pytest.fixture(scope="module")
def lab(open_lab: Callable[..., Lab]) -> Lab:
    """Three hosts with a shared disk: room for a rank and a replica on each of the last two."""
    built = open_lab(3, has_shared_disk=True)
    built.start_ray(num_cpus=(2, 4, 4))
    return built


def test_ranks_on_hosts_that_call_themselves_127_0_1_1_train_together(lab: Lab) -> None:
    spread = ["train.mesh.shard=2", "resources.actor.cpus=3", "rollout.replicas=2"]
    with LabRun.on(lab, 1, spread) as run:
        ended = run.end()
        assert ended.code == 0, ended.err
        assert len(run.steps_at) == 4
        files = [run.folder / "machine" / f"actor-{rank}.jsonl" for rank in range(2)]
        assert {json.loads(line)["host"] for path in files for line in path.open()} == {"h2", "h3"}
