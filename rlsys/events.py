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
class WeightsPublished:
    """The actor handed a version to the relays."""

    kind: ClassVar[str] = "weights_published"
    version: PolicyVersion
    hash: str
    num_bytes: int
    stall_s: float


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
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last event of a run. `reason`: `finished`, `interrupted` or `failed`; `detail` is the error's text."""

    kind: ClassVar[str] = "run_ended"
    step: int
    reason: str
    detail: str = ""


Event: TypeAlias = (
    RunStarted
    | PhaseDone
    | StepDone
    | GroupDropped
    | WeightsPublished
    | WorkerFailed
    | WorkerRestarted
    | CheckpointSaved
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


METRICS: Mapping[str, Metric] = {
    "step": Metric("", "optimizer steps taken, also the version of the weights"),
    "loss": Metric("", "loss of the step, normalised over the whole batch"),
    "reward/mean": Metric("", "mean reward of the episodes trained"),
    "reward/std": Metric("", "standard deviation of their rewards"),
    "reward/min": Metric("", "lowest reward"),
    "reward/max": Metric("", "highest reward"),
    "reward/failed_frac": Metric("share", "episodes that could not be judged or played, and so were left out"),
    "group/frac_zero_std": Metric("share", "groups whose rewards are all equal and teach nothing"),
    "policy/kl_ref": Metric("nats", "KL from the policy to the reference, per token"),
    "policy/approx_kl": Metric("nats", "KL from the sampling policy to the one trained, per token"),
    "policy/ratio_mean": Metric("", "mean probability ratio, trained policy over sampling policy"),
    "policy/clip_frac_low": Metric("share", "tokens clipped at the lower bound of the ratio"),
    "policy/clip_frac_high": Metric("share", "tokens clipped at the upper bound of the ratio"),
    "policy/entropy": Metric("nats", "mean entropy of the next-token distribution"),
    "sampler/logp_diff_mean": Metric("nats", "mean |logprob of the trainer - logprob of the engine| of sampled tokens"),
    "sampler/logp_diff_max": Metric("nats", "largest such difference"),
    "completions/length_mean": Metric("tokens", "mean tokens sampled in a trajectory"),
    "completions/length_max": Metric("tokens", "most tokens sampled in a trajectory"),
    "completions/truncated_frac": Metric("share", "trajectories cut off at the token limit"),
    "async/staleness_mean": Metric("versions", "mean staleness of the tokens trained"),
    "async/staleness_max": Metric("versions", "largest staleness of any of them; never above the bound"),
    "async/dropped": Metric("groups", "groups dropped since the run began, for any reason"),
    "async/dropped_stale": Metric("groups", "those of them that were too stale to train; should read 0"),
    "async/queue_depth": Metric("groups", "finished groups that waited when the step ended"),
    "time/step": Metric("s", "wall time of the step"),
    "time/rollout": Metric("s", "the busiest replica was at work on groups that came in during the step"),
    "time/reward": Metric("s", "the busiest reward worker was at work on groups that came in during the step"),
    "time/train": Metric("s", "the trainer's step, with fetching its data"),
    "time/publish": Metric("s", "handing the weights over; the trainer waits meanwhile"),
    "time/annotate": Metric("s", "adding the columns the algorithm asked for"),
    "time/wait_batch": Metric("s", "the trainer waited for finished groups"),
    "time/wait_permit": Metric("s", "no group was being produced at all: rollouts waited for the trainer"),
    "time/checkpoint": Metric("s", "writing a checkpoint after the step before"),
    "driver/cpu_share": Metric("share", "CPU time of the driver over the wall time of the step"),
    "perf/tokens_per_s": Metric("tokens/s", "trained tokens per second of wall time"),
    "perf/samples_per_s": Metric("1/s", "trained episodes per second of wall time"),
    "optim/grad_norm": Metric("", "norm of the gradient before clipping"),
    "optim/lr": Metric("", "learning rate of the step"),
}
"""Every metric the framework and its own algorithms report: name -> unit and meaning."""


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that `METRICS` does not explain, sorted. A run in the tests must have none."""
    return sorted(set(names) - METRICS.keys())
