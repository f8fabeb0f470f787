"""Reader of data files: rows, their tasks, and every problem of invalid rows.

    {"prompt": "Sort 312", "answer": "123"}
    {"prompt": [{"role": "user", "content": "2+3?"}], "answer": 5, "id": "sum-17", "level": "easy"}

A prompt is text or a list of messages; `answer` and `id` are optional. Every other column is in `Task.info`, where
reward functions pick it by name. Two rows with one id must have the same content. Rows of other forms (verl's,
SkyRL's, TRL's): `rlsys.data.row_adapters`.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from rlsys.data import row_adapters
from rlsys.data.row_adapters import AS_FOUND, PARTS, Columns, Layout, Part, Row, RowProblem, with_info_parsed
from rlsys.errors import DataError
from rlsys.types import Task
from rlsys.util.regular_files import open_regular

if TYPE_CHECKING:
    from datasets import Dataset

_LINES = (".jsonl", ".json")
_MOST_ROW_BYTES = 2**28
_SETS = {".parquet": "parquet", ".csv": "csv"}
"""Files that `datasets` reads, with the name of its reader."""
_FILES = (*_LINES, *_SETS)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of rows: `rows.jsonl`, `folder#test`, `org/name:config#test`."""

    path: str
    config: str | None = None
    """Configuration of a hub data set; None: its only one."""
    split: str | None = None
    """Split; None: the only one."""

    @classmethod
    def of(cls, text: str) -> Place:
        """Parse a place. If `text` as a whole is an existing path, it is not split at `:` and `#`.

        Raises `DataError` for a NUL, which no path may contain.
        """
        if "\0" in text:
            raise DataError(f"cannot read {text!r}: no path contains a NUL")
        whole, split = _cut(text, "#")
        path, config = _cut(whole, ":")
        return cls(path, config, split)

    def __str__(self) -> str:
        config, split = (mark + name if name else "" for mark, name in ((":", self.config), ("#", self.split)))
        return f"{self.path}{config}{split}"

    def absolute(self) -> Place:
        """Make the path absolute if it exists on this machine; otherwise it may be on the hub and stays unchanged."""
        path = Path(self.path)
        return Place(str(path.absolute()), self.config, self.split) if path.exists() else self


def _cut(text: str, mark: str) -> tuple[str, str | None]:
    """Split at the last `mark`, unless it is inside the path of a file or folder."""
    before, found, after = text.rpartition(mark)
    is_path = not (before and found and after) or "/" in after or text.endswith(_FILES) or Path(text).exists()
    return (text, None) if is_path else (before, after)


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
    """Load every task of a JSONL file, or of data that `datasets` reads: a parquet or CSV file, a folder, a hub data
    set. A `.json` file may be one array.

    `folder#test` and `org/name:config#test` name a split; a single split needs no name. `columns` names parts that are
    not found automatically, e.g. `{"prompt": "problem"}`. Raises `DataError` if nothing can be read, or with a list
    of rows that cannot be used, at most ten.
    """
    return read(path, columns).tasks


def read(path: str | os.PathLike[str], columns: Columns = AS_FOUND) -> TaskFile:
    """Read the tasks as `load_tasks` does, with the rows and their layout."""
    name = os.fspath(path)
    opened, split = _open_rows(name)
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
                raise RowProblem(f"its id {task.id!r} is also that of {place}, whose content differs: ids are unique")
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


# -------------------------------------------------------------------------------------------------------------- rows


def _open_rows(text: str) -> tuple[Iterable[tuple[str, object]], str | None]:
    """Open the rows at a `Place`, each with its position, e.g. `train.jsonl:3`; and the split, see `TaskFile`.

    Raises `DataError` if it cannot be read, or has several splits and none is named.
    """
    place = Place.of(text)
    if place.path.endswith(_LINES):
        _has_no_splits(place)
        return _lines(Path(place.path)), None
    if Path(place.path).is_file() and not place.path.endswith(_FILES):
        raise DataError(f"cannot read {place.path}: it is none of {', '.join(_FILES)}; convert or rename it")
    rows, split = _set(place)
    return _rows_of(text, rows), split


