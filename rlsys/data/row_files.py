"""Rows of data files, as their text says them.

| given | read as |
| --- | --- |
| `rows.jsonl` | one JSON object a line |
| `rows.json` | the same, or one array of objects |
| `rows.csv` | every cell is text, and an empty one null; a list of messages may be there as JSON |
| `rows.parquet`, a folder, `org/name:config#split` | by the `datasets` library |
| `shards/*.jsonl` | each file that the pattern finds, in order of their names |

JSONL, JSON and CSV may be compressed (`rows.jsonl.gz`).
"""

from __future__ import annotations

import codecs
import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from glob import escape, glob, has_magic
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rlsys.data.row_adapters import Row, RowProblem, unpack_row, without_nulls
from rlsys.errors import DataError
from rlsys.types import Json
from rlsys.util.regular_files import open_regular

if TYPE_CHECKING:
    from datasets import Dataset

_LINES, _CSV, _PARQUET, _GZ = (".jsonl", ".json"), ".csv", ".parquet", ".gz"
FORMS = (*_LINES, _CSV, _PARQUET)
_ENDS = (*FORMS, *(f"{form}{_GZ}" for form in (*_LINES, _CSV)))
_MOST_ROW_BYTES = 2**27
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""Beginning of a list of messages, as JSON or as Python prints it."""
_CHAT = {"role", "function"}
"""Keys of which messages or schemas of tools have one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Location of rows: `rows.jsonl`, `shards/*.jsonl`, `folder#test`, `org/name:config#test`."""

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
        """Make the path absolute if it is on this machine; otherwise it may be on the hub and stays unchanged."""
        path = Path(self.path)
        return replace(self, path=str(path.absolute())) if path.exists() or self.is_pattern else self

    @property
    def is_pattern(self) -> bool:
        """True if the path is a pattern of several files."""
        return has_magic(self.path) and not Path(self.path).exists()


def _cut(text: str, mark: str) -> tuple[str, str | None]:
    """Split at the last `mark`, unless it is inside the path of a file or folder."""
    before, found, after = text.rpartition(mark)
    is_path = not (before and found and after) or "/" in after or text.endswith(_ENDS) or Path(text).exists()
    return (text, None) if is_path else (before, after)


def open_rows(text: str) -> tuple[Iterable[tuple[str, object]], str | None]:
    """Open the rows at a `Place`, each with its position, e.g. `train.jsonl:3`; and the split that was read, None for a
    file, or a folder of one data set. A row that cannot be read is a `RowProblem`.

    Raises `DataError`, also while rows are taken, if the rest cannot be read, or if there are several splits and none
    is named.
    """
    place = Place.of(text)
    if place.is_pattern:
        _has_no_splits(place)
        paths = sorted(glob(place.path, recursive=True))  # noqa: PTH207  (`Path.glob` takes no absolute one)
        if not paths:
            raise DataError(f"cannot read {place.path}: no file matches it")
        return chain.from_iterable(_rows_in(path) for path in paths), None
    if place.path.endswith(_ENDS):
        _has_no_splits(place)
        return _rows_in(place.path), None
    _check_form(place.path)
    return _set(place)


def _rows_in(path: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a file."""
    form = Path(path.removesuffix(_GZ)).suffix
    if path.endswith(_ENDS) and form in _LINES:
        return _lines(Path(path), form)
    if path.endswith(_ENDS) and form == _CSV:
        return _read_csv(Path(path))
    _check_form(path)
    return _set(Place(path))[0]


def _check_form(path: str) -> None:
    if Path(path).is_file() and not path.endswith(_ENDS):
        raise DataError(f"cannot read {path}: it is none of {', '.join(FORMS)}; convert or rename it")


def _has_no_splits(place: Place) -> None:
    if place.config or place.split:
        raise DataError(f"{place}: {place.path} has neither configurations nor splits; give it alone")


