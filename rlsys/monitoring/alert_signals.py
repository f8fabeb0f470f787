"""Signals of metrics that alerts compare with thresholds: each reads the metrics of every step and returns one number.

gauge = Fallen("policy/entropy", "entropy", cap=0.5)
gauge.read(1, {"policy/entropy": 1.1})     # None: too few steps yet
...
gauge.read(58, {"policy/entropy": 0.02})   # SignalReading(0.04, "policy/entropy", "entropy fell to 0.02 nats ...")

`rlsys.monitoring.worker_signals` has those of workers, groups and files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import hypot, isfinite, sqrt
from statistics import StatisticsError, correlation, fmean, median, mode
from typing import NamedTuple, Protocol

from rlsys.monitoring.events import EvalDone, Event, GroupScored, StepDone, ZeroAdvantageWarning
from rlsys.monitoring.metric_catalog import metric_of

LEVEL_STEPS = 5
"""Steps whose median is the level of a metric."""
HALVING_STEPS = 10
"""A level that takes this many steps to halve declines slowly; a faster one falls."""
LEFT_BEHIND = 0.25
"""A level below this share of its former level has fallen, until it is above that share again."""
RISE_STEPS = 20
"""Number of steps in each of the two means that a rise compares."""
DOUBLING_STEPS = 100
"""A level that takes this many steps to double grows slowly; a faster one explodes."""


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
    """One figure of a run, updated by its events."""

    @property
    def hears(self) -> tuple[type[Event], ...]:
        """Events that `observe` takes."""

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        """Process one event, emitted at `time_s`. Returns None if it says nothing about the signal, or too little was
        observed so far."""


class StepSignal:
    """Base of signals that read the metrics of a step."""

    hears: tuple[type[Event], ...] = (StepDone,)

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        return self.read(event.step, event.metrics) if isinstance(event, StepDone) else None

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        """Read the metrics of one step. Returns None if they lack the metric, or if too few steps were read."""
        raise NotImplementedError


class Mean(StepSignal):
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
        words = f"{self._what} was {_value(self._metric, mean)} on average over {self._num_steps} steps"
        return SignalReading(mean, self._metric, words) if len(self._recent) == self._num_steps else None


class Fallen(StepSignal):
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
            f"{self._what} fell to {_value(self._metric, now)} from {_value(self._metric, self._before)}; the last "
            f"step above half of that was {self._last_well}"
        )
        level = min(self._before, self._cap)
        return SignalReading(now / level, self._metric, words) if level > 0 else None


class Rise(StepSignal):
    """Rise of a metric: mean absolute value of the last `RISE_STEPS` minus the lowest such mean before.

    Three standard errors of the difference are subtracted, because the lowest of many means is low by chance.
    """

    def __init__(self, metric: str, what: str, where: str = "", ordinary: float = float("inf")) -> None:
        """`where`: a second metric; steps where it is missing or 0 only update the lowest mean. `ordinary`: a higher
        lowest mean counts as this, so that a value that is high from the first steps on has risen, too."""
        self._metric, self._what, self._where = metric, what, where
        self._recent: deque[float] = deque(maxlen=RISE_STEPS)
        self._lowest = (ordinary, 0.0)
        """The mean and its squared standard error."""
        self._least_steps = LEVEL_STEPS if isfinite(ordinary) else RISE_STEPS

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        value = _finite(metrics, self._metric)
        if value is None:
            return None
        self._recent.append(abs(value))
        num_steps = len(self._recent)
        if num_steps < self._least_steps:
            return None
        mean = fmean(self._recent)
        error_2 = fmean((each - mean) * (each - mean) for each in self._recent) / num_steps
        if num_steps == RISE_STEPS:
            self._lowest = min(self._lowest, (mean, error_2))
        if self._where and not metrics.get(self._where):
            return None
        lowest, lowest_error_2 = self._lowest
        words = (
            f"{self._what} rose to {_value(self._metric, mean)} from {_value(self._metric, lowest)}, means of "
            f"{num_steps} steps"
        )
        return SignalReading(mean - lowest - 3 * sqrt(error_2 + lowest_error_2), self._metric, words)


class Added(StepSignal):
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


class NotFinite(StepSignal):
    """Number of metrics of a step that are not finite. Rates do not count: a step may take no measurable time."""

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        if isfinite(sum(metrics.values())):
            return SignalReading(0, "", "")
        names = [n for n, value in metrics.items() if not isfinite(value) and not n.startswith(("perf/", "time/"))]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return SignalReading(len(names), names[0] if names else "", f"no finite number: {shown}")


class Idle(StepSignal):
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


class RewardByLength(StepSignal):
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


class Grown(StepSignal):
    """Level of a metric, the median of the last `LEVEL_STEPS`, as a multiple of its former level.

    The former level follows the lowest one, and a growth that takes `DOUBLING_STEPS` to double. Of a family of
    metrics, the one that grew most.
    """

    def __init__(self, metric: str, what: str, least: float) -> None:
        """`metric`: its name, or a beginning and `*`. `what`: its name in a sentence; `{}` is what `*` stands for.
        `least`: growth below this, in the unit of the metric, counts as none."""
        self._prefix, self._what, self._least = metric.removesuffix("*"), what, least
        self._is_family = metric.endswith("*")
        self._recent: dict[str, deque[float]] = {}
        self._before: dict[str, float] = {}

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        if self._is_family:
            names = [name for name in metrics if name.startswith(self._prefix)]
        else:
            names = [self._prefix]
        readings = [reading for name in names if (reading := self._growth(name, _finite(metrics, name)))]
        return max(readings, default=None)

    def _growth(self, name: str, value: float | None) -> SignalReading | None:
        if value is None:
            return None
        recent = self._recent.setdefault(name, deque(maxlen=LEVEL_STEPS))
        recent.append(value)
        if len(recent) < LEVEL_STEPS:
            return None
        now = median(recent)
        before = self._before.setdefault(name, now)
        if now <= before / LEFT_BEHIND:
            before = self._before[name] = min(now, before * 2 ** (1 / DOUBLING_STEPS))
        grew = now / before if before > 0 and now - before >= self._least else 1.0
        what = self._what.format(name.removeprefix(self._prefix))
        return SignalReading(grew, name, f"{what} grew to {_value(name, now)} from {_value(name, before)}")


class Lost(StepSignal):
    """Drop of the reward below its best level so far, as a share of that level.

    A level is a mean of 5 or of 20 steps. Four standard errors of the difference are subtracted from the drop, because
    the best of many means is high by chance. Where the best is far from 0, the share is of the range of the rewards
    instead. Of the reward of all training and that of each source of data, the one that lost most.
    """

    def __init__(self) -> None:
        self._series: dict[str, _RewardSeries] = {}
        self._losses: dict[str, SignalReading] = {}
        self._range = (float("inf"), float("-inf"))
        """Lowest and highest reward of any episode."""

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        least, most = (_finite(metrics, f"reward/{name}") for name in ("min", "max"))
        if least is not None and most is not None:
            self._range = (min(self._range[0], least), max(self._range[1], most))
        span = self._range[1] - self._range[0]
        for name in metrics:
            value = _finite(metrics, name) if name == "reward/mean" or name.startswith("reward/source/") else None
            if value is not None and (drop := self._series.setdefault(name, _RewardSeries()).put(step, value)):
                sure, scale, words = drop
                scale = min(scale, span) if span > 0 else scale
                self._losses[name] = SignalReading(sure / scale if scale > 0 else 0.0, name, f"{name} fell to {words}")
        return max(self._losses.values(), default=None)


class LostEvaluation:
    """Drop of the mean of an evaluation below its best so far, as a share of that best, less twice the half width of
    the 95 % interval of the difference. Of the evaluations, the one that lost most."""

    hears: tuple[type[Event], ...] = (EvalDone,)

    def __init__(self) -> None:
        self._best: dict[str, tuple[float, float, int]] = {}
        """Metric -> its best value, the half width of that value's interval, and its step."""
        self._losses: dict[str, SignalReading] = {}

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        if not isinstance(event, EvalDone):
            return None
        name = f"eval/{event.dataset}/mean"
        mean, interval = _finite(event.metrics, name), _finite(event.metrics, f"{name}_ci95")
        if mean is not None and interval is not None:
            now = (mean, interval, event.step)
            self._best[name] = best, of_best, step = max(self._best.get(name, now), now)
            sure = best - mean - 2 * hypot(interval, of_best)
            words = f"{name} fell to {mean:.3g} from {best:.3g} at step {step}"
            self._losses[name] = SignalReading(sure / abs(best) if best else 0.0, name, words)
        return max(self._losses.values(), default=None)


