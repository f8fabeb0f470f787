"""What happens in a run, as typed events, and the bus that hands them to sinks.

The driver emits; files, the console and trackers are sinks; a dashboard reads the files. Nothing here decides anything,
and nothing a sink does can stop training.

    events = Events([JsonlSink(run_dir), ConsoleSink(total_steps)])
    events.emit(StepDone(1, {"reward/mean": 0.52, "time/step": 0.21}))
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from rlsys.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Every worker is ready and training begins."""

    kind: ClassVar[str] = "run_started"
    run_dir: str
    first_step: int
    """Step the run begins after: 0, or the resumed one."""
    total_steps: int


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """One phase of start-up or shutdown ended, e.g. `load_data` after 0.4 s. Phases may overlap."""

    kind: ClassVar[str] = "phase_done"
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineChosen:
    """Which inference engine a replica runs, and why."""

    kind: ClassVar[str] = "engine_chosen"
    worker: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step was taken and its weights published."""

    kind: ClassVar[str] = "step_done"
    step: int
    """Steps behind the weights now, which is also their version."""
    metrics: Mapping[str, float]
    """Metric name -> value; the names are those of `METRICS`."""


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """A group left the pipe untrained. `reason` is what the drop is counted under, `detail` the story."""

    kind: ClassVar[str] = "group_dropped"
    serial: int
    task_id: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupReissued:
    """What was rolled out of a group is lost: the group is issued again, with its number and so its seeds."""

    kind: ClassVar[str] = "group_reissued"
    serial: int
    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EpisodeGrafted:
    """All episodes of a group failed: a stored success of the same task took the place of one of them."""

    kind: ClassVar[str] = "episode_grafted"
    serial: int
    task_id: str
    episode: int
    """Which one, from 0."""
    donor: int
    """Serial of the group that the success is from."""


@dataclass(frozen=True, slots=True)
class SignalMissing:
    """So many groups one after the other had nothing to learn in them, a tenth of those that end the run."""

    kind: ClassVar[str] = "signal_missing"
    num_groups: int
    limit: int
    """`limits.max_no_signal_groups`."""
    detail: str
    """What was found of the last of them."""


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """A version that the actor published is in the relay tier."""

    kind: ClassVar[str] = "weights_published"
    version: PolicyVersion
    hash: str
    num_bytes: int
    num_sent: int
    """Bytes that had to travel: those of buckets which the version before did not have."""
    stall_s: float
    """Seconds the actor could not train because of it."""
    seconds: float
    """From the end of the publish to the first relay holding all of it."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker died, or did not answer, or held the wrong weights."""

    kind: ClassVar[str] = "worker_failed"
    worker: str
    phase: str
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerRestarted:
    """A failed worker was replaced and is ready again."""

    kind: ClassVar[str] = "worker_restarted"
    worker: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TrajectoriesMoved:
    """Replica `to` goes on with groups that `source` was sampling, so that `source` can take newer weights."""

    kind: ClassVar[str] = "trajectories_moved"
    source: str
    to: str
    num_groups: int
    version: PolicyVersion
    """What they are sampled from, there as before."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EvalDone:
    """One version was measured on one data set."""

    kind: ClassVar[str] = "eval_done"
    step: int
    """Steps behind the weights measured, which is also their version: every token was sampled from exactly that one."""
    dataset: str
    hash: str
    """Content hash those weights were published with."""
    seconds: float
    """From the moment the version was pinned."""
    metrics: Mapping[str, float]
    """Metric name -> value, e.g. `eval/held_out/pass@4`; the measures are those of `rlsys.measures.Measures`."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last event of a run. `reason`: `finished`, `interrupted` or `failed`; `detail` is the error's text."""

    kind: ClassVar[str] = "run_ended"
    step: int
    reason: str
    detail: str = ""


Event: TypeAlias = (
    RunStarted
    | EngineChosen
    | PhaseDone
    | StepDone
    | GroupDropped
    | GroupReissued
    | EpisodeGrafted
    | SignalMissing
    | WeightsPublished
    | WorkerFailed
    | WorkerRestarted
    | TrajectoriesMoved
    | CheckpointSaved
    | EvalDone
    | RunEnded
)


class Sink(Protocol):
    """Something that reads events. May raise: it is then dropped."""

    def handle(self, event: Event, time_s: float) -> None:
        """Take one event, emitted at `time_s` (Unix seconds). Called in order, and must be quick."""
        ...

    def close(self) -> None:
        """No event follows."""
        ...


