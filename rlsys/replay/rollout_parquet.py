"""Rollouts on disk: one file per step. A Parquet file has one row per episode and one row group per group.

Numbers by token are in columns of their own: `prompt_ids`, `output_ids` and `logprobs` of all turns of an episode one
after the other, and the readings of its trained tokens. `session` is the episode as JSON, with the length of each of
these lists in its place. What holds for the whole group is in its first row: `task`, as JSON, and each of the
algorithm's columns. The others repeat a part of that for readers without rlsys: any tool that reads
Parquet can filter episodes by reward or text. The round trip is exact for finite numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.errors import DataError
from rlsys.number_arrays import BoolArray, FloatArray, IntArray, NumberArray
from rlsys.replay.parquet_bounds import MOST_GROUP_BYTES, BoundedParquet
from rlsys.replay.rollout_json import EpisodeReading, RolloutRecord, TokenStats, as_plain, decoder_of
from rlsys.types import Episode, GroupKey, Task

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROLLOUT_FORMAT = 3
"""Format of the files."""
_NAME = re.compile(r"step_(\d{1,15})\.parquet")
_TURN = {"prompt_ids": IntArray, "output_ids": IntArray, "logprobs": FloatArray}
_READING = {"trainer_logprobs": FloatArray, "entropies": FloatArray, "advantages": FloatArray, "is_masked": BoolArray}
_PIECES = "pieces"
_NUMBERS = ("step", "group_id", "attempt", "permit_version", "episode", "num_tokens", "reward", "advantage", "seconds")
_SHORT = ("task_id", "source", "policy", "replica", "outcome", "reason")
_COLUMN = "column_"
"""Prefix of the columns that an algorithm asked for."""
_FORMAT = b"rlsys.record_v"
"""Key of the format in the metadata of a file."""
DICTIONARIES = (*_SHORT, f"{_PIECES}.list.element")
"""Columns in which equal texts are stored once."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors of a group whose values are not those of an episode."""
_ANY_BYTES = 2**40
_MOST_VALUES = 2_000_000
"""Most values in a JSON text; each takes about 100 bytes of memory."""
_Lists: TypeAlias = dict[str, list[Sequence[Any]]]
"""Lists of one episode by column, in order."""


def rollout_path(run: Path, step: int) -> Path:
    """Return the file of a step in a run's folder."""
    return run / "rollouts" / f"step_{step:06d}.parquet"