def _rows_of(text: str, rows: Dataset) -> Iterator[tuple[str, object]]:
    """Yield each row of a data set. Raises `DataError` for a value that cannot be read, as of a damaged file."""
    number = 0
    try:
        for number, row in enumerate(rows.with_format(None), 1):
            yield f"{text}: row {number}", _plain(row)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {text}: row {number + 1}: {error}") from error


def _has_no_splits(place: Place) -> None:
    if place.config or place.split:
        raise DataError(f"{place}: {place.path} has neither configurations nor splits; give it alone")


# ------------------------------------------------------------------------------------------------------------- lines


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield each row of a JSONL file, or of a file that is one JSON array; skips a byte order mark at its start."""
    try:
        with open_regular(path) as file, BufferedReader(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_MOST_ROW_BYTES + 1), b""), 1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if number == 1 and path.suffix == ".json" and text.lstrip().startswith(b"["):
                    yield from _array(path, text + lines.read())
                    return
                if len(line) > _MOST_ROW_BYTES:
                    raise DataError(f"{path}:{number}: a row has more than {_MOST_ROW_BYTES} bytes")
                if text.strip():
                    yield f"{path}:{number}", _parse_line(text)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _array(path: Path, text: bytes) -> Iterator[tuple[str, object]]:
    try:
        rows = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", with_info_parsed(row) if isinstance(row, dict) else row


def _parse_line(line: bytes) -> object:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return RowProblem(f"not JSON: {error.msg} at column {error.colno}; give one object a line")
    return with_info_parsed(row) if isinstance(row, dict) else row


# -------------------------------------------------------------------------- the `datasets` library, a second to import


def _set(place: Place) -> tuple[Dataset, str | None]:
    """Load a parquet file, or one split of a folder or a hub data set, and the split's name; None if there is none."""
    import datasets
    from datasets.exceptions import DatasetsError

    folder = Path(place.path)
    try:
        if place.path.endswith(_FILES):
            _has_no_splits(place)
            if folder.exists() and not folder.is_file():
                raise DataError(f"cannot read {place.path}: it is no regular file")
            reader = _SETS[Path(place.path).suffix]
            return datasets.load_dataset(reader, data_files=place.path, split="train"), None
        if (folder / "dataset_dict.json").is_file():
            split = _split_of(place, _splits_in(folder / "dataset_dict.json"))
            return datasets.Dataset.load_from_disk(str(folder / split)), split
        if (folder / "state.json").is_file():
            _has_no_splits(place)
            return datasets.Dataset.load_from_disk(place.path), None
        split = _split_of(place, datasets.get_dataset_split_names(place.path, place.config))
        return datasets.load_dataset(place.path, place.config, split=split), split
    except (OSError, ValueError, DatasetsError) as error:
        remedy = "give a .jsonl, .csv or .parquet file, a folder, or a hub data set such as org/name:config#split"
        raise DataError(f"cannot read '{place}': {remedy}: {error}") from error


def _splits_in(path: Path) -> list[str]:
    found = orjson.loads(path.read_bytes())
    splits = found.get("splits") if isinstance(found, dict) else None
    if not (splits and isinstance(splits, list) and all(isinstance(split, str) for split in splits)):
        raise DataError(f"{path} lists no splits; save the data set again")
    return splits


def _split_of(place: Place, splits: Sequence[str]) -> str:
    listed = ", ".join(splits)
    if place.split is None and len(splits) > 1:
        raise DataError(f"{place} has several splits: {listed}; name one, as in {place}#{splits[0]}")
    if place.split is not None and place.split not in splits:
        raise DataError(f"{place}: there is no split {place.split}; there are: {listed}")
    return place.split or splits[0]


def _plain(row: object) -> object:
    """Convert a row to plain JSON: dates and decimals become text, numbers that are not finite become null."""
    assert isinstance(row, dict)
    plain: Row = {}
    for column, value in row.items():
        try:
            plain[column] = orjson.loads(orjson.dumps(value, default=_text))
        except orjson.JSONEncodeError as error:
            return RowProblem(f"`{column}`: {error.__cause__ or error}; remove the column")
    return with_info_parsed(plain)


def _text(value: object) -> str:
    if isinstance(value, Decimal | timedelta):
        return str(value)
    raise TypeError(f"JSON has no form for a value of type {type(value).__name__}")
