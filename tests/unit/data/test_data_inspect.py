"""Output of `rlsys data inspect` for a file, with and without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from rlsys.cli import app
from rlsys.data.inspection import ColumnReport, Inspection, Lengths, TemplateReport, inspect, lines_of
from rlsys.errors import DataError, ModelError
from rlsys.launch import inspect_data

pytestmark = pytest.mark.slow

PLAIN = """\
{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<end>{% endfor %}
{%- if add_generation_prompt %}<a>{% endif %}"""
FORGETTING = PLAIN.replace("m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)")
"""Leaves the reasoning of earlier turns out, as many reasoning models do."""
REWRITING = PLAIN.replace("<end>{% endfor", "{{ '' if loop.last else '.' }}<end>{% endfor")
"""Ends every message but the last with a dot."""
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN

ROWS = [
    {
        "prompt": [{"role": "system", "content": "ab"}, {"role": "user", "content": f"{'2+' * n}3?"}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * n + 3)},
        "data_source": "sums" if n else None,
    }
    for n in range(4)
]


def text_of(found: Inspection) -> str:
    return "\n".join(lines_of(found))


def rows_in(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def model_in(folder: Path, template: str | None) -> str:
    """A tokenizer of characters and markers, as a model folder."""
    symbols = ["<end>", "<s>", "<u>", "<a>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(".|\\n"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(symbols[:4])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return str(folder / "model")


def template_of(folder: Path, template: str) -> TemplateReport:
    found = inspect_data(rows_in(folder, *ROWS), model=model_in(folder, template)).template
    assert found is not None
    return found


def test_columns_are_listed_with_what_they_became(tmp_path: Path):
    found = inspect(rows_in(tmp_path, *ROWS))
    assert (found.kind, found.num_rows, found.num_answers) == ("verl", 4, 4)
    assert found.columns == (
        ColumnReport("prompt", 4, ("prompt",)),
        ColumnReport("reward_model", 4, ("answer (reward_model.ground_truth)", "info.reward_model")),
        ColumnReport("data_source", 3, ("info.data_source",)),
    )
    assert [task.answer for task in found.tasks] == ["3", "5"]
    plain = inspect(rows_in(tmp_path, {"problem": "2+3?", "answer": "5", "info": {"n": 1}}), {"prompt": "problem"})
    assert plain.kind == "plain"
    assert [column.became for column in plain.columns] == [("prompt", "info.problem"), ("answer",), ("info.*",)]


def test_the_split_that_was_read_is_named(tmp_path: Path):
    (tmp_path / "set").mkdir()
    rows_in(tmp_path / "set", *ROWS).rename(tmp_path / "set" / "test.jsonl")
    found = inspect(tmp_path / "set")
    assert found.split == "test"
    assert text_of(found).startswith(f"{tmp_path}/set: split test, verl, 4 rows, 4 with an answer\n")


def test_without_a_model_characters_are_counted_and_nothing_is_rendered(tmp_path: Path):
    found = inspect_data(rows_in(tmp_path, *ROWS))
    assert found.lengths == Lengths("characters", 4, 6, 10, 10, 10)
    assert (found.num_too_long, found.first_prompt, found.template) == (None, None, None)
    assert "chat template" not in text_of(found)


def test_prompts_are_rendered_and_counted_with_the_chat_template(tmp_path: Path):
    found = inspect_data(rows_in(tmp_path, *ROWS), model=model_in(tmp_path, PLAIN), max_prompt_tokens=11)
    assert found.first_prompt == "<s>ab<end><u>3?<end><a>"
    assert found.lengths == Lengths("tokens", 9, 11, 15, 15, 15)
    assert found.num_too_long == 2


def test_a_text_prompt_is_shown_without_a_template(tmp_path: Path):
    found = inspect_data(rows_in(tmp_path, {"prompt": "2+3?"}), model=model_in(tmp_path, None))
    assert (found.first_prompt, found.template) == ("2+3?", None)
    assert "chat template: none; prompts must be plain text" in text_of(found)


def test_a_text_prompt_is_a_users_message_where_there_is_a_template(tmp_path: Path):
    path, model = rows_in(tmp_path, {"prompt": "2+3?"}), model_in(tmp_path, PLAIN)
    assert inspect_data(path, model=model).first_prompt == "<u>2+3?<end><a>"
    shown = CliRunner().invoke(app, ["data", "inspect", str(path), "--model", model, "--chat", "system=ab"]).stdout
    assert "\n<s>ab<end><u>2+3?<end><a>\n" in shown


@pytest.mark.parametrize(
    ("template", "keeps_turns", "keeps_reasoning", "says"),
    [
        (PLAIN, True, True, "keeps earlier turns, so a conversation is one sample"),
        (FORGETTING, True, False, "keeps earlier turns but for their <think> part, so turns that think are samples of"),
        (REWRITING, False, False, "rewrites earlier turns, so every turn of a conversation is a separate sample"),
    ],
)
def test_a_template_is_tried_for_keeping_what_came_before(tmp_path: Path, template, keeps_turns, keeps_reasoning, says):
    found = inspect_data(rows_in(tmp_path, *ROWS), model=model_in(tmp_path, template))
    assert found.template is not None
    assert (found.template.keeps_turns, found.template.keeps_reasoning) == (keeps_turns, keeps_reasoning)
    assert f"chat template {found.template.hash}: {says}" in text_of(found)


def test_the_hash_of_a_template_is_that_of_its_text(tmp_path: Path):
    hashes = [template_of(tmp_path, template).hash for template in (PLAIN, FORGETTING, PLAIN)]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_prompt_that_the_template_refuses_is_a_data_error(tmp_path: Path):
    path, model = rows_in(tmp_path, *ROWS), model_in(tmp_path, STRICT)
    with pytest.raises(DataError, match=r"the chat template of .*/model' refuses .*: no system role"):
        inspect_data(path, model=model)
    with pytest.raises(DataError, match=r"the model '.*' has no chat template"):
        inspect_data(path, model=model_in(tmp_path / "bare", None))
    with pytest.raises(ModelError, match="no tokenizer at"):
        inspect_data(path, model=str(tmp_path / "nothing"))


@given(st.lists(st.integers(0, 1000), min_size=1), st.randoms())
def test_a_percentile_is_the_least_length_that_covers_its_share(lengths: list[int], random):
    found = Lengths.of("tokens", lengths)
    for percent, length in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert (
            100 * sum(n <= length for n in lengths) >= percent * len(lengths) > 100 * sum(n < length for n in lengths)
        )
    assert (found.min, found.max) == (min(lengths), max(lengths))
    random.shuffle(lengths)
    assert Lengths.of("tokens", lengths) == found


# ------------------------------------------------------------------------------------------------------ command line


def test_the_command_prints_all_of_it_as_text(tmp_path: Path):
    path, model = rows_in(tmp_path, *ROWS), model_in(tmp_path, PLAIN)
    done = CliRunner().invoke(app, ["data", "inspect", str(path), "--model", model, "--max-prompt-tokens", "11"])
    digest = template_of(tmp_path, PLAIN).hash
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        f"{path}: verl, 4 rows, 4 with an answer",
        "",
        "  prompt               4 rows   prompt",
        "  reward_model         4 rows   answer (reward_model.ground_truth), info.reward_model",
        "  data_source          3 rows   info.data_source",
        "",
        f"task 1, id {inspect(path).tasks[0].id}",
        "  prompt  system: ab",
        "  prompt  user: 3?",
        "  answer  3",
        '  info    {"reward_model":{"style":"rule","ground_truth":"3"},"data_source":null,"ground_truth":"3"}',
        "",
        f"task 2, id {inspect(path).tasks[1].id}",
        "  prompt  system: ab",
        "  prompt  user: 2+3?",
        "  answer  5",
        '  info    {"reward_model":{"style":"rule","ground_truth":"5"},"data_source":"sums","ground_truth":"5"}',
        "",
        "the first prompt as the model sees it:",
        "<s>ab<end><u>3?<end><a>",
        "",
        "the policy samples and trains what follows, up to and including one of: <end>",
        "",
        "prompts, in tokens: min 9, p50 11, p90 15, p99 15, max 15; 2 of 4 are longer than 11",
        f"chat template {digest}: keeps earlier turns, so a conversation is one sample",
    ]


def test_the_command_prints_json_and_takes_names_of_columns(tmp_path: Path):
    path = rows_in(tmp_path, {"problem": "a" * 300, "meta": {"gold": 5}})
    names = ["--columns", "prompt=problem", "--columns", "answer=meta.gold"]
    done = CliRunner().invoke(app, ["data", "inspect", str(path), "--json", *names])
    found = json.loads(done.stdout)
    assert (found["kind"], found["lengths"]["max"], found["tasks"][0]["prompt"]) == ("plain", 300, "a" * 300)
    assert found["tasks"][0]["answer"] == "5"
    assert "aaa... (300 characters)" in CliRunner().invoke(app, ["data", "inspect", str(path), *names]).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--columns", "promt=problem"], "columns.promt: unknown key; did you mean `columns.prompt`?"),
        (["--columns", "problem"], "--columns problem: give OURS=THEIRS, as in prompt=problem"),
        (["--max-prompt-tokens", "9"], "--max-prompt-tokens needs --model"),
        ([], "if it has another name, say so: data.columns: {prompt: problem}"),
    ],
)
def test_wrong_command_usage_exits_with_2_and_a_remedy(tmp_path: Path, options: list[str], message: str):
    path = rows_in(tmp_path, {"problem": "2+3?"})
    rlsys = Path(sys.executable).with_name("rlsys")
    done = subprocess.run([rlsys, "data", "inspect", path, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


def test_without_a_model_nothing_heavy_is_loaded(tmp_path: Path):
    program = "import sys; from rlsys.launch import inspect_data; inspect_data(sys.argv[1])\n"
    program += "print([m for m in ('torch', 'ray', 'transformers', 'datasets', 'workers') if m in sys.modules])"
    command = [sys.executable, "-c", program, rows_in(tmp_path, *ROWS)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
