"""Run in a terminal: its last events, and then new ones, in the format of the run itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from pathlib import Path
from typing import TextIO

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.event_decoding import UnknownKind, Unreadable, decode
from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.run_files import Tail
from rlsys.dashboard.query.configs import read_config
from rlsys.dashboard.query.summary import GONE
from rlsys.monitoring.alerts import Alarms
from rlsys.monitoring.events import AlertRaised, Event, PhaseDone, RolledBack, RunEnded, RunStarted, StepDone
from rlsys.monitoring.trackers.console import ConsoleSink, note_of

NUM_NOTES = 20
"""Most past notes to show, and most past steps, from which the remaining time is estimated."""

_POLL_S = 0.3
_NOT_SHOWN = b'{"kind":"worker_busy"'
"""Most lines of a file are of this kind; they are not shown."""


def tail(run_dir: Path, stream: TextIO, *, once: bool = False, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the last notes of a run, then new ones until it ends; with `once`, only the last ones.

    Shows an alert if no step was done for long, by the thresholds of the run. A replaced file is shown from its last
    notes on. Waits for the run to write, by polling, because file systems of clusters do not notify of writes. Raises
    `NoSuch` if the folder is not a run that has begun.
    """
    if not (run_dir / "events.jsonl").is_file():
        raise NoSuch(f"{run_dir} has no events.jsonl: give the directory of a run that has begun")
    run, policies = _Followed(run_dir), sorted(path for path in run_dir.glob("policies/*") if path.is_dir())
    followed = [run, *(_Followed(path, path.name) for path in policies)]
    try:
        for one in followed:
            one.show(stream)
        while not (once or run.has_ended):
            sleep(_POLL_S)
            for one in followed:
                one.show(stream)
    finally:
        for one in followed:
            one.close()


class _Followed:
    """File of events of a run, or of one of its policies, and the lines shown of it."""

    def __init__(self, folder: Path, policy: str = "") -> None:
        self._folder, self._policy = folder, policy
        self._run_dir = "" if policy else folder
        self._sink: ConsoleSink | None = None
        self._total_steps = self._sink_steps = 0
        self._begin()

    def show(self, stream: TextIO) -> None:
        """Show appended events, at first only the last ones, and one alert if the run makes no progress."""
        if self._file.was_replaced:
            self._begin()
        shown = list(_last(self._read()) if self._is_first else self._read())
        self._is_first = False
        late = None if self.has_ended else self._alarms.silent(time.time())
        pid = None if self.has_ended else self._run.gone_process
        if pid is not None and not self._was_gone:
            shown.append((AlertRaised("no_progress", self._alarms.step, 0.0, 0.0, GONE.format(pid=pid)), time.time()))
        self._was_gone = pid is not None
        if late is not None and late.step != self._late_after:
            self._late_after = late.step
            alert = AlertRaised(late.alert, late.step, late.value, late.threshold, late.sentence)
            shown.append((alert, time.time()))
        sink = self._sink_on(stream)
        for event, time_s in shown:
            sink.handle(event, time_s)

    def _begin(self) -> None:
        """Reset the state."""
        self._file = Tail(self._folder / "events.jsonl")
        self._run = RunFolder(self._folder.resolve(), ".")
        self._alarms = Alarms(read_config(self._run).thresholds)
        self._was_gone = False
        self._is_first, self.has_ended = True, False
        self._late_after: int | None = None
        """Step of the last `no_progress` alert, from this class or from the run."""

    def _read(self) -> Iterator[tuple[Event, float]]:
        """Events written since the last call, with their times; unreadable lines are skipped."""
        for chunk in self._file.read():
            for line in chunk.lines:
                if line.startswith(_NOT_SHOWN):
                    continue
                try:
                    event, time_s = decode(line)
                except (Unreadable, UnknownKind):
                    continue
                if self._take_in(event, time_s):
                    yield event, time_s

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def _sink_on(self, stream: TextIO) -> ConsoleSink:
        """Sink with the current number of steps, once it is known."""
        if self._sink is None or self._sink_steps != self._total_steps:
            self.close()
            self._sink, self._sink_steps = (
                ConsoleSink(self._total_steps, stream, policy=self._policy, run_dir=self._run_dir),
                self._total_steps,
            )
        return self._sink

    def _take_in(self, event: Event, time_s: float) -> bool:
        """Process an event; True if it is to be shown. A `no_progress` alert of the run may already be shown."""
        self._alarms.observe(event, time_s)
        match event:
            case RunStarted(total_steps=total):
                self._total_steps = total
                self.has_ended, self._late_after = False, None  # the run continues
            case RolledBack(total_steps=total):
                self._total_steps = total
            case PhaseDone() | StepDone():
                self.has_ended = False  # also continues: of several policies, each start is in the policy's own file
            case RunEnded():
                self.has_ended = True
            case AlertRaised(alert="no_progress", step=step):
                was_told, self._late_after = step == self._late_after, step
                return not was_told
            case _:
                pass
        return True


def _last(events: Iterable[tuple[Event, float]]) -> list[tuple[Event, float]]:
    """Last events that are shown as notes, and the last steps, in order."""
    notes: deque[tuple[int, Event, float]] = deque(maxlen=NUM_NOTES)
    steps: deque[tuple[int, Event, float]] = deque(maxlen=NUM_NOTES)
    for i, (event, time_s) in enumerate(events):
        if isinstance(event, StepDone):
            steps.append((i, event, time_s))
        elif note_of(event) is not None:
            notes.append((i, event, time_s))
    return [(event, time_s) for _, event, time_s in merge(notes, steps, key=lambda one: one[0])]
