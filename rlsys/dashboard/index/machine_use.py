"""Use of processors, memory, GPUs and networks over time, from the samples of workers."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.run_files import Tail
from rlsys.dashboard.index.series import thin_indices
from rlsys.dashboard.responses import MachineAnswer, MachineRow, TimeSeries
from rlsys.monitoring.machine_metrics import OF_NODE, OF_WORKER
from rlsys.monitoring.machine_samples import MACHINE, MachineSample, sample_of
from rlsys.monitoring.metric_catalog import metric_of
from rlsys.util.regular_files import lines_of

_NAN = float("nan")
_MOST = 50_000
"""Samples of a worker in memory; of more, every second one is forgotten."""


@dataclass
class _Samples:
    """Samples of one worker, oldest first."""

    tail: Tail
    times_s: array[float] = field(default_factory=lambda: array("d"))
    worker: Mapping[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in OF_WORKER})
    node: Mapping[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in OF_NODE})
    logs: list[tuple[int, int]] = field(default_factory=list)
    """Turn and size of its log at each sample."""
    last: MachineSample | None = None

    def take(self, sample: MachineSample) -> None:
        self.times_s.append(sample.time_s)
        for values, columns in ((OF_WORKER, self.worker), (OF_NODE, self.node)):
            for name, value_of in values.items():
                value = value_of(sample)
                columns[name].append(_NAN if value is None else value)
        self.logs.append((sample.log_turn, sample.log_bytes))
        self.last = sample
        if len(self.times_s) > _MOST:
            for numbers in (self.times_s, self.logs, *self.worker.values(), *self.node.values()):
                del numbers[1::2]


class MachineUse:
    """Samples of all workers of a run, updated by `look`."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._samples: dict[str, _Samples] = {}

    def look(self) -> None:
        """Read the samples written since the last call."""
        for name in self._folder.files(MACHINE, ending=".jsonl"):
            worker, path = name.removesuffix(".jsonl"), self._folder.file(MACHINE, name)
            found = self._samples.get(worker)
            if found is None:
                found = self._samples[worker] = _Samples(Tail(path))
                for line in _earlier(self._folder.file(MACHINE, f"{name}.1")):
                    self._take(found, line)
            elif found.tail.was_replaced:  # it began anew
                found.tail = Tail(path)
            for chunk in found.tail.read():
                for line in chunk.lines:
                    self._take(found, line)

    def _take(self, found: _Samples, line: bytes) -> None:
        if (sample := sample_of(line)) is not None:
            found.take(sample)

    def answer(self, points: int) -> MachineAnswer:
        """Describe every worker and node, with series of about `points` points."""
        series: list[TimeSeries] = []
        hosts: dict[str, list[_Samples]] = {}
        for worker, found in sorted(self._samples.items()):
            if found.last is not None:
                hosts.setdefault(found.last.host, []).append(found)
                series += [
                    _series(f"machine/{worker}/{name}", found.times_s, found.worker[name], points) for name in OF_WORKER
                ]
        for host, of_host in sorted(hosts.items()):
            for name in OF_NODE:
                pairs = sorted(
                    (t, v) for found in of_host for t, v in zip(found.times_s, found.node[name], strict=True)
                )
                times_s, values = array("d", [t for t, _ in pairs]), array("d", [v for _, v in pairs])
                series.append(_series(f"node/{host}/{name}", times_s, values, points))
        rows = [_row(worker, found.last) for worker, found in sorted(self._samples.items()) if found.last is not None]
        return MachineAnswer(rows, [one for one in series if any(v is not None for v in one.values)])

    def written_s(self, worker: str, turn: int, at: int) -> float | None:
        """Time by which the byte `at` of a worker's log was written, in the `turn`-th file of that log; None if no
        sample says."""
        found = self._samples.get(worker)
        if found is None:
            return None
        place = bisect_left(found.logs, (turn, at + 1))
        return found.times_s[place] if place < len(found.logs) else None

    def log_turn(self, worker: str) -> int:
        """Number of times that a worker's log began anew."""
        found = self._samples.get(worker)
        return found.last.log_turn if found and found.last else 0


def _earlier(path: Path | None) -> list[bytes]:
    try:
        return list(lines_of(path)) if path else []
    except OSError:
        return []


def _series(name: str, times_s: array[float], values: array[float], points: int) -> TimeSeries:
    metric, kept = metric_of(name), thin_indices(values, points)
    shown = [None if values[i] != values[i] else values[i] for i in kept]
    unit, meaning = (metric.unit, metric.help) if metric else ("", "")
    return TimeSeries(name, unit, meaning, [times_s[i] for i in kept], shown)


def _row(worker: str, last: MachineSample) -> MachineRow:
    return MachineRow(
        worker=worker,
        host=last.host,
        pid=last.pid,
        seen_s=last.time_s,
        **{name: value_of(last) for name, value_of in OF_WORKER.items()},
    )
