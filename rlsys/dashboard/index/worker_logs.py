"""Lines of the logs of workers: each with a time, a worker and a level."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from rlsys.dashboard.index.machine_use import MachineUse
from rlsys.monitoring.machine_samples import line_of_log

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_MOST_CHARS = 4000
_PLAIN: LogLevel = "info"
_LEVEL = re.compile(
    r"(?P<error>\b(?:ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent call last\)|^Fatal Python error|"
    r"^[\w.]*(?:Error|Exception)\b)"
    r"|(?P<warning>\bWARN(?:ING)?\b|\w*Warning:)|(?P<debug>\bDEBUG\b)|(?P<info>\bINFO\b)"
)


@dataclass(frozen=True, slots=True)
class WorkerLogLine:
    """A line of a worker's output."""

    time_s: float
    """At most a few seconds after it was written; the clock is that of the worker's node."""
    worker: str
    level: LogLevel
    text: str


def lines_in(
    data: bytes, begin: int, worker: str, turn: int, machine: MachineUse, written_s: float
) -> Iterator[WorkerLogLine]:
    """Yield the lines of a part of a log, which begins at the byte `begin` of the `turn`-th file of that log.

    The time of a line is that of the first sample of the worker after it, and so a few seconds late; of the lines after
    the last sample, that of the last write. A line that continues another, as in a traceback, has its level.
    """
    at, level = begin, _PLAIN
    for raw in data.split(b"\n"):
        at += len(raw) + 1
        text = line_of_log(raw)[:_MOST_CHARS]
        if not text:
            continue
        found = _LEVEL.search(text[:200])
        if found and found.lastgroup:
            level = cast("LogLevel", found.lastgroup)
        elif not text[0].isspace():
            level = _PLAIN
        yield WorkerLogLine(machine.written_s(worker, turn, at - 1) or written_s, worker, level, text)
