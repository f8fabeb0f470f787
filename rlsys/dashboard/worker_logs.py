"""Logs of all workers as one: lines with a time, a worker and a level, filtered.

for line in log_lines(folder, "rollout-0", machine):
    line.time_s, line.level, line.text
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import chain
from typing import cast, get_args

import regex

from rlsys.dashboard.folders import RunFolder
from rlsys.dashboard.http_problems import BadRequest
from rlsys.dashboard.machine_use import MachineUse
from rlsys.dashboard.responses import LogLevel, WorkerLogLine, WorkerLogsAnswer
from rlsys.monitoring.machine_samples import LOGS, line_of_log

LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
"""From the least to the most severe."""
MOST_READ = 1 << 20
"""Bytes read of the end of each log in one request, of few logs."""
_MOST_READ_IN_ALL = 16 << 20
_MOST_CHARS = 4000
_PLAIN: LogLevel = "info"
_LEVEL = re.compile(
    r"(?P<error>\b(?:ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent call last\)|^Fatal Python error|"
    r"^[\w.]*(?:Error|Exception)\b)"
    r"|(?P<warning>\bWARN(?:ING)?\b|\w*Warning:)|(?P<debug>\bDEBUG\b)|(?P<info>\bINFO\b)"
)


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


def logs_answer(
    folder: RunFolder,
    machine: MachineUse,
    workers: Sequence[str],
    level: str,
    pattern: str,
    page: int,
    limit: int,
    most_s: float = 5.0,
) -> WorkerLogsAnswer:
    """Merge the logs of these workers, or of all, newest line first: those of at least `level` that match the regular
    expression `pattern`. Raises `BadRequest`, also for an expression that takes longer than `most_s`."""
    if level not in LEVELS:
        raise BadRequest(f"level={level!r:.50}: it is one of {', '.join(LEVELS)}")
    try:
        wanted = regex.compile(pattern, regex.IGNORECASE)
    except (regex.error, OverflowError, RecursionError) as error:
        raise BadRequest(f"q={pattern!r:.200} is no regular expression: {error}") from error
    known = workers_with_logs(folder)
    if unknown := set(workers) - set(known):
        raise BadRequest(f"worker={min(unknown)!r:.200} has no log; those that have: {', '.join(known)}")
    least, until_s = LEVELS.index(level), time.monotonic() + most_s
    chosen = workers or known
    most = min(MOST_READ, _MOST_READ_IN_ALL // max(1, len(chosen)))
    num_found = 0

    def found() -> Iterator[tuple[float, int, WorkerLogLine]]:
        nonlocal num_found
        for line in chain.from_iterable(log_lines(folder, worker, machine, most) for worker in chosen):
            left_s = max(0.001, until_s - time.monotonic())
            if LEVELS.index(line.level) >= least and wanted.search(line.text, timeout=left_s, concurrent=True):
                num_found += 1
                yield line.time_s, num_found, line

    try:
        newest = [line for *_, line in nlargest((page + 1) * limit, found())]
    except TimeoutError as error:
        raise BadRequest(f"q={pattern!r:.200} takes longer than {most_s:g} s") from error
    return WorkerLogsAnswer(newest[page * limit :], num_found, page, known)
