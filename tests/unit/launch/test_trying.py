"""`rlsys workflow try`: one session, with the model of a configuration or a scripted policy, and no Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import ray
from typer.testing import CliRunner, Result

from examples.tiny_policy import build_tokenizer
from rlsys.agents.workflow import Session, Workflow
from rlsys.cli import app
from rlsys.errors import ConfigError, DataError, RlsysError, WorkflowError
from rlsys.types import Distribution, Task
from tests.models import tiny_sorter

ROW = '{"prompt": "2+3?", "answer": 5, "id": "sum"}'


class Asks(Workflow):
    """A lead that asks a helper, and breaks on some tasks."""

    async def run(self, session: Session) -> None:
        lead = session.agent("lead", system="Lead.")
        await lead.chat(session.task.prompt)
        helper = session.agent("helper", parent=lead)
        said = await helper.chat("help me>")
        session.reward(float(said == session.task.answer), helper)
        if session.task.id == "broken":
            _ = session.task.info["nothing"]


class Refuses(Asks):
    """Plays no task without an answer."""

    def check(self, tasks: Sequence[Task], *, group_size: int, distribution: Distribution) -> None:
        if any(task.answer is None for task in tasks):
            raise DataError("there is a task without an answer")


def echo(prompt: str) -> str:
    """The last letters, and a code that would colour a terminal."""
    return f"{prompt[-5:-1]}\x1b[31m"


def tried(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["workflow", "try", *arguments])


ASKS = f"{__name__}:Asks"
REFUSES = f"{__name__}:Refuses"


def test_a_scripted_session_is_printed_line_by_line():
    done = tried(ASKS, "--task", ROW, "--policy", f"{__name__}:echo")
    assert done.stdout.splitlines() == [
        "Asks on task sum",
        "[lead] system: Lead.",
        "[lead] user: 2+3?",
        "[lead] assistant: tant\\x1b[31m",
        "[helper#1] user: help me>",
        "[helper#1] assistant: p me\\x1b[31m",
        "#0 lead: ok, turns 1, tokens 9",
        "#1 helper of #0: ok, turns 1, tokens 9, reward 0",
        "#0 lead, sample 1:",
        "  context <system>Lead.",
        "          <user>2+3?",
        "          <assistant>",
        "  trained tant\ufffd[31m",
        "#1 helper, sample 1:",
        "  context help me>",
        "  trained p me\ufffd[31m",
    ]


def test_the_same_as_json_is_uncut():
    done = tried(ASKS, "--task", ROW, "--policy", "scripted:5", "--json", "--reward", "reward.fn=exact")
    shown = json.loads(done.stdout)
    assert [said["role"] for said in shown["said"]] == ["system", "user", "assistant", "user", "assistant"]
    assert shown["agents"][1] == {
        "index": 1, "agent": "helper", "parent": 0, "policy": "policy", "turns": 1, "tokens": 1, "outcome": "ok",
        "reason": "", "reward": 1.0,
    }  # fmt: skip
    assert shown["reward"]["value"] == 1.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("job")
    tiny_sorter().save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": f"{n}>", "answer": str(n), **({"id": "named"} if n == 21 else {})} for n in (12, 21, 31)]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "run.yaml").write_text(
        f"run: {{steps: 5}}\nmodel: {{path: {folder / 'model'}}}\ndata: {{path: {folder / 'tasks.jsonl'}}}\n"
        "reward: {fn: exact}\nrollout: {max_new_tokens: 8}\n"
    )
    return str(folder / "run.yaml")


def test_a_model_session_is_reproducible_by_seed_without_ray(job: str):
    was_there = ray.is_initialized()
    first, again, other = (tried(job, "--json", "--reward", "--seed", seed).stdout for seed in "112")
    assert ray.is_initialized() == was_there
    assert first == again != other
    shown = json.loads(first)
    assert shown["said"][0] == {"agent": "policy", "role": "user", "text": "12>"}
    assert 0 < shown["agents"][0]["tokens"] <= 8
    (sample,) = shown["samples"]
    assert sample["heading"].endswith(", replies end at <eos>:")
    assert sample["parts"][0] == [False, "12>"] and sample["parts"][1][0] is True
    assert isinstance(shown["reward"]["value"], float)


@pytest.mark.parametrize(("task", "prompt"), [("1", "21>"), ("named", "21>"), ("2", "31>")])
def test_a_task_is_found_by_number_or_id(job: str, task: str, prompt: str):
    done = tried(job, "--task", task, "--policy", "scripted:5")
    assert f"[policy] user: {prompt}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["JOB", "--task", "3"], DataError, "has 3 tasks, 0 to 2, and no such id"),
        (["JOB", "--task", '{"answer": 3}'], DataError, "not a row of data: no `prompt`"),
        (["JOB", "--task", "{"], DataError, "not a row of data: "),
        (["JOB", "rollout.workflow=nobody"], ConfigError, "no workflow is named 'nobody'"),
        (["JOB", ASKS], ConfigError, "give configuration files, or one workflow"),
        (
            ["JOB", "--policy", "nowhere:f"],
            ConfigError,
            "--policy: cannot import policy 'nowhere:f': ModuleNotFoundError",
        ),
        (
            ["JOB", "--policy", "json:f"],
            ConfigError,
            "module 'json' has no 'f'; give scripted:REPLY, or module:function",
        ),
        (["JOB", "--policy", "scripted"], ConfigError, "policy 'scripted' is not of the form"),
        (["single_trun"], ConfigError, "did you mean `single_turn`?"),
        ([REFUSES, "--task", '{"prompt": "?"}', "--policy", "scripted:1"], DataError, "a task without an answer"),
        ([ASKS], DataError, "there is no data to find it in; give a row"),
        ([ASKS, "--task", ROW], ConfigError, "there is no model to play: give a configuration file"),
        (
            ["JOB", "--reward", "reward.fn=[{fn: model, args: {path: m}}]"],
            ConfigError,
            "no reward function to judge by",
        ),
    ],
)
def test_what_cannot_be_tried_is_named(job: str, arguments: list[str], kind: type[Exception], message: str):
    done = tried(*(job if word == "JOB" else word for word in arguments))
    assert isinstance(done.exception, RlsysError) and isinstance(done.exception, kind)
    assert message in str(done.exception)
    assert done.exception.exit_code == 2


def test_a_bug_shows_the_authors_line_and_what_was_said():
    done = tried(ASKS, "--task", '{"prompt": "a>", "id": "broken"}', "--policy", "scripted:5")
    assert isinstance(done.exception, WorkflowError)
    text = str(done.exception)
    assert 'in run\n    _ = session.task.info["nothing"]' in text
    assert text.endswith("[helper#1] user: help me>\n[helper#1] assistant: 5")
    assert done.exception.exit_code == 1
