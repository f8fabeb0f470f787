"""Alerts about a run, in words: a pure fold over its events, for the run itself and for readers of its files.

    alarms = Alarms()                               # or Alarms({"entropy_collapse": 0.1, "idle_side": None})
    for event, time_s in events:
        for alert in alarms.observe(event, time_s):
            print(alert.sentence)
    alarms.open, alarms.history, alarms.silent(now_s)

A rule is a signal (`rlsys.monitoring.alert_signals`, `rlsys.monitoring.worker_signals`) and a threshold. An alert
closes only when the signal is well on the other side of the threshold, so that noise does not open and close it
repeatedly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rlsys.monitoring import alert_signals as gauges
from rlsys.monitoring import worker_signals as fleet
from rlsys.monitoring.alert_signals import AlertSignal, SignalReading
from rlsys.monitoring.events import (
    AlertRaised,
    CheckpointCopyFailed,
    DataChanged,
    EngineChosen,
    Event,
    Events,
    FileSkipped,
    FileStalled,
    PhaseDone,
    RolledBack,
    RunEnded,
    RunStarted,
    StepDone,
    TransportChosen,
    WorkerFailed,
)

MARGIN = 0.8
"""An alert closes when its signal is below this share of the threshold; for low values, above 1 / this."""
LEAST_SILENCE_S = 60.0
"""Shorter silence raises no alert, however short the steps are."""
FIRST_STEP_S = 600.0
"""Silence that raises an alert before any step was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Condition of an alert, and its remedy."""

    threshold: float
    """Default threshold; `alerts: {name: value}` sets it, null turns the rule off."""
    unit: str
    """Unit of the threshold and of `Alert.value`."""
    when: str
    """Condition in words, where `this` is the threshold."""
    remedy: str
    """Remedy, as a sentence."""
    gauge: Callable[[], AlertSignal] | None
    """Makes the signal; None: the rule compares the time since the last step."""
    is_low: bool = False
    """True if values below the threshold raise the alert."""

    @property
    def meaning(self) -> str:
        """Condition and remedy in words."""
        return f"{self.when}. {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Problem of a run, observed from `step` on."""

    alert: str
    """Name of its rule."""
    step: int
    until_step: int | None
    """Step at which the alert closed; None: it is open."""
    time_s: float
    value: float
    """Value of the signal at `step`."""
    threshold: float
    unit: str
    metric: str
    """Metric to look at, a name of `rlsys.monitoring.metric_catalog`; empty if no single metric applies."""
    sentence: str
    """Problem with its numbers, and the remedy."""


