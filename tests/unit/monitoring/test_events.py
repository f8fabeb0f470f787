"""Event bus: every event is stamped and forwarded, and no sink can stop training."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

import pytest

from rlsys.monitoring.events import Event, Events, RunEnded, StepDone, WorkerRestarted
from rlsys.monitoring.metric_catalog import METRICS, undocumented


class PartialStream:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Event, float]] = []
        self.is_closed = False

    def handle(self, event: Event, time_s: float) -> None:
        self.heard.append((event, time_s))

    def close(self) -> None:
        self.is_closed = True


class Broken(PartialStream):
    """A sink that raises from its second event on."""

    def handle(self, event: Event, time_s: float) -> None:
        super().handle(event, time_s)
        if len(self.heard) > 1:
            raise OSError("disk full")


def test_every_sink_hears_every_event_in_order_with_its_time() -> None:
    ticks = count(100)
    one, other = PartialStream(), PartialStream()
    events = Events([one], clock=lambda: float(next(ticks)))
    events.attach(other)
    step, end = StepDone(1, {"loss": 0.5}), RunEnded(1, "finished")
    events.emit(step)
    events.emit(end)
    assert one.heard == other.heard == [(step, 100.0), (end, 101.0)]


def test_a_sink_that_raises_is_named_once_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    broken, sound = Broken(), PartialStream()
    events = Events([broken, sound])
    for step in range(4):
        events.emit(StepDone(step, {}))
    assert len(broken.heard) == 2
    assert len(sound.heard) == 4
    said = capsys.readouterr()
    assert said.err == "rlsys: Broken is off for the rest of the run: OSError('disk full')\n"
    assert said.out == ""


def test_closing_the_bus_closes_its_sinks_once() -> None:
    sink = PartialStream()
    events = Events([sink])
    events.close()
    assert sink.is_closed
    events.close()
    events.emit(WorkerRestarted("rollout-0", 1.5))
    assert sink.heard == []


def test_metrics_without_documentation_are_found() -> None:
    assert undocumented({"loss": 1.0, "reward/mean": 0.5, "my/own": 1.0, "a": 2}) == ["a", "my/own"]


def test_every_metric_is_explained() -> None:
    assert all(metric.help and not metric.help.endswith(".") for metric in METRICS.values())


def test_importing_events_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'rich', 'pydantic', 'datasets', 'numpy'}"
    script = f"import sys, rlsys.monitoring.events, rlsys.util.seeds; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"set()\n"
