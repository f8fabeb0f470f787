"""Typed events of a run, and the bus that passes them to sinks.

The driver emits; files, the console and trackers are sinks; a dashboard reads the files. Nothing here makes a decision,
and no sink can stop training.

    events = Events([JsonlSink(run_dir), ConsoleSink(total_steps)])
    events.emit(StepDone(1, {"reward/mean": 0.52, "time/step": 0.21}))
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, dataclass_transform

from rlsys.types import Busy, Group, OutcomeKind, PolicyVersion
from rlsys.util.printing import encodable, print_note


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Base of all events. A subclass becomes a frozen dataclass, in `EVENT_TYPES` under the snake case of its name."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        EVENT_TYPES[cls.kind] = cls


EVENT_TYPES: dict[str, type[Event]] = {}
"""Every event by its kind."""


class RunStarted(Event):
    """All workers are ready and training begins."""

    run_dir: str
    first_step: int
    """Step after which the run begins: 0, or the resumed step."""
    total_steps: int
    max_staleness: int = -1
    """Bound of the run, `asynchrony.max_staleness`; -1: not recorded."""


class PhaseDone(Event):
    """One phase of start-up or shutdown ended, e.g. `load_data` after 0.4 s. Phases may overlap."""

    phase: str
    seconds: float


class EngineChosen(Event):
    """Inference engine of a replica, with the reason for the choice."""

    worker: str
    engine: str
    reason: str


class TransportChosen(Event):
    """Transport of the weights of a policy, with the reason for the choice."""

    policy: str
    transport: str
    reason: str


class CautionRaised(Event):
    """A setting is valid, and may cost reward; with the remedy."""

    sentence: str


class DataChanged(Event):
    """Change of the sources of data since the checkpoint that a run resumes from."""

    detail: str


class StepDone(Event):
    """An optimizer step is done and its weights are published."""

    step: int
    """Optimizer steps behind the weights, which is also their version."""
    metrics: Mapping[str, float]
    """Metric name -> value; the names are those of `rlsys.monitoring.metric_catalog.METRICS`."""
    group_ids: tuple[int, ...] = ()
    """Trained groups in the order of the batch."""


class GroupIssued(Event):
    """A group has a permit and a task, and is to be rolled out. Emitted again when the group is reissued."""

    group_id: int
    task_id: str
    version: PolicyVersion
    """Oldest version that its tokens may have."""
    size: int
    """Number of its episodes."""


class GroupPlaced(Event):
    """A replica is rolling out a group. Found by polling every few seconds, so shorter rollouts are not reported."""

    group_id: int
    worker: str


class GroupRolledOut(Event):
    """All episodes of a group are rolled out."""

    group_id: int
    task_id: str
    worker: str
    """Replica that rolled it out."""
    oldest: PolicyVersion
    newest: PolicyVersion
    """`oldest` and `newest` version that its tokens were sampled from."""
    lengths: tuple[int, ...]
    """Tokens sampled in each episode, by all its agents."""
    num_truncated: int
    """Episodes in which an agent was cut at the token limit."""
    seconds: float
    """Seconds at the replica, from start to end, without `waited_s`."""
    waited_s: float
    """Seconds that the group waited for weights before it started."""


class GroupScored(Event):
    """Every episode of a group has its reward, or the reason why it has none.

    The group then waits to be trained, unless a `GroupDropped` follows because it has zero advantage.
    """

    group_id: int
    task_id: str
    rewards: tuple[float | None, ...]
    """Reward of each episode's root; None: the episode failed, or has no reward."""
    failures: Mapping[str, float] = field(default_factory=dict)
    """See `failures_in`."""
    worker: str = ""
    """Reward worker that scored it."""
    seconds: float = 0.0
    """Seconds at the reward worker."""


class GroupDropped(Event):
    """A group left the pipe untrained. The drop is counted under `reason`; `detail` explains it."""

    group_id: int
    task_id: str
    reason: str
    detail: str = ""


class GroupReissued(Event):
    """The rollouts of a group are lost: the group is issued again, with the same group id and so the same seeds."""

    group_id: int
    task_id: str
    reason: str


class EpisodeReplaced(Event):
    """All episodes of a group failed: a stored success of the same task replaced one of them."""

    group_id: int
    task_id: str
    episode: int
    """Index of the replaced episode, from 0."""
    donor: int
    """Group id of the stored success."""


class ZeroAdvantageWarning(Event):
    """`num_groups` groups in a row had zero advantage, a tenth of the `limit` that ends the run."""

    num_groups: int
    limit: int
    """`limits.max_zero_advantage_groups`."""
    detail: str
    """Detail of the last such group."""


class WeightsPublished(Event):
    """A version published by the actor is in the relay tier."""

    version: PolicyVersion
    hash: str
    num_bytes: int
    num_sent: int
    """Bytes sent: those of the buckets that differ from the version before."""
    stall_s: float
    """Seconds during which the publish kept the actor from training."""
    seconds: float
    """Seconds from the end of the publish until the first relay has the whole version."""