class Events:
    """The bus: stamps each event with the time and hands it to every sink, in order.

    A sink that raises is named once on stderr and dropped: observing must never stop training.
    """

    def __init__(self, sinks: Iterable[Sink] = (), clock: Callable[[], float] = time.time) -> None:
        self._sinks, self._clock = list(sinks), clock

    def attach(self, sink: Sink) -> None:
        """Hand `sink` every event from now."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Tell every sink."""
        time_s = self._clock()
        for sink in tuple(self._sinks):
            self._guarded(sink, lambda sink=sink: sink.handle(event, time_s))

    def close(self) -> None:
        """Close every sink; idempotent."""
        for sink in tuple(self._sinks):
            self._guarded(sink, sink.close)
        self._sinks.clear()

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  (the boundary between training and observers)
            self._sinks.remove(sink)
            sys.stderr.write(f"rlsys: {type(sink).__name__} is off for the rest of the run: {error!r}\n")


class Metric(NamedTuple):
    """What a metric means, for tables, tooltips and trackers."""

    unit: str
    help: str


STALENESS_BUCKETS: Mapping[str, str] = {
    "s0": "tokens sampled from the version trained",
    "s1": "tokens one version old",
    "s2": "tokens two versions old",
    "s3": "tokens three versions old",
    "s4plus": "tokens four or more versions old",
}
"""Name -> meaning of what `sampler/*` is reported for again, e.g. as `sampler/s1/ess`, and of the staleness histogram,
e.g. `async/staleness/s1`; the index is the staleness."""

_SAMPLER: Mapping[str, Metric] = {
    "logp_diff_mean": Metric("nats", "mean |logprob of the trainer - logprob of the engine| of trained tokens"),
    "logp_diff_max": Metric("nats", "largest such difference; those above 20 count as 20"),
    "mismatch_kl": Metric("nats", "KL from the engine's distribution to the trainer's, per token"),
    "ratio_p01": Metric("", "1st percentile of the probability ratio of tokens, trainer over engine"),
    "ratio_p50": Metric("", "median of that ratio"),
    "ratio_p99": Metric("", "99th percentile of that ratio"),
    "ratio_max": Metric("", "largest such ratio"),
    "ess": Metric("share", "effective sample size under that ratio: 1 if all tokens weigh the same"),
}

