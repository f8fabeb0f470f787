"""Alerts about a run, in words: a pure fold over its events, for the run itself and for readers of its files.

    alarms = Alarms()                               # or Alarms({"entropy_collapse": 0.1, "idle_side": None})
    for event, time_s in events:
        for alert in alarms.observe(event, time_s):
            print(alert.sentence)
    alarms.open, alarms.history, alarms.silent(now_s)

`rlsys.monitoring.alert_rules` has the rules. An alert closes only when the signal of its rule is well on the other side
of the threshold, so that noise does not open and close it repeatedly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rlsys.monitoring.alert_rules import RULES
from rlsys.monitoring.alert_signals import AlertSignal, SignalReading
from rlsys.monitoring.events import (
    AlertRaised,
    DataChanged,
    EngineChosen,
    Event,
    Events,
    PhaseDone,
    RolledBack,
    RunEnded,
    RunStarted,
    StepDone,
    TransportChosen,
)

MARGIN = 0.8
"""An alert closes when its signal is below this share of the threshold; for low values, above 1 / this."""
LEAST_SILENCE_S = 60.0
"""Shorter silence raises no alert, however short the steps are."""
FIRST_STEP_S = 600.0
"""Silence that raises an alert before any step was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Problem of a run, observed from `step` on."""

    alert: str
    """Name of its rule."""
    step: int
    until_step: int | None
    """Step at which the alert closed; None: it is open."""
    time_s: float
    value: float
    """Value of the signal at `step`."""
    threshold: float
    unit: str
    metric: str
    """Metric to look at, a name of `rlsys.monitoring.metric_catalog`; empty if no single metric applies."""
    sentence: str
    """Problem with its numbers, and the remedy."""


class Alarms:
    """Open and closed alerts after the events of a run so far."""

    HEARS = tuple(
        {RunStarted, StepDone, RolledBack, RunEnded}.union(
            *(rule.gauge().hears for rule in RULES.values() if rule.gauge)
        )
    )
    """Events that change the state."""

    def __init__(self, thresholds: Mapping[str, float | None] | None = None) -> None:
        """`thresholds`: values that replace the default of a rule; a value of None turns the rule off.

        Names that `RULES` lacks are ignored: they may come from the checked configuration of another version.
        """
        given = {name: rule.threshold for name, rule in RULES.items()} | dict(thresholds or {})
        self._thresholds = {name: value for name in RULES if (value := given[name]) is not None}
        self._hearing: dict[type[Event], list[tuple[str, AlertSignal]]] = {}
        """Rules, with their signals, that hear an event."""
        for name in self._thresholds:
            if make := RULES[name].gauge:
                gauge = make()
                for kind in gauge.hears:
                    self._hearing.setdefault(kind, []).append((name, gauge))
        self._open: dict[str, Alert] = {}
        self._closed: list[Alert] = []
        self._step = 0
        self._total_steps: int | None = None
        self._step_times_s: deque[float] = deque(maxlen=20)
        """Seconds of the last steps, without the first step of each session."""
        self._first_s: float | None = None
        """Seconds of the first step of all; the only estimate until the second step is done."""
        self._moved_s: float | None = None
        """Time of the start of the run or of its last step; None: not started, or no step is left."""
        self._is_first = True
        """True until the first step since the run began."""

    @property
    def step(self) -> int:
        """Last step that was done."""
        return self._step

    @property
    def open(self) -> Sequence[Alert]:
        """Open alerts, oldest first."""
        return tuple(self._open.values())

    @property
    def history(self) -> Sequence[Alert]:
        """All alerts, open and closed, in the order in which they were raised."""
        return sorted((*self._closed, *self._open.values()), key=lambda alert: alert.time_s)

    @property
    def thresholds(self) -> Mapping[str, float]:
        """Thresholds of the rules that are on."""
        return self._thresholds

    def observe(self, event: Event, time_s: float) -> Sequence[Alert]:
        """Process one event, emitted at `time_s` (Unix seconds), and return the alerts it raises.

        Only events in `HEARS` change the state. Other events only show that time passes, so a reader may leave them out
        and call `silent`. A metric that is not a number must be NaN, not missing.
        """
        late = None
        match event:
            case RunStarted(first_step=first, total_steps=total):
                self._close("no_progress", first)
                self._step, self._total_steps, self._is_first = first, total, True
                self._waits_from(time_s)
            case RunEnded():
                self._moved_s = None
                return []  # nothing follows the end of a run
            case RolledBack(total_steps=total):
                self._total_steps = total
            case PhaseDone() | EngineChosen() | TransportChosen() | DataChanged():
                pass  # start-up, maybe of a run that resumes days after it was killed
            case _:
                late = self.silent(time_s)
        if isinstance(event, StepDone):
            self._on_progress(event.step, time_s)
        raised = [] if late is None else [late]
        for name, gauge in self._hearing.get(type(event), ()):
            reading = gauge.observe(event, time_s)
            if reading is not None and (alert := self._judge_reading(name, reading, time_s)):
                raised.append(alert)
        for alert in raised:
            self._open.setdefault(alert.alert, alert)
        if isinstance(event, StepDone):
            self._close("no_progress", event.step)
        return raised

    def silent(self, now_s: float) -> Alert | None:
        """Return the `no_progress` alert due at `now_s`; None if no alert is due, or it is open already."""
        threshold = self._thresholds.get("no_progress")
        if threshold is None or self._moved_s is None or "no_progress" in self._open:
            return None
        silence_s = now_s - self._moved_s
        if silence_s <= LEAST_SILENCE_S:
            return None
        typical_s, usual = self._typical(FIRST_STEP_S / threshold if threshold else FIRST_STEP_S)
        num_steps = silence_s / typical_s if typical_s > 0 else float("inf")
        if num_steps <= threshold:
            return None
        words = f"no step was done for {_spelt(silence_s)} after step {self._step}; {usual}"
        return self._alert("no_progress", SignalReading(num_steps, "", words), now_s)

    def _on_progress(self, step: int, time_s: float) -> None:
        if self._moved_s is not None:
            took_s = time_s - self._moved_s
            if not self._is_first:
                self._step_times_s.append(took_s)
            elif self._first_s is None:
                self._first_s = took_s
        self._step, self._is_first = step, False
        self._waits_from(time_s)

    def _waits_from(self, time_s: float) -> None:
        """Wait for the next step from `time_s` on, if one is left. The last evaluation has no deadline."""
        is_last = self._total_steps is not None and self._step >= self._total_steps
        self._moved_s = None if is_last else time_s

    def _typical(self, unknown_s: float) -> tuple[float, str]:
        """Duration of a step and its source in words; `unknown_s` if no step was done."""
        if self._step_times_s:
            typical_s = median(self._step_times_s)
            return typical_s, f"steps take {typical_s:.3g} s"
        if self._first_s is not None:
            return self._first_s, f"the first took {self._first_s:.3g} s"
        return unknown_s, "it is the first since the run began"

    def _judge_reading(self, name: str, reading: SignalReading, time_s: float) -> Alert | None:
        """Compare a reading with the threshold of its rule; close its alert, or return a new one."""
        threshold, is_low, value = self._thresholds[name], RULES[name].is_low, reading.value
        if name in self._open:
            if value >= threshold / MARGIN if is_low else value <= threshold * MARGIN:
                self._close(name, self._step)
            return None
        is_wrong = value < threshold if is_low else value > threshold
        return self._alert(name, reading, time_s) if is_wrong else None

    def _alert(self, name: str, reading: SignalReading, time_s: float) -> Alert:
        rule = RULES[name]
        return Alert(
            alert=name,
            step=self._step,
            until_step=None,
            time_s=time_s,
            value=reading.value,
            threshold=self._thresholds[name],
            unit=rule.unit,
            metric=reading.metric,
            sentence=f"{_capitalise(reading.words)}. {rule.remedy}",
        )

    def _close(self, name: str, step: int) -> None:
        if alert := self._open.pop(name, None):
            self._closed.append(replace(alert, until_step=max(alert.step, step)))  # a resume may go back


def _capitalise(words: str) -> str:
    """Words as the beginning of a sentence. The name of a metric, a worker or a file stays as it is."""
    is_word = words.split(" ", 1)[0].isalpha()
    return words[:1].upper() + words[1:] if is_word else words


def _spelt(seconds: float) -> str:
    """`101 s`, `12 min`, `325 days`."""
    units = ((86_400, "days"), (3_600, "hours"), (60, "min"))
    return next(
        (f"{seconds / unit_s:.0f} {unit}" for unit_s, unit in units if seconds >= 2 * unit_s), f"{seconds:.0f} s"
    )


class AlertSink:
    """Sink that emits an `AlertRaised` for each problem in a run's events.

    It emits inside `handle`, so attach it last: every other sink then sees the cause of an alert before the alert. It
    sees one session only. In a resumed run it collects its statistics anew and repeats alerts that still apply. A
    reader of the files folds all sessions as one, and may get different alerts.
    """

    def __init__(self, events: Events, thresholds: Mapping[str, float | None]) -> None:
        """`events`: the bus that this sink is attached to. `thresholds`: see `Alarms`."""
        self._events, self._alarms = events, Alarms(thresholds)

    def handle(self, event: Event, time_s: float) -> None:
        """Process one event, and emit the alerts that it raises."""
        for alert in self._alarms.observe(event, time_s):
            self._events.emit(AlertRaised(alert.alert, alert.step, alert.value, alert.threshold, alert.sentence))

    def close(self) -> None:
        """Do nothing: the sink has no resources."""
