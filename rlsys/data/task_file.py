"""Tasks of data files, and every problem of rows that are none.

    {"prompt": "Sort 312", "answer": "123"}
    {"prompt": [{"role": "user", "content": "2+3?"}], "answer": 5, "id": "sum-17", "level": "easy"}

A prompt is text or a list of messages; `answer` and `id` are optional. Every other column is in `Task.info`, where
reward functions pick it by name. Two rows with one id must have the same content. Rows of other forms (verl's,
SkyRL's, TRL's): `rlsys.data.row_adapters`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from rlsys.data import row_adapters
from rlsys.data.row_adapters import AS_FOUND, PARTS, Columns, Layout, Part, Row, RowProblem
from rlsys.data.row_files import open_rows
from rlsys.errors import DataError
from rlsys.types import Task


@dataclass(frozen=True, slots=True)
class TaskFile:
    """Data file with its rows and tasks."""

    layout: Layout
    rows: Sequence[Row]
    tasks: Sequence[Task]
    """One per row, in order."""
    split: str | None
    """Split that was read; None for a file, or a folder of one data set."""


def load_tasks(path: str | os.PathLike[str], columns: Columns = AS_FOUND) -> Sequence[Task]:
    """Load every task of data: a file, files of a pattern, a folder, or a hub data set, see `rlsys.data.row_files`.

    `folder#test` and `org/name:config#test` name a split; a single split needs no name. `columns` names parts that are
    not found automatically, e.g. `{"prompt": "problem"}`. Raises `DataError` if nothing can be read, or with a list
    of rows that cannot be used, at most ten.
    """
    return read(path, columns).tasks


def read(path: str | os.PathLike[str], columns: Columns = AS_FOUND) -> TaskFile:
    """Read the tasks as `load_tasks` does, with the rows and their layout."""
    name = os.fspath(path)
    opened, split = open_rows(name)
    found = list(opened)
    rows = [row for _, row in found if isinstance(row, dict)]
    layout = row_adapters.sniff(rows, columns)
    tasks: list[Task] = []
    problems: list[str] = []
    lacking: dict[Part, list[Row]] = {part: [] for part in PARTS}
    first_with: dict[str, tuple[Task, str]] = {}
    for where, row in found:
        try:
            if isinstance(row, RowProblem):
                raise row
            task = row_adapters.task_of(row, layout)
            first, place = first_with.setdefault(task.id, (task, where))
            if first != task:
                raise RowProblem(
                    f"its id {task.id!r} is also that of {place}, whose content differs: name a column of unique ids, "
                    "or none with data.columns: {id: null}"
                )
            tasks.append(task)
        except orjson.JSONEncodeError as error:  # nested more deeply than orjson writes
            problems.append(f"{where}: cannot be written as JSON: {error}")
        except RowProblem as problem:
            problems.append(f"{where}: {problem}")
            if problem.lacks and isinstance(row, dict):
                lacking[problem.lacks].append(row)
    if problems:
        remedies = row_adapters.remedies(lacking, layout, rows)
        raise DataError("\n  ".join([*row_adapters.problem_lines(name, problems), *remedies]))
    if not tasks:
        raise DataError(f"{name}: no rows")
    return TaskFile(layout, rows, tasks, split)
