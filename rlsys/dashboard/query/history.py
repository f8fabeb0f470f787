"""State of one run, computed from its events as of the last read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from rlsys.dashboard.index.event_decoding import UnknownKind, Unreadable, decode, decode_metrics
from rlsys.dashboard.index.groups import Groups
from rlsys.dashboard.index.run_files import FileChunk, Tail
from rlsys.dashboard.index.series import SeriesColumns
from rlsys.dashboard.index.spans import PREFIX, Spans
from rlsys.dashboard.query.failures import Failures
from rlsys.dashboard.query.paces import Paces
from rlsys.dashboard.query.replicas import Replicas
from rlsys.monitoring.alerts import Alarms
from rlsys.monitoring.events import (
    EngineChosen,
    EvalDone,
    Event,
    PhaseDone,
    RolledBack,
    RunEnded,
    RunStarted,
    StepDone,
    WorkerFailed,
)

_Hears: TypeAlias = Callable[[Event, float], object]


class EventHistory:
    """Fold over the events of a run, updated by `look`.

    If a run has no events, the rows of its metrics are used instead.
    """

    def __init__(self, events: Path | None, metrics: Path | None, thresholds: Mapping[str, float | None]) -> None:
        """A path of None: the file does not exist. `thresholds`: of alerts, see `Alarms`."""
        self.columns, self.groups, self.replicas = SeriesColumns(), Groups(), Replicas()
        self.failures, self.paces = Failures(), Paces()
        self.alarms, self.spans = Alarms(thresholds), Spans(events)
        self.phases: dict[str, float] = {}
        """Phases of start-up and shutdown: name -> seconds."""
        self.evaluations: dict[tuple[str, int], EvalDone] = {}
        """By data set and step."""
        self.engines: dict[str, str] = {}
        """Worker -> engine and reason."""
        self.started: RunStarted | None = None
        """Last start; a resumed run has several."""
        self.ended: RunEnded | None = None
        self.failure: WorkerFailed | None = None
        """Last failure of a worker."""
        self.first_s: float | None = None
        self.last_s: float | None = None
        """Time of the last event."""
        self.step = 0
        self._num_corrupt = self.num_unknown = 0
        self._events, self._metrics = Tail(events), Tail(metrics)
        self._hears = self._table()

    @property
    def num_corrupt(self) -> int:
        """Unreadable lines. Those of spans are counted when the spans are summarised."""
        return self._num_corrupt + self.spans.num_corrupt

    @property
    def was_replaced(self) -> bool:
        """True if files were replaced, so that the fold must start again."""
        return self._events.was_replaced or self._metrics.was_replaced

    def look(self) -> None:
        """Process the lines written since the last call."""
        if not self._events.size:
            for chunk in self._metrics.read():
                self._take(chunk.lines, decode_metrics)
            return
        for chunk in self._events.read():
            self._take_events(chunk)

    def _take_events(self, chunk: FileChunk) -> None:
        others = [line for line in chunk.data.split(b"\n") if line and not line.startswith(PREFIX)]
        self.spans.note(chunk)
        if self.spans.last_s is not None:
            self.mark_active(self.spans.last_s)
        self._take(others, decode)

    def _take(self, lines: list[bytes], decoded: Callable[[bytes], tuple[Event, float]]) -> None:
        for line in lines:
            try:
                event, time_s = decoded(line)
            except Unreadable:
                self._num_corrupt += 1
            except UnknownKind:
                self.num_unknown += 1
            else:
                self.observe(event, time_s)

    def observe(self, event: Event, time_s: float) -> None:
        """Process one event, emitted at `time_s`."""
        if self.first_s is None:
            self.first_s = time_s
        self.mark_active(time_s)
        for hear in self._hears.get(type(event), ()):
            hear(event, time_s)

    def mark_active(self, time_s: float) -> None:
        """Record that the run was active at `time_s`."""
        if self.last_s is None or time_s > self.last_s:
            self.last_s = time_s

    def _table(self) -> Mapping[type, list[_Hears]]:
        """Event type -> its handlers, in order."""
        own = (RunStarted, PhaseDone, EngineChosen, StepDone, EvalDone, WorkerFailed, RolledBack, RunEnded)
        table: dict[type, list[_Hears]] = {}
        for kinds, hear in (
            (own, self._hear),
            (Groups.HEARS, self.groups.observe),
            (Replicas.HEARS, self.replicas.observe),
            (Paces.HEARS, self.paces.observe),
            (Failures.HEARS, self.failures.observe),
            (Alarms.HEARS, self.alarms.observe),
        ):
            for kind in kinds:
                table.setdefault(kind, []).append(hear)
        return table

    def _hear(self, event: Event, time_s: float) -> None:
        match event:
            case RunStarted(first_step=first):
                self.started, self.ended, self.failure, self.step = event, None, None, first
                self.columns.forget_after(first)
                self.evaluations = {at: done for at, done in self.evaluations.items() if at[1] <= first}
            case PhaseDone(phase=phase, seconds=seconds):
                self.phases[phase] = seconds
            case EngineChosen(worker=worker, engine=engine, reason=reason):
                self.engines[worker] = f"{engine}: {reason}"
            case StepDone(step=step, metrics=metrics):
                if step <= self.step:  # resumed without a start event
                    self.columns.forget_after(step - 1)
                self.columns.put(step, metrics, time_s - (self.first_s or time_s))
                self.step = step
            case EvalDone(step=step, dataset=dataset, metrics=metrics):
                self.columns.put(step, metrics, time_s - (self.first_s or time_s))
                self.evaluations[dataset, step] = event
            case WorkerFailed():
                self.failure = event
            case RolledBack(total_steps=total) if self.started is not None:
                self.started = replace(self.started, total_steps=total)
            case RunEnded():
                self.ended = event
            case _:
                pass
