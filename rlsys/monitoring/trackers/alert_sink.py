"""The sink that raises alerts while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping

from rlsys.monitoring.alerts import Alarms
from rlsys.monitoring.events import AlertRaised, Event, Events


class AlertSink:
    """Watches a run's events and emits an `AlertRaised` for whatever looks wrong; see `rlsys.monitoring.alerts`.

    It emits while it handles, so attach it last: every other sink then sees what led to an alert before the alert.
    It knows its own session only. In a resumed run it learns anew what is usual, and tells again what still holds;
    whoever reads the files folds all sessions as one, and may differ in that.
    """

    def __init__(self, events: Events, thresholds: Mapping[str, float | None]) -> None:
        """`events`: the bus it is attached to. `thresholds`: as `Alarms` takes them."""
        self._events, self._alarms = events, Alarms(thresholds)

    def handle(self, event: Event, time_s: float) -> None:
        """Take in one event, and tell what it gives cause for."""
        for alert in self._alarms.observe(event, time_s):
            self._events.emit(AlertRaised(alert.alert, alert.step, alert.value, alert.threshold, alert.sentence))

    def close(self) -> None:
        """Nothing is held."""
