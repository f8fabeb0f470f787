"""Preview of a run for the list of runs, without reading all of its events.

It reads all metrics, and only the first and last events: start, end, and recent failures.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlsys.dashboard.index.event_decoding import UnknownKind, Unreadable, decode, decode_metrics
from rlsys.dashboard.index.folders import EVENTS, METRICS, RunFolder, size_of
from rlsys.dashboard.index.run_files import Tail
from rlsys.dashboard.query.configs import modification_stamp, read_config
from rlsys.dashboard.query.history import EventHistory
from rlsys.monitoring.events import Event, PhaseDone, RunEnded, RunStarted, WorkerFailed
from rlsys.util.regular_files import open_regular

_SECTIONS = ("run", "model", "algorithm", "alerts")
"""Sections that a summary of a run shows, and the thresholds of alerts."""
_FIRST_BYTES = 64 * 1024
_LAST_BYTES = 256 * 1024
_KINDS = tuple(b'{"kind":"%s"' % event.kind.encode() for event in (RunStarted, RunEnded, WorkerFailed, PhaseDone))


class Glimpses:
    """Previews of the runs in a folder. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._glimpses: dict[str, Glimpse] = {}

    def of(self, folder: RunFolder) -> Glimpse | None:
        """Current preview of a run; None for a run of several policies or without metrics, which must be opened."""
        events, metrics = folder.file(EVENTS), folder.file(METRICS)
        if events is None or metrics is None or folder.policies:
            return None
        with self._lock:
            glimpse = self._glimpses.get(folder.id)
            if glimpse is None or glimpse.was_replaced:
                glimpse = self._glimpses[folder.id] = Glimpse(folder, events, metrics)
            glimpse.look()
            return glimpse


class Glimpse:
    """Preview of a run; `history` has no groups, spans or replicas."""

    def __init__(self, folder: RunFolder, events: Path, metrics: Path) -> None:
        self._folder, self._config_at = folder, modification_stamp(folder)
        self.config = read_config(folder, _SECTIONS)
        self.history = EventHistory(None, None, self.config.thresholds)
        self._events, self._metrics = events, Tail(metrics)
        self._read_to = 0

    @property
    def was_replaced(self) -> bool:
        """True if its files were replaced."""
        has_shrunk = size_of(self._events) < self._read_to
        return has_shrunk or self._metrics.was_replaced or modification_stamp(self._folder) != self._config_at

    def look(self) -> None:
        """Process the lines written since the last call."""
        rows = [
            row for chunk in self._metrics.read() for line in chunk.lines if (row := _decode_line(line, is_row=True))
        ]
        try:
            lines = list(self._lines())
        except OSError:  # deleted just now, or not readable
            lines = []
        events = [event for line in lines if line.startswith(_KINDS) and (event := _decode_line(line, is_row=False))]
        for event, time_s in sorted([*rows, *events], key=lambda stamped: stamped.time_s):
            self.history.observe(event, time_s)
        if lines and (last := _decode_line(lines[-1], is_row=False)):
            self.history.mark_active(last.time_s)

    def _lines(self) -> Iterator[bytes]:
        """First and last appended lines, without those between."""
        size = size_of(self._events)
        with open_regular(self._events) as file:
            if not self._read_to:
                data = file.read(_FIRST_BYTES)
                self._read_to = data.rfind(b"\n") + 1
                yield from data[: self._read_to].splitlines()
            start = max(self._read_to, size - _LAST_BYTES)
            file.seek(start)
            data = file.read(size - start)
        end = data.rfind(b"\n") + 1
        yield from data[:end].splitlines()
        self._read_to = start + end


class _Stamped(NamedTuple):
    event: Event
    time_s: float


def _decode_line(line: bytes, is_row: bool) -> _Stamped | None:
    try:
        return _Stamped(*(decode_metrics(line) if is_row else decode(line)))
    except (Unreadable, UnknownKind):  # counted when the run is opened
        return None
