"""A population of two runs on Ray: one takes the other's weights and values between two steps, in its own processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import CheckpointError
from rlsys.launch import run_population
from tests.jobs import config_of


def rows_of(path: Path) -> dict[int, dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row for row in rows if "reward/mean" in row}


@pytest.mark.usefixtures("cluster")
def test_the_worse_of_two_runs_goes_on_with_the_weights_and_near_the_values_of_the_better(
    model_path, data_path, tmp_path
):
    job = tmp_path / "run.yaml"
    job.write_text(config_of(model_path, data_path, tmp_path, ["run.steps=4", "asynchrony.max_staleness=1"]).to_yaml())
    file = tmp_path / "population.yaml"
    keys = "{train.lr: {low: 1.0e-5, high: 1.0e-2}, algorithm.clip_high: {low: 0.2, high: 0.4}}"
    file.write_text(f"config: [{job}]\nmembers: 2\nevery: 2\nshare: 0.5\nscore: optim/lr\nkeys: {keys}\n")
    result = run_population(file)
    copied = next(number for number, line in enumerate(result.lineage) if len(line) > 1)
    best = 1 - copied
    assert result.lineage[copied] == [best, copied]
    folders = [Path(member.run_dir) for member in result.members]
    before = rows_of(folders[copied] / "metrics.jsonl")
    assert list(before) == [1, 2, 4, 5]  # version 3 has the copied weights
    assert before[1]["optim/lr"] < rows_of(folders[best] / "metrics.jsonl")[1]["optim/lr"]
    value = result.values[copied]["train.lr"]
    assert value == pytest.approx(0.8 * result.values[best]["train.lr"]) or value == pytest.approx(
        min(1e-2, 1.2 * result.values[best]["train.lr"])
    )
    assert before[5]["optim/lr"] == pytest.approx(value)
    assert max(row["sampler/probe_diff"] for row in before.values()) < 1e-3
    now = Config.load(folders[copied] / "config.resolved.yaml")
    assert now.train.lr == value
    assert vars(now.algorithm)["clip_high"] == result.values[copied]["algorithm.clip_high"]
    (earlier,) = (folders[copied] / "configs").iterdir()
    assert Config.load(earlier).train.lr == pytest.approx(before[1]["optim/lr"])
    again = run_population(file, ["run.steps=6"])
    assert len(rows_of(folders[best] / "metrics.jsonl")) == 6
    assert len(again.lineage) == 2


@pytest.mark.usefixtures("cluster")
def test_an_error_of_one_run_ends_the_others_in_order(model_path, data_path, tmp_path):
    job = tmp_path / "run.yaml"
    job.write_text(config_of(model_path, data_path, tmp_path, ["run.steps=60", "checkpoint.every=1"]).to_yaml())
    file = tmp_path / "population.yaml"
    file.write_text(
        f"config: [{job}]\nmembers: 2\nsearch: random\nkeys: {{algorithm.clip_high: {{low: 0.2, high: 0.4}}}}\n"
    )
    blocked = tmp_path / "run" / "member1" / "checkpoints"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where its checkpoints would be")
    with pytest.raises(CheckpointError):
        run_population(file)
    ends = {}
    for number in range(2):
        events = (tmp_path / "run" / f"member{number}" / "events.jsonl").read_text().splitlines()
        (ends[number],) = (json.loads(line)["reason"] for line in events if '"kind":"run_ended"' in line)
    assert ends == {0: "interrupted", 1: "failed"}
