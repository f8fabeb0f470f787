"""Any sequence of events with any text is written, read back, indexed, and shown by everything that shows a run."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.changed_keys import changed_keys
from rlsys.dashboard.http_server import Answer
from rlsys.dashboard.index.event_decoding import decode
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.report.html_report import report_of
from rlsys.dashboard.tail import tail
from rlsys.monitoring.alerts import AlertSink
from rlsys.monitoring.events import EVENT_TYPES, Event, Events, RunEnded, RunStarted, StepDone
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.util.printing import printable
from tests.unit.dashboard.test_dashboard_damage import answers

TEXTS = st.text(st.characters(exclude_categories=()), max_size=12)
"""Every code point: also halves of surrogate pairs, NUL, control characters, right-to-left marks."""
PLAIN: Mapping[object, st.SearchStrategy[Any]] = {
    str: TEXTS,
    bool: st.booleans(),
    int: st.integers(0, 40),
    float: st.floats(0, 1e9) | st.sampled_from((float("nan"), float("inf"), -1.5)),
    NoneType: st.none(),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field with this type."""
    if hint in PLAIN:
        return PLAIN[hint]
    kinds = get_args(hint)
    if isinstance(hint, UnionType):
        return st.one_of(*map(values_of, kinds))
    if get_origin(hint) is tuple:
        return st.lists(values_of(kinds[0]), max_size=4).map(tuple)
    assert issubclass(get_origin(hint), Mapping), hint
    return st.dictionaries(values_of(kinds[0]), values_of(kinds[1]), max_size=3)


def events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name != "kind"}
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})


EVENTS = st.lists(st.one_of(*map(events_of, EVENT_TYPES.values())), max_size=25)


@settings(deadline=None)
@given(EVENTS)
def test_any_events_are_written_read_back_indexed_and_shown(events: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, screen = Path(folder, "run"), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        bus = Events([JsonlSink(run), ConsoleSink(30, screen, every_s=0.0)], clock=lambda: 1_767_225_600.0)
        bus.attach(AlertSink(bus, {}))
        whole = [RunStarted("runs/run", 0, 30), *events, StepDone(30, {"reward/mean": 0.5}), RunEnded(30, "finished")]
        for event in whole:
            bus.emit(event)
        bus.close()
        lines = (run / "events.jsonl").read_bytes().splitlines()
        read = [decode(line)[0] for line in lines]
        assert [event.kind for event in read if event.kind != "alert_raised"] == [
            event.kind for event in whole if event.kind != "alert_raised"
        ]
        screen.seek(0)
        shown = screen.read()
        assert printable(shown) == shown
        readings = Readings(run.parent)
        assert all(Answer(answer).body for answer in answers(readings))
        report_of(Readings(run), changed_keys)
        tail(run, io.StringIO(), once=True)