def step_in(name: str) -> int | None:
    """Return the step of a rollout file by its name; None for another file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def rollout_paths(run: Path) -> list[Path]:
    """Return the file of each step of a run that has one, in order."""
    found = (run / "rollouts").glob("step_*") if (run / "rollouts").is_dir() else ()
    steps = {step for path in found if (step := step_in(path.name)) is not None}
    return [rollout_path(run, step) for step in sorted(steps)]


# -------------------------------------------------------------------------------------------------------------- write


def write_records(path: Path, records: Iterable[RolloutRecord]) -> None:
    """Write the records of one step, which have the same columns. The file appears whole."""
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.tmp")  # whoever reads all files of the folder passes over it
    tables = map(_table, records)
    first = next(tables, None)
    schema = _schema(()) if first is None else first.schema
    lists = [f"{field.name}.list.element" for field in schema if _is_list(field)]
    floats = [name for field, name in zip(filter(_is_list, schema), lists, strict=True) if _is_float(field)]
    with pq.ParquetWriter(
        partial,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[*_SHORT, f"{_PIECES}.list.element"],
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        write_statistics=[*_NUMBERS, *_SHORT],
        write_page_checksum=True,
    ) as writer:
        if first is not None:
            writer.write_table(first)
        for table in tables:
            writer.write_table(table)
    partial.replace(path)


def _schema(columns: Iterable[str]) -> pa.Schema:
    import pyarrow as pa

    texts = (*_SHORT, "prompt", "text", "task", "session")
    lists: list[tuple[str, Any]] = [(name, pa.int32()) for name in ("prompt_ids", "output_ids")]
    lists += [(name, pa.float32()) for name in ("logprobs", "trainer_logprobs", "entropies", "advantages")]
    lists += [("is_masked", pa.bool_()), (_PIECES, pa.string()), *((_COLUMN + s, pa.float32()) for s in columns)]
    numbers = [(name, pa.float64() if name in ("reward", "advantage", "seconds") else pa.int64()) for name in _NUMBERS]
    plain = [*numbers, *((name, pa.string()) for name in texts)]
    metadata = {_FORMAT: str(ROLLOUT_FORMAT).encode()}
    return pa.schema([*plain, *((name, pa.list_(kind)) for name, kind in lists)], metadata)


def _is_list(field: pa.Field) -> bool:
    import pyarrow as pa

    return pa.types.is_list(field.type)


def _is_float(field: pa.Field) -> bool:
    import pyarrow as pa

    return pa.types.is_floating(field.type.value_type)


def _table(record: RolloutRecord) -> pa.Table:
    """Return the rows of a group."""
    import pyarrow as pa

    schema, size = _schema(sorted(record.columns)), len(record.episodes)
    rows = [episode_row(record, e) for e in range(size)]
    lists = [_lists(record, e) for e in range(size)]
    columns = []
    for field in schema:
        name = field.name
        if name.startswith(_COLUMN):
            own = record.columns[name.removeprefix(_COLUMN)]
            columns.append(_list_column([own] + [()] * (size - 1), field.type.value_type))
        elif _is_list(field):
            columns.append(_list_column([of_row[name] for of_row in lists], field.type.value_type))
        else:
            columns.append(pa.array([row[name] for row in rows], field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(record: RolloutRecord, e: int) -> _Lists:
    """Return the lists of an episode, by turn."""
    turns = [turn for t in record.episodes[e].trajectories for turn in t.turns]
    readings = [reading for of_t in record.readings[e] for reading in of_t] if record.readings else []
    own: _Lists = {name: [getattr(turn, name) for turn in turns] for name in _TURN}
    return own | {name: [getattr(reading, name) for reading in readings] for name in (*_READING, _PIECES)}


def _list_column(rows: Sequence[Sequence[Sequence[Any]]], kind: pa.DataType) -> pa.Array:
    """Return a column of lists, of which each joins the lists of a row."""
    import numpy as np
    import pyarrow as pa

    offsets = list(accumulate((sum(map(len, row)) for row in rows), initial=0))
    parts = [part for row in rows for part in row if len(part)]
    if not parts:
        values = pa.array([], kind)
    elif pa.types.is_string(kind):
        values = pa.array([text for part in parts for text in part], kind)
    else:
        values = pa.array(np.concatenate(parts, dtype=kind.to_pandas_dtype(), casting="unsafe"), kind)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def episode_row(record: RolloutRecord, e: int) -> Mapping[str, Any]:
    """Return the columns of an episode that are not lists."""
    episode, task = record.episodes[e], record.task
    root = episode.trajectories[0]
    prompt = (
        task.prompt
        if isinstance(task.prompt, str)
        else "\n\n".join(f"{m['role']}: {m['content']}" for m in task.prompt)
    )
    session = {"episode": episode, "readings": _sizes(record.readings[e]) if record.readings else None}
    return {
        "step": record.step,
        "group_id": record.key.group_id,
        "attempt": record.key.attempt,
        "permit_version": record.permit_version,
        "episode": e,
        "num_tokens": sum(len(turn.output_ids) for t in episode.trajectories for turn in t.turns),
        "reward": None if root.reward is None else float(root.reward),
        "advantage": None if (advantage := record.advantages[e][0]) is None else float(advantage),
        "seconds": episode.seconds,
        "task_id": task.id,
        "source": task.source,
        "policy": record.policy,
        "replica": record.replica,
        "outcome": root.outcome.kind.value,
        "reason": root.outcome.reason,
        "prompt": prompt,
        "text": "\n\n".join(turn.text for turn in root.turns),
        "task": "" if e else _json(_group_fields(record)),
        "session": _json(session),
    }


def _group_fields(record: RolloutRecord) -> Mapping[str, Any]:
    """Return what holds for the whole group, with the length of each row of its columns."""
    columns = {kind: [len(row) for row in rows] for kind, rows in record.columns.items()}
    return {"task": record.task, "assigned": record.assigned, "parts": record.parts, "columns": columns}


def _sizes(reading: EpisodeReading) -> list[list[dict[str, Any]]]:
    """Return a reading with the length of each of its lists."""
    names = [f.name for f in fields(TokenStats)]

    def sizes(stats: TokenStats) -> dict[str, Any]:
        values = ((name, getattr(stats, name)) for name in names)
        return {name: value if isinstance(value, str) else len(value) for name, value in values}

    return [[sizes(stats) for stats in of_t] for of_t in reading]


def _json(value: object) -> str:
    """Encode as JSON, with the length of each array in its place."""
    return orjson.dumps(value, default=lambda v: len(v) if isinstance(v, NumberArray) else as_plain(v)).decode()


# --------------------------------------------------------------------------------------------------------------- read


def read_records(path: Path) -> list[RolloutRecord]:
    """Read a rollout file whole, of a run that is trusted. Raises `DataError` if it is none, or damaged, and
    `OSError`."""
    file = RolloutFile(path, _ANY_BYTES)
    return [file.decode(place) for place in range(len(file.group_ids))]


class RolloutFile:
    """A rollout file, of which only the groups that are asked for are decoded."""

    def __init__(self, path: Path, most_bytes: int = MOST_GROUP_BYTES) -> None:
        """Open a file, whose groups decode to at most `most_bytes` each. Raises `DataError` if it is no rollout file,
        and `OSError`."""
        import pyarrow as pa

        self._path, self._most_bytes = path, most_bytes
        try:
            self._file = BoundedParquet(path, DICTIONARIES)
            metadata = self._file.rows.metadata
            own_format = (metadata.metadata or {}).get(_FORMAT, b"").decode(errors="replace")
            if own_format != str(ROLLOUT_FORMAT):
                raise ValueError(f"its format is {own_format or 'of another program'}")
            groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
            at = self._file.rows.schema_arrow.get_field_index("group_id")
            self.group_ids = [_group_id(group.column(at).statistics) for group in groups]
            """By place in the file."""
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, IndexError, OverflowError, ValueError) as error:
            raise self._problem(error) from error

    def num_episodes(self, place: int) -> int:
        """Return the number of episodes of the group at a place."""
        return self._file.rows.metadata.row_group(place).num_rows

    def record(self, place: int) -> RolloutRecord:
        """Decode the group at a place, to show it. Raises `DataError`, also for a record that no run writes."""
        record = self.decode(place)
        try:
            _check_sense(record)
        except MALFORMED as error:
            raise self._problem(error) from error
        return record

    def decode(self, place: int) -> RolloutRecord:
        """Decode the group at a place. Raises `DataError`."""
        import pyarrow as pa

        try:
            self._file.check_group(place, self._most_bytes)
            return _record(self._file.rows.read_row_group(place))
        except (pa.ArrowException, OSError, *MALFORMED) as error:
            raise self._problem(error) from error

    def _problem(self, error: Exception) -> DataError:
        return DataError(f"{self._path}: not a rollout file of this version of rlsys, or damaged: {error!r}")


def _group_id(statistics: pq.Statistics | None) -> int:
    """Return the id of a group from the least value of its column. Raises `ValueError`."""
    if statistics is None or type(statistics.min) is not int:
        raise ValueError("a group has no id")
    return statistics.min


def texts_in(column: pa.ChunkedArray) -> list[Any]:
    """Return the texts of a column that is read as a dictionary: equal ones are one object."""
    found: list[Any] = []
    for chunk in column.chunks:
        texts = chunk.dictionary.to_pylist()
        found += [None if at is None else texts[at] for at in chunk.indices.to_pylist()]
    return found


def parse_json(text: str) -> Any:  # noqa: ANN401
    """Parse JSON of a rollout file. Raises `ValueError`, also for more values than a text of its kind has."""
    if sum(map(text.count, "[{,")) > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES} values")
    return orjson.loads(text)


def _record(rows: pa.Table) -> RolloutRecord:
    """Return the group of these rows."""
    import pyarrow as pa

    first = {name: rows[name][0].as_py() for name in ("step", "permit_version", "policy", "replica")}
    group = parse_json(rows["task"][0].as_py())
    sessions = [parse_json(text.as_py()) for text in rows["session"]]
    lists = {name: _Reader(rows[name], kind) for name, kind in (*_TURN.items(), *_READING.items())}
    pieces = texts_in(pa.chunked_array([rows[_PIECES].combine_chunks().values]))
    place = 0
    for session in sessions:
        for trajectory in session["episode"]["trajectories"]:
            for turn in trajectory["turns"]:
                turn |= {name: lists[name].take(turn[name]) for name in _TURN}
    readings = []
    for session in sessions if sessions[0]["readings"] is not None else ():
        of_episode = []
        for of_t in session["readings"]:
            of_trajectory = []
            for sizes in of_t:
                end = place + sizes[_PIECES]
                own = {name: lists[name].take(sizes[name]) for name in _READING}
                of_trajectory.append(TokenStats(said=sizes["said"], pieces=tuple(pieces[place:end]), **own))
                place = end
            of_episode.append(tuple(of_trajectory))
        readings.append(tuple(of_episode))
    columns = {}
    for key, lengths in group["columns"].items():
        column = _Reader(rows[_COLUMN + key], FloatArray)
        columns[key] = tuple(column.take(length) for length in lengths)
    return RolloutRecord(
        **first,
        key=GroupKey(rows["group_id"][0].as_py(), rows["attempt"][0].as_py()),
        task=decoder_of(Task)(group["task"]),
        episodes=tuple(decoder_of(Episode)(session["episode"]) for session in sessions),
        assigned=tuple(map(decoder_of(TrajectoryAdvantage), group["assigned"])),
        parts=tuple(group["parts"]),
        columns=columns,
        readings=tuple(readings),
    )


def _check_sense(record: RolloutRecord) -> None:
    """Raise `ValueError` for a record that no run writes."""
    task, sizes = record.task, [len(episode.trajectories) for episode in record.episodes]
    if not isinstance(task.prompt, str) and not all(isinstance(message, dict) for message in task.prompt):
        raise ValueError("the prompt is neither a text nor messages")
    if not all(sizes) or len(record.parts) != len(sizes) or not all(isinstance(each, dict) for each in record.parts):
        raise ValueError("an episode has no trajectory, or no parts of its reward")
    if record.readings and [len(of_episode) for of_episode in record.readings] != sizes:
        raise ValueError("the readings are not those of the trajectories")


class _Reader:
    """Takes one array after the other from a column of lists."""

    def __init__(self, column: pa.ChunkedArray, kind: type[NumberArray]) -> None:
        values = column.combine_chunks().values
        self._all, self._at = kind.over(values.to_numpy(zero_copy_only=False)), 0

    def take(self, size: int) -> NumberArray:
        self._at += size
        found = self._all[self._at - size : self._at]
        if len(found) != size:
            raise ValueError(f"a list of {size} numbers has {len(found)}")
        return found
