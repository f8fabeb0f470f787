"""Queries from the command line: `rlsys query RUN "select task from episodes where reward < 0.1"`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.event_decoding import is_time
from rlsys.dashboard.index.index_followers import IndexFollowers
from rlsys.dashboard.index.index_schema import INDEXED
from rlsys.dashboard.index.sql_query import MOST_ROWS
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.query.table_queries import Tables
from rlsys.dashboard.responses import TableAnswer, TableColumn
from rlsys.types import Json
from rlsys.util.printing import printable

_LETTERS = 80
"""Most letters of a text in a terminal; JSON has all of them."""


def query(
    folder: Path, text: str, progress: TextIO, *, between: tuple[int, int] | None = None, is_whole: bool
) -> TableAnswer:
    """Answer a query about a run, after bringing its index up to date; `progress` gets a line if that takes long.

    `folder` may be a folder of runs for the table `runs`. `between` are the steps of the table `tasks`. `is_whole`:
    texts are not cut. Raises `BadQuery`, `NoSuch` and `IndexProblem`.
    """
    if not folder.is_dir():
        raise NoSuch(f"{folder} is no folder: give the directory of a run, or a folder of them for the table `runs`")
    readings, indexes = Readings(folder), IndexFollowers()
    if INDEXED.keys() & re.findall(r"\w+", text):
        index = indexes.want(readings.folder("."))
        while not index.update(2.0):
            progress.write(f"reading the run: {100 * index.share:.0f} %\n")
    return Tables(readings, indexes).sql(".", text, between, None if is_whole else _LETTERS)


def lines_of(found: TableAnswer) -> Iterator[str]:
    """Yield the lines of a table, with numbers to the right."""
    shown = [[_cell_text(column, row[column.name]) for column in found.columns] for row in found.rows]
    names = [column.name for column in found.columns]
    widths = [max(map(len, cells)) for cells in zip(names, *shown, strict=True)]
    for cells in (names, *shown):
        padded = (
            cell.ljust(width) if column.kind in ("text", "time") else cell.rjust(width)
            for cell, width, column in zip(cells, widths, found.columns, strict=True)
        )
        yield "  ".join(padded).rstrip()
    if len(found.rows) == MOST_ROWS:
        yield f"the first {MOST_ROWS} rows: `limit` and `offset` show others"


def _cell_text(column: TableColumn, value: Json) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.kind == "time" and is_time(value):
        return datetime.fromtimestamp(value).isoformat(" ", "seconds")
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(" ".join(str(value).split()) if isinstance(value, str) else str(value))
