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
from typing import ClassVar, Protocol, TypeAlias

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
    """Metric name -> value; the names are those of `rlsys.monitoring.metric_catalog.METRICS`."""
    group_ids: tuple[int, ...] = ()
    """Groups it trained, in the order of its batch."""


@dataclass(frozen=True, slots=True)
class GroupIssued:
    """A permit was taken and a task drawn: the group is to be rolled out. Told again if it is issued again."""

    kind: ClassVar[str] = "group_issued"
    group_id: int
    task_id: str
    version: PolicyVersion
    """No token of it may be older."""
    size: int
    """Episodes it will have."""


@dataclass(frozen=True, slots=True)
class GroupPlaced:
    """A group is being rolled out there. Found by looking every few seconds: what is done sooner is not told."""

    kind: ClassVar[str] = "group_placed"
    group_id: int
    worker: str


@dataclass(frozen=True, slots=True)
class GroupRolledOut:
    """All episodes of a group were played."""

    kind: ClassVar[str] = "group_rolled_out"
    group_id: int
    task_id: str
    worker: str
    """The replica."""
    oldest: PolicyVersion
    newest: PolicyVersion
    """Of the versions its tokens were sampled from."""
    lengths: tuple[int, ...]
    """Tokens sampled in each episode, by all its agents."""
    num_truncated: int
    """Episodes in which somebody was cut at the token limit."""
    seconds: float
    """At the replica, from its start to its end."""
    waited_s: float
    """Before that, for weights."""


@dataclass(frozen=True, slots=True)
class GroupScored:
    """Every episode of a group has its reward, or the reason why not.

    The group waits to be trained, unless a `GroupDropped` follows: there may be nothing to learn in it.
    """

    kind: ClassVar[str] = "group_scored"
    group_id: int
    task_id: str
    rewards: tuple[float | None, ...]
    """Of each episode's root; None: it failed, or has none."""


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """A group left the pipe untrained. `reason` is what the drop is counted under, `detail` the story."""

    kind: ClassVar[str] = "group_dropped"
    group_id: int
    task_id: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupReissued:
    """What was rolled out of a group is lost: the group is issued again, with its number and so its seeds."""

    kind: ClassVar[str] = "group_reissued"
    group_id: int
    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EpisodeGrafted:
    """All episodes of a group failed: a stored success of the same task took the place of one of them."""

    kind: ClassVar[str] = "episode_grafted"
    group_id: int
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
    """Metric name -> value, e.g. `eval/held_out/pass@4`; the measures are those of
    `rlsys.loop.eval_metrics.EvalMetrics`."""


@dataclass(frozen=True, slots=True)
class WorkerBusy:
    """A worker was at work on one thing. What is between is idleness."""

    kind: ClassVar[str] = "worker_busy"
    worker: str
    activity: str
    """One of `ACTIVITIES`."""
    start_s: float
    end_s: float
    """Unix seconds on the driver's clock; they may be off by what a message takes."""


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """What a replica holds and does, found by looking every few seconds; told when it changes, and now and then."""

    kind: ClassVar[str] = "replica_seen"
    worker: str
    version: PolicyVersion
    is_loading: bool
    """Is it taking in weights?"""
    num_running: int
    """Sequences or groups that it is decoding."""
    num_waiting: int
    kv_used: float
    """Share of its cache slots, 0 to 1."""
    num_tokens: int
    """Sampled since it started."""


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """What is in the pipe, found by looking every few seconds; told when it changes."""

    kind: ClassVar[str] = "queue_seen"
    num_open: int
    """Groups that are issued, and neither trained nor dropped."""
    num_finished: int
    """Those of them that wait to be trained."""


@dataclass(frozen=True, slots=True)
class RolloutsWritten:
    """The groups of a step can be read, for people: `rlsys.replay.rollout_log.read_rollouts`."""

    kind: ClassVar[str] = "rollouts_written"
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class AlertRaised:
    """Something looks wrong, and what to do about it; see `rlsys.monitoring.alerts`."""

    kind: ClassVar[str] = "alert_raised"
    alert: str
    """Its name, e.g. `entropy_collapse`."""
    step: int
    value: float
    threshold: float
    sentence: str


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
    | GroupIssued
    | GroupPlaced
    | GroupRolledOut
    | GroupScored
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
    | WorkerBusy
    | ReplicaSeen
    | QueueSeen
    | RolloutsWritten
    | AlertRaised
    | RunEnded
)

ACTIVITIES: Mapping[str, str] = {
    "generating": "a replica played a group",
    "pulling": "a replica took in new weights",
    "evaluating": "a replica of the evaluation lane played a group",
    "scoring": "a reward worker scored a group",
    "annotating": "an annotator added a column to groups",
    "fetching": "the trainer's ranks fetched the data of a step",
    "preparing": "columns were made that need the whole step",
    "training": "the actor or the critic took its step",
    "publishing": "the actor handed its weights over",
    "recording": "the actor wrote the rollouts of a step for people",
    "saving": "a checkpoint was written",
}
"""What `WorkerBusy` tells of: name -> meaning."""


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

    def now(self) -> float:
        """The time on the clock that events are stamped with."""
        return self._clock()

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
