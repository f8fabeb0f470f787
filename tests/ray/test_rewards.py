"""Several reward functions and a reward model, through a whole run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

import rlsys
from benchmarks.measure import rows_of
from examples.tiny_policy import build_tokenizer
from rlsys.replay.rollout_parquet import read_records
from tests.jobs import config_of


@pytest.fixture
def classifier(tmp_path: Path, model_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(model_path)
    config.num_labels = 1
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    build_tokenizer().save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def test_functions_and_a_model_make_one_reward(cluster, model_path, data_path, classifier, tmp_path):
    functions = "{fn: tests/ray/judges.py:digits, weight: 2}, {fn: regex, name: any, args: {pattern: '', counts: any}}"
    model = f"{{fn: model, weight: 0.5, args: {{path: {classifier}}}}}"
    overrides = [f"reward.fn=[{functions}, {model}]", "run.steps=1"]
    rlsys.train(config_of(model_path, data_path, tmp_path, overrides), progress=False)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    by_part = {name: metrics[f"reward/by/{name}"] for name in ("digits", "any", "model")}
    assert len(set(by_part.values())) == 3
    total = 2 * by_part["digits"] + by_part["any"] + 0.5 * by_part["model"]
    assert metrics["reward/mean"] == pytest.approx(total)
    (path,) = (tmp_path / "run" / "rollouts").glob("*.parquet")
    for record in read_records(path):
        for episode, parts in zip(record.episodes, record.parts, strict=True):
            value = 2 * parts["digits"] + parts["any"] + 0.5 * parts["model"]
            assert episode.trajectories[0].reward == pytest.approx(value)


@pytest.mark.nightly
def test_groups_are_shared_among_the_replicas_of_a_reward_model(cluster, model_path, data_path, classifier, tmp_path):
    """Each worker has a copy of the model, and the least busy one gets the next group."""
    overrides = [f"reward.fn=[{{fn: model, args: {{path: {classifier}}}}}]", "reward.workers=2", "run.steps=3"]
    rlsys.train(config_of(model_path, data_path, tmp_path, overrides), progress=False)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    scored = Counter(event["worker"] for event in events if event.get("activity") == "scoring")
    assert scored.keys() == {"reward-0", "reward-1"} and min(scored.values()) >= 1
    assert all("reward/by/model" in row for row in rows_of(tmp_path / "run" / "metrics.jsonl"))


def test_replicas_that_score_their_groups_change_nothing_but_the_number_of_processes(
    cluster, model_path, data_path, tmp_path
):
    def run(workers: int) -> tuple[list[list[float]], list[float]]:
        folder = tmp_path / str(workers)
        keys = [f"reward.workers={workers}", "eval.every=2", f"eval.data={data_path}", "eval.limit=4"]
        rlsys.train(config_of(model_path, data_path, folder, keys), progress=False)
        rows = rows_of(folder / "run/metrics.jsonl")
        steps = [[row[name] for name in ("reward/mean", "loss", "optim/grad_norm")] for row in rows if "loss" in row]
        return steps, [row["eval/tasks/mean"] for row in rows if "eval/tasks/mean" in row]

    assert run(0) == run(1)
