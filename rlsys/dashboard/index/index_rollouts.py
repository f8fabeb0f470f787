"""Rows of the index from rollout files, with the columns that lists show and without numbers by token.

Most files are read at once. One that is large or damaged is read group by group, and a group that is damaged or decodes
to more than 128 MiB is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from rlsys.replay.parquet_bounds import BoundedParquet
from rlsys.replay.rollout_parquet import DICTIONARIES, MALFORMED, parse_json, texts_in

_COLUMNS = (
    "step", "group_id", "episode", "task_id", "source", "policy", "replica", "reward", "advantage", "outcome", "reason",
    "num_tokens", "prompt", "text", "session",
)  # fmt: skip

_MOST_BITS = 63
_MOST_SHORT = 10_000
"""Most letters of a text that is stored with every episode, such as the reason of its outcome."""
_MOST_GROUP_BYTES = 2**27
"""Most decoded bytes of the columns of a group."""
_AT_ONCE_BYTES = 2**24
"""Most decoded bytes of a file that is read at once."""


class IndexedEpisode(NamedTuple):
    """Recorded episode: columns of `episodes` and its texts."""

    columns: Mapping[str, Any]
    prompt: str
    answer: str


class IndexedGroups(NamedTuple):
    """Episodes of some groups of a file, and the number of these groups that cannot be read."""

    episodes: Sequence[IndexedEpisode]
    num_corrupt: int


def indexed_groups(path: Path) -> Iterator[IndexedGroups]:
    """Read a rollout file, part by part. Raises `OSError`; of a damaged file, the groups that can be read."""
    import pyarrow as pa

    unreadable = (pa.ArrowException, OSError, *MALFORMED)
    try:
        file = BoundedParquet(path, DICTIONARIES)
        places = range(file.rows.metadata.num_row_groups)
    except FileNotFoundError:
        raise
    except unreadable:
        yield IndexedGroups((), 1)
        return
    try:
        if sum(file.check_group(place, _MOST_GROUP_BYTES, _COLUMNS) for place in places) < _AT_ONCE_BYTES:
            yield IndexedGroups(list(_episodes(file.rows.read(_COLUMNS, use_threads=False))), 0)
            return
    except unreadable:
        pass  # a group is damaged: read them one by one
    for place in places:
        try:
            file.check_group(place, _MOST_GROUP_BYTES, _COLUMNS)
            yield IndexedGroups(list(_episodes(file.rows.read_row_group(place, _COLUMNS, use_threads=False))), 0)
        except unreadable:
            yield IndexedGroups((), 1)


def _episodes(rows: Any) -> Iterator[IndexedEpisode]:  # noqa: ANN401  (a table of pyarrow)
    columns = (texts_in(rows[name]) if name in DICTIONARIES else rows[name].to_pylist() for name in _COLUMNS)
    for row in zip(*columns, strict=True):
        yield _episode(dict(zip(_COLUMNS, row, strict=True)))


def _episode(row: Mapping[str, Any]) -> IndexedEpisode:
    session = parse_json(row["session"])["episode"]
    turns = [turn for trajectory in session["trajectories"] for turn in trajectory["turns"]]
    versions = [span["version"] for turn in turns for span in turn["versions"]]
    columns = {
        "step": row["step"],
        "group_id": row["group_id"],
        "episode": row["episode"],
        "task": row["task_id"],
        "source": row["source"],
        "policy": row["policy"],
        "replica": row["replica"],
        "reward": row["reward"],
        "advantage": row["advantage"],
        "outcome": row["outcome"],
        "reason": row["reason"],
        "agents": ", ".join(trajectory["agent"] for trajectory in session["trajectories"]),
        "length": row["num_tokens"],
        "turns": len(turns),
        "seconds": max((span["start_s"] + span["seconds"] for span in session.get("spans", ())), default=None),
        "tool_calls": session["num_tool_calls"],
        "staleness": max(0, row["step"] - 1 - min(versions)) if versions else None,
        "prompt_id": _id_of(row["prompt"]),
    }
    stored = {name: _storable(value) for name, value in columns.items()}
    return IndexedEpisode(stored, str(row["prompt"]), str(row["text"]))


def _storable(value: object) -> str | int | float | None:
    """Value that SQLite stores; of a text, its beginning. Raises `ValueError`."""
    if isinstance(value, str):
        return value[:_MOST_SHORT]
    if not isinstance(value, int | float | None):
        raise ValueError("a value is neither a number nor a text")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("a whole number is larger than SQLite stores")
    return value


def _id_of(prompt: str) -> int:
    """Id of a prompt by its content, so that a prompt is kept once."""
    digest = blake2b(prompt.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