RULES: Mapping[str, Rule] = {
    "reward_drop": Rule(
        threshold=0.3,
        unit="of the best",
        when="Mean reward of training, or of one source of data, surely lost more than this since its best level, a "
        "mean of 5 or of 20 steps",
        remedy="Look at what changed at that step: policy/entropy, optim/grad_norm, sampler/ratio_p99. Go back to a "
        "checkpoint before it with a lower learning rate (train.lr); if only one source fell, read its episodes.",
        gauge=gauges.Lost,
    ),
    "evaluation_drop": Rule(
        threshold=0.3,
        unit="of the best",
        when="Mean of an evaluation surely lost more than this since its best",
        remedy="If the reward of training fell, too, the policy is damaged: go back to a checkpoint before it with a "
        "lower learning rate (train.lr). If it did not, the policy learns what only the training rewards: read "
        "episodes of both.",
        gauge=gauges.LostEvaluation,
    ),
    "failed_samples": Rule(
        threshold=0.2,
        unit="share",
        when="Share of samples that could not be played or scored, of all or of one source of data, mean over 3 steps, "
        "is above this",
        remedy="They are left out, and the policy learns from the others alone. Read the reason at one of them "
        "(Groups, Failed), then mend the reward function (reward.fn), the tool or the data, or give it longer "
        "(reward.timeout_s).",
        gauge=gauges.Failed,
    ),
    "failed_evaluation": Rule(
        threshold=0.2,
        unit="share",
        when="Share of samples of an evaluation that could not be played or scored is above this",
        remedy="Its score is that of the others alone, and compares with no other score. Read the reason at one of "
        "them, then mend the reward function (reward.fn) or the data (eval.data).",
        gauge=gauges.FailedEvaluation,
    ),
    "constant_reward": Rule(
        threshold=2.0,
        unit="steps",
        when="All rewards were equal for more steps in a row than this, or those of one source of data for four times "
        "as many",
        remedy="Nothing can be learned from them. Score a right and a wrong answer with the reward function "
        "(reward.fn), see that `answer` is the right column (`rlsys data inspect`), or begin with easier tasks.",
        gauge=gauges.EqualRewards,
    ),
    "entropy_collapse": Rule(
        threshold=0.2,
        unit="of what it was",
        when="Entropy over 5 steps, as a share of what it was before it fell (at most 0.5 nats of that), is below "
        "this; to halve in 10 steps or more is no fall",
        remedy="The policy hardly explores any more. If reward is not where it should be, go back to a checkpoint "
        "before the fall with a higher clip_high, an entropy or KL term, a lower learning rate, or less staleness.",
        gauge=lambda: gauges.Fallen("policy/entropy", "entropy", cap=0.5),
        is_low=True,
    ),
    "kl_tail": Rule(
        threshold=0.5,
        unit="nats",
        when="Mean KL to the reference over 5 steps, per token, is above this",
        remedy="The policy has left the reference far behind. Read a few episodes for reward hacking; raise kl_coef "
        "or lower the learning rate.",
        gauge=lambda: gauges.Mean("policy/kl_ref", "KL to the reference", 5),
    ),
    "ratio_tail": Rule(
        threshold=3.0,
        unit="",
        when="99th percentile of the ratio of trainer to engine probability, mean over 5 steps, is above this",
        remedy="One token in a hundred is weighted far off. Lower max_staleness or the learning rate, or turn on an "
        "importance correction.",
        gauge=lambda: gauges.Mean("sampler/ratio_p99", "the 99th percentile of the ratio", 5),
    ),
    "equal_groups": Rule(
        threshold=0.9,
        unit="share",
        when="Share of groups whose rewards are all equal, mean over 20 steps, is above this",
        remedy="Compared within their group, such episodes teach nothing. Leave out tasks that are always or never "
        "solved, take a larger group_size, or look whether the reward can tell answers apart.",
        gauge=lambda: gauges.Mean("group/frac_zero_std", "the share of groups with equal rewards", 20),
    ),
    "truncation": Rule(
        threshold=0.2,
        unit="share",
        when="Share of trajectories cut at the token limit, mean over 5 to 20 steps, is surely by more than this above "
        "its lowest mean so far, or above 0.3",
        remedy="Look whether the ends of episodes ramble. Raise the limit of tokens (rollout.max_new_tokens), or "
        "penalise length that earns nothing.",
        gauge=lambda: gauges.Rise("completions/truncated_frac", "the share cut at the token limit", ordinary=0.3),
    ),
    "length_explosion": Rule(
        threshold=2.5,
        unit="times",
        when="Length of completions over 5 steps, as a multiple of what it was (at least 50 tokens more), is above "
        "this; to double in 100 steps or more is no explosion",
        remedy="Read a few episodes for repetition. Go back to a checkpoint before it with a lower learning rate "
        "(train.lr), or penalise length (`reward.fn: overlong`).",
        gauge=lambda: gauges.Grown("completions/length_mean", "the length of completions", least=50.0),
    ),
    "gradient_alignment": Rule(
        threshold=0.25,
        unit="",
        when="Size of the cosine of consecutive gradients, mean over 20 steps, surely rose by more than this while "
        "stale samples were trained",
        remedy="Stale samples can make updates point the same way, so that the policy overshoots. Set "
        "stabilizer.enabled, or lower max_staleness.",
        gauge=lambda: gauges.Rise("gac/cosine", "the |cosine| of consecutive gradients", where="async/staleness_max"),
    ),
    "mismatch": Rule(
        threshold=0.05,
        unit="nats",
        when="KL from the engine's distribution to the trainer's, per token, mean over 20 steps, is above this",
        remedy="Engine and trainer disagree on the same tokens. Compare sampler/s0/* with older ones: if s0 is as "
        "bad, the engine's numerics or weights are off (precision, kernels); else lower max_staleness.",
        gauge=lambda: gauges.Mean("sampler/mismatch_kl", "KL from engine to trainer", 20),
    ),
    "stale_drops": Rule(
        threshold=0.0,
        unit="groups",
        when="More groups than this were dropped as too stale within 10 steps",
        remedy="Rollouts are wasted, and slow tasks are lost first. Look on the cluster page for a replica that stays "
        "behind, or raise max_staleness.",
        gauge=lambda: gauges.Added("async/dropped_stale", "groups were dropped as too stale"),
    ),
    "not_finite": Rule(
        threshold=0.0,
        unit="metrics",
        when="More metrics of a step than this are NaN or infinite",
        remedy="Stop: the weights may be lost already. Go back to the last checkpoint, lower the learning rate, and "
        "look at the episodes of this step.",
        gauge=gauges.NotFinite,
    ),
    "idle_side": Rule(
        threshold=0.9,
        unit="share",
        when="Share of the last 20 steps in which one side waited for the other is above this",
        remedy="If the trainer waits, add replicas or reward workers, whichever the cluster page calls the "
        "bottleneck; if rollouts wait, give the trainer more, or raise max_staleness.",
        gauge=gauges.Idle,
    ),
    "reward_length": Rule(
        threshold=0.9,
        unit="",
        when="Correlation of reward and length over 40 steps, both rising, length by a quarter, is above this",
        remedy="Read a few episodes: does the policy earn by saying more? If so, penalise length or mend the reward; "
        "if it truly solves more, all is well.",
        gauge=gauges.RewardByLength,
    ),
    "slow_worker": Rule(
        threshold=3.0,
        unit="times",
        when="Seconds per token of a replica, or per episode of a reward worker, as a multiple of those of its peers, "
        "are above this for nearly all of its last groups",
        remedy="Look at its machine: another process on its cores or GPU, a throttled clock, a slow disk or network. "
        "Stop its process to have it replaced.",
        gauge=fleet.Slowest,
    ),
    "slow_tool": Rule(
        threshold=3.0,
        unit="times",
        when="Seconds that an episode waits for one tool, over 5 steps, as a multiple of what they were (at least 1 s "
        "more), are above this",
        remedy="Look at what the tool calls: a server under load, a sandbox that starts anew. Give it more capacity, "
        "or a shorter deadline.",
        gauge=lambda: gauges.Grown("agents/tool_s/*", "the time of an episode in the tool `{}`", least=1.0),
    ),
    "stale_replica": Rule(
        threshold=2.0,
        unit="versions",
        when="A busy replica is behind the newest weights by more than this beyond asynchrony.max_staleness + 1, at 3 "
        "polls in a row",
        remedy="Its groups will be too old to train. Look in the lanes whether it pulls; read its log; stop its "
        "process to have it replaced.",
        gauge=fleet.Behind,
    ),
    "stuck_group": Rule(
        threshold=5.0,
        unit="times",
        when="Age of the oldest group without rewards, as a multiple of what the slowest of the last 200 took, and for "
        "a minute at least, is above this",
        remedy="Look on the ledger where it is, and at the log of that worker. A workflow or tool that waits for ever "
        "needs a deadline (limits.lease_s replaces the worker).",
        gauge=fleet.Stuck,
    ),
    "worker_failed": Rule(
        threshold=0.0,
        unit="failures",
        when="More workers than this failed within 10 steps",
        remedy="A worker that died is replaced, and the run goes on. If it happens again, read its log, and look at "
        "the memory, cores and GPUs of its machine.",
        gauge=lambda: fleet.Happened(WorkerFailed),
    ),
    "file_not_written": Rule(
        threshold=0.0,
        unit="files",
        when="More files than this could not be written or copied within 10 steps",
        remedy="Free space on that disk (run.folder), or mend the access to it: the next checkpoint needs both.",
        gauge=lambda: fleet.Happened(FileSkipped, FileStalled, CheckpointCopyFailed),
    ),
    "disk_low": Rule(
        threshold=1.0,
        unit="GB",
        when="Free space where the run writes is below this",
        remedy="Free space before the next checkpoint, which ends the run if it does not fit: keep fewer "
        "(checkpoint.keep_last), write fewer rollouts (record.rollouts_every).",
        gauge=lambda: gauges.Mean("driver/disk_free", "the free space of the run's disk", 1),
        is_low=True,
    ),
    "no_progress": Rule(
        threshold=10.0,
        unit="typical steps",
        when="No step was done in the time of more typical steps than this, and for a minute at least",
        remedy="Look at the ledger for what is pending and where, and at the cluster page for a worker that is stuck.",
        gauge=None,
    ),
}
"""Every rule by the name of its alert."""


