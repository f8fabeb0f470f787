"""Sink that raises alerts while a run is in progress."""

from __future__ import annotations

from collections.abc import Mapping

from rlsys.monitoring.alerts import Alarms
from rlsys.monitoring.events import AlertRaised, Event, Events


class AlertSink:
    """Sink that emits an `AlertRaised` for each problem in a run's events; see `rlsys.monitoring.alerts`.

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
