"""Rows of the index from the log files of workers, whose lines may have neither a time nor a level."""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import orjson

from rlsys.dashboard.folders import RunFolder
from rlsys.dashboard.index_events import PUT_LOG

ENDINGS = (".log", ".log.1")
"""Endings of log files: of the current one, and of the one before it."""
_MOST_LETTERS = 10_000
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_TIME = re.compile(r"\W{0,2}(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)(Z|[+-]\d\d:?\d\d)?")
_LEVEL = re.compile(
    r"(?P<error>\b(?:ERROR|CRITICAL|FATAL)\b|^Traceback |^Fatal Python error|^[\w.]*(?:Error|Exception)\b)"
    r"|(?P<warning>\bWARN(?:ING)?\b|\w*Warning:)|(?P<debug>\bDEBUG\b)|(?P<info>\bINFO\b)"
)


class _LogSample(NamedTuple):
    """Size of a log at a time."""

    num_bytes: int
    time_s: float


def put_log(connection: sqlite3.Connection, folder: RunFolder, file: str, data: bytes, begin: int) -> None:
    """Write the rows of lines of a log file, which begin at the offset `begin`.

    The time of a line is its own, or that of the line before if that has one; else that of the first sample of the
    worker in which the log is so long, or of the last write. A line that continues another has its level.
    """
    path = folder.path / file
    ending = next(ending for ending in reversed(ENDINGS) if file.endswith(ending))
    worker = path.name.removesuffix(ending)
    samples = [] if begin else _samples(folder, worker, is_before=ending != ENDINGS[0])
    try:
        written_s = path.stat().st_mtime
    except OSError:  # deleted just now
        return
    rows = (
        (file, time_s, level, worker, "line", text) for time_s, level, text in _lines(data, begin, samples, written_s)
    )
    connection.executemany(PUT_LOG, rows)


def _lines(
    data: bytes, begin: int, samples: Sequence[_LogSample], written_s: float
) -> Iterator[tuple[float, str, str]]:
    own_s: float | None = None
    level, end = "info", begin
    for line in data.split(b"\n"):
        end += len(line) + 1
        text = _ESCAPES.sub("", line[:_MOST_LETTERS].decode(errors="replace")).rstrip()
        if not text:
            continue
        own_s = _time_in(text) or own_s
        at = bisect_left(samples, (end, 0.0))
        told_s = samples[at].time_s if at < len(samples) else written_s
        found = _LEVEL.search(text[:200])
        if found or not text[0].isspace():
            level = (found and found.lastgroup) or "info"
        yield (told_s if own_s is None else own_s), level, text


def _time_in(line: str) -> float | None:
    """Time at the beginning of a line; one without a zone is of this machine."""
    found = _TIME.match(line)
    if found is None:
        return None
    try:
        return datetime.fromisoformat(found[1].replace(",", ".") + (found[2] or "")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _samples(folder: RunFolder, worker: str, *, is_before: bool) -> list[_LogSample]:
    """Sizes of a worker's log over time, from `machine/WORKER.jsonl`; those of the log before, if `is_before`."""
    path = folder.file("machine", f"{worker}.jsonl")
    by_turn: dict[int, list[_LogSample]] = {}
    for line in _read(path).splitlines():
        try:
            row = orjson.loads(line)
            by_turn.setdefault(row["log_turn"], []).append(_LogSample(int(row["log_bytes"]), float(row["time_s"])))
        except (ValueError, LookupError, TypeError):  # damaged, or of another version
            continue
    return sorted(by_turn.get(max(by_turn, default=0) - is_before, []))


def _read(path: Path | None) -> bytes:
    try:
        return path.read_bytes() if path else b""
    except OSError:  # deleted just now
        return b""