@contextmanager
def _open(path: Path) -> Iterator[gzip.GzipFile | BufferedReader]:
    """Open a file, unpack_row. Raises `DataError` if it cannot be read, also while its bytes are taken."""
    try:
        with open_regular(path) as file:
            yield gzip.GzipFile(fileobj=file) if path.suffix == _GZ else BufferedReader(file)
    except _DAMAGED as error:
        raise DataError(f"cannot read {path}: it is damaged: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


# ------------------------------------------------------------------------------------------------------ lines of JSON


def _lines(path: Path, form: str) -> Iterator[tuple[str, object]]:
    """Yield each row of a JSONL file, or of a file that is one JSON array; skips a byte order mark at its start."""
    with _open(path) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MOST_ROW_BYTES + 1), b""), 1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if number == 1 and form == ".json" and text.lstrip().startswith(b"["):
                yield from _array(path, text + lines.read())
                return
            if len(line) > _MOST_ROW_BYTES:
                raise DataError(f"{path}:{number}: a row has more than {_MOST_ROW_BYTES} bytes")
            if text.strip():
                yield f"{path}:{number}", _parse_line(text)


def _array(path: Path, text: bytes) -> Iterator[tuple[str, object]]:
    try:
        rows = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {_describe_json_error(error, text)}") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", unpack_row(row) if isinstance(row, dict) else row


def _parse_line(line: bytes) -> object:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return RowProblem(f"not JSON: {_describe_json_error(error, line)}; give one object a line")
    return unpack_row(row) if isinstance(row, dict) else row


def _describe_json_error(error: orjson.JSONDecodeError, text: bytes) -> str:
    """Say what is wrong with JSON, and where."""
    rest = text.decode(errors="replace")[error.pos :]
    if number := re.match(r"NaN|Infinity", rest):
        return f"{number[0]} at column {error.colno} is no number of JSON: write null"
    return f"{error.msg} at column {error.colno}"


# ---------------------------------------------------------------------------------------------------------------- CSV