class WorkerFailed(Event):
    """A worker died, did not answer, or had the wrong weights."""

    worker: str
    phase: str
    detail: str


class WorkerRestarted(Event):
    """A failed worker was replaced and is ready again."""

    worker: str
    seconds: float


class WorkerJoined(Event):
    """A worker that was added to a running job is ready."""

    worker: str
    seconds: float
    """Seconds since it was asked for."""


class WorkerLeft(Event):
    """A worker of which the job wants fewer has ended, with nothing left to do."""

    worker: str
    seconds: float
    """Seconds since it was asked to leave."""


class TrajectoriesMoved(Event):
    """Replica `to` continues groups that `source` was sampling, so that `source` can load newer weights."""

    source: str
    to: str
    num_groups: int
    version: PolicyVersion
    """Version that the groups are sampled from, on both replicas."""


class CheckpointSaved(Event):
    """A checkpoint is complete, in the folder or at the URL `path`."""

    step: int
    path: str
    seconds: float


class CheckpointPassedOver(Event):
    """A checkpoint is damaged, and the run starts from an older one."""

    problem: str
    """The file, and what is wrong with it."""


class RolledBack(Event):
    """Actor and critic were replaced, and train on from an older state. The steps between are lost."""

    version: PolicyVersion
    """New version of the restored weights."""
    restored: PolicyVersion
    """Their version in the checkpoint; 0 for the initial model."""
    num_lost: int
    """Versions of the whole run that are no longer steps behind the weights."""
    total_steps: int
    """Version at which the run ends now."""


class EvalDone(Event):
    """A version was evaluated on a data set."""

    step: int
    """Optimizer steps behind the evaluated weights, which is also the version of every sampled token."""
    dataset: str
    hash: str
    """Content hash of the weights, as published."""
    seconds: float
    """Seconds since the version was pinned."""
    metrics: Mapping[str, float]
    """Metric name -> value, e.g. `eval/held_out/pass@4`; see `rlsys.loop.evaluation.EvalMetrics`."""
    failures: Mapping[str, float] = field(default_factory=dict)
    """See `failures_in`."""


class WorkerBusy(Event):
    """A worker worked on one activity. The time between two such events is idle time."""

    worker: str
    activity: str
    """One of `ACTIVITIES`."""
    start_s: float
    end_s: float
    """`start_s` and `end_s`: Unix seconds on the driver's clock, accurate to the delay of one message."""


class ReplicaSeen(Event):
    """State of a replica, polled every few seconds; emitted when it changes, and at intervals."""

    worker: str
    version: PolicyVersion
    is_loading: bool
    """True while it loads weights."""
    num_running: int
    """Sequences or groups that it decodes now."""
    num_waiting: int
    kv_used: float
    """Share of its cache slots in use, 0 to 1."""
    num_tokens: int
    """Tokens sampled since it started."""


class QueueSeen(Event):
    """State of the pipe, polled every few seconds; emitted when it changes."""

    num_open: int
    """Issued groups that are neither trained nor dropped."""
    num_finished: int
    """Open groups that wait to be trained."""


class RolloutsWritten(Event):
    """The groups of a step are written; see `rlsys.replay.rollout_parquet.read_records`."""

    step: int
    path: str


class FileSkipped(Event):
    """A file that the run does not need, such as the rollouts of a step, could not be written; the run goes on."""

    path: str
    problem: str


class FileStalled(Event):
    """A file of events or metrics could not be written for `seconds`, and is again complete, but for `num_lost` lines.

    Those found no room in memory while earlier ones waited.
    """

    path: str
    problem: str
    seconds: float
    num_lost: int


class EndpointFailed(Event):
    """A server reached by URL does not answer: groups that need it wait until it does."""

    endpoint: str
    detail: str


class EndpointRecovered(Event):
    """A server answers again."""

    endpoint: str
    seconds: float
    """From its first failure."""
    num_waited: int
    """Pieces of work that waited for it at the end."""


class FileReplaced(Event):
    """A file of events or metrics was moved or removed, and another of its name begins."""

    path: str


class EventLost(Event):
    """A sink could not process an event, and got this one in its place."""

    lost: str
    """Kind of that event."""
    problem: str


class AlertRaised(Event):
    """A problem of the run with its remedy; see `rlsys.monitoring.alerts`."""

    alert: str
    """Name of the alert, e.g. `entropy_collapse`."""
    step: int
    value: float
    threshold: float
    sentence: str


class RunEnded(Event):
    """The last event of a run. `reason`: `finished`, `interrupted` or `failed`; `detail` is the error's text."""

    step: int
    reason: str
    detail: str = ""


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
"""Activities of `WorkerBusy`: name -> meaning."""