class _RewardSeries:
    """Levels of one reward, and its noise."""

    _WINDOWS = (LEVEL_STEPS, RISE_STEPS)

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=max(self._WINDOWS))
        self._best: dict[int, tuple[float, int]] = {}
        """Best mean of so many steps, and the last of those steps."""
        self._lowest = float("inf")
        self._changes, self._num_changes = 0.0, 0

    def put(self, step: int, value: float) -> tuple[float, float, str] | None:
        """Add the value of a step. Returns the sure drop from the best level, the scale to compare it with, and the two
        levels in words, for the window in which it is largest; None: too few steps."""
        if self._recent:
            self._changes, self._num_changes = self._changes + abs(value - self._recent[-1]), self._num_changes + 1
        self._recent.append(value)
        drops = []
        for num_steps in self._WINDOWS:
            if len(self._recent) < num_steps:
                continue
            now = fmean(list(self._recent)[-num_steps:])
            best, at = self._best[num_steps] = max(self._best.get(num_steps, (now, step)), (now, step))
            self._lowest = min(self._lowest, now)
            noise = 0.886 * self._changes / self._num_changes  # of normal noise, from the mean change between steps
            sure = best - now - 4 * noise * sqrt(2 / num_steps)
            words = f"{now:.3g} from {best:.3g}, means of {num_steps} steps, the best up to step {at}"
            drops.append((sure, max(abs(best), best - self._lowest), words))
        return max(drops, default=None)