class Alarms:
    """Open and closed alerts after the events of a run so far."""

    HEARS = tuple(
        {RunStarted, StepDone, RolledBack, RunEnded}.union(
            *(rule.gauge().hears for rule in RULES.values() if rule.gauge)
        )
    )
    """Events that change the state."""

    def __init__(self, thresholds: Mapping[str, float | None] | None = None) -> None:
        """`thresholds`: values that replace the default of a rule; a value of None turns the rule off.

        Names that `RULES` lacks are ignored: they may come from the checked configuration of another version.
        """
        given = {name: rule.threshold for name, rule in RULES.items()} | dict(thresholds or {})
        self._thresholds = {name: value for name in RULES if (value := given[name]) is not None}
        self._hearing: dict[type[Event], list[tuple[str, AlertSignal]]] = {}
        """Rules, with their signals, that hear an event."""
        for name in self._thresholds:
            if make := RULES[name].gauge:
                gauge = make()
                for kind in gauge.hears:
                    self._hearing.setdefault(kind, []).append((name, gauge))
        self._open: dict[str, Alert] = {}
        self._closed: list[Alert] = []
        self._step = 0
        self._total_steps: int | None = None
        self._step_times_s: deque[float] = deque(maxlen=20)
        """Seconds of the last steps, without the first step of each session."""
        self._first_s: float | None = None
        """Seconds of the first step of all; the only estimate until the second step is done."""
        self._moved_s: float | None = None
        """Time of the start of the run or of its last step; None: not started, or no step is left."""
        self._is_first = True
        """True until the first step since the run began."""

    @property
    def step(self) -> int:
        """Last step that was done."""
        return self._step

    @property
    def open(self) -> Sequence[Alert]:
        """Open alerts, oldest first."""
        return tuple(self._open.values())

    @property
    def history(self) -> Sequence[Alert]:
        """All alerts, open and closed, in the order in which they were raised."""
        return sorted((*self._closed, *self._open.values()), key=lambda alert: alert.time_s)

    @property
    def thresholds(self) -> Mapping[str, float]:
        """Thresholds of the rules that are on."""
        return self._thresholds

    def observe(self, event: Event, time_s: float) -> Sequence[Alert]:
        """Process one event, emitted at `time_s` (Unix seconds), and return the alerts it raises.

        Only events in `HEARS` change the state. Other events only show that time passes, so a reader may leave them out
        and call `silent`. A metric that is not a number must be NaN, not missing.
        """
        late = None
        match event:
            case RunStarted(first_step=first, total_steps=total):
                self._close("no_progress", first)
                self._step, self._total_steps, self._is_first = first, total, True
                self._waits_from(time_s)
            case RunEnded():
                self._moved_s = None
                return []  # nothing follows the end of a run
            case RolledBack(total_steps=total):
                self._total_steps = total
            case PhaseDone() | EngineChosen() | TransportChosen() | DataChanged():
                pass  # start-up, maybe of a run that resumes days after it was killed
            case _:
                late = self.silent(time_s)
        if isinstance(event, StepDone):
            self._moved(event.step, time_s)
        raised = [] if late is None else [late]
        for name, gauge in self._hearing.get(type(event), ()):
            reading = gauge.observe(event, time_s)
            if reading is not None and (alert := self._judged(name, reading, time_s)):
                raised.append(alert)
        for alert in raised:
            self._open.setdefault(alert.alert, alert)
        if isinstance(event, StepDone):
            self._close("no_progress", event.step)
        return raised

    def silent(self, now_s: float) -> Alert | None:
        """Return the `no_progress` alert due at `now_s`; None if no alert is due, or it is open already."""
        threshold = self._thresholds.get("no_progress")
        if threshold is None or self._moved_s is None or "no_progress" in self._open:
            return None
        silence_s = now_s - self._moved_s
        if silence_s <= LEAST_SILENCE_S:
            return None
        typical_s, usual = self._typical(FIRST_STEP_S / threshold if threshold else FIRST_STEP_S)
        num_steps = silence_s / typical_s if typical_s > 0 else float("inf")
        if num_steps <= threshold:
            return None
        words = f"no step was done for {_spelt(silence_s)} after step {self._step}; {usual}"
        return self._alert("no_progress", SignalReading(num_steps, "", words), now_s)

    def _moved(self, step: int, time_s: float) -> None:
        if self._moved_s is not None:
            took_s = time_s - self._moved_s
            if not self._is_first:
                self._step_times_s.append(took_s)
            elif self._first_s is None:
                self._first_s = took_s
        self._step, self._is_first = step, False
        self._waits_from(time_s)

    def _waits_from(self, time_s: float) -> None:
        """Wait for the next step from `time_s` on, if one is left. The last evaluation has no deadline."""
        is_last = self._total_steps is not None and self._step >= self._total_steps
        self._moved_s = None if is_last else time_s

    def _typical(self, unknown_s: float) -> tuple[float, str]:
        """Duration of a step and its source in words; `unknown_s` if no step was done."""
        if self._step_times_s:
            typical_s = median(self._step_times_s)
            return typical_s, f"steps take {typical_s:.3g} s"
        if self._first_s is not None:
            return self._first_s, f"the first took {self._first_s:.3g} s"
        return unknown_s, "it is the first since the run began"

    def _judged(self, name: str, reading: SignalReading, time_s: float) -> Alert | None:
        """Compare a reading with the threshold of its rule; close its alert, or return a new one."""
        threshold, is_low, value = self._thresholds[name], RULES[name].is_low, reading.value
        if name in self._open:
            if value >= threshold / MARGIN if is_low else value <= threshold * MARGIN:
                self._close(name, self._step)
            return None
        is_wrong = value < threshold if is_low else value > threshold
        return self._alert(name, reading, time_s) if is_wrong else None

    def _alert(self, name: str, reading: SignalReading, time_s: float) -> Alert:
        rule = RULES[name]
        return Alert(
            alert=name,
            step=self._step,
            until_step=None,
            time_s=time_s,
            value=reading.value,
            threshold=self._thresholds[name],
            unit=rule.unit,
            metric=reading.metric,
            sentence=f"{_begun(reading.words)}. {rule.remedy}",
        )

    def _close(self, name: str, step: int) -> None:
        if alert := self._open.pop(name, None):
            self._closed.append(replace(alert, until_step=max(alert.step, step)))  # a resume may go back


