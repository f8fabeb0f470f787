"""Threads of trackers: each tracker may be slow, fail or hang without stopping training.

The threads share the interpreter with the driver: Python code of a tracker delays the driver by a few ms at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from rlsys.errors import DataError
from rlsys.monitoring.events import AlertRaised, EvalDone, Event, RolloutsWritten, RunEnded, RunStarted, StepDone
from rlsys.monitoring.metric_catalog import rename_metrics
from rlsys.monitoring.tracker import EndReason, RunFacts, TrackedEpisode, Tracker, TrackerPlugin
from rlsys.util.printing import print_note

LONGEST = 10_000
"""Most characters of a prompt or a text in a table; the file has the rest."""
_READ = (RunStarted, StepDone, EvalDone, RolloutsWritten, AlertRaised, RunEnded)


class InThread:
    """Sink that passes the events of a run to one tracker, in a thread.

        consumes: events of the bus    waits for: the next event
        produces: calls of the tracker unblocked by: `handle`, `close`

    The bus only appends to a queue. A full queue drops its oldest event, so memory stays flat while the tracker hangs.
    A tracker that raises loses this event and gets the next one; only its first error is written to stderr. One that
    cannot start is off. An unreadable rollout file costs the table of its step; only the first one is reported. The
    tracker starts when training begins: a run that fails before that leaves nothing behind.
    """

    def __init__(self, plugin: TrackerPlugin, run: RunFacts, *, most: int = 1000, patience_s: float = 10.0) -> None:
        """`most`: most events in the queue. `patience_s`: most seconds that `close` waits after the end of the run."""
        self._plugin, self._run, self._patience_s = plugin, run, patience_s
        self._name = type(plugin).__name__
        self._queue: deque[Event] = deque(maxlen=most)
        self._news = threading.Condition()
        self._num_lost = 0
        self._has_failed = False
        self._is_off = False
        self._has_told_of_table = False
        self._ended_s: float | None = None
        self._thread = threading.Thread(target=self._run_feed, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def handle(self, event: Event, time_s: float) -> None:
        """Queue one event. Never waits for the tracker."""
        if not isinstance(event, _READ):
            return
        with self._news:
            if self._is_off or self._ended_s is not None:
                return
            is_full = len(self._queue) == self._queue.maxlen
            self._num_lost += is_full
            self._queue.append(event)
            if isinstance(event, RunEnded):
                self._ended_s = time.monotonic()
            self._news.notify()
        if is_full and self._num_lost == 1:
            self._tell("does not keep up: the oldest of what it has not taken is dropped")

    def close(self) -> None:
        """Wait until the tracker has processed the queue, for `patience_s` at most."""
        self.handle(RunEnded(0, "interrupted"), time.time())  # ignored if the bus has emitted the end
        ended_s = self._ended_s if self._ended_s is not None else time.monotonic()
        self._thread.join(max(0.0, ended_s + self._patience_s - time.monotonic()))
        if self._thread.is_alive():
            self._is_off = True
            self._tell(f"did not end within {self._patience_s:g} s; what it had not taken is lost")
        elif self._num_lost and not self._is_off:
            self._tell(f"lost {self._num_lost} events: it did not keep up")

    def _run_feed(self) -> None:
        try:
            self._feed()
        except BaseException as error:  # noqa: BLE001  (the boundary between training and trackers)
            with self._news:
                was_off, self._is_off = self._is_off, True
                self._queue.clear()
            if not was_off:
                self._tell(f"is off for the rest of the run: {error!r}")

    def _feed(self) -> None:
        tracker: Tracker | None = None
        event: Event | None = None
        while not isinstance(event, RunEnded):
            with self._news:
                self._news.wait_for(lambda: self._queue)
                event = self._queue.popleft()
            if isinstance(event, RunStarted):
                tracker = self._plugin.start(replace(self._run, first_step=event.first_step))
            elif tracker is not None:
                self._pass_on(event, tracker)

    def _pass_on(self, event: Event, tracker: Tracker) -> None:
        try:
            self._call(event, tracker)
        except BaseException as error:  # noqa: BLE001  (the boundary between training and trackers)
            if not (self._has_failed or self._is_off):
                self._has_failed = True
                self._tell(f"failed at {event.kind}, and goes on: {error!r}")

    def _call(self, event: Event, tracker: Tracker) -> None:
        match event:
            case StepDone() | EvalDone():
                tracker.metrics(event.step, rename_metrics(event.metrics, self._plugin.name_set))
            case RolloutsWritten():
                if (rows := self._rows(event)) is not None:
                    tracker.rollouts(event.step, rows)
            case AlertRaised():
                tracker.alert(event)
            case RunEnded():
                tracker.close(cast("EndReason", event.reason))

    def _rows(self, written: RolloutsWritten) -> list[TrackedEpisode] | None:
        """Table of a step; None if the tracker wants none, or the file cannot be read."""
        most = self._plugin.num_rows(written.step)
        try:
            return sample_rows(Path(written.path), most) if most else None
        except (OSError, DataError) as error:
            if not self._has_told_of_table:
                self._has_told_of_table = True
                self._tell(f"shows no rollouts of step {written.step}, nor of others whose file is like that: {error}")
            return None

    def _tell(self, what: str) -> None:
        print_note(f"rlsys: the tracker {self._name} {what}")


def sample_rows(path: Path, most: int) -> list[TrackedEpisode]:
    """Sample at most `most` episodes of a rollout file, evenly from the lowest reward to the highest.

    Episodes without a reward come first. Raises `OSError`, and `DataError` for a file that has no rollouts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[Any] = pq.read_table(BytesIO(path.read_bytes()), columns=list(TrackedEpisode._fields)).to_pylist()
    except (pa.ArrowException, KeyError) as error:
        raise DataError(f"{path} is no rollout file, or damaged: {error!r}") from error
    rows.sort(key=lambda row: (row["reward"] is not None, row["reward"], row["group_id"], row["episode"]))
    last = len(rows) - 1
    if len(rows) > most:
        rows = [rows[round(place * last / max(most - 1, 1))] for place in range(most)]
    return [TrackedEpisode(**row)._replace(prompt=_cut(row["prompt"]), text=_cut(row["text"])) for row in rows]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text) - LONGEST:,} characters more)"