class Sink(Protocol):
    """Reader of events. One that raises gets an `EventLost` in place of the event, and then the next event."""

    def handle(self, event: Event, time_s: float) -> None:
        """Process one event, emitted at `time_s` (Unix seconds). Called in order; must return quickly."""

    def close(self) -> None:
        """Close the sink: no event follows."""


class Events:
    """Event bus: stamps each event with the time and passes it to every sink, in order.

    Texts may come from outside, such as the error of a reward function: they are made encodable here, for all sinks.
    A sink that raises is reported once on stderr and gets the next event, because observers must never stop training.
    """

    def __init__(self, sinks: Iterable[Sink] = (), clock: Callable[[], float] = time.time) -> None:
        self._sinks, self._clock = list(sinks), clock
        self._reported: list[Sink] = []

    def attach(self, sink: Sink) -> None:
        """Pass every event from now on to `sink`."""
        self._sinks.append(sink)

    def now(self) -> float:
        """Current time on the clock that stamps events."""
        return self._clock()

    def emit(self, event: Event) -> None:
        """Pass an event to every sink."""
        event, time_s = _encodable(event), self._clock()
        for sink in tuple(self._sinks):
            if problem := self._call_sink(sink, lambda sink=sink: sink.handle(event, time_s)):
                lost = EventLost(event.kind, problem)
                self._call_sink(sink, lambda sink=sink, lost=lost: sink.handle(lost, time_s))

    def close(self) -> None:
        """Close every sink; idempotent."""
        for sink in tuple(self._sinks):
            self._call_sink(sink, sink.close)
        self._sinks.clear()

    def _call_sink(self, sink: Sink, call: Callable[[], None]) -> str:
        """Call a sink. Returns its error, empty if there is none; the first one of each sink goes to stderr."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  (the boundary between training and observers)
            if sink not in self._reported:
                self._reported.append(sink)
                print_note(f"rlsys: {type(sink).__name__} failed, and goes on: {error!r}")
            return encodable(repr(error))
        return ""


def _encodable(event: Event) -> Event:
    changed = {name: text for name, value in vars(event).items() if (text := _encodable_value(value)) != value}
    return replace(event, **changed) if changed else event


def _encodable_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {encodable(str(name)): number for name, number in value.items()}
    return encodable(value) if isinstance(value, str) else value


SHORTEST_S = 0.001
"""Shorter work is not emitted: it would be invisible on a timeline."""


MOST_REASON, MOST_REASONS = 2000, 20


def emit_busy(events: Events, activity: str, spans: Iterable[Busy], answered_s: float) -> None:
    """Emit when one worker did `activity`, one of `rlsys.monitoring.events.ACTIVITIES`.

    `answered_s` is the time of the answer on the worker's clock; its offset from the driver's clock corrects all times.
    """
    ahead_s = events.now() - answered_s
    for busy in spans:
        if busy.end_s - busy.start_s >= SHORTEST_S:
            events.emit(WorkerBusy(busy.worker, activity, busy.start_s + ahead_s, busy.end_s + ahead_s))


def group_rolled_out(group: Group) -> GroupRolledOut:
    """Event of a group whose episodes were rolled out, with the report of the replica."""
    report = group.report
    assert report is not None, f"group {group.group_id} has no report"
    return GroupRolledOut(
        group_id=group.group_id,
        task_id=group.task_id,
        worker=group.replica,
        oldest=group.oldest_version,
        newest=group.versions[-1].version if group.versions else group.permit_version,
        lengths=tuple(
            sum(s.num_trained for t in episode.trajectories for s in t.samples) for episode in group.episodes
        ),
        num_truncated=sum(
            any(t.outcome.kind is OutcomeKind.TRUNCATED for t in episode.trajectories) for episode in group.episodes
        ),
        seconds=report.busy.end_s - report.busy.start_s,
        waited_s=report.waited_s,
    )


def group_scored(group: Group, busy: Busy | None = None) -> GroupScored:
    """Event of a group whose episodes were scored. `busy`: of the reward worker; None if none was needed."""
    roots = [episode.trajectories[0] for episode in group.episodes]
    rewards = tuple(None if root.outcome.is_failed else root.reward for root in roots)
    worker, seconds = (busy.worker, busy.end_s - busy.start_s) if busy else ("", 0.0)
    return GroupScored(group.group_id, group.task_id, rewards, failures_in([group]), worker, seconds)


def failures_in(groups: Iterable[Group]) -> Mapping[str, int]:
    """Return the reasons for which episodes failed, such as the traceback of a reward function, cut to
    `MOST_REASON` characters, and the number of episodes of each; at most `MOST_REASONS`, the most frequent first."""
    roots = (episode.trajectories[0] for group in groups for episode in group.episodes if episode.is_failed)
    return dict(Counter(root.outcome.reason[:MOST_REASON] for root in roots).most_common(MOST_REASONS))
