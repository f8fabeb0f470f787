"""Rows and reward functions as users have them train as they are."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

import rlsys
from tests.jobs import config_of

FORMS = {
    "plain": {"prompt": "312>", "answer": "123"},
    "trl": {"prompt": "312>", "ground_truth": "123", "level": "easy"},
    "verl": {
        "data_source": "me/sorting",
        "prompt": [{"role": "user", "content": "312"}],
        "ability": "sort",
        "reward_model": {"style": "rule", "ground_truth": "123"},
        "extra_info": {"split": "train", "index": 0},
    },
    "skyrl": {
        "data_source": "me/sorting",
        "prompt": [{"role": "user", "content": "312"}],
        "env_class": "sort",
        "reward_spec": {"method": "rule", "ground_truth": "123"},
        "extra_info": {"index": 0},
    },
}
REWARDS = {
    "plain": """
        def reward(completion, answer):
            return sum(a == b for a, b in zip(completion, answer)) / 3
    """,
    "trl": """
        import re

        def reward(completions, ground_truth, **kwargs):
            found = [re.search(r"[0-9]+", completion) for completion in completions]
            contents = [match.group(0) if match else "" for match in found]
            return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
    """,
    "verl": """
        def reward(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "me/sorting" and extra_info["split"] == "train"
            return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
    """,
    "skyrl": """
        import asyncio

        async def reward(completion, reward_spec):
            await asyncio.sleep(0)
            return float(completion.startswith(reward_spec["ground_truth"][0]))
    """,
}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"


@pytest.fixture(scope="module")
def chat_model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    from shutil import copytree

    folder = copytree(model_path, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


@pytest.mark.parametrize("form", [pytest.param(n, marks=[pytest.mark.nightly] if n != "verl" else []) for n in FORMS])
def test_rows_and_rewards_of_each_form_train_without_adapter_code(form, cluster, chat_model, tmp_path):
    data, reward = tmp_path / "rows.jsonl", tmp_path / "my_reward.py"
    data.write_text("".join(json.dumps(FORMS[form]) + "\n" for _ in range(8)))
    reward.write_text(dedent(REWARDS[form]))
    overrides = [f"reward.fn={reward}:reward", "run.steps=1", "checkpoint.every=0"]
    result = rlsys.train(config_of(chat_model, data, tmp_path, overrides), progress=False)
    assert result.steps == 1
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/failed_frac"] == 0
    assert 0 <= metrics["reward/mean"] <= 1