def _begun(words: str) -> str:
    """Words as the beginning of a sentence. The name of a metric, a worker or a file stays as it is."""
    is_word = words.split(" ", 1)[0].isalpha()
    return words[:1].upper() + words[1:] if is_word else words


def _spelt(seconds: float) -> str:
    """`101 s`, `12 min`, `325 days`."""
    units = ((86_400, "days"), (3_600, "hours"), (60, "min"))
    return next(
        (f"{seconds / unit_s:.0f} {unit}" for unit_s, unit in units if seconds >= 2 * unit_s), f"{seconds:.0f} s"
    )


class AlertSink:
    """Sink that emits an `AlertRaised` for each problem in a run's events.

    It emits inside `handle`, so attach it last: every other sink then sees the cause of an alert before the alert. It
    sees one session only. In a resumed run it collects its statistics anew and repeats alerts that still apply. A
    reader of the files folds all sessions as one, and may get different alerts.
    """

    def __init__(self, events: Events, thresholds: Mapping[str, float | None]) -> None:
        """`events`: the bus that this sink is attached to. `thresholds`: see `Alarms`."""
        self._events, self._alarms = events, Alarms(thresholds)

    def handle(self, event: Event, time_s: float) -> None:
        """Process one event, and emit the alerts that it raises."""
        for alert in self._alarms.observe(event, time_s):
            self._events.emit(AlertRaised(alert.alert, alert.step, alert.value, alert.threshold, alert.sentence))

    def close(self) -> None:
        """Do nothing: the sink has no resources."""