class Failed(StepSignal):
    """Share of the episodes of the last 3 steps that failed, or of those of one source of data: the larger one."""

    hears = (StepDone, GroupScored)
    _STEPS = 3

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._reasons: deque[str] = deque(maxlen=32)

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        if isinstance(event, GroupScored):
            self._reasons.extend(_last_line(reason) for reason in event.failures)
        return super().observe(event, time_s)

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        for name in metrics:
            value = _finite(metrics, name)
            if value is not None and (name == "reward/failed_frac" or name.startswith("reward/failed_by/")):
                self._recent.setdefault(name, deque(maxlen=self._STEPS)).append(value)
        shares = {name: fmean(recent) for name, recent in self._recent.items() if len(recent) == self._STEPS}
        if not shares:
            return None
        # Of equal shares, that of all training rather than that of a source.
        worst = max(shares, key=lambda name: (round(shares[name], 2), name == "reward/failed_frac"))
        source = worst.removeprefix("reward/failed_by/")
        whose = f" of source `{source}`" if source != worst else ""
        words = f"{_percent(shares[worst])} of the samples{whose} failed in the last {self._STEPS} steps"
        words += f", most often with “{mode(self._reasons)}”" if self._reasons else ""
        return SignalReading(shares[worst], worst, words)


class FailedEvaluation:
    """Share of the samples of an evaluation that failed, at its last time. Of the evaluations, the largest."""

    hears: tuple[type[Event], ...] = (EvalDone,)

    def __init__(self) -> None:
        self._readings: dict[str, SignalReading] = {}

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        if not isinstance(event, EvalDone):
            return None
        name = f"eval/{event.dataset}/failed_frac"
        if (share := _finite(event.metrics, name)) is not None:
            words = f"{_percent(share)} of the samples of the evaluation `{event.dataset}` of step {event.step} failed"
            if reason := max(event.failures, key=lambda reason: event.failures[reason], default=""):
                words += f", most often with “{_last_line(reason)}”"
            self._readings[name] = SignalReading(share, name, words)
        return max(self._readings.values(), default=None)


class EqualRewards(StepSignal):
    """Steps in a row in which all rewards were equal, or a quarter of those in which all of one source of data were.

    Rewards that vary and then all reach the highest do not count: the tasks are solved. Groups that are dropped
    because they have zero advantage count as steps, since without others there is no step.
    """

    hears = (StepDone, ZeroAdvantageWarning)
    _WITHOUT_REWARDS = ("policy/nll", "distill/kl")
    """Metrics of algorithms that do not need rewards."""

    def __init__(self) -> None:
        self._num_steps: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._highest = float("-inf")
        self._has_varied = False

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        if isinstance(event, ZeroAdvantageWarning):
            words = f"{event.num_groups} groups in a row had nothing to learn in them: {event.detail}"
            return SignalReading(event.num_groups, "", words)
        return super().observe(event, time_s)

    def read(self, step: int, metrics: Mapping[str, float]) -> SignalReading | None:
        least, most = (_finite(metrics, f"reward/{name}") for name in ("min", "max"))
        if least is None or most is None or any(name in metrics for name in self._WITHOUT_REWARDS):
            return None
        self._highest, self._has_varied = max(self._highest, most), self._has_varied or least < most
        self._count("", most, is_equal=least == most)
        for name in metrics:
            if name.startswith("reward/source/") and (value := _finite(metrics, name)) is not None:
                self._count(name, value, is_equal=value in (least, most))
        in_a_row = {name: num / (4 if name else 1) for name, num in self._num_steps.items()}
        worst = max(in_a_row, key=lambda name: in_a_row[name])
        whose = f"of source `{worst.removeprefix('reward/source/')}` " if worst else ""
        words = f"all rewards {whose}were {self._last[worst]:.3g} in the last {self._num_steps[worst]} steps"
        return SignalReading(in_a_row[worst], worst or "reward/max", words)

    def _count(self, name: str, value: float, *, is_equal: bool) -> None:
        is_solved = self._has_varied and value >= self._highest
        goes_on = is_equal and not is_solved
        same = self._num_steps.get(name, 0) if self._last.get(name) == value else 0
        self._num_steps[name], self._last[name] = (same + 1 if goes_on else 0), value


def _last_line(reason: str) -> str:
    """Last line of a reason, which of a traceback is the exception, at most 200 characters of it."""
    return next((line.strip() for line in reversed(reason.splitlines()) if line.strip()), "")[:200]


def _finite(metrics: Mapping[str, float], name: str) -> float | None:
    """Value whose sums and squares are finite too; None if there is none."""
    value = metrics.get(name)
    return value if value is not None and abs(value) < _MOST else None


def _value(name: str, value: float) -> str:
    """`0.041 nats`, `62 %`."""
    metric = metric_of(name)
    unit = metric.unit if metric else ""
    return _percent(value) if unit == "share" else f"{value:.3g} {unit}".rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
