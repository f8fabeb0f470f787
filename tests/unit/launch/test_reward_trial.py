"""The reward functions of a job, called before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.launch.reward_trial import try_rewards

pytestmark = pytest.mark.slow

BY_LENGTH = "def judge(completion, answer):\n    return {'score': len(completion), 'right': completion == answer}\n"


def config_of(folder: Path, judge: str, *keys: str, row: dict | None = None) -> Config:
    (folder / "judge.py").write_text(judge)
    (folder / "rows.jsonl").write_text(json.dumps(row or {"prompt": "2+3?", "answer": "five", "id": "sum"}) + "\n")
    needed = ["run.steps=1", "model.path=m", f"data.path={folder}/rows.jsonl", f"reward.fn={folder}/judge.py:judge"]
    return Config.load([], [*needed, *keys])


def test_the_answer_of_the_first_task_is_scored(tmp_path: Path):
    (tried,) = try_rewards(config_of(tmp_path, BY_LENGTH))
    assert tried.line() == "reward of the reply 'five' to task 'sum': 4.0, judge 4, judge/right 1"


def test_each_source_is_tried_with_its_own_functions(tmp_path: Path):
    config = config_of(tmp_path, BY_LENGTH)
    rows = tmp_path / "rows.jsonl"
    sources = f"data=[{{path: {rows}, name: a}}, {{path: {rows}, name: b}}]"
    keys = ["run.steps=1", "model.path=m", f"reward.fn=[{{fn: {config.reward.fn}}}, {{fn: exact, source: b}}]", sources]
    assert [tried.score.value for tried in try_rewards(Config.load([], keys))] == [4.0, 1.0]


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (
            "def judge(completion): return int(completion)\n",
            r"judge: raised ValueError: invalid literal.* at .*judge\.py",
        ),
        ("def judge(completion): return 'good'\n", r"judge: returned 'good' \(str\), not a number"),
        ("import os\ndef judge(completion): os._exit(3)\n", "its process ended with exit code 3"),
        ("import time\ndef judge(completion): time.sleep(60)\n", "took longer than 1 s"),
    ],
)
def test_a_function_that_cannot_score_the_answer_is_named(tmp_path: Path, judge: str, words: str):
    with pytest.raises(ConfigError, match=rf"data\.path: the reward of the reply 'five' to task sum fails: .*{words}"):
        try_rewards(config_of(tmp_path, judge, "reward.timeout_s=1"))


def test_a_row_without_the_answer_that_a_reward_needs_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="task sum fails: exact: the row has no answer"):
        try_rewards(config_of(tmp_path, BY_LENGTH, "reward.fn=exact", row={"prompt": "2+3?", "id": "sum"}))


def test_servers_and_rewards_of_workflows_are_not_tried(tmp_path: Path):
    raises = "def judge(completion): raise RuntimeError('called')\n"
    assert try_rewards(config_of(tmp_path, raises, "rollout.workflow=lead_subagents")) == []
    server = "reward.fn=[{fn: http, args: {url: 'http://127.0.0.1:1'}}]"
    assert try_rewards(config_of(tmp_path, raises, server, "reward.timeout_s=31")) == []
