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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is right now and then, and its tasks."""
    folder = tmp_path_factory.mktemp("sorter")
    prepare(folder, Recipe(steps=250, batch_size=64, num_train=64, num_eval=8))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("framework", ["openai_agents", "smolagents"])
def test_an_agent_of_a_framework_is_trained_as_it_is(cluster, framework: str, files: Path, tmp_path: Path):
    agent = f"examples.agent_frameworks.agents:with_{framework}"
    keys = [
        f"rollout.workflow={{type: openai_agent, agent: '{agent}'}}",
        "rollout.max_new_tokens=9",
        "reward.fn=",
        "run.steps=2",
        "train.groups_per_step=4",
        "algorithm.group_size=8",
    ]
    config = config_of(files / "model", files / "train.jsonl", tmp_path, keys)
    train(config, progress=False)
    rows = rows_of(config.run_dir / "metrics.jsonl")
    assert len(rows) == 2
    assert all(row["reward/failed_frac"] == 0 for row in rows)
    assert any(row["optim/grad_norm"] > 0 for row in rows)
