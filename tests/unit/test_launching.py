"""What a configuration makes of replicas, before any is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys import Config
from rlsys.data.source import TaskSource
from rlsys.events import Events
from rlsys.launch.preparing import Data
from rlsys.launch.training import driver_of
from rlsys.testing import FakeWorld, tasks
from rlsys.types import Sampling
from tests.jobs import config_of
from workers.launching import _replica_spec


def config(folder: Path, *overrides: str) -> Config:
    return config_of(folder / "model", folder / "data.jsonl", folder, overrides)


@pytest.mark.parametrize(
    ("overrides", "num_versions"),
    [
        ([], 1),
        (["rollout.weight_change=inflight"], 1),
        (["rollout.weight_change=beside"], 2),
        (["rollout.weight_change=beside", "rollout.resident_versions=3"], 3),
    ],
)
def test_only_replicas_that_train_hold_several_versions(tmp_path, overrides, num_versions):
    job = config(tmp_path, *overrides)
    trained = _replica_spec(job, "model", Sampling(), "newest")
    assert (trained.engine.resident_versions, trained.change.when) == (num_versions, job.rollout.weight_change)
    pinned = _replica_spec(job, "model", Sampling(), "pinned")
    assert (pinned.engine.resident_versions, pinned.change.when) == (1, "between")


@pytest.mark.parametrize(
    ("overrides", "every_s"),
    [
        ([], 5.0),
        (["rollout.repack_s=2"], 2.0),
        (["rollout.repack_s=0"], None),
        (["rollout.replicas=1"], None),
        (["rollout.weight_change=inflight"], None),
        (["rollout.weight_change=beside"], None),
    ],
)
def test_trajectories_are_moved_where_running_groups_hold_new_weights_back(tmp_path, overrides, every_s):
    data = Data(TaskSource(tasks(3), seed=0), {})
    repacker = driver_of(config(tmp_path, *overrides), data, FakeWorld().workers(), Events([])).repacker
    assert (repacker and repacker.every_s) == every_s
