"""Rows to tasks: what a data file may look like, and every complaint about one that does not.

    {"prompt": "Sort 312", "answer": "123"}
    {"prompt": [{"role": "user", "content": "2+3?"}], "answer": 5, "id": "sum-17", "level": "easy"}

`prompt` is text or a list of messages. `answer` and `id` are optional. Every other column lands in `Task.info`, where
reward functions pick from it by name; a column `info` that holds an object is unpacked into it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import orjson
from xxhash import xxh3_64_hexdigest

from rlsys.errors import DataError
from rlsys.types import Json, Message, Prompt, Task

_PROBLEMS_SHOWN = 10

Row = TypeVar("Row")


class _RowProblem(Exception):
    """One row cannot be used; its place is added to the message by the reader."""


def load_tasks(path: str | os.PathLike[str]) -> Sequence[Task]:
    """Every task of a JSONL file, or of what `datasets` reads: a parquet file, a folder, a hub name (split `train`).

    Raises `DataError` if nothing can be read there, or listing the rows that cannot be used, ten at most.
    """
    name = os.fspath(path)
    if name.endswith((".jsonl", ".json")):
        return _collected(name, _lines(Path(name)), lambda line: task_of(_parsed(line)))
    return _collected(name, _dataset_rows(name), task_of)


def _collected(name: str, rows: Iterable[tuple[str, Row]], task: Callable[[Row], Task]) -> list[Task]:
    """The task of each row; `rows` tells where each stands, e.g. `train.jsonl:3`."""
    tasks: list[Task] = []
    problems: list[str] = []
    for where, row in rows:
        try:
            tasks.append(task(row))
        except _RowProblem as problem:
            problems.append(f"{where}: {problem}")
    if problems:
        raise DataError(_summary(name, problems))
    if not tasks:
        raise DataError(f"{name}: no rows")
    return tasks


def task_of(row: object) -> Task:
    """The task a row describes."""
    if not isinstance(row, Mapping):
        raise _RowProblem(f"the row is {_named(row)}, not an object with a `prompt`")
    info = dict(row)
    if info.get("prompt") is None:
        raise _RowProblem(f"no `prompt`; the row has {', '.join(map(str, info)) or 'no columns'}")
    prompt = _prompt_of(info.pop("prompt"))
    answer = _text_of("answer", info.pop("answer", None))
    own_id = _text_of("id", info.pop("id", None))
    nested = info.get("info")
    if isinstance(nested, Mapping):
        del info["info"]
        info = {**nested, **info}
    return Task(id=own_id or _content_id(prompt, answer, info), prompt=prompt, answer=answer, info=info)


def _prompt_of(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise _RowProblem("the `prompt` is empty")
        return prompt
    if not isinstance(prompt, list):
        raise _RowProblem(f"`prompt` is {_named(prompt)}; give text or a list of messages")
    if not prompt:
        raise _RowProblem("the `prompt` is empty")
    return tuple(_message_of(number, message) for number, message in enumerate(prompt, 1))


def _message_of(number: int, message: object) -> Message:
    """A message with exactly `role` and `content`; keys that hold null (columnar files add them) do not count."""
    given = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
    role, content = given.pop("role", None), given.pop("content", None)
    if not (isinstance(role, str) and isinstance(content, str)):
        raise _RowProblem(f'message {number} of the `prompt` is not of the form {{"role": "...", "content": "..."}}')
    if given:
        raise _RowProblem(f"message {number} of the `prompt` has {', '.join(given)} besides role and content")
    return {"role": role, "content": content}


def _text_of(column: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise _RowProblem(f"`{column}` is {_named(value)}; give text or a number")


def _content_id(prompt: Prompt, answer: str | None, info: Mapping[str, Json]) -> str:
    return xxh3_64_hexdigest(orjson.dumps([prompt, answer, info], default=repr, option=orjson.OPT_SORT_KEYS))


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _parsed(line: bytes) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _RowProblem(f"not JSON: {error.msg} at column {error.colno}; give one object a line") from error


def _dataset_rows(name: str) -> Iterator[tuple[str, object]]:
    """Rows that the `datasets` library reads, which takes a second to import."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if name.endswith(".parquet"):
            rows = datasets.load_dataset("parquet", data_files=name, split="train")
        elif Path(name, "state.json").exists():
            rows = datasets.load_from_disk(name)
        else:
            rows = datasets.load_dataset(name, split="train")
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"cannot read {name!r}: give a .jsonl or .parquet file, a folder or a hub name: {error}"
        ) from error
    if not isinstance(rows, datasets.Dataset):
        raise DataError(f"{name} holds several splits: {', '.join(map(str, rows))}; give the folder of one of them")
    return ((f"{name}: row {number}", row) for number, row in enumerate(rows))


def _summary(name: str, problems: list[str]) -> str:
    num_more = len(problems) - _PROBLEMS_SHOWN
    more = [f"... and {num_more} more"] if num_more > 0 else []
    return "\n  ".join([f"{name}: {len(problems)} rows cannot be used", *problems[:_PROBLEMS_SHOWN], *more])


def _named(value: object) -> str:
    """`null`, or the type in words: `a list`, `an int`."""
    if value is None:
        return "null"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
