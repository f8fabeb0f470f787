"""Event bus: every event is stamped and forwarded, no sink can stop training, and no event can stop a sink."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rlsys.monitoring.events import (
    Event,
    EventLost,
    Events,
    FileSkipped,
    GroupScored,
    RunEnded,
    StepDone,
    WorkerRestarted,
)
from rlsys.monitoring.metric_catalog import METRICS, undocumented_names
from rlsys.monitoring.trackers.jsonl import JsonlSink


class Sink:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Event, float]] = []
        self.is_closed = False

    def handle(self, event: Event, time_s: float) -> None:
        self.heard.append((event, time_s))

    def close(self) -> None:
        self.is_closed = True


class Broken(Sink):
    """A sink that raises at every event of training."""

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, StepDone):
            raise OSError("disk full")
        super().handle(event, time_s)


def test_every_sink_hears_every_event_in_order_with_its_time() -> None:
    ticks = count(100)
    one, other = Sink(), Sink()
    events = Events([one], clock=lambda: float(next(ticks)))
    events.attach(other)
    step, end = StepDone(1, {"loss": 0.5}), RunEnded(1, "finished")
    events.emit(step)
    events.emit(end)
    assert one.heard == other.heard == [(step, 100.0), (end, 101.0)]


def test_a_sink_that_raises_is_named_once_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    broken, sound = Broken(), Sink()
    events = Events([broken, sound], clock=lambda: 0.0)
    emitted = [StepDone(1, {}), StepDone(2, {}), RunEnded(2, "finished")]
    for event in emitted:
        events.emit(event)
    lost = EventLost("step_done", "OSError('disk full')")
    assert broken.heard == [(lost, 0.0), (lost, 0.0), (emitted[2], 0.0)]
    assert sound.heard == [(event, 0.0) for event in emitted]
    said = capsys.readouterr()
    assert said.err == "rlsys: Broken failed, and goes on: OSError('disk full')\n"
    assert said.out == ""


def written(folder: Path, *emitted: Event) -> list[dict[str, Any]]:
    events = Events([JsonlSink(folder)])
    for event in emitted:
        events.emit(event)
    events.close()
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_text_that_utf8_lacks_is_replaced_in_every_event(tmp_path: Path) -> None:
    scored, skipped = written(
        tmp_path,
        GroupScored(1, "t", (None,), {"raised ValueError: \ud800": 8}),
        FileSkipped("runs/\udcff.parquet", "no room for é"),
    )
    assert scored["failures"] == {"raised ValueError: \ufffd": 8}
    assert (skipped["path"], skipped["problem"]) == ("runs/\ufffd.parquet", "no room for é")


def test_an_event_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    lost, end = written(tmp_path, StepDone(1, {"loss": 2**64}), RunEnded(1, "finished"))
    assert (lost["kind"], lost["lost"]) == ("event_lost", "step_done")
    assert "64-bit" in lost["problem"]
    assert end["kind"] == "run_ended"


SPEAKS = """
import sys
from pathlib import Path
from rlsys.monitoring.events import Events, GroupDropped, RunEnded, StepDone
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.monitoring.trackers.jsonl import JsonlSink

events = Events([ConsoleSink(3, every_s=0.0), JsonlSink(Path(sys.argv[1]))])
for step in (1, 2, 3):
    events.emit(StepDone(step, {}))
    events.emit(GroupDropped(step, "task", "zero_advantage", ""))
events.emit(RunEnded(3, "finished"))
events.close()
"""
"""Program that shows and records the events of a run."""


@pytest.mark.parametrize("goes_to", ["a pipe that nobody reads", "a full disk"])
def test_no_output_ends_a_run(goes_to: str, tmp_path: Path) -> None:
    if goes_to == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-c", SPEAKS, str(tmp_path)], stdout=output, stderr=output, check=False)
    finally:
        os.close(output)
    assert ended.returncode == 0
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == [*["step_done", "group_dropped"] * 3, "run_ended"]


def test_closing_the_bus_closes_its_sinks_once() -> None:
    sink = Sink()
    events = Events([sink])
    events.close()
    assert sink.is_closed
    events.close()
    events.emit(WorkerRestarted("rollout-0", 1.5))
    assert sink.heard == []


def test_metrics_without_documentation_are_found() -> None:
    assert undocumented_names({"loss": 1.0, "reward/mean": 0.5, "my/own": 1.0, "a": 2}) == ["a", "my/own"]


def test_every_metric_is_explained() -> None:
    assert all(metric.help and not metric.help.endswith(".") for metric in METRICS.values())


def test_importing_events_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'rich', 'pydantic', 'datasets', 'numpy'}"
    script = f"import sys, rlsys.monitoring.events, rlsys.util.seeds; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"set()\n"
