"""What a data file may look like, and what is said about one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.data.rows import load_tasks
from rlsys.errors import DataError
from rlsys.types import Task


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def complaint(path: Path, *rows: object) -> str:
    with pytest.raises(DataError) as caught:
        load_tasks(written(path, *rows))
    return str(caught.value)


def test_a_row_becomes_a_task_and_its_other_columns_info(tmp_path: Path) -> None:
    row = {"prompt": "Sort 312", "answer": "123", "id": "a", "level": "easy", "tags": [1, 2]}
    (task,) = load_tasks(written(tmp_path / "train.jsonl", row))
    assert task == Task(id="a", prompt="Sort 312", answer="123", info={"level": "easy", "tags": [1, 2]})


def test_a_prompt_may_be_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    (task,) = load_tasks(written(tmp_path / "train.jsonl", {"prompt": messages}))
    assert task.prompt == tuple(messages)


def test_numbers_become_text_and_an_absent_answer_none(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 5, "id": 17}, {"prompt": "b", "answer": 0.5}, {"prompt": "c", "answer": None}]
    tasks = load_tasks(written(tmp_path / "train.jsonl", *rows))
    assert [t.answer for t in tasks] == ["5", "0.5", None]
    assert tasks[0].id == "17"


def test_an_id_comes_from_the_content_when_the_row_has_none(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "x": 1, "y": 2}, {"y": 2, "x": 1, "prompt": "a"}, {"prompt": "a", "x": 1, "y": 3}]
    one, same, other = load_tasks(written(tmp_path / "train.jsonl", *rows))
    assert one.id == same.id != other.id


def test_an_info_object_is_unpacked(tmp_path: Path) -> None:
    row = {"prompt": "a", "info": {"level": "easy"}, "source": "web"}
    (task,) = load_tasks(written(tmp_path / "train.jsonl", row))
    assert task.info == {"level": "easy", "source": "web"}


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    assert len(load_tasks(written(tmp_path / "train.jsonl", {"prompt": "a"}, "", "  ", {"prompt": "b"}))) == 2


def test_every_bad_row_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    text = complaint(
        path,
        {"prompt": "fine"},
        '{"prompt": "cut off',
        {"question": "2+3?", "solution": 5},
        {"prompt": "  "},
        {"prompt": []},
        {"prompt": 7},
        {"prompt": [{"role": "user", "text": "hi"}]},
        {"prompt": [{"role": "user", "content": "hi", "tool_calls": [1]}]},
        {"prompt": "a", "answer": ["x"]},
        [1, 2],
    )
    assert text.splitlines()[0] == f"{path}: 9 rows cannot be used"
    for number, words in {
        2: "not JSON: ",
        3: "no `prompt`; the row has question, solution",
        4: "the `prompt` is empty",
        5: "the `prompt` is empty",
        6: "`prompt` is an int; give text or a list of messages",
        7: "message 1 of the `prompt` is not of the form",
        8: "message 1 of the `prompt` has tool_calls besides role and content",
        9: "`answer` is a list; give text or a number",
        10: "the row is a list, not an object with a `prompt`",
    }.items():
        assert f"{path}:{number}: {words}" in text


def test_ten_problems_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    text = complaint(tmp_path / "train.jsonl", *[{"prompt": ""}] * 13)
    assert "13 rows cannot be used" in text
    assert text.count("the `prompt` is empty") == 10
    assert text.endswith("... and 3 more")


def test_a_file_that_is_missing_or_empty_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        load_tasks(tmp_path / "nowhere.jsonl")
    assert "no rows" in complaint(tmp_path / "empty.jsonl")


def test_parquet_is_read_like_jsonl(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "5", "level": 1}, {"prompt": None, "answer": "6"}]
    good = tmp_path / "good.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:1]), good)
    (task,) = load_tasks(good)
    assert (task.prompt, task.answer, task.info) == (({"role": "user", "content": "hi"},), "5", {"level": 1})
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist(rows), bad)
    with pytest.raises(DataError, match="row 1: no `prompt`; the row has prompt, answer, level"):
        load_tasks(bad)


def test_a_hub_name_that_cannot_be_reached_is_a_data_error() -> None:
    with pytest.raises(DataError, match="cannot read 'nobody/nothing'"):
        load_tasks("nobody/nothing")
