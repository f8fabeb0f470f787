"""Two policies trained in one run on Ray: each with weights, metrics and checkpoints of its own."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest

from rlsys import train
from rlsys.config import Config
from rlsys.errors import WorkerDied
from rlsys.replay.rollout_parquet import read_records
from rlsys.types import Assignment, Episode, GroupKey, Task
from tests.jobs import config_of
from tests.ray_workers import kill_for_good
from workers.worker_set import WorkerSet

POLICIES = "policies={first: {}, second: {train: {groups_per_step: 2, lr: 1e-2}}, third: {train: null}}"


def pair(model_path: Path, data_path: Path, folder: Path, *overrides: str) -> Config:
    keys = [
        "rollout.workflow=tests.ray.pairs:AskAndAnswer",
        "agents={asker: first, answerer: second}",
        POLICIES,
    ]
    return config_of(model_path, data_path, folder, ["asynchrony.max_staleness=1", *keys, *overrides])


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_by(run: Path) -> list[tuple[int, Episode]]:
    """Serial and episodes of all that a policy trained."""
    records = [record for path in sorted((run / "rollouts").iterdir()) for record in read_records(path)]
    return [(record.key.group_id, episode) for record in records for episode in record.episodes]


@pytest.mark.usefixtures("cluster")
def test_two_policies_are_trained_and_resumed_each_by_itself(model_path, data_path, tmp_path):
    result = train(pair(model_path, data_path, tmp_path, "run.steps=2"), progress=False)
    assert (result.steps, {name: own.steps for name, own in result.policies.items()}) == (2, {"first": 2, "second": 2})
    resumed = pair(model_path, data_path, tmp_path, "run.steps=4", "run.resume=must")
    assert train(resumed, progress=False).steps == 4
    run = tmp_path / "run"
    whole = Config.load(run / "config.resolved.yaml")
    assert (whole.policies, whole.agents) == (resumed.policies, resumed.agents)
    assert not (run / "policies" / "third").exists()
    for policy, num_groups in (("first", 16), ("second", 8)):
        own = run / "policies" / policy
        metrics = {row["step"]: row for row in rows(own / "metrics.jsonl")}
        assert sorted(metrics) == [1, 2, 3, 4]
        assert max(row["async/staleness_max"] for row in metrics.values()) <= 1
        assert max(row["sampler/probe_diff"] for row in metrics.values()) < 1e-3, "each computes with its own weights"
        fresh = [row["sampler/logp_diff_max"] for row in metrics.values() if row["async/staleness_max"] == 0]
        assert fresh
        assert max(fresh) < 1e-4
        trained = trained_by(own)
        group_ids = [group_id for group_id, _ in trained]
        assert len(set(group_ids)) == num_groups
        assert {group_ids.count(group_id) for group_id in group_ids} == {4}, "each group once, with four episodes"
        assert {(t.policy, t.agent) for _, e in trained for t in e.trajectories} == {
            ("first", "asker"),
            ("second", "answerer"),
        }
        assert (own / "checkpoints" / "step_000004").is_dir()
        assert Config.load(own / "config.resolved.yaml").run_dir == own
    assert {row["kind"] for row in rows(run / "events.jsonl")} >= {"engine_chosen", "run_ended"}


@pytest.mark.nightly
def test_groups_of_several_policies_survive_a_dead_replica(cluster, model_path, data_path, tmp_path):
    crew = WorkerSet.of(pair(model_path, data_path, tmp_path, "rollout.replicas=2"))
    rollouts, recovered = crew.rollouts, asyncio.Event()
    rollouts.on_recovery = lambda worker, seconds: recovered.set()

    async def group(group_id: int) -> list[str]:
        """The policies of its views; a group that was claiming weights when the replica died is played again."""
        assignment = Assignment(
            GroupKey(group_id, 1), Task(id="t", prompt="312>"), 2, 0, group_id, {"first": 0, "second": 0}
        )
        while True:
            with suppress(WorkerDied):
                return [view.policy for view in await rollouts.run(assignment)]

    async def main() -> list[list[str]]:
        await crew.ready()
        for line in crew.lines.values():
            await line.actor.publish(0)
        kill_for_good(rollouts)
        ends = await asyncio.gather(*(group(group_id) for group_id in range(4)))
        await recovered.wait()
        ends.append(await group(4))
        assert {load.replica for load in await rollouts.loads("second")} == {"rollout-0.1", "rollout-1"}
        await crew.close()
        return ends

    assert asyncio.run(asyncio.wait_for(main(), 200)) == [["first", "second"]] * 5
