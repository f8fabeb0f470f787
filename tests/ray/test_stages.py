"""The example of three stages: demonstrations, preferences, rewards, each from the folder of the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.sort import stages
from examples.sort.prepare import Recipe, prepare
from rlsys.config import Config

pytestmark = pytest.mark.ray


@pytest.mark.nightly
def test_sft_dpo_and_grpo_train_one_after_the_other(cluster, tmp_path: Path) -> None:
    prepare(tmp_path / "seed3", Recipe(seed=3, steps=40, batch_size=64, num_train=300, num_eval=8))
    accuracies = stages.train(tmp_path / "seed3", tmp_path / "runs", seed=3, steps=2, rows=100)
    assert list(accuracies) == ["sft", "dpo", "grpo"]
    for before, stage in (("sft", "dpo"), ("dpo", "grpo")):
        model = Path(Config.load(tmp_path / "runs" / stage / "config.resolved.yaml").model.path)
        assert model == tmp_path / "runs" / before / "checkpoints" / "step_000002" / "model"
    rows = [json.loads(line) for line in (tmp_path / "runs" / "dpo" / "metrics.jsonl").open()]
    assert {"dpo/accuracy", "dpo/margin"} <= {name for row in rows for name in row}
