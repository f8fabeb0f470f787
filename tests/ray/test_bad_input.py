"""Bad input ends with a message and an exit code, without a traceback, and nothing that was saved is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys import train
from rlsys.errors import CheckpointError, ConfigError, RunAborted
from rlsys.loop.checkpoint_files import find_latest
from rlsys.replay.rollout_parquet import read_records
from rlsys.types import OutcomeKind
from tests.jobs import config_of, keys_of
from tests.ray.commands import Ended, rlsys

pytestmark = pytest.mark.usefixtures("cluster")

JUDGE = """
import time

def judge(completion: str, prompt: str) -> object:
    match prompt[0]:
        case "0": raise ValueError("no digits")
        case "1": time.sleep(600)
        case "2": return float("nan")
        case "3": return None
        case "4": return "good"
    return sum(c.isdigit() for c in completion) / 8

def silent(completion: str) -> None:
    return None
"""


def command(keys: list[str], *more: str, folder: Path) -> Ended:
    """`rlsys train` on the command line, without a terminal."""
    file = folder / "job.yaml"
    file.write_text("run: {steps: 4}\n")
    ended = rlsys("train", file, *keys, *more)
    assert "Traceback" not in ended.stderr
    return ended


@pytest.fixture
def keys(model_path: Path, data_path: Path, tmp_path: Path) -> list[str]:
    return keys_of(model_path, data_path, tmp_path)


# ------------------------------------------------------------------------------------- refused before anything runs


def test_data_that_cannot_be_read_is_named(keys, tmp_path):
    ended = command(keys, "data.path=/no/such/tasks.jsonl", folder=tmp_path)
    assert ended.code == 2
    last = ended.stderr.splitlines()[-1]
    assert last == "rlsys: data.path: cannot read /no/such/tasks.jsonl: No such file or directory"


@pytest.mark.nightly
def test_a_row_without_a_prompt_is_named_with_its_line(keys, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "1>"}\n{"question": "2>", "answer": 3}\n')
    ended = command(keys, f"data.path={path}", folder=tmp_path)
    assert ended.code == 2
    assert f"{path}:2: no `prompt`; the row has question, answer" in ended.stderr


@pytest.mark.nightly
def test_a_run_that_failed_before_its_first_step_may_restart(keys, tmp_path):
    for name in ("one.jsonl", "two.jsonl"):
        ended = command(keys, f"data.path={name}", folder=tmp_path)
        assert f"cannot read {name}" in ended.stderr


@pytest.mark.nightly
def test_a_reward_function_with_a_missing_column_is_refused(keys, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(completion, difficulty): return 0.0\n")
    ended = command(keys, f"reward.fn={judge}:judge", folder=tmp_path)
    assert ended.code == 2
    assert "asks for difficulty, which not every row has" in ended.stderr


@pytest.mark.nightly
def test_must_resume_without_a_checkpoint_is_refused_and_writes_nothing(keys, tmp_path):
    ended = command(keys, "run.resume=must", folder=tmp_path)
    assert ended.code == 1
    assert ended.stderr == f"rlsys: run.resume is must, and {tmp_path / 'run'} has no complete checkpoint\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_missing_model_path_is_named_by_the_command(keys, tmp_path):
    ended = command(keys, "model.path=/no/such/model", folder=tmp_path)
    assert ended.code == 2
    assert "/no/such/model" in ended.stderr.splitlines()[-1]


# -------------------------------------------------------------------------------------------- found out on the way


def judge_in(folder: Path, name: str = "judge") -> str:
    path = folder / "judge.py"
    path.write_text(JUDGE)
    return f"{path}:{name}"


@pytest.mark.nightly
def test_a_run_of_overlong_prompts_ends_naming_limit_and_key(model_path, tmp_path):
    path = tmp_path / "rows.jsonl"  # all but the last: a run whose prompts are all too long does not start
    path.write_text(
        "".join(f'{{"prompt": "{prompt}", "answer": "1"}}\n' for prompt in ["12>", "21>", "31>", "13>", ">"])
    )
    keys = ["data.max_prompt_tokens=1", "data.shuffle=false"]
    config = config_of(model_path, path, tmp_path, keys)
    with pytest.raises(
        RunAborted, match=r"of the last 100 groups failed.* allowed are 1 to data\.max_prompt_tokens = 1"
    ):
        train(config, progress=False)


@pytest.mark.nightly
def test_a_failing_judge_drops_only_its_groups_with_the_reason(model_path, data_path, tmp_path):
    overrides = [f"reward.fn={judge_in(tmp_path)}", "reward.timeout_s=1", "reward.concurrency=4", "run.steps=8"]
    config = config_of(model_path, data_path, tmp_path, overrides)
    assert train(config, progress=False).steps == 8
    records = [r for p in (config.run_dir / "rollouts").iterdir() for r in read_records(p)]
    assert len(records) == 8 * 4
    assert not [r for r in records if str(r.task.prompt)[0] in "01234"]
    assert all(t.outcome.kind is not OutcomeKind.FAILED for r in records for e in r.episodes for t in e.trajectories)
    events = [json.loads(line) for line in (config.run_dir / "events.jsonl").read_text().splitlines()]
    dropped = [e for e in events if e["kind"] == "group_dropped"]
    assert {e["reason"] for e in dropped} == {"failed"}
    for words in (
        "raised ValueError: no digits at",
        "took longer than 1 s",
        "returned nan",
        "no reward function applies",
        "(str)",
    ):
        assert any(words in e["detail"] for e in dropped), words


@pytest.mark.nightly
def test_what_was_saved_before_bad_input_is_still_there(model_path, data_path, tmp_path):
    train(config_of(model_path, data_path, tmp_path, ["run.steps=2"]), progress=False)
    latest = find_latest(tmp_path / "run" / "checkpoints")
    assert latest is not None
    before = {p: p.read_bytes() for p in latest.rglob("*") if p.is_file()}
    silent = f"reward.fn={judge_in(tmp_path, 'silent')}"
    for overrides, error in (
        (["run.steps=4"], ConfigError),
        (["run.steps=4", "run.resume=/no/such/run"], CheckpointError),
        (["run.steps=4", "run.resume=must", "rollout.replicas=90"], ConfigError),
        (
            ["run.steps=4", "run.resume=must", silent],
            RunAborted,
        ),
    ):
        with pytest.raises(error):
            train(config_of(model_path, data_path, tmp_path, overrides), progress=False)
    assert find_latest(tmp_path / "run" / "checkpoints") == latest
    assert {p: p.read_bytes() for p in before} == before
    assert train(config_of(model_path, data_path, tmp_path, ["run.resume=must"]), progress=False).steps == 4
