"""Signals that alerts compare with thresholds: each reads the metrics of every step and returns one number.

gauge = Fallen("policy/entropy", "entropy", cap=0.5)
gauge.read(1, {"policy/entropy": 1.1})     # None: too few steps yet
...
gauge.read(58, {"policy/entropy": 0.02})   # SignalReading(0.04, "policy/entropy", "entropy fell to 0.02 nats ...")
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite, sqrt
from statistics import StatisticsError, correlation, fmean, median
from typing import NamedTuple, Protocol

from rlsys.monitoring.metric_catalog import metric_of

LEVEL_STEPS = 5
"""Steps whose median is the level of a metric."""
HALVING_STEPS = 10
"""A level that takes this many steps to halve declines slowly; a faster one falls."""
LEFT_BEHIND = 0.25
"""A level below this share of its former level has fallen, until it is above that share again."""
RISE_STEPS = 20
"""Number of steps in each of the two means that a rise compares."""


_MOST = 1e100
"""Greater values are not taken for measurements."""


class SignalReading(NamedTuple):
    """Value of a signal after a step."""

    value: float
    """Compared with the threshold of the rule."""
    metric: str
    """Metric that explains the value."""
    words: str
    """Description of the problem, for a value beyond the threshold."""


class AlertSignal(Protocol):
    """One figure of a run, updated step by step."""

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        """Read the metrics of one step. Returns None if they lack the metric, or if too few steps were read."""


class Mean:
    """Mean of the absolute value of a metric over the last steps."""

    def __init__(self, metric: str, what: str, num_steps: int) -> None:
        """`what`: name of the metric in a sentence."""
        self._metric, self._what, self._num_steps = metric, what, num_steps
        self._recent: deque[float] = deque(maxlen=num_steps)

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        value = _finite(metrics, self._metric)
        if value is None:
            return None
        self._recent.append(abs(value))
        mean = fmean(self._recent)
        words = f"{self._what} was {_shown(self._metric, mean)} on average over {self._num_steps} steps"
        return SignalReading(mean, self._metric, words) if len(self._recent) == self._num_steps else None


class Fallen:
    """Level of a metric, the median of the last `LEVEL_STEPS`, as a share of its former level.

    The former level follows a slow decline, such as that of a policy that learns, but not a fall. A former level above
    `cap` counts as `cap`: a fall from far above an ordinary level to that level is no loss.
    """

    def __init__(self, metric: str, what: str, cap: float) -> None:
        """`what`: name of the metric in a sentence."""
        self._metric, self._what, self._cap = metric, what, cap
        self._recent: deque[float] = deque(maxlen=LEVEL_STEPS)
        self._before = 0.0
        """The former level."""
        self._last_well = 0
        """Last step above half of the former level."""

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        value = _finite(metrics, self._metric)
        if value is None:
            return None
        self._recent.append(value)
        if len(self._recent) < LEVEL_STEPS:
            return None
        now = median(self._recent)
        if now >= LEFT_BEHIND * min(self._before, self._cap):
            self._before = max(now, self._before * 0.5 ** (1 / HALVING_STEPS))
        if value > self._before / 2:
            self._last_well = step
        words = (
            f"{self._what} fell to {_shown(self._metric, now)} from {_shown(self._metric, self._before)}; the last "
            f"step above half of that was {self._last_well}"
        )
        level = min(self._before, self._cap)
        return SignalReading(now / level, self._metric, words) if level > 0 else None


class Rise:
    """Rise of a metric: mean absolute value of the last `RISE_STEPS` minus the lowest such mean before.

    Three standard errors of the difference are subtracted, because the lowest of many means is low by chance.
    """

    def __init__(self, metric: str, what: str, where: str = "") -> None:
        """`where`: a second metric; steps where it is missing or 0 only update the lowest mean."""
        self._metric, self._what, self._where = metric, what, where
        self._recent: deque[float] = deque(maxlen=RISE_STEPS)
        self._lowest = (float("inf"), 0.0)
        """The mean and its squared standard error."""

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        value = _finite(metrics, self._metric)
        if value is None:
            return None
        self._recent.append(abs(value))
        if len(self._recent) < RISE_STEPS:
            return None
        mean = fmean(self._recent)
        error_2 = fmean((each - mean) * (each - mean) for each in self._recent) / RISE_STEPS
        self._lowest = min(self._lowest, (mean, error_2))
        if self._where and not metrics.get(self._where):
            return None
        lowest, lowest_error_2 = self._lowest
        words = (
            f"{self._what} rose to {_shown(self._metric, mean)} from {_shown(self._metric, lowest)}, means of "
            f"{RISE_STEPS} steps"
        )
        return SignalReading(mean - lowest - 3 * sqrt(error_2 + lowest_error_2), self._metric, words)


class Added:
    """Increase of a counter within the last 10 steps."""

    def __init__(self, metric: str, what: str) -> None:
        self._metric, self._what = metric, what
        self._recent: deque[float] = deque([0.0], maxlen=11)

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        value = _finite(metrics, self._metric)
        if value is None:
            return None
        if value < self._recent[-1]:  # the counter restarted
            self._recent.clear()
            self._recent.append(0.0)
        self._recent.append(value)
        added = value - self._recent[0]
        return SignalReading(added, self._metric, f"{added:.0f} {self._what} in the last 10 steps")


class NotFinite:
    """Number of metrics of a step that are not finite. Rates do not count: a step may take no measurable time."""

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        if isfinite(sum(metrics.values())):
            return SignalReading(0, "", "")
        names = [n for n, value in metrics.items() if not isfinite(value) and not n.startswith(("perf/", "time/"))]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return SignalReading(len(names), names[0] if names else "", f"no finite number: {shown}")


class Idle:
    """Share of the last 20 steps that the trainer waited for groups, or rollouts for the trainer: the larger one."""

    _SIDES = (("time/wait_batch", "the trainer waited for groups"), ("time/wait_permit", "rollouts waited for permits"))

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=20)

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        step_s = _finite(metrics, "time/step")
        if not step_s:
            return None
        first, second = (_finite(metrics, metric) or 0.0 for metric, _ in self._SIDES)
        self._recent.append((step_s, first, second))
        if len(self._recent) < 20:
            return None
        total_s, *waits_s = (sum(column) for column in zip(*self._recent, strict=True))
        wait_s, (metric, who) = max(zip(waits_s, self._SIDES, strict=True))
        share = wait_s / total_s
        return SignalReading(share, metric, f"{who} for {_percent(share)} of the last 20 steps")


class RewardByLength:
    """Correlation of reward and length over the last 40 steps. It is 0 unless the reward rises, and the length rises
    by a quarter and by 20 tokens."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=40)

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        reward, length = _finite(metrics, "reward/mean"), _finite(metrics, "completions/length_mean")
        if reward is None or length is None:
            return None
        self._recent.append((reward, length))
        if len(self._recent) < 40:
            return None
        rewards, lengths = zip(*self._recent, strict=True)
        before, after = fmean(lengths[:10]), fmean(lengths[-10:])
        if after - before < max(before / 4, 20) or fmean(rewards[-10:]) <= fmean(rewards[:10]):
            return SignalReading(0.0, "completions/length_mean", "")
        try:
            value = correlation(rewards, lengths)
        except StatisticsError:  # rewards or lengths do not vary
            value = 0.0
        words = (
            f"reward rises with length: correlation {value:.2f} over 40 steps, in which completions grew from "
            f"{before:.0f} to {after:.0f} tokens"
        )
        return SignalReading(value, "completions/length_mean", words)


def _finite(metrics: Mapping[str, float], name: str) -> float | None:
    """Value whose sums and squares are finite too; None if there is none."""
    value = metrics.get(name)
    return value if value is not None and abs(value) < _MOST else None


def _shown(name: str, value: float) -> str:
    """`0.041 nats`, `62 %`."""
    metric = metric_of(name)
    unit = metric.unit if metric else ""
    return _percent(value) if unit == "share" else f"{value:.3g} {unit}".rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
