"""Session workers in processes of their own, which a run can lose."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys import train
from rlsys.replay.rollout_parquet import read_records
from tests.jobs import config_of


def processes_of(run: Path) -> dict[str, set[float | None]]:
    """Ids of the processes in which sessions ran, by the replica that sampled most."""
    found: dict[str, set[float | None]] = {}
    for path in sorted((run / "rollouts").iterdir()):
        for record in read_records(path):
            rewards = {episode.trajectories[0].reward for episode in record.episodes}
            found.setdefault(record.replica, set()).update(rewards)
    return found


KEYS = ["rollout.replicas=2", "record.rollouts_every=1", "asynchrony.max_staleness=1"]


@pytest.mark.usefixtures("cluster")
def test_workflows_of_users_run_apart_from_engines(model_path, data_path, tmp_path):
    keys = [*KEYS, "rollout.workflow=tests.ray.hosted:TellsProcess"]
    assert train(config_of(model_path, data_path, tmp_path, keys), progress=False).steps == 4
    by_replica = processes_of(tmp_path / "run")
    assert set(by_replica) == {"rollout-0", "rollout-1"}
    assert len(set.union(*by_replica.values())) == 2, "as many session workers as replicas"


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_run_outlives_a_session_worker(model_path, data_path, tmp_path):
    flag = tmp_path / "died"
    workflow = f"rollout.workflow={{type: tests.ray.hosted:TellsProcess, flag: {flag}}}"
    assert train(config_of(model_path, data_path, tmp_path, [*KEYS, workflow]), progress=False).steps == 4
    assert flag.exists()
    assert len(set.union(*processes_of(tmp_path / "run").values())) >= 2
