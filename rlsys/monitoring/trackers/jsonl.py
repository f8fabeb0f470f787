"""Files that every run writes: `events.jsonl`, and `metrics.jsonl` with one row per step or evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from io import SEEK_END, FileIO
from pathlib import Path

import orjson

from rlsys.monitoring.events import EvalDone, Event, StepDone


class JsonlSink:
    """Sink that appends to the files of a run directory, line by line, so a killed run is readable to its last step.

    `events.jsonl`:  {"kind": "weights_published", "time_s": 1767225600.2, "version": 3, ...}
    `metrics.jsonl`: {"step": 3, "time_s": 1767225600.2, "reward/mean": 0.52, ...}
                     {"step": 2, "time_s": 1767225601.7, "eval/held_out/mean": 0.48, ...}

    The metrics of a step may be in several rows: its evaluations, one row per data set, may end after later steps. A
    resumed run appends, on a new line if the last one was cut. It may repeat steps that the killed run took after its
    last checkpoint: of two rows with the same metric of the same step, the later one counts.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._events = _appending(run_dir / "events.jsonl")
        self._metrics = _appending(run_dir / "metrics.jsonl")

    def handle(self, event: Event, time_s: float) -> None:
        """Write one event, and its metrics if it has any. NaN is written as null."""
        self._events.write(_line({"kind": event.kind, "time_s": time_s, **vars(event)}))
        if isinstance(event, StepDone | EvalDone):
            self._metrics.write(_line({"step": event.step, "time_s": time_s, **event.metrics}))

    def close(self) -> None:
        self._events.close()
        self._metrics.close()


def _appending(path: Path) -> FileIO:
    """Open a file for appending at the beginning of a line."""
    file = path.open("a+b", buffering=0)
    if file.tell():
        file.seek(-1, SEEK_END)
        if file.read(1) != b"\n":  # a killed run or a full disk left an incomplete line
            file.write(b"\n")
    return file


def _line(row: Mapping[str, object]) -> bytes:
    return orjson.dumps(row, default=dict, option=orjson.OPT_APPEND_NEWLINE)
