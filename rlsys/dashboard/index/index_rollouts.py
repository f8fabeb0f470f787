"""Rows of the index from rollout files, with the columns that lists show and without numbers by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import orjson

_COLUMNS = (
    "step", "group_id", "episode", "task_id", "source", "policy", "replica", "reward", "advantage", "outcome", "reason",
    "num_tokens", "prompt", "text", "session",
)  # fmt: skip

_MOST_BITS = 63


class IndexedEpisode(NamedTuple):
    """Recorded episode: columns of `episodes` and its texts."""

    columns: Mapping[str, Any]
    prompt: str
    answer: str


class IndexedFile(NamedTuple):
    """Episodes of a file, and the number of its groups that cannot be read."""

    episodes: Sequence[IndexedEpisode]
    num_corrupt: int


def indexed_file(path: Path) -> IndexedFile:
    """Read a rollout file. Raises `OSError`; of a damaged file, the groups that can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    unreadable = (pa.ArrowException, OSError, LookupError, TypeError, ValueError)
    data = BytesIO(path.read_bytes())
    try:
        file = pq.ParquetFile(data, page_checksum_verification=True)
    except unreadable:
        return IndexedFile((), 1)
    try:
        return IndexedFile(list(_episodes(file.read(_COLUMNS, use_threads=False))), 0)
    except unreadable:
        pass  # a group is damaged: read them one by one
    found: list[IndexedEpisode] = []
    num_corrupt = 0
    for place in range(file.metadata.num_row_groups):
        try:
            found += _episodes(file.read_row_group(place, _COLUMNS, use_threads=False))
        except unreadable:
            num_corrupt += 1
    return IndexedFile(found, num_corrupt)


def _episodes(rows: Any) -> Iterator[IndexedEpisode]:  # noqa: ANN401  (a table of pyarrow)
    for row in zip(*(rows[name].to_pylist() for name in _COLUMNS), strict=True):
        yield _episode(dict(zip(_COLUMNS, row, strict=True)))


def _episode(row: Mapping[str, Any]) -> IndexedEpisode:
    session = orjson.loads(row["session"])["episode"]
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
    if any(isinstance(value, int) and value.bit_length() > _MOST_BITS for value in columns.values()):
        raise ValueError("a whole number is larger than SQLite stores")
    return IndexedEpisode(columns, row["prompt"], row["text"])


def _id_of(prompt: str) -> int:
    """Id of a prompt by its content, so that a prompt is kept once."""
    digest = blake2b(prompt.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
