"""Formats of a data file, and errors for invalid ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.data.row_files import Place
from rlsys.data.task_file import load_tasks, read
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


def test_a_row_without_an_id_gets_one_from_its_content(tmp_path: Path) -> None:
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
        {"prompt": "a", "answer": 2.0**60},
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
        8: "message 1 of the `prompt` has tool_calls, and its role is user",
        9: "`answer` is 1.152921504606847e+18, too large a number to be exact",
        10: "the row is a list, not an object with a `prompt`",
    }.items():
        assert f"{path}:{number}: {words}" in text


def test_rows_of_one_id_with_other_content_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": "a", "answer": 1, "id": 7}, {"prompt": "b", "id": "7"}, {"prompt": "a", "answer": 1, "id": 7}]
    assert f"{path}:2: its id '7' is also that of {path}:1, whose content differs: name" in complaint(path, *rows)
    assert len(load_tasks(written(path, rows[0], rows[2]))) == 2


def test_what_cannot_be_written_again_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    deep = '{"prompt": "a", "answer": 1, "x": ' + "[" * 300 + "]" * 300 + "}"
    assert f"{path}:2: cannot be written as JSON: Recursion limit reached" in complaint(path, {"prompt": "a"}, deep)


@pytest.mark.parametrize("name", ["a\0b.jsonl", "a\0b.parquet", "a\0b"])
def test_a_path_with_a_nul_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"cannot read 'a\\x00b.*': no path contains a NUL"):
        load_tasks(name)


@pytest.mark.parametrize("text", ["[1]", "{}", '{"splits": []}', '{"splits": [1, 2]}'])
def test_a_folder_that_lists_no_splits_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(text)
    with pytest.raises(DataError, match="lists no splits; save the data set again"):
        load_tasks(tmp_path)


def test_ten_problems_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    text = complaint(tmp_path / "train.jsonl", *[{"prompt": ""}] * 13)
    assert "13 rows cannot be used" in text
    assert text.count("the `prompt` is empty") == 10
    assert text.endswith("... and 3 more")


def test_a_missing_or_empty_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        load_tasks(tmp_path / "nowhere.jsonl")
    assert "no rows" in complaint(tmp_path / "empty.jsonl")


def test_an_unsupported_file_type_is_named_without_asking_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("prompt\na\n")
    with pytest.raises(DataError, match=r"cannot read .*rows\.tsv: it is none of \.jsonl, \.json, \.csv, \.parquet"):
        load_tasks(path)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n\ufeff{"prompt": "b"}\n', encoding="utf-8-sig")
    with pytest.raises(DataError, match=r"1 row cannot be used\n.*train\.jsonl:2: not JSON"):
        load_tasks(path)
    path.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert [task.prompt for task in load_tasks(path)] == ["a"]


def test_whole_numbers_lose_the_point_and_inexact_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    numbers = ["5.0", "-0.0", "0.5", str(2**63), str(2**64 - 1), str(2**53 - 1) + ".0"]
    tasks = load_tasks(written(path, *(f'{{"prompt": "a", "answer": {number}}}' for number in numbers)))
    assert [task.answer for task in tasks] == ["5", "0", "0.5", str(2**63), str(2**64 - 1), str(2**53 - 1)]
    for number in (str(2**64), str(-(2**63) - 1), "9007199254740992.0", "1e300"):
        text = complaint(path, f'{{"prompt": "a", "answer": {number}}}')
        assert "train.jsonl:1: `answer` is " in text
        assert "give it as text" in text
    truth = complaint(path, f'{{"prompt": "a", "reward_model": {{"ground_truth": {2**64}}}}}')
    assert "`reward_model.ground_truth` is 1.8446744073709552e+19, too large a number to be exact" in truth
    assert "`id` is 1e+16" in complaint(path, '{"prompt": "a", "id": 1e16}')


# ------------------------------------------------------------------------------------------------------------ splits


def saved(folder: Path, **splits: list[str]) -> Path:
    """A folder of `DatasetDict.save_to_disk` with these prompts."""
    import datasets

    sets = datasets.DatasetDict()
    for name, prompts in splits.items():
        sets[name] = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    sets.save_to_disk(str(folder))
    return folder


def files(folder: Path, **splits: list[str]) -> Path:
    """A folder with a file for each split, as hub data sets have them."""
    folder.mkdir()
    for name, prompts in splits.items():
        written(folder / f"{name}.jsonl", *({"prompt": prompt} for prompt in prompts))
    return folder


@pytest.mark.parametrize("write", [saved, files])
def test_of_several_splits_one_must_be_named(tmp_path: Path, write) -> None:
    folder = write(tmp_path / "set", train=["a"], test=["b", "c"])
    with pytest.raises(DataError) as caught:
        load_tasks(folder)
    assert str(caught.value) == f"{folder} has several splits: train, test; name one, as in {folder}#train"
    assert [task.prompt for task in load_tasks(f"{folder}#train")] == ["a"]
    assert [task.prompt for task in load_tasks(f"{folder}#test")] == ["b", "c"]
    with pytest.raises(DataError, match=r"set#dev: there is no split dev; there are: train, test"):
        load_tasks(f"{folder}#dev")


@pytest.mark.parametrize("write", [saved, files])
def test_a_single_split_is_taken_whatever_its_name(tmp_path: Path, write) -> None:
    file = read(write(tmp_path / "set", validation=["a"]))
    assert ([task.prompt for task in file.tasks], file.split) == (["a"], "validation")


def test_what_has_no_splits_is_given_without_one(tmp_path: Path) -> None:
    import datasets

    path = written(tmp_path / "rows.jsonl", {"prompt": "a"})
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "set"))
    for whole in (path, tmp_path / "set"):
        assert read(whole).split is None
        with pytest.raises(DataError, match="has neither configurations nor splits; give it alone"):
            load_tasks(f"{whole}#train")


def test_a_place_is_a_path_with_configuration_and_split(tmp_path: Path) -> None:
    assert Place.of("org/name") == Place("org/name")
    assert Place.of("org/name:main#test") == Place("org/name", "main", "test")
    assert Place.of("org/name:main") == Place("org/name", "main")
    assert Place.of("a#b/c:d/rows.jsonl") == Place("a#b/c:d/rows.jsonl")
    odd = files(tmp_path / "10:30#a", train=["x"])
    assert Place.of(f"{odd}#train") == Place(str(odd), None, "train")
    assert [task.prompt for task in load_tasks(f"{odd}#train")] == ["x"]


def test_a_configuration_of_a_data_set_is_named(tmp_path: Path) -> None:
    folder = files(tmp_path / "set", easy=["a"], hard=["b"])
    listed = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("easy", "hard"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    assert [task.prompt for task in load_tasks(f"{folder}:hard")] == ["b"]
    assert [task.prompt for task in load_tasks(f"{folder}:easy#train")] == ["a"]
    with pytest.raises(DataError, match=r"a hub data set such as org/name:config#split: (.|\n)*easy"):
        load_tasks(folder)


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
    with pytest.raises(DataError, match="row 2: no `prompt`; the row has prompt, answer, level"):
        load_tasks(bad)


def test_an_unreachable_hub_name_is_a_data_error() -> None:
    with pytest.raises(DataError, match="cannot read 'nobody/nothing'"):
        load_tasks("nobody/nothing")


def test_a_json_array_and_a_csv_file_give_the_tasks_of_lines(tmp_path: Path):
    rows = [{"prompt": "2+3?", "answer": "five", "level": "1"}, {"prompt": "1+1?", "answer": "two", "level": "2"}]
    lines, array, table = (tmp_path / name for name in ("rows.jsonl", "rows.json", "rows.csv"))
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    array.write_text(json.dumps(rows, indent=2))
    table.write_text("prompt,answer,level\n2+3?,five,1\n1+1?,two,2\n")
    assert load_tasks(array) == load_tasks(lines) == load_tasks(table)


def test_a_broken_array_and_a_bad_row_in_it_are_located(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text('[\n{"prompt": "a"},\n{"prompt": }\n]')
    with pytest.raises(DataError, match=r"rows\.json:3: not JSON: "):
        load_tasks(path)
    path.write_text('[{"prompt": "a"}, {"question": ""}, 3]')
    with pytest.raises(DataError, match=r"rows\.json: row 2: .*\n.*rows\.json: row 3: the row is an int"):
        load_tasks(path)
