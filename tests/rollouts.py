"""Rollout files made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.replay.rollout_json import RolloutRecord, as_plain, decoder_of
from rlsys.replay.rollout_parquet import read_records, write_records
from rlsys.types import Episode, GroupKey, Message, Outcome, OutcomeKind, Task, Trajectory, Turn, VersionSpan


def said(text: str, num_tokens: int) -> Turn:
    """A turn."""
    return Turn(
        prompt_ids=(1,),
        output_ids=(5,) * num_tokens,
        logprobs=(-0.5,) * num_tokens,
        versions=(VersionSpan(0, num_tokens),),
        finish="stop",
        text=text,
    )


def rollouts(path: Path, rewards: Sequence[float | None], step: int = 10) -> Path:
    """A rollout file: two episodes a group, one turn each."""

    def episode(reward: float | None) -> Episode:
        turn = said(f"it is {reward}", 2)
        outcome = Outcome(OutcomeKind.OK) if reward is not None else Outcome(OutcomeKind.FAILED, "no judge")
        return Episode((Trajectory("policy", (turn,), outcome, reward),))

    def record(group_id: int) -> RolloutRecord:
        prompt = (Message(role="user", content="1 + 1?"),) if group_id else "2 + 2?"
        task = Task(id=f"t{group_id}", prompt=prompt)
        pair = tuple(map(episode, rewards[2 * group_id : 2 * group_id + 2]))
        return RolloutRecord(
            step, GroupKey(group_id, 1), task, "rollout-0", 0, pair, (TrajectoryAdvantage(1, 0, 0.5),), ({}, {})
        )

    write_records(path, map(record, range(len(rewards) // 2)))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The groups of a file, as JSON."""
    return list(map(_line_of, read_records(path)))


def _line_of(record: RolloutRecord) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in ("step", "key")}
    line = {"step": record.step, "group_id": record.key.group_id, **values}
    return orjson.loads(orjson.dumps(line, default=as_plain, option=orjson.OPT_SERIALIZE_NUMPY))


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write groups that are given as JSON."""
    decode = decoder_of(RolloutRecord)
    rows = (orjson.loads(orjson.dumps(line)) for line in lines)
    write_records(path, [decode({**row, "key": GroupKey(row["group_id"], 0)}) for row in rows])


def damage(path: Path, *places: int) -> None:
    """Change a byte of the groups at these places."""
    data, metadata = bytearray(path.read_bytes()), pq.read_metadata(path)
    for place in places:
        group = metadata.row_group(place)
        (session,) = (c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "session")
        data[session.data_page_offset + session.total_compressed_size * 3 // 4] ^= 0xFF
    path.write_bytes(data)
