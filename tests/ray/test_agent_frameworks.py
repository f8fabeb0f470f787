"""Whole runs in which the policy is asked by agents of frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measure import rows_of
from examples.agent_frameworks.prepare import prepare
from examples.sort.prepare import Recipe
from rlsys import train
from tests.jobs import config_of

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("framework", ["openai_agents", "smolagents"])
def test_an_agent_of_a_framework_is_trained_as_it_is(cluster, framework: str, tmp_path: Path):
    prepare(tmp_path / "files", Recipe(steps=30, num_train=64, num_eval=8))
    agent = f"examples.agent_frameworks.agents:with_{framework}"
    keys = [f"rollout.workflow={{type: openai_agent, agent: '{agent}'}}", "rollout.max_new_tokens=9", "reward.fn="]
    files = (tmp_path / "files" / "model", tmp_path / "files" / "train.jsonl")
    config = config_of(*files, tmp_path, [*keys, "run.steps=2"])
    train(config, progress=False)
    rows = rows_of(config.run_dir / "metrics.jsonl")
    assert len(rows) == 2 and all(row["reward/failed_frac"] == 0 for row in rows)
    assert any(row["update/grad_norm"] > 0 for row in rows)