METRICS: Mapping[str, Metric] = {
    "step": Metric("", "optimizer steps taken, also the version of the weights"),
    "loss": Metric("", "loss of the policy over the whole batch, as the algorithm averages it; mean over updates"),
    "reward/mean": Metric("", "mean reward of the episodes trained"),
    "reward/std": Metric("", "standard deviation of their rewards"),
    "reward/min": Metric("", "lowest reward"),
    "reward/max": Metric("", "highest reward"),
    "reward/failed_frac": Metric("share", "episodes that could not be judged or played, and so were left out"),
    "reward/by/*": Metric("", "mean of what one reward function gave where it applied, before its weight"),
    "agents/per_episode": Metric("agents", "mean over the episodes trained, the root and failed ones counted"),
    "agents/failed_frac": Metric("share", "agents besides the root that failed alone, so that they were left out"),
    "agents/tool_calls": Metric("calls", "calls of tools in an episode, by all its agents, mean"),
    "agents/sequential_tokens": Metric(
        "tokens", "sampled on the longest chain of an episode, in which each waits for the one before, mean"
    ),
    "agents/reward/*": Metric("", "mean reward of the agents of one name besides the root, where they have their own"),
    "group/frac_zero_std": Metric("share", "groups whose rewards are all equal and teach nothing"),
    "kto/desirable_frac": Metric("share", "samples whose reward makes them desirable"),
    "kto/z0": Metric("nats", "reference point: mean log-ratio to the reference over mismatched pairs, at least 0"),
    "kto/margin": Metric("", "beta (r - z0), negated for undesirable samples; mean over tokens, positive once learned"),
    "kto/clip_frac": Metric("share", "tokens of samples that moved further than `clip` since they were drawn"),
    "kto/saturated_frac": Metric("share", "tokens of samples whose gradient is below a tenth of its maximum"),
    "kto/reward_desirable": Metric("", "implicit reward beta r of desirable samples at the start of the step, mean"),
    "kto/reward_undesirable": Metric("", "the same of undesirable samples"),
    "policy/kl_ref": Metric("nats", "KL from the policy to the reference, mean over the tokens as sampled, unweighted"),
    "policy/ratio_mean": Metric("", "mean of the probability ratio that the loss takes"),
    "policy/clip_frac_low": Metric("share", "tokens whose ratio was clipped at its lower bound"),
    "policy/clip_frac_high": Metric("share", "tokens whose ratio was clipped at its upper bound"),
    "policy/clip_frac_dual": Metric("share", "tokens of negative advantage whose ratio was clipped at dual_clip"),
    "policy/entropy": Metric("nats", "mean entropy of the next-token distribution"),
    "policy/*_truncated_frac": Metric(
        "share", "tokens whose importance weight was truncated to the cap, by correction"
    ),
    "policy/*_masked_frac": Metric("share", "tokens left out because they are too far off-policy, by correction"),
    "policy/trains_negatives": Metric(
        "", "1 if trajectories of negative advantage are trained, 0 if they are left out"
    ),
    "batch/samples_left_out": Metric("samples", "left out of the step, so that a multiple of samples_multiple remains"),
    **{f"sampler/{name}": metric for name, metric in _SAMPLER.items()},
    **{
        f"sampler/{bucket}/{name}": Metric(metric.unit, f"{metric.help}; {tokens}")
        for bucket, tokens in STALENESS_BUCKETS.items()
        for name, metric in _SAMPLER.items()
    },
    "sampler/probe_diff": Metric("nats", "mean |logprob of trainer - engine| after a weight change, worst replica"),
    "completions/length_mean": Metric("tokens", "mean tokens sampled in a trajectory"),
    "completions/length_p50": Metric("tokens", "median of the tokens sampled in a trajectory"),
    "completions/length_p90": Metric("tokens", "90th percentile of them"),
    "completions/length_max": Metric("tokens", "most tokens sampled in a trajectory"),
    "completions/offered_length_mean": Metric(
        "tokens", "the same over all groups rolled out during the step, trained or not: mean"
    ),
    "completions/offered_length_p50": Metric("tokens", "median of those offered"),
    "completions/offered_length_p90": Metric("tokens", "90th percentile of those offered"),
    "completions/offered_length_max": Metric("tokens", "most of those offered"),
    "completions/truncated_frac": Metric("share", "trajectories cut off at the token limit"),
    "async/staleness_mean": Metric("versions", "mean staleness of the tokens trained"),
    "async/staleness_max": Metric("versions", "largest staleness of any of them; never above the bound"),
    **{
        f"async/staleness/{bucket}": Metric("share", f"of the tokens trained: {tokens}")
        for bucket, tokens in STALENESS_BUCKETS.items()
    },
    "async/num_versions": Metric("versions", "versions that groups rolled out during the step were sampled from"),
    "async/dropped": Metric("groups", "groups dropped since the run began, for any reason"),
    "async/dropped_stale": Metric("groups", "those of them that were too stale to train; should read 0"),
    "async/reissued": Metric(
        "", "attempts at groups since the run began, beyond the first of each: what they had was lost"
    ),
    "async/refused": Metric(
        "", "columns handed in since the run began for an attempt that was over, or twice; never trained"
    ),
    "async/moved": Metric("groups", "groups moved between replicas since the run began; see rollout.repack_s"),
    "async/queue_depth": Metric("groups", "groups that waited to be trained when the step ended"),
    "curation/no_signal": Metric(
        "groups", "dropped since the run began, and replaced: the algorithm found nothing to learn in them"
    ),
    "curation/smaller_groups": Metric(
        "groups", "given fewer episodes since the run began, because their task mostly succeeds"
    ),
    "curation/passed_over": Metric("tasks", "passed over since the run began; one counts each time"),
    "curation/grafted": Metric("groups", "that failed altogether since the run began, and got a stored success"),
    "curation/too_old": Metric(
        "groups", "that failed altogether since the run began, with a stored success too old for the staleness bound"
    ),
    "curation/stored": Metric("", "successes that are stored"),
    "time/step": Metric("s", "wall time of the step"),
    "time/rollout": Metric("s", "the busiest replica was at work on groups that came in during the step"),
    "time/reward": Metric("s", "the busiest reward worker was at work on groups that came in during the step"),
    "time/fetch": Metric("s", "the ranks of actor and critic fetched the data of the step"),
    "time/columns": Metric("s", "columns were made that need the whole step: values, mismatched pairs"),
    "time/train": Metric("s", "the step of the policy, then that of the critic; each on its slowest rank"),
    "time/publish": Metric("s", "handing the weights over; the trainer waits meanwhile"),
    "time/annotate": Metric("s", "the busiest annotator added columns the algorithm asked for, beside everything else"),
    "time/wait_batch": Metric("s", "the trainer waited for groups with all their columns"),
    "time/weights_wait": Metric("s", "a group waited at its replica for weights, mean over those of the step"),
    "time/wait_permit": Metric("s", "no group was being produced at all: rollouts waited for the trainer"),
    "time/checkpoint": Metric("s", "writing a checkpoint after the step before"),
    "time/eval_wait": Metric(
        "s", "the trainer waited for an evaluation before the step: to pin its weights, or to end"
    ),
    "eval/*/mean": Metric("", "mean reward of an evaluation: over its tasks, of the mean of their samples"),
    "eval/*/mean_ci95": Metric("", "half width of the 95 % confidence interval of that mean, over tasks"),
    "eval/*/pass@*": Metric("share", "tasks solved by at least one of so many samples, unbiased estimate"),
    "eval/*/truncated_frac": Metric("share", "samples of the evaluation cut at the token limit"),
    "eval/*/failed_frac": Metric("share", "samples of the evaluation that could not be judged, and so were left out"),
    "eval/*/length_mean": Metric("tokens", "mean tokens of a sample of the evaluation"),
    "eval/*/num_tasks": Metric("tasks", "tasks with at least one judged sample"),
    "eval/*/num_too_long": Metric("tasks", "tasks left out, because their prompt exceeds the limit"),
    "eval/*/samples": Metric("", "samples per task"),
    "driver/cpu_share": Metric("share", "CPU time of the driver over the wall time of the step"),
    "perf/tokens_per_s": Metric("tokens/s", "trained tokens per second of wall time"),
    "perf/samples_per_s": Metric("1/s", "trained episodes per second of wall time"),
    "gac/cosine": Metric(
        "", "cosine of an update's gradient with that of the update before, both raw; 0 for the first"
    ),
    "gac/parallel_share": Metric("share", "length of the part along the gradient before, of the whole: |gac/cosine|"),
    "gac/cosine_after": Metric("", "the same cosine, of the gradient as it goes on to clipping and the optimizer"),
    "gac/regime": Metric(
        "",
        "what it called for: 0 nothing, 1 projection, 2 skipping; only done if stabilizer.enabled, mean over updates",
    ),
    "gac/skips_in_a_row": Metric("updates", "skipped without one between them, up to this one"),
    "gac/c_low": Metric("", "largest |cosine| that is safe; not reported while it is being calibrated"),
    "gac/c_high": Metric("", "|cosine| above which an update is skipped; not reported while it is being calibrated"),
    "gac/update_cosine": Metric(
        "", "cosine of the optimizer's own update, before any projection of it, with the one before; every 10th update"
    ),
    "critic/loss": Metric("", "loss of the critic, mean over the updates of the step"),
    "critic/explained_variance": Metric(
        "share", "of the returns, by the values before the step: 1 - Var(returns - values) / Var(returns)"
    ),
    "critic/value_mean": Metric("", "mean value of the states before trained tokens, before the step"),
    "critic/grad_norm": Metric("", "norm of the critic's gradient before clipping, mean over the updates of the step"),
    "critic/clip_frac": Metric(
        "share", "tokens whose value moved beyond value_clip, so that they teach the critic nothing"
    ),
    "critic/lr": Metric("", "learning rate of the critic in the step"),
    "optim/grad_norm": Metric("", "norm of the gradient before clipping, mean over the updates of the step"),
    "optim/lr": Metric("", "learning rate of the step"),
}
"""Every metric the framework and its own algorithms report: name -> unit and meaning.

A `*` stands for any text: `eval/*/mean` for `eval/held_out/mean`.
"""


def metric_of(name: str) -> Metric | None:
    """What `METRICS` says of a name, `reward/by/exact` for instance; None if nothing."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for key, metric in METRICS.items() if "*" in key and fnmatchcase(name, key)), None)


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that `METRICS` does not explain, sorted. A run in the tests must have none."""
    return sorted(name for name in set(names) if metric_of(name) is None)