def _read_csv(path: Path) -> Iterator[tuple[str, object]]:
    """Yield each row of a CSV file: every cell is the text that stands there, and an empty one is null."""
    csv.field_size_limit(_MOST_ROW_BYTES)
    with _open(path) as file, TextIOWrapper(file, "utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            names = next(reader, [])
            _check_names(path, names)
            for cells in reader:
                if cells:
                    yield f"{path}:{reader.line_num}", _row_of_cells(names, cells)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {path}: line {reader.line_num + 1}: {error}") from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise DataError(f"{path}:1: two columns are called {twice[0]!r}; rename one")


def _row_of_cells(names: Sequence[str], cells: Sequence[str]) -> Row | RowProblem:
    if len(cells) != len(names):
        return RowProblem(f"it has {len(cells)} cells, and the first line {len(names)} names: quote cells with commas")
    try:
        row = {name: _value_of(name, cell) for name, cell in zip(names, cells, strict=True) if name}
    except RowProblem as problem:
        return problem
    return unpack_row(row)


def _value_of(name: str, cell: str) -> Json:
    """Return a cell's text, the messages that it is the JSON of, or null if it is empty. Raises `RowProblem` for other
    texts of messages."""
    if not cell:
        return None
    if not _MESSAGES.match(cell):
        return cell
    try:
        return orjson.loads(cell)
    except orjson.JSONDecodeError as error:
        raise RowProblem(
            f"`{name}` begins as a list of messages, but is no JSON: {error.msg}; use json.dumps"
        ) from None


# -------------------------------------------------------------------------- the `datasets` library, a second to import


def _set(place: Place) -> tuple[Iterator[tuple[str, object]], str | None]:
    """Open the rows of a parquet file, or of one split of a folder or a hub data set, with the split's name; None if
    there is none.

    The files of a folder that declares no types are read as each alone would be: the library guesses types, and its
    parser of JSON does not survive every damaged file.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    folder = Path(place.path)
    try:
        if place.path.endswith(_PARQUET):
            if folder.exists() and not folder.is_file():
                raise DataError(f"cannot read {place.path}: it is no regular file")
            found = datasets.load_dataset("parquet", data_files=escape(place.path), split="train")
            return _rows_of(str(place), _plain_rows(found)), None
        if (folder / "dataset_dict.json").is_file():
            split = _split_of(place, _splits_in(folder / "dataset_dict.json"))
            return _rows_of(str(place), _plain_rows(datasets.Dataset.load_from_disk(str(folder / split)))), split
        if (folder / "state.json").is_file():
            _has_no_splits(place)
            return _rows_of(str(place), _plain_rows(datasets.Dataset.load_from_disk(place.path))), None
        builder = datasets.load_dataset_builder(place.path, place.config)
        files: Mapping[Any, Sequence[object]] = getattr(builder.config, "data_files", None) or {}
        splits = [str(split) for split in files] or datasets.get_dataset_split_names(place.path, place.config)
        split = _split_of(place, splits)
        paths = [str(path) for path in files.get(split, ())]
        if paths and not builder.info.features and all(path.endswith(_ENDS) and Path(path).exists() for path in paths):
            return chain.from_iterable(map(_rows_in, paths)), split
        return _rows_of(str(place), _load_split(place, split)), split
    except (OSError, ValueError, *_DAMAGED, DatasetsError) as error:
        remedy = "give a .jsonl, .csv or .parquet file, a folder, or a hub data set such as org/name:config#split"
        raise DataError(f"cannot read '{place}': {remedy}: {error}") from error


def _load_split(place: Place, split: str) -> Iterator[object]:
    """Open a split as its builder reads it; of CSV files whose columns have no declared types, each cell as text."""
    import datasets
    from datasets.packaged_modules.csv.csv import Csv

    builder = datasets.load_dataset_builder(place.path, place.config)
    if not isinstance(builder, Csv) or builder.info.features:
        return _plain_rows(datasets.load_dataset(place.path, place.config, split=split))
    names = next(iter(datasets.load_dataset(place.path, place.config, split=split, streaming=True)), {})
    texts = datasets.Features({name: datasets.Value("string") for name in names})
    options: dict[str, Any] = {"features": texts, "keep_default_na": False}
    return _cells_of(datasets.load_dataset(place.path, place.config, split=split, **options))


def _cells_of(table: Dataset) -> Iterator[Row | RowProblem]:
    for row in table.with_format(None):
        assert isinstance(row, dict)
        yield _row_of_cells(list(row), list(row.values()))


def _plain_rows(table: Dataset) -> Iterator[object]:
    return (_plain(row) for row in table.with_format(None))


def _rows_of(text: str, rows: Iterator[object]) -> Iterator[tuple[str, object]]:
    """Yield each row with its place. Raises `DataError` for a value that cannot be read, as of a damaged file."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield f"{text}: row {number}", row
    except (OSError, ValueError, *_DAMAGED) as error:
        raise DataError(f"cannot read {text}: row {number + 1}: {error}") from error


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
            plain[column] = drop_filled_nulls(orjson.loads(orjson.dumps(value, default=_text)))
        except orjson.JSONEncodeError as error:
            return RowProblem(f"`{column}`: {error.__cause__ or error}; remove the column")
    return unpack_row(plain)


def _text(value: object) -> str:
    if isinstance(value, Decimal | timedelta):
        return str(value)
    raise TypeError(f"JSON has no form for a value of type {type(value).__name__}")


def drop_filled_nulls(value: Json) -> Json:
    """Remove the nulls that columnar files write where one message or tool has no key that another has."""
    if isinstance(value, dict):
        return {key: drop_filled_nulls(inner) for key, inner in value.items()}
    if isinstance(value, list):
        objects = [each for each in value if isinstance(each, dict) and _CHAT.intersection(each)]
        return [without_nulls(each) for each in objects] if len(objects) == len(value) else value
    return value
