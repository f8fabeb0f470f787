"""Reads what wandb writes offline, a `.wandb` file, for tests: wandb itself has no public reader.

The file is a LevelDB log: seven bytes of header, then records in pieces that never cross a block of 32 KiB, each with a
checksum, a length and a type (whole, first, middle or last piece).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
HEADER = 7
WHOLE, FIRST, LAST = 1, 2, 4


def read(path: Path) -> list[Any]:
    """Every record of a file."""
    from wandb.proto import wandb_internal_pb2  # seconds, which only those who read a file should take

    of_bytes = vars(wandb_internal_pb2)["Record"].FromString  # generated, and without types
    return [of_bytes(record) for record in _records(path.read_bytes())]


def history(records: list[Any]) -> list[dict[str, Any]]:
    """The rows that were logged, without those that wandb adds."""
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [
        {key: json.loads(item.value_json) for item in row.item if not (key := _key(item)).startswith("_")}
        for row in rows
    ]


def config(records: list[Any]) -> dict[str, Any]:
    """What the run was begun with."""
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    return {_key(item): json.loads(item.value_json) for item in run.config.update}


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, piece = struct.unpack_from("<HB", data, at + 4)
        part = data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        parts = part if piece in (WHOLE, FIRST) else parts + part
        if piece in (WHOLE, LAST):
            yield parts
