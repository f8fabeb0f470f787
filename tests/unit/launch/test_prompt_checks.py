"""What a dry run says about the model's tokenizer, its chat template and the prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.tiny_policy import build_tokenizer
from rlsys.cli import app
from rlsys.config import Config
from rlsys.errors import DataError, ModelError, RlsysError
from rlsys.launch.preflight import look_up, with_steps
from tests.models import tiny_sorter

STRICT = "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' }}{{ m.content }}{% endfor %}"


def dry_run(tmp_path: Path, *prompts: object, template: str | None = None, keys: tuple[str, ...] = ()) -> RlsysError:
    model = tmp_path / "model"
    tiny_sorter().save_pretrained(model)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'prompt': prompt, 'answer': '1'})}\n" for prompt in prompts))
    (tmp_path / "run.yaml").write_text(
        f"run: {{steps: 2}}\nmodel: {{path: {model}}}\ndata: {{path: {rows}, max_prompt_tokens: 8}}\n"
        "reward: {fn: exact}\nrollout: {max_new_tokens: 4}\n"
    )
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--dry-run", *keys])
    assert isinstance(done.exception, RlsysError), done.output
    return done.exception


def chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "12"} for role in roles]  # digits: the tokenizer knows nothing else


def test_a_model_that_is_nowhere_is_named(tmp_path: Path):
    error = dry_run(tmp_path, "12>", keys=("model.path=models/nope",))
    assert isinstance(error, ModelError)
    assert str(error).startswith(
        "model.path: there is no folder models/nope, and as a model of the hub it does not load"
    )


def test_a_conversation_that_the_template_refuses_is_named_wherever_it_is(tmp_path: Path):
    rows = [chat("user")] * 150 + [chat("system", "user")]
    error = dry_run(tmp_path, *rows, template=STRICT, keys=("data.max_prompt_tokens=40",))
    assert isinstance(error, DataError)
    assert "the chat template of" in str(error) and "refuses a conversation of system, user" in str(error)


def test_messages_without_a_template_are_refused(tmp_path: Path):
    assert "has no chat template" in str(dry_run(tmp_path, chat("user")))


def test_prompts_that_are_all_too_long_are_refused(tmp_path: Path):
    error = dry_run(tmp_path, "123456789>", "1234567890>")
    assert (
        "none of the 2 prompts has at most 8 tokens, and the first 2 have 10 to 11: raise data.max_prompt_tokens"
        in str(error)
    )


def test_prompts_that_are_too_long_are_left_out_and_counted(model_path: Path, tmp_path: Path):
    rows = [{"prompt": f"{10 ** (i % 10)}>", "answer": "1", "id": str(i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = ["run.epochs=1", f"model.path={model_path}", f"data={{path: {tmp_path}/rows.jsonl, max_prompt_tokens: 4}}"]
    config = with_steps(Config.load([], [*keys, "train.groups_per_step=3", "reward.fn=exact"]))
    assert config.run.steps == 4, "an epoch is 12 tasks"
    for _ in range(2):  # measured, and remembered
        data = look_up(config)
        assert {data.train.next().id for _ in range(12)} == {str(i) for i in range(40) if i % 10 < 3}
        (note,) = data.notes
        assert note.startswith(
            "data.path: 28 of 40 prompts are left out: they have more than data.max_prompt_tokens = 4"
        )


def test_a_text_that_is_rendered_already_is_refused(tmp_path: Path):
    error = dry_run(tmp_path, *["12"] * 200, "13<eos>", "14<eos>", template=STRICT)
    assert "(and 1 more): its prompt contains <eos>, so it seems to be in a chat template already" in str(error)


@pytest.mark.parametrize("problem", ["nope.jinja", "{{ unclosed"])
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, problem: str):
    error = dry_run(tmp_path, "12>", keys=(f"rollout.chat.template='{problem}'",))
    assert "chat template" in str(error) or "rollout.chat.template" in str(error)
