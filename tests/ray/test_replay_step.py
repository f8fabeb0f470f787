"""`rlsys replay RUN --step N` on runs of the whole system: every weight and every metric, to the last bit."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlsys import train
from rlsys.launch import replay_step
from rlsys.replay.rollout_parquet import read_records
from tests.families import tiny
from tests.jobs import config_of
from tests.models import save_model
from tests.ray.commands import DEADLINE_S, RLSYS

pytestmark = pytest.mark.usefixtures("cluster")

GRPO = [
    "train.mesh.shard=2",
    "algorithm.kl_coef=0.1",
    "stabilizer={type: gac, enabled: true, c_low: 1e-4, c_high: 1.0}",
    "asynchrony.max_staleness=1",
    "checkpoint.every=2",
]
PPO = ["algorithm.type=ppo", "train.updates_per_step=2", "checkpoint.every=0"]


def trained(model_path: Path | str, data_path: Path, folder: Path, overrides: Sequence[str]) -> Path:
    config = config_of(model_path, data_path, folder, ["run.steps=3", *overrides])
    train(config, progress=False)
    return config.run_dir


def test_two_ranks_with_reference_and_gac_replay_equally(model_path, data_path, tmp_path):
    run = trained(model_path, data_path, tmp_path, GRPO)
    found = replay_step(run, 3)
    assert (found.is_equal, found.beginning) == (True, "checkpoints/step_000002"), found.first
    assert len({each.found for each in found.weights}) == 2
    metrics = {each.what: each.found for each in found.metrics}
    assert metrics["gac/regime"] == 1, "it projected"
    assert metrics["policy/kl_ref"] != 0


def test_a_step_with_a_reference_that_follows_the_policy_replays_equally(model_path, data_path, tmp_path):
    keys = ["train.lr=0.01", "algorithm.kl_coef=0.1", "reference.sync={every: 2, mixup: 1}", "checkpoint.every=2"]
    run = trained(model_path, data_path, tmp_path, keys)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, second, third = (row["policy/kl_ref"] for row in rows)
    assert first == pytest.approx(0, abs=1e-6) and third == pytest.approx(0, abs=1e-6) and second > 1e-4
    found = replay_step(run, 3)
    assert (found.is_equal, found.beginning) == (True, "checkpoints/step_000002"), found.first


@pytest.mark.nightly
def test_a_critic_with_two_updates_a_step_replays_equally(model_path, data_path, tmp_path):
    run = trained(model_path, data_path, tmp_path, PPO)
    found = replay_step(run, 3)
    assert (found.is_equal, found.beginning, len(found.weights)) == (True, "the initial model", 4), found.first
    assert "critic/explained_variance" in {each.what for each in found.metrics}
    readings = [
        (turn, reading)
        for record in read_records(run / "rollouts" / "step_000003.parquet")
        for episode, of_episode in zip(record.episodes, record.readings, strict=True)
        for turn, reading in zip(episode.trajectories[0].turns, of_episode[0], strict=True)
    ]
    for turn, reading in readings:
        assert reading.trainer_logprobs == pytest.approx(turn.logprobs, abs=1e-4), "it was sampled from these weights"
        assert "".join(reading.pieces).startswith(turn.text[:1])
        assert all(0 < entropy < math.log(91) for entropy in reading.entropies)
        assert len(reading.advantages) == len(turn.output_ids), "GAE gives each token one of its own"
    commands = "p step, len(groups), backend.step, type(plan[0]).__name__\nc\n"
    words = [RLSYS, "replay", run, "--step", "2", "--debug"]
    done = subprocess.run(words, input=commands, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "(2, 4, 1, 'RankPlan')" in done.stdout
    assert done.stdout.splitlines()[-1] == "equal bit for bit"


@pytest.mark.nightly
def test_experts_that_the_engine_chose_are_trained_and_replayed(data_path, tmp_path):
    path = save_model(tmp_path / "moe", tiny("qwen3_moe"))
    run = trained(path, data_path, tmp_path, ["run.steps=2", "train.routing_replay=true"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["sampler/experts_recorded"] for row in rows] == [1.0, 1.0]
    assert max(row["sampler/experts_differ"] for row in rows) < 0.05
    (turn,) = read_records(run / "rollouts" / "step_000002.parquet")[0].episodes[0].trajectories[0].turns
    assert len(turn.routing) == len(turn.output_ids)
    assert replay_step(run, 2).is_equal
