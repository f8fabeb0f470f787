"""The tracker `tensorboard`: event files that TensorBoard shows, written without TensorFlow or torch."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

from rlsys.monitoring.events import AlertRaised
from rlsys.monitoring.metric_catalog import metric_of
from rlsys.monitoring.tracker import EndReason, RolloutRow, RunFacts, StepTracker

_Message: TypeAlias = Any
"""What protoc generated has no types."""


@dataclass(frozen=True, kw_only=True)
class TensorBoard(StepTracker):
    """TensorBoard: `tensorboard --logdir RUN/tracking/tensorboard`, or `--logdir runs` for all of them."""

    package: ClassVar[str] = "tensorboard"

    def start(self, run: RunFacts) -> EventFile:
        file = EventFile(run.folder / "tensorboard", run.first_step)
        file.text("config", run.first_step, [[json.dumps(run.config, indent=2)]])
        return file


class EventFile:
    """One file of records; a resumed run begins another, which takes the steps that it repeats out of the ones
    before."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._event, self._summary = _generated("event"), _generated("summary").Summary
        self._records = RecordWriter((folder / name).open("wb"))
        self._names: set[str] = set()
        self._write(file_version="brain.Event:2")
        session = self._event.SessionLog
        self._write(step=first_step + 1, session_log=session(status=session.START))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar each; the first of a name says what it means."""
        meanings = {name: _meaning(name) for name in values if name not in self._names}
        self._names |= meanings.keys()
        self._summarise(
            step,
            [
                self._summary.Value(tag=name, simple_value=value, metadata=meanings.get(name))
                for name, value in values.items()
            ],
        )

    def rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """A table under Text."""
        header = [f.name for f in fields(RolloutRow)]
        self.text("rollouts", step, [header, *([str(value) for value in astuple(row)] for row in rows)])

    def alert(self, alert: AlertRaised) -> None:
        """A line under Text."""
        self.text(f"alerts/{alert.alert}", alert.step, [[alert.sentence]])

    def close(self, reason: EndReason) -> None:
        """Close the file."""
        self._records.close()

    def text(self, tag: str, step: int, rows: Sequence[Sequence[str]]) -> None:
        """A table of texts, each shown as it is: as a block of code, not as Markdown."""
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = _generated("tensor_shape").TensorShapeProto
        cells = ["\n".join(f"    {line}" for line in cell.splitlines()).encode() for row in rows for cell in row]
        dims = [shape.Dim(size=len(rows)), shape.Dim(size=len(rows[0]))]
        kind = _generated("types").DT_STRING
        tensor = _generated("tensor").TensorProto(dtype=kind, string_val=cells, tensor_shape=shape(dim=dims))
        metadata = create_summary_metadata(display_name=tag, description="")
        self._summarise(step, [self._summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

    def _summarise(self, step: int, values: list[_Message]) -> None:
        self._write(step=step, summary=self._summary(value=values))

    def _write(self, **told: object) -> None:
        event = self._event.Event(wall_time=time.time(), **told)
        self._records.write(event.SerializeToString())
        self._records.flush()


def _meaning(name: str) -> _Message:
    from tensorboard.plugins.scalar.metadata import create_summary_metadata

    metric = metric_of(name)  # none where it has the name that another framework gives it
    unit = f" [{metric.unit}]" if metric and metric.unit else ""
    return create_summary_metadata(display_name="", description=f"{metric.help}{unit}" if metric else "")


def _generated(name: str) -> ModuleType:
    return import_module(f"tensorboard.compat.proto.{name}_pb2")
