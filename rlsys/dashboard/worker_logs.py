"""Logs of all workers as one: lines with a time, a worker and a level, filtered.

for line in log_lines(folder, "rollout-0", machine):
    line.time_s, line.level, line.text
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import cast, get_args

from rlsys.dashboard.folders import RunFolder
from rlsys.dashboard.http_problems import BadRequest
from rlsys.dashboard.machine_use import MachineUse
from rlsys.dashboard.responses import LogLevel, WorkerLogLine, WorkerLogsAnswer
from rlsys.monitoring.machine_samples import LOGS

LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
"""From the least to the most severe."""
MOST_READ = 1 << 20
"""Bytes read of the end of each log in one request."""
_MOST_CHARS = 4000
_PLAIN: LogLevel = "info"
_LEVEL = re.compile(
    r"(?P<error>\b(?:ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent call last\)|^Fatal Python error|"
    r"^[\w.]*(?:Error|Exception)\b)"
    r"|(?P<warning>\bWARN(?:ING)?\b|\w*Warning:)|(?P<debug>\bDEBUG\b)|(?P<info>\bINFO\b)"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def workers_with_logs(folder: RunFolder) -> list[str]:
    """Names of the workers that have a log, the driver's among them."""
    return [name.removesuffix(".log") for name in folder.files(LOGS, ending=".log")]


def log_lines(
    folder: RunFolder, worker: str, machine: MachineUse, most_bytes: int = 1 << 62
) -> Iterator[WorkerLogLine]:
    """Yield the lines in the last bytes of a worker's log, oldest first.

    The time of a line is that of the first sample of the worker after it, and so a few seconds late; of the lines after
    the last sample, that of the last write. A line that continues another, as in a traceback, has its level.
    """
    parts = ((f"{worker}.log.1", machine.log_turn(worker) - 1), (f"{worker}.log", machine.log_turn(worker)))
    for name, turn in parts:
        path = folder.file(LOGS, name)
        if path is None:
            continue
        try:
            with path.open("rb") as file:
                begin = max(0, path.stat().st_size - most_bytes)
                file.seek(begin)
                if begin:
                    begin += len(file.readline())  # it may be cut off
                data, written_s = file.read(), path.stat().st_mtime
        except OSError:  # deleted just now
            continue
        yield from lines_in(data, begin, worker, turn, machine, written_s)


def lines_in(
    data: bytes, begin: int, worker: str, turn: int, machine: MachineUse, written_s: float
) -> Iterator[WorkerLogLine]:
    """Yield the lines of a part of a log, which begins at the byte `begin` of the `turn`-th file of that log."""
    at, level = begin, _PLAIN
    for raw in data.splitlines(keepends=True):
        at += len(raw)
        text = _ESCAPES.sub("", raw.decode(errors="replace")).rstrip()[:_MOST_CHARS]
        if not text:
            continue
        found = _LEVEL.search(text[:200])
        if found and found.lastgroup:
            level = cast("LogLevel", found.lastgroup)
        elif not text[0].isspace():
            level = _PLAIN
        yield WorkerLogLine(machine.written_s(worker, turn, at - 1) or written_s, worker, level, text)


def logs_answer(
    folder: RunFolder, machine: MachineUse, workers: Sequence[str], level: str, pattern: str, page: int, limit: int
) -> WorkerLogsAnswer:
    """Merge the logs of these workers, or of all, newest line first: those of at least `level` that match the regular
    expression `pattern`. Raises `BadRequest`."""
    if level not in LEVELS:
        raise BadRequest(f"level={level!r:.50}: it is one of {', '.join(LEVELS)}")
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise BadRequest(f"q={pattern!r:.200} is no regular expression: {error}") from error
    known = workers_with_logs(folder)
    if unknown := set(workers) - set(known):
        raise BadRequest(f"worker={min(unknown)!r:.200} has no log; those that have: {', '.join(known)}")
    least = LEVELS.index(level)
    logs = (log_lines(folder, worker, machine, MOST_READ) for worker in workers or known)
    found = [
        line for line in chain.from_iterable(logs) if LEVELS.index(line.level) >= least and wanted.search(line.text)
    ]
    found = sorted(found, key=lambda line: line.time_s)[::-1]
    return WorkerLogsAnswer(found[page * limit : (page + 1) * limit], len(found), page, known)
