"""Rows of verl, SkyRL and TRL train unchanged; other names need one line of configuration."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import Config
from rlsys.data.row_adapters import AS_FOUND, PARTS, Columns, sniff, task_of, unpack_row
from rlsys.data.task_file import load_tasks, read
from rlsys.errors import ConfigError, DataError
from rlsys.launch import evaluate, train
from rlsys.rewards.reward_function import RewardFunction, RewardInput
from rlsys.types import Task

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
EXTRA: dict[str, Any] = {"split": "train", "index": 7}

FORMS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": ASKED, "answer": "5", "level": "easy"},
    "trl": {"prompt": ASKED, "ground_truth": "5", "level": "easy"},
    "verl": {
        "data_source": "sums",
        "prompt": ASKED,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": EXTRA,
    },
    "skyrl": {
        "data_source": "sums",
        "prompt": ASKED,
        "env_class": "sums",
        "reward_spec": {"method": "rule", "ground_truth": "5"},
        "extra_info": EXTRA,
    },
}


def as_jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def as_parquet(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.parquet"
    names = list(dict.fromkeys(name for row in rows for name in row))
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
    return path


def as_folder(folder: Path, *rows: dict[str, Any]) -> Path:
    import datasets

    path = folder / "rows"
    datasets.Dataset.from_parquet(str(as_parquet(folder, *rows))).with_format("numpy").save_to_disk(str(path))  # type: ignore[union-attr]
    return path


def adapted(*rows: dict[str, Any], columns: Columns = AS_FOUND) -> list[Task]:
    """As a file of these rows is read, without the file."""
    parsed = [unpack_row(row) for row in rows]
    layout = sniff(parsed, columns)
    return [task_of(row, layout) for row in parsed]


def complaint(folder: Path, *rows: object, columns: Columns = AS_FOUND) -> str:
    with pytest.raises(DataError) as caught:
        load_tasks(as_jsonl(folder, *rows), columns)
    return str(caught.value).replace(f"{folder}/", "")


# --------------------------------------------------------------------------------------------------------- the forms


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_folder])
@pytest.mark.parametrize("kind", FORMS)
def test_a_form_is_detected_by_columns_in_any_file_type(tmp_path: Path, kind: str, write):
    second = {**FORMS[kind], "prompt": ASKED[1:]}
    file = read(write(tmp_path, FORMS[kind], second))
    assert file.layout.form.kind == kind
    assert [(task.prompt, task.answer) for task in file.tasks] == [(tuple(ASKED), "5"), (tuple(ASKED[1:]), "5")]


@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
@pytest.mark.parametrize("kind", ["verl", "skyrl"])
def test_a_compute_score_of_verl_finds_all_it_asks_for(tmp_path: Path, kind: str, write):
    (tmp_path / "verl.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return (data_source, solution_str, ground_truth, extra_info) == ('sums', 'so 5', '5', {EXTRA})\n"
    )
    (task,) = load_tasks(write(tmp_path, FORMS[kind]))
    (said,) = RewardFunction.load(f"{tmp_path}/verl.py:compute_score").begin(task, [RewardInput("so 5")])
    assert said is True


def test_text_prompts_and_alternative_column_names_are_found():
    assert [t.prompt for t in adapted({"question": "2+3?"})] == ["2+3?"]
    assert [t.prompt for t in adapted({"messages": ASKED})] == [tuple(ASKED)]
    for name in ("ground_truth", "solution", "label"):
        assert [t.answer for t in adapted({"prompt": "2+3?", name: 5})] == ["5"]


def test_the_answer_comes_from_one_column_in_the_whole_file():
    proof, sum_ = {"prompt": "a", "solution": "long", "answer": None}, {"prompt": "b", "solution": "2+3", "answer": "5"}
    assert [t.answer for t in adapted(proof, sum_)] == [None, "5"]


def test_a_label_that_is_true_or_false_is_no_answer():
    (task,) = adapted({"prompt": "a", "completion": "b", "label": True})
    assert (task.answer, task.info) == (None, {"completion": "b", "label": True})


@pytest.mark.parametrize("truth", [["a", "b"], {"target": ["a"], "match": "any"}, True, 5, 0.5, "5"])
def test_ground_truth_of_any_type_becomes_a_text_answer(truth):
    (task,) = adapted({**FORMS["verl"], "reward_model": {"style": "rule", "ground_truth": truth}})
    assert task.info["ground_truth"] == truth
    as_json = json.dumps(truth, sort_keys=True, separators=(",", ":"))
    assert task.answer == (truth if isinstance(truth, str) else as_json)


def test_a_verl_row_without_ground_truth_has_no_answer():
    rows = [{**FORMS["verl"], "reward_model": {"style": "model", "ground_truth": None}}, FORMS["verl"]]
    assert [t.answer for t in adapted(*rows)] == [None, "5"]


def test_json_text_in_info_is_parsed_and_other_text_kept():
    (task,) = adapted({"prompt": "a", "info": '{"level": "easy", "answer": 5}'}, columns={"answer": "info.answer"})
    assert (task.answer, task.info) == ("5", {"level": "easy", "answer": 5, "ground_truth": 5})
    assert [t.info for t in adapted({"prompt": "a", "info": "{see"}, {"prompt": "b", "info": "[1]"})] == [
        {"info": "{see"},
        {"info": "[1]"},
    ]


def test_nulls_that_arrow_adds_change_nothing(tmp_path: Path):
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": None}], "reward_model": {"ground_truth": "1"}},
        {"prompt": [{"role": "user", "content": "b"}], "reward_model": {"ground_truth": "2", "style": "rule"}},
        {"prompt": ASKED, "reward_model": {"style": "rule"}, "reward_spec": None, "answer": None, "id": None},
    ]
    tasks, same = load_tasks(as_jsonl(tmp_path, *rows)), load_tasks(as_parquet(tmp_path, *rows))
    assert [t.answer for t in tasks] == ["1", "2", None]
    assert [(t.prompt, t.answer) for t in same] == [(t.prompt, t.answer) for t in tasks]
    (task,) = adapted({"prompt": "a", "level": None, "info": {"level": "easy"}})
    assert task.info == {"level": "easy"}


def test_values_of_columnar_files_are_plain_json(tmp_path: Path):
    row = {"x": float("nan"), "day": date(2024, 5, 1), "price": Decimal("1.50"), "s": {"y": float("inf")}}
    (task,) = load_tasks(as_parquet(tmp_path, {"prompt": "a", **row}))
    assert task.info == {"x": None, "day": "2024-05-01", "price": "1.50", "s": {"y": None}}
    with pytest.raises(DataError, match="row 1: `image`: JSON has no form for a value of type bytes; remove"):
        load_tasks(as_parquet(tmp_path, {"prompt": "a", "image": b"\xff"}))


def test_the_identity_of_plain_rows_never_changes():
    rows = [
        {"prompt": "Sort 312", "answer": "123", "level": "easy", "tags": [1, 2], "info": {"n": 1.5, "x": None}},
        {"prompt": [{"role": "user", "content": "2+3?"}], "answer": 5, "level": None},
    ]
    assert [task.id for task in adapted(*rows)] == ["e49656ab1cb62c23", "13796f4c3bb63878"]


# --------------------------------------------------------------------------------------------------------- own names


def test_given_names_win_over_what_would_be_found():
    row = {**FORMS["verl"], "answer": "five", "problem": "What is 2+3?", "extra_info": {**EXTRA, "key": 9}}
    columns: Columns = {"prompt": "problem", "answer": "answer", "id": "extra_info.key"}
    assert adapted(row, columns=columns) == [
        Task(
            id="9",
            prompt="What is 2+3?",
            answer="five",
            info={k: v for k, v in row.items() if k != "answer"},
        )
    ]


def test_a_column_whose_own_name_has_a_dot_is_found():
    (task,) = adapted({"prompt": "a", "gold.answer": "5"}, columns={"answer": "gold.answer"})
    assert task.answer == "5"


NAMES = ["prompt", "messages", "question", "problem", "answer", "solution", "label", "id", "level", "x.y"]
COLUMN = st.sampled_from(NAMES)
VALUE = st.text(min_size=1).filter(str.strip) | st.integers(-9, 9).map(str)


@given(
    st.dictionaries(COLUMN, VALUE, min_size=1), st.fixed_dictionaries({"prompt": COLUMN}, optional={"answer": COLUMN})
)
def test_no_column_of_a_row_is_lost(row: dict[str, Any], columns: Columns):
    names = {str(columns["prompt"]): "2+3?", **({str(columns["answer"]): "5"} if "answer" in columns else {})}
    row = {**names, **row}
    (task,) = adapted(row, columns=columns)
    became = {"prompt": task.prompt, "answer": task.answer, "id": task.id}
    for name, value in row.items():
        assert task.info.get(name, became.get(name)) == value
    assert set(task.info) <= {*row, "ground_truth"}
    layout = sniff([row], columns)
    for name in row:
        assert ("info." + name in layout.became(name)) == (name in task.info)
        assert all(part in layout.became(name) for part in PARTS if layout.sources[part] == name)


# ------------------------------------------------------------------------------------------------------- complaints


def test_rows_of_no_form_are_listed_with_the_likeliest_column(tmp_path: Path):
    looked = "looked for the prompt in prompt, messages, question; if it has another name, say so: data.columns: "
    assert complaint(tmp_path, {"problem": "2+3?", "solution": 5}, {"problem": "1+1?", "level": 2}).splitlines() == [
        "rows.jsonl: 2 rows cannot be used",
        "  rows.jsonl:1: no `prompt`; the row has problem, solution",
        "  rows.jsonl:2: no `prompt`; the row has problem, level",
        f"  {looked}{{prompt: problem}}",
        "  data.columns applies to training and to evaluations; a set may have its own: {path: ..., columns: ...}",
        "  the columns of all rows: problem, solution, level",
    ]


@pytest.mark.parametrize(
    ("columns", "absent", "proposed"),
    [
        ({"prompt": "problm"}, "problm", "prompt: problem"),
        ({"prompt": "problem", "answer": "anser"}, "anser", "answer: solution"),
        ({"prompt": "problem", "answer": "meta.solutio"}, "meta.solutio", "answer: meta.solution"),
        ({"prompt": "problem", "id": "meta.idx"}, "meta.idx", "id: meta.index"),
    ],
)
def test_a_missing_configured_column_is_named_with_the_nearest_one(tmp_path: Path, columns, absent, proposed):
    row = {"problem": "2+3?", "solution": "5", "meta": {"solution": "2+3=5", "index": 3}}
    text = complaint(tmp_path, *[row] * 12, columns=columns)
    assert f"rows.jsonl:1: no `{absent}`; the row has problem, solution, meta" in text
    assert text.count("no `") == 10
    assert "... and 2 more" in text
    assert f"in {absent}; if it has another name, say so: data.columns: {{{proposed}}}\n" in text


def test_a_file_keeps_its_prompts_in_one_column(tmp_path: Path):
    assert complaint(tmp_path, {"prompt": "a"}, {"question": "b"}, "cut off").splitlines() == [
        "rows.jsonl: 2 rows cannot be used",
        "  rows.jsonl:2: no `prompt`; the row has question",
        "  rows.jsonl:3: the row is a str, not an object with a `prompt`",
        "  looked for the prompt in prompt, where other rows have it; keep it in one column",
        "  data.columns applies to training and to evaluations; a set may have its own: {path: ..., columns: ...}",
        "  the columns of all rows: prompt, question",
    ]


def test_a_configured_answer_column_may_be_missing_in_some_rows():
    rows = [{"prompt": "a", "gold": "5"}, {"prompt": "b"}]
    assert [t.answer for t in adapted(*rows, columns={"answer": "gold"})] == ["5", None]


def test_mixed_forms_are_refused_unless_the_answer_column_is_named(tmp_path: Path):
    rows = [{**FORMS[kind], "gold": "5"} for kind in ("verl", "skyrl", "plain")]
    lines = complaint(tmp_path, *rows).splitlines()
    assert lines[0] == "rows.jsonl: 2 rows cannot be used"
    assert lines[1].startswith("  rows.jsonl:2: the row is of the form skyrl, the first one verl; the row has data_")
    assert lines[2].startswith("  rows.jsonl:3: the row is of the form plain, the first one verl; the row has prompt")
    assert "looked for the answer in reward_model.ground_truth, answer, " in lines[3]
    assert "give each form a file of its own, or name a column that all rows have: data.columns: {answer: " in lines[3]
    tasks = load_tasks(as_jsonl(tmp_path, *rows), {"answer": "gold"})
    assert [t.answer for t in tasks] == ["5", "5", "5"]


def test_the_prompt_of_an_answered_conversation_is_what_comes_before_its_answer(tmp_path: Path):
    answered = [*ASKED, {"role": "assistant", "content": "5"}]
    (task,) = load_tasks(as_jsonl(tmp_path, {"messages": answered}))
    assert task.prompt == tuple(ASKED) and task.info["messages"] == answered
    assert "`messages` has nothing before the assistant's answer" in complaint(tmp_path, {"messages": answered[-1:]})


def test_a_prompt_may_end_with_the_start_of_the_answer(tmp_path: Path):
    begun = [*ASKED, {"role": "assistant", "content": "The sum is"}]
    assert load_tasks(as_jsonl(tmp_path, {"prompt": begun}))[0].prompt == tuple(begun)


def test_messages_keep_tool_calls_and_text_parts_become_text(tmp_path: Path):
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    rows = [
        {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?", "image": None}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c0", "name": "add"},
    ]
    (task,) = load_tasks(as_jsonl(tmp_path, {"prompt": rows}))
    assert task.prompt == ({"role": "user", "content": "2+3?"}, {**rows[1], "content": ""}, rows[2])


def test_an_image_in_a_prompt_is_refused_by_name(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    assert "message 1 of the `prompt` has a part of type image_url; only text" in complaint(tmp_path, row)


@pytest.mark.parametrize("as_text", [True, False])
def test_rows_bring_tools_and_template_variables(tmp_path: Path, as_text: bool):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    kwargs = {"enable_thinking": False}
    row = {"prompt": "2+3?", "tools": tools, "chat_template_kwargs": kwargs}
    columns = {name: json.dumps(value) if as_text and name != "prompt" else value for name, value in row.items()}
    (task,) = load_tasks(as_jsonl(tmp_path, columns))
    assert list(task.tools) == tools and task.template_kwargs == kwargs


def test_tools_and_template_variables_of_another_form_are_refused(tmp_path: Path):
    text = complaint(
        tmp_path,
        {"prompt": "a", "tools": ["add"]},
        {"prompt": "a", "chat_template_kwargs": [1]},
        {"prompt": "a", "tools": [{}]},
    )
    assert "rows.jsonl:1: `tools` is text, but not JSON" in text
    assert "rows.jsonl:2: `chat_template_kwargs` is a list; give an object" in text
    assert "rows.jsonl:3: `tools` is not of the form" in text


def test_the_configuration_names_columns_and_refuses_parts_there_are_not():
    needed = ["run.steps=1", "model.path=m", "data.path=d"]
    columns = Config.load([], [*needed, "data.columns.prompt=problem", "data.columns.answer=meta.gold"]).data.columns
    assert columns == {"prompt": "problem", "answer": "meta.gold"}
    with pytest.raises(ConfigError) as caught:
        Config.load([], [*needed, "data.columns.promt=problem", "data.columns.answer="])
    assert "data.columns.promt: unknown key; did you mean `data.columns.prompt`?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.columns\.answer: string should have at least 1 character"):
        Config.load([], [*needed, "data.columns.answer=''"])


def test_training_and_evaluation_read_the_columns_that_the_configuration_names(tmp_path: Path):
    path = as_jsonl(tmp_path, {"prompt": "2+3?", "problem": "3+4?"})
    names = "data.columns.prompt=problm"
    needed = ["run.steps=1", f"run.folder={tmp_path}", "model.path=org/none", f"data.path={path}"]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no `problm`.*\n.*data\.columns: {prompt: problem}"):
        train(Config.load([], [*needed, names]), progress=False)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no `problm`"):
        evaluate("org/none", data={"sums": str(path)}, config_overrides=[names])


def test_a_text_that_is_not_utf8_is_named_with_its_row(tmp_path: Path):
    data = pa.py_buffer(b"2+3?\x92\x81")
    offsets = pa.array([0, 4, 6], pa.int32()).buffers()[1]
    prompts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, data])
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"cannot read .*rows\.parquet: row \d: 'utf-8' codec can't decode byte 0x92"):
        load_tasks(tmp_path / "rows.parquet")
