"""Rows are what the text of a file says, in whatever format: nothing is guessed, filled in or left out."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import Table, parquet

from rlsys.data.task_file import load_tasks
from rlsys.errors import DataError
from rlsys.types import Task

Rows = Sequence[dict[str, Any]]
CITY = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
SUM = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [{"c": 2}, {"d": 3}]}}}


def write_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_array(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(rows))


def write_table(path: Path, rows: Rows) -> None:
    """Write CSV: text as it is, everything else as JSON; null is an empty cell."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer.writerow(names)
        writer.writerows([cell_of(row.get(name)) for name in names] for row in rows)


def cell_of(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def write_columns(path: Path, rows: Rows) -> None:
    parquet.write_table(Table.from_pylist(list(rows)), path)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "rows.jsonl": write_lines,
    "rows.json": write_array,
    "rows.csv": write_table,
    "rows.parquet": write_columns,
}


def tasks_in(folder: Path, name: str, rows: Rows) -> Sequence[Task]:
    WRITERS[name](folder / name, rows)
    return load_tasks(folder / name)


# Arrow has no half surrogate pairs, and CSV no difference between empty text and nothing
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
PROMPTS = st.one_of(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.lists(
        st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXTS}),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    ),
)
ANSWERS = st.sampled_from([TEXTS, st.integers(-(2**40), 2**40), st.booleans(), st.none()])


@given(st.data())
def test_the_same_rows_in_four_formats_have_the_same_prompts_and_answers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    prompts = data.draw(PROMPTS)
    answers = data.draw(ANSWERS)
    rows = [{"prompt": prompt, "answer": data.draw(answers)} for prompt in prompts]
    folder = tmp_path_factory.mktemp("rows")
    found = {name: [(t.prompt, t.answer) for t in tasks_in(folder, name, rows)] for name in WRITERS}
    assert found["rows.json"] == found["rows.csv"] == found["rows.parquet"] == found["rows.jsonl"]


@pytest.mark.parametrize("text", ["012358", "1.50", "NA", "null", "True", "1e5", " 7 ", "2024-01-01", "-0", "nan"])
def test_a_cell_of_a_table_is_its_text(tmp_path: Path, text: str) -> None:
    (task,) = tasks_in(tmp_path, "rows.csv", [{"prompt": text, "answer": text, "level": text}])
    assert (task.prompt, task.answer, task.info["level"]) == (text, text, text)


def test_a_folder_of_tables_is_read_as_text_too(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv", [{"prompt": "012358", "answer": "NA"}, {"prompt": "1.50"}])
    assert [(task.prompt, task.answer) for task in load_tasks(tmp_path)] == [("012358", "NA"), ("1.50", None)]


def test_messages_in_a_cell_are_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1, 2\nand 3?"}]
    (task,) = tasks_in(tmp_path, "rows.csv", [{"prompt": messages, "answer": "6"}])
    assert task.prompt == tuple(messages)


def test_messages_in_a_cell_as_python_prints_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.csv:2: `prompt` begins as a list of messages, but is no JSON: "):
        tasks_in(tmp_path, "rows.csv", [{"prompt": str([{"role": "user", "content": "a"}])}])


@pytest.mark.parametrize("text", ["[1, 2]", '[{"a": 1}]', "[citation needed]", "[{'a': 1}]"])
def test_other_lists_in_a_cell_are_text(tmp_path: Path, text: str) -> None:
    (task,) = tasks_in(tmp_path, "rows.csv", [{"prompt": text}])
    assert task.prompt == text


def test_a_row_of_other_cells_than_names_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\na,1\nb, c,2\n")
    with pytest.raises(DataError, match=r"rows\.csv:3: it has 3 cells, and the first line 2 names: quote"):
        load_tasks(tmp_path / "rows.csv")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer,prompt\na,1,b\n")
    with pytest.raises(DataError, match=r"rows\.csv:1: two columns are called 'prompt'"):
        load_tasks(tmp_path / "rows.csv")


def test_a_column_without_a_name_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\ufeff,prompt\r\n0,a\r\n\r\n1,b\r\n")
    assert [(task.prompt, task.info) for task in load_tasks(tmp_path / "rows.csv")] == [("a", {}), ("b", {})]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_call_has_the_arguments_of_its_row_and_no_nulls_of_others(tmp_path: Path, name: str) -> None:
    calls = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in (CITY, SUM)]
    rows = [{"prompt": [{"role": "user", "content": "?"}, call, {"role": "user", "content": "!"}]} for call in calls]
    found = tasks_in(tmp_path, name, rows)
    assert [task.prompt[1]["tool_calls"] for task in found] == [[CITY], [SUM]]  # pyrefly: ignore


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_tool_has_no_nulls_that_its_row_has_not(tmp_path: Path, name: str) -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    tool = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"of": either}}}}
    (task,) = tasks_in(tmp_path, name, [{"prompt": "a", "tools": [tool]}])
    assert task.tools == (tool,)


