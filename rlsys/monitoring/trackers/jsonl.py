"""Files that every run writes: `events.jsonl`, and `metrics.jsonl` with one row per step or evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import SEEK_END, FileIO
from pathlib import Path
from typing import TypeAlias

import orjson

from rlsys.monitoring.events import EvalDone, Event, FileStalled, StepDone
from rlsys.util.printing import print_note

MAX_WAITING = 16 * 2**20
"""Bytes of lines kept in memory for one file that cannot be written; later lines are lost."""
Opens: TypeAlias = Callable[[Path], FileIO]
"""Opens a file for reading and appending, unbuffered."""


class JsonlSink:
    """Sink that appends to the files of a run directory, line by line, so a killed run is readable to its last step.

    `events.jsonl`:  {"kind": "weights_published", "time_s": 1767225600.2, "version": 3, ...}
    `metrics.jsonl`: {"step": 3, "time_s": 1767225600.2, "reward/mean": 0.52, ...}
                     {"step": 2, "time_s": 1767225601.7, "eval/held_out/mean": 0.48, ...}

    The metrics of a step may be in several rows: its evaluations, one row per data set, may end after later steps. A
    resumed run appends, on a new line if the last one was cut. It may repeat steps that the killed run took after its
    last checkpoint: of two rows with the same metric of the same step, the later one counts.

    Lines that cannot be written, for example to a full disk, stay in memory and are tried again with the next event.
    Once they are written, a `FileStalled` follows them.
    """

    def __init__(self, run_dir: Path, opens: Opens | None = None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._events = _Lines(run_dir / "events.jsonl", opens or _open_file)
        self._metrics = _Lines(run_dir / "metrics.jsonl", opens or _open_file)

    def handle(self, event: Event, time_s: float) -> None:
        """Write one event, and its metrics if it has any. NaN is written as null."""
        self._events.write(_line({"kind": event.kind, "time_s": time_s, **vars(event)}), time_s)
        if isinstance(event, StepDone | EvalDone):
            self._metrics.write(_line({"step": event.step, "time_s": time_s, **event.metrics}), time_s)
        else:
            self._metrics.write(b"", time_s)
        for lines in (self._events, self._metrics):
            if gap := lines.gap():
                self.handle(gap, time_s)

    def close(self) -> None:
        self._events.close()
        self._metrics.close()


class _Lines:
    """Lines on their way into one file."""

    def __init__(self, path: Path, opens: Opens) -> None:
        self._path, self._file = path, opens(path)
        self._waiting = bytearray()
        self._stalled_s = self._now_s = 0.0
        """Times of the first failed write, and of the last write."""
        self._problem = ""
        """Why lines wait, or have waited; empty if that is told."""
        self._num_lost = 0
        if self._file.tell():
            self._file.seek(-1, SEEK_END)
            if self._file.read(1) != b"\n":  # a killed run or a full disk left an incomplete line
                self._waiting += b"\n"

    def write(self, line: bytes, time_s: float) -> None:
        """Write what waits and then this line; an empty line only tries again."""
        self._now_s = time_s
        self._flush()
        if len(self._waiting) + len(line) > MAX_WAITING:
            self._num_lost += 1
            return
        self._waiting += line
        self._flush()

    def gap(self) -> FileStalled | None:
        """Return how long lines had to wait, once after they are written."""
        if self._waiting or not self._problem:
            return None
        gap = FileStalled(self._path.name, self._problem, self._now_s - self._stalled_s, self._num_lost)
        self._problem, self._num_lost = "", 0
        return gap

    def close(self) -> None:
        self._flush()
        if self._waiting:
            lines = self._num_lost + self._waiting.count(b"\n")
            print_note(f"rlsys: the last {lines} lines of {self._path} are lost: {self._problem}")
        self._file.close()

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]  # which may be a part of a line
        except OSError as error:
            if not self._problem:
                self._stalled_s = self._now_s
                print_note(f"rlsys: {self._path} cannot be written now: {error.strerror}; its lines wait")
            self._problem = error.strerror or repr(error)


def _open_file(path: Path) -> FileIO:
    return path.open("a+b", buffering=0)


def _line(row: Mapping[str, object]) -> bytes:
    return orjson.dumps(row, default=dict, option=orjson.OPT_APPEND_NEWLINE)
