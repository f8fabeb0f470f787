"""Reader of data files: rows, their tasks, and every problem of invalid rows.

    {"prompt": "Sort 312", "answer": "123"}
    {"prompt": [{"role": "user", "content": "2+3?"}], "answer": 5, "id": "sum-17", "level": "easy"}

A prompt is text or a list of messages; `answer` and `id` are optional. Every other column is in `Task.info`, where
reward functions pick it by name. Rows of other forms (verl's, SkyRL's, TRL's): `rlsys.data.row_adapters`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlsys.data.column_hints import remedy
from rlsys.data.data_files import opened
from rlsys.data.row_adapters import AS_FOUND, PARTS, Columns, Layout, Row, RowProblem, sniff, task_of
from rlsys.errors import DataError
from rlsys.types import Task

_PROBLEMS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Placed:
    """Problem of a row, and the row's position."""

    where: str
    row: object
    problem: RowProblem


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
    """Load every task of a JSONL file, or of data that `datasets` reads: a parquet file, a folder, a hub data set.

    `folder#test` and `org/name:config#test` name a split; a single split needs no name. `columns` names parts that are
    not found automatically, e.g. `Columns(prompt="problem")`. Raises `DataError` if nothing can be read, or with a list
    of rows that cannot be used, at most ten.
    """
    return read(path, columns).tasks


def read(path: str | os.PathLike[str], columns: Columns = AS_FOUND) -> TaskFile:
    """Read the tasks as `load_tasks` does, with the rows and their layout."""
    name = os.fspath(path)
    source = opened(name)
    found = list(source.rows)
    rows = [row for _, row in found if isinstance(row, dict)]
    layout = sniff(rows, columns)
    tasks: list[Task] = []
    problems: list[_Placed] = []
    for where, row in found:
        try:
            if isinstance(row, RowProblem):
                raise row
            tasks.append(task_of(row, layout))
        except RowProblem as problem:
            problems.append(_Placed(where, row, problem))
    if problems:
        count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
        raise DataError("\n  ".join([f"{name}: {count} cannot be used", *_listed(problems, layout, rows)]))
    if not tasks:
        raise DataError(f"{name}: no rows")
    return TaskFile(layout, rows, tasks, source.split)


def _listed(problems: Sequence[_Placed], layout: Layout, rows: Sequence[Row]) -> Iterator[str]:
    """Yield at most ten problems, the number of further ones, and proposals for missing columns."""
    yield from (f"{p.where}: {p.problem}" for p in problems[:_PROBLEMS_SHOWN])
    if (num_more := len(problems) - _PROBLEMS_SHOWN) > 0:
        yield f"... and {num_more} more"
    lacking = {part: [p.row for p in problems if p.problem.lacks == part and isinstance(p.row, dict)] for part in PARTS}
    yield from (remedy(part, layout, lacking[part], len(rows)) for part in PARTS if lacking[part])
    if any(lacking.values()):
        yield "data.columns holds for training and for every set of eval.data: keep to one name for each part"
        yield f"the columns of all rows: {', '.join(dict.fromkeys(column for row in rows for column in row))}"