def test_a_null_that_a_row_has_stays(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None, "enum": ["a", None]}}}
    (task,) = tasks_in(tmp_path, "rows.jsonl", [{"prompt": "a", "tools": [tool]}])
    assert task.tools == (tool,)


def test_keys_of_messages_that_only_templates_know_are_theirs(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "name": "ann", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two", "refusal": None, "id": "m1"},
        {"role": "user", "content": "And 3+3?", "weight": 1},
    ]
    (task,) = tasks_in(tmp_path, "rows.jsonl", [{"prompt": messages}])
    assert task.prompt == tuple({k: v for k, v in message.items() if v is not None} for message in messages)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(["b", "a"], '["b","a"]'), (True, "true"), (False, "false"), ({"b": 1, "a": 2}, '{"a":2,"b":1}')],
)
def test_an_answer_of_any_type_is_taken(tmp_path: Path, answer: object, text: str) -> None:
    (task,) = tasks_in(tmp_path, "rows.jsonl", [{"prompt": "a", "answer": answer}])
    assert (task.answer, task.info) == (text, {"ground_truth": answer})


def test_ids_that_repeat_can_be_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "id": 0} for prompt in "ab"]
    with pytest.raises(DataError, match=r"or none with data\.columns: \{id: null\}"):
        tasks_in(tmp_path, "rows.jsonl", rows)
    first, second = load_tasks(tmp_path / "rows.jsonl", {"id": None})
    assert first.id != second.id and first.info == {"id": 0}


@pytest.mark.parametrize("text", ["NaN", "Infinity"])
def test_a_number_that_json_has_not_is_named_with_its_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a", "level": {text}}}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: not JSON: {text} at column 2\d is no number of JSON"):
        load_tasks(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_packed_file_is_read_like_the_file(tmp_path: Path, name: str) -> None:
    plain = tasks_in(tmp_path, name, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert load_tasks(packed) == plain
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"cannot read .*{name}\.gz: it is damaged"):
        load_tasks(packed)


def test_a_pattern_is_its_files_in_order_of_their_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "part-2.jsonl", [{"prompt": "c"}])
    write_table(tmp_path / "part-1.csv", [{"prompt": "b"}])
    write_columns(tmp_path / "part-3.parquet", [{"prompt": "d"}])
    (tmp_path / "part-0.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}'))
    assert [task.prompt for task in load_tasks(f"{tmp_path}/part-*")] == ["a", "b", "c", "d"]
    assert [task.prompt for task in load_tasks(f"{tmp_path}/part-[12].*")] == ["b", "c"]


def test_a_pattern_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches it"):
        load_tasks(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_whose_name_is_like_a_pattern_is_a_file(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs[1]*"
    folder.mkdir()
    assert [task.prompt for task in tasks_in(folder, name, [{"prompt": "a"}])] == ["a"]


def test_a_damaged_file_of_a_folder_is_named_like_the_file_alone(tmp_path: Path) -> None:
    """The parser of JSON in Arrow, which reads folders for the library, ends the process at such nests."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+3?", "answer": 5}\n{"reward_model": 1e999, "prompt": ' + 500 * "[" + "\n")
    with pytest.raises(DataError, match=rf"{path}:2: not JSON"):
        load_tasks(tmp_path)


def test_the_rows_of_a_folder_are_those_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "train-0.jsonl").write_text('{"prompt": "2+3?", "answer": "05"}\n')
    (tmp_path / "train-1.jsonl").write_text('{"prompt": "1+1?", "answer": 2, "level": [1, "a"]}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "0+0?", "answer": "0"}\n')
    found = load_tasks(f"{tmp_path}#train")
    assert [(task.prompt, task.answer) for task in found] == [("2+3?", "05"), ("1+1?", "2")]
    assert found[1].info["level"] == [1, "a"]
    with pytest.raises(DataError, match="several splits: train, test"):
        load_tasks(tmp_path)
