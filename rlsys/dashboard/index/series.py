"""Metrics over steps, stored as arrays and reduced to the points of a chart."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from math import isnan
from statistics import fmean

from rlsys.dashboard.responses import Axis, MetricName, Series
from rlsys.monitoring.metric_catalog import Metric, metric_of

_NOT_IN_TABLE = Metric("", "")

MOST_METRICS = 10_000
"""Most metrics of a run; further names are left out."""
_RATES: Mapping[str, str] = {"tokens": "perf/tokens_per_s", "samples": "perf/samples_per_s"}
"""Axis -> the metric which, times the seconds of a step, is what a step adds to it."""


class _Column:
    """One metric: ascending steps, with one value each."""

    __slots__ = ("steps", "values")

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def put(self, step: int, value: float) -> None:
        """Store a value; a later value of the same step replaces the earlier."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.values[at] = value
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)

    def at(self, step: int) -> float:
        """Value at a step, or else at the last step before; 0 if there is none."""
        place = bisect_right(self.steps, step)
        return self.values[place - 1] if place else 0.0

    def forget_after(self, step: int) -> None:
        at = bisect_right(self.steps, step)
        del self.steps[at:], self.values[at:]


class SeriesColumns:
    """Every metric of a run."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._times = _Column()

    def put(self, step: int, metrics: Mapping[str, float], since_s: float = 0.0) -> None:
        """Store the metrics of a step or an evaluation, told `since_s` seconds after the run began."""
        self._times.put(step, since_s)
        for name, value in metrics.items():
            column = self._columns.get(name)
            if column is None and len(self._columns) < MOST_METRICS:
                column = self._columns[name] = _Column()
            if column is not None:
                column.put(step, value)

    def forget_after(self, step: int) -> None:
        """Discard all later steps, because the run resumed after `step`."""
        for column in (self._times, *self._columns.values()):
            column.forget_after(step)

    def last(self, name: str, count: int = 1) -> list[float]:
        """Last finite values of a metric, oldest first."""
        column = self._columns.get(name)
        return [] if column is None else [v for v in column.values[-count:] if not isnan(v)]

    def recent(self, count: int) -> dict[str, float]:
        """Mean of each metric over its last `count` finite values; of evaluations, the last value."""
        found = ((name, self.last(name, 1 if name.startswith("eval/") else count)) for name in self._columns)
        return {name: fmean(values) for name, values in found if values}

    def outline(self, name: str, points: int) -> list[float | None]:
        """Values of a metric, thinned to about `points`; empty if there is none."""
        column = self._columns.get(name)
        return [] if column is None else [_finite(column.values[i]) for i in thin_indices(column.values, points)]

    def sum_since(self, name: str, step: int) -> float:
        """Sum of a metric over the steps after `step`; steps without it count as 0."""
        column = self._columns.get(name)
        if column is None:
            return 0.0
        return sum(v for v in column.values[bisect_right(column.steps, step) :] if not isnan(v))

    def last_of(self, prefix: str) -> dict[str, tuple[int, float | None]]:
        """Last step and value of each metric whose name begins so."""
        found = ((name, column) for name, column in self._columns.items() if name.startswith(prefix) and column.steps)
        return {name: (column.steps[-1], _finite(column.values[-1])) for name, column in found}

    def means_since(self, prefix: str, step: int) -> dict[str, float]:
        """Mean over the steps after `step` of each metric whose name begins so; by the rest of the name."""
        found = {}
        for name, column in self._columns.items():
            if name.startswith(prefix):
                values = [v for v in column.values[bisect_right(column.steps, step) :] if not isnan(v)]
                if values:
                    found[name.removeprefix(prefix)] = sum(values) / len(values)
        return found

    def names(self) -> list[MetricName]:
        """Every metric, by name."""
        return [_metric_name(name, column) for name, column in sorted(self._columns.items()) if column.steps]

    def axis(self, x: Axis) -> _Column | None:
        """Value of x at each step; None if x is the step itself, or not recorded."""
        if x == "step":
            return None
        if x == "time":
            return self._times
        rates, seconds = self._columns.get(_RATES[x]), self._columns.get("time/step")
        if rates is None or seconds is None:
            return None
        sums, total = _Column(), 0.0
        for step, rate in zip(rates.steps, rates.values, strict=True):
            added = rate * seconds.at(step)
            total += 0.0 if isnan(added) else added
            sums.put(step, total)
        return sums

    def series(
        self,
        names: Sequence[str],
        points: int,
        axis: _Column | None = None,
        stretch: tuple[float | None, float | None] = (None, None),
    ) -> list[Series]:
        """Series of the available metrics, in the requested order; see `SeriesAnswer`."""
        found = dict.fromkeys(name for asked in names for name in self._matching(asked))
        return [_series(name, self._columns[name], points, axis, stretch) for name in found]

    def _matching(self, asked: str) -> list[str]:
        if not asked.endswith("*"):
            return [asked] if asked in self._columns else []
        return sorted(name for name in self._columns if name.startswith(asked[:-1]))


def _metric_name(name: str, column: _Column) -> MetricName:
    metric = metric_of(name) or _NOT_IN_TABLE
    return MetricName(name, metric.unit, metric.help, _finite(column.values[-1]))


def _series(
    name: str, column: _Column, points: int, axis: _Column | None, stretch: tuple[float | None, float | None]
) -> Series:
    metric = metric_of(name) or _NOT_IN_TABLE
    xs = column.steps if axis is None else [axis.at(step) for step in column.steps]
    first = 0 if stretch[0] is None else bisect_left(xs, stretch[0])
    last = len(xs) if stretch[1] is None else bisect_right(xs, stretch[1])
    kept = [first + i for i in thin_indices(column.values[first:last], points)]
    steps, values = [column.steps[i] for i in kept], [_finite(column.values[i]) for i in kept]
    counted = None if axis is None else [xs[i] for i in kept]
    return Series(name, metric.unit, metric.help, steps, values, max(last - first, 0), counted)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def thin_indices(values: array[float], points: int) -> Sequence[int]:
    """Indices to show in a chart of about `points` points: the least, the greatest and a gap of each stretch.

    The first and the last are always included, so there may be a few more than `points`.
    """
    if len(values) <= points:
        return range(len(values))
    num = max(1, points // 2)
    kept = {0, len(values) - 1}
    for bucket in range(num):
        stretch = range(bucket * len(values) // num, (bucket + 1) * len(values) // num)
        part: Sequence[float] = values[stretch.start : stretch.stop]
        if gaps := [i for i, v in zip(stretch, part, strict=True) if v != v]:
            kept.add(gaps[0])
            part = [v for v in part if v == v]
        if part:
            for extreme in (min(part), max(part)):
                kept.add(values.index(extreme, stretch.start, stretch.stop))
    return sorted(kept)
