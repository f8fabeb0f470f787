"""What the dashboard's server answers, one class per address: the contract between `readings` and the pages.

Every answer is JSON of the fields below, under their own names. Times are Unix seconds, durations seconds. A number
that is not finite is null. `run` is always the id of a run, see `RunSummary.id`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlsys.monitoring.alerts import Alert
from rlsys.types import Json

Status = Literal["starting", "running", "silent", "finished", "interrupted", "failed"]
"""`silent`: it wrote nothing for long, and never said that it ended: killed, or stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of the list of runs."""

    id: str
    """Its folder relative to the one that is served, with `/`; `.` if that is the run itself."""
    name: str
    status: Status
    model: str
    algorithm: str
    step: int
    total_steps: int | None
    started_s: float | None
    updated_s: float | None
    """When it last wrote anything."""
    step_s: float | None
    """Median seconds of its last 20 steps."""
    eta_s: float | None
    """Seconds left; only of a run that is running."""
    reward: float | None
    """Mean reward of its last step."""
    last_error: str | None
    """What it failed with, or the last failure of a worker."""
    num_alerts: int
    """That are open."""


@dataclass(frozen=True, slots=True)
class RunsAnswer:
    """`/api/runs`"""

    folder: str
    runs: Sequence[RunSummary]
    """Newest first."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """Something that happened, in words."""

    time_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswer:
    """`/api/run?run=`"""

    summary: RunSummary
    folder: str
    config: str
    """`config.resolved.yaml`; empty if it has none."""
    phases: Mapping[str, float]
    """Of start-up: name -> seconds."""
    engines: Mapping[str, str]
    """Worker -> engine and why."""
    num_corrupt: int
    """Lines of its files that could not be read, and were skipped."""
    num_unknown: int
    """Events of a kind that this version does not know."""
    has_groups: bool
    """Do its events tell of groups? Those of older versions do not."""
    has_spans: bool
    """Do they tell when workers were busy?"""
    steps_written: tuple[int, int] | None
    """First and last step whose rollouts can be read."""
    policies: Sequence[RunSummary]
    """In a run of several policies, theirs: each is a run of its own. Empty for one policy."""


@dataclass(frozen=True, slots=True)
class LogAnswer:
    """`/api/log?run=&before=&limit=`: newest first; `before` is an index from an earlier answer, for paging."""

    lines: Sequence[LogLine]
    next_before: int | None


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over steps, thinned out to what a chart can show: extremes are kept."""

    name: str
    unit: str
    help: str
    steps: Sequence[int]
    values: Sequence[float | None]
    num_points: int
    """Before thinning."""


@dataclass(frozen=True, slots=True)
class SeriesAnswer:
    """`/api/series?run=&name=&name=&points=`: one for each name that the run has reported, in the order asked for.

    A name may end in `*`, as `eval/*` or `reward/by/*`: all that begin so.
    """

    series: Sequence[Series]


@dataclass(frozen=True, slots=True)
class MetricName:
    """A metric, and what it last was."""

    name: str
    unit: str
    help: str
    last: float | None


@dataclass(frozen=True, slots=True)
class MetricsAnswer:
    """`/api/metrics?run=`: every metric that it has reported."""

    metrics: Sequence[MetricName]


@dataclass(frozen=True, slots=True)
class AlertRule:
    """What alerts are raised by."""

    alert: str
    threshold: float | None
    """None: turned off."""
    unit: str
    meaning: str
    """When it is raised, and what to do then."""


@dataclass(frozen=True, slots=True)
class AlertsAnswer:
    """`/api/alerts?run=`: open ones first, then newest first; and every rule."""

    alerts: Sequence[Alert]
    rules: Sequence[AlertRule]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One trained group in the list of a step."""

    group_id: int
    task_id: str
    replica: str
    num_episodes: int
    num_failed: int
    num_truncated: int | None
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    is_zero_std: bool
    """All rewards are equal: it teaches nothing to who compares."""
    length_mean: float | None
    """Tokens sampled in an episode."""
    staleness: int | None
    """Versions between its oldest token and the weights it trained."""
    has_rollouts: bool
    """Can it be looked at? Rollouts are written every so many steps, see `record.rollouts_every`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsAnswer:
    """`/api/groups?run=&step=&page=&show=&q=`: groups trained by a step; without `step`, by the newest there is.

    `show` is `all`, `zero_std`, `failed` or `truncated`; `q` is part of a task's id. `page` counts from 0, 50 a page.
    """

    step: int | None
    """None: no step has trained a group that was told of or written."""
    previous_step: int | None
    next_step: int | None
    first_step: int | None
    last_step: int | None
    groups: Sequence[GroupRow]
    num_groups: int
    """On all pages."""
    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode beside the others of its group."""

    episode: int
    reward: float | None
    advantage: float | None
    """Of its root; None: not trained, or one per token."""
    outcome: Literal["ok", "truncated", "failed"]
    reason: str
    parts: Mapping[str, float]
    """What its reward is made of."""
    num_tokens: int
    num_turns: int
    agents: Sequence[str]
    """Names of its agents, the root first."""
    num_tool_calls: int
    versions: tuple[int, int] | None
    """Oldest and newest of its tokens."""
    text: str
    """What its root said last, at most 2,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """`/api/group?run=&step=&group_id=`: the episodes of one task side by side."""

    step: int
    group_id: int
    previous_group_id: int | None
    next_group_id: int | None
    """Of the step's groups."""
    task_id: str
    prompt: Sequence[Mapping[str, Json]]
    """Messages; a plain prompt is one of role `prompt`."""
    answer: str | None
    info: Mapping[str, Json]
    replica: str
    is_zero_std: bool
    episodes: Sequence[EpisodeRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """One turn. Columns have an entry per token of `pieces`; one that is empty was not recorded."""

    said: str
    """What was new in its prompt, decoded with special tokens; empty if that was not recorded."""
    text: str
    """What it answered."""
    pieces: Sequence[str]
    """`text` by token; where text was not recorded by token, one piece that is all of it."""
    logprobs: Sequence[float | None]
    """As sampled."""
    ratios: Sequence[float | None]
    """Probability under the trainer over that under the sampler."""
    entropies: Sequence[float | None]
    """Nats."""
    advantages: Sequence[float | None]
    """Null: not trained."""
    masks: Sequence[Literal["trained", "left_out", "context"]]
    """`left_out`: its trajectory has no advantage, or a correction masked it."""
    versions: Sequence[int]
    finish: str
    tool_calls: Sequence[Mapping[str, Json]]
    """Calls found in `text`: `name`, `arguments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryAnswer:
    """What one agent said."""

    index: int
    agent: str
    policy: str
    parent: int | None
    """Index of the agent that called it; None for the root."""
    reward: float | None
    advantage: float | None
    """Of all its tokens; None: not trained, or one per token."""
    outcome: Literal["ok", "truncated", "failed"]
    reason: str
    turns: Sequence[TurnAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeAnswer:
    """`/api/episode?run=&step=&group_id=&episode=`"""

    step: int
    group_id: int
    episode: int
    num_episodes: int
    task_id: str
    prompt: Sequence[Mapping[str, Json]]
    answer: str | None
    parts: Mapping[str, float]
    reward: float | None
    trajectories: Sequence[TrajectoryAnswer]
    """The root first."""
    replay: str
    """The command that computes its step again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPoint:
    """One time that a task was rolled out."""

    group_id: int
    step: int | None
    """That trained it; None: none did."""
    fate: Literal["trained", "pending", "dropped"]
    reason: str
    """It was dropped for."""
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    num_episodes: int
    length_mean: float | None
    has_rollouts: bool
    """Can the group be looked at?"""


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """`/api/task?run=&task=`: one task over time, oldest first."""

    task_id: str
    points: Sequence[TaskPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A task in the list of tasks."""

    task_id: str
    num_groups: int
    first_reward: float | None
    last_reward: float | None
    last_step: int | None


@dataclass(frozen=True, slots=True)
class TasksAnswer:
    """`/api/tasks?run=&q=&page=`: tasks by id, 50 a page; `q` is part of the id."""

    tasks: Sequence[TaskRow]
    num_tasks: int
    page: int


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A worker was at work."""

    activity: str
    """One of `rlsys.monitoring.events.ACTIVITIES`."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one worker did in the time shown. Where spans lie closer than a pixel they are merged."""

    worker: str
    kind: str
    """`actor`, `critic`, `rollout`, `reward`, `reference`, `eval`, `relay`."""
    spans: Sequence[LaneSpan]
    busy_share: float
    """Of the time shown."""
    by_activity: Mapping[str, float]
    """Activity -> share of the time shown; `idle` is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """What one rollout replica holds."""

    worker: str
    version: int | None
    behind: int | None
    """Versions between what it held when it last answered and the newest published then."""
    is_stale: bool
    """Further behind than the run allows, or than it can be by working properly; or it does not answer."""
    answers: bool
    """False: it has not for 30 seconds in which others have."""
    is_loading: bool
    num_running: int
    num_waiting: int
    kv_used: float
    tokens_per_s: float | None
    seen_s: float
    """When it last answered."""
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRow:
    """A worker failed."""

    worker: str
    phase: str
    detail: str
    failed_s: float
    back_s: float | None
    """When it was replaced; None: not yet, or never."""


@dataclass(frozen=True, slots=True)
class QueuePoint:
    """What was in the pipe at one moment."""

    time_s: float
    num_open: int
    num_finished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Who waits for whom, over the last 20 steps."""

    who: str
    """`rollout`, `reward`, `annotate`, `trainer`, `weights`, `evaluation` or `balanced`."""
    sentence: str
    """In words, with the shares it follows from, and what to do."""
    shares: Mapping[str, float]
    """Of the time of a step: `rollout`, `reward`, `annotate` (their busiest worker); `train`, `fetch`, `columns`,
    `publish`, `record`, `checkpoint` (what the trainer does); `trainer waits`, `rollouts wait`, `wait for weights`,
    `wait for evaluation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
    """`/api/cluster?run=&from=&to=&width=`: without `from` and `to`, the last 10 minutes. `width`: pixels."""

    begin_s: float | None
    """Of all the run."""
    end_s: float | None
    from_s: float | None
    to_s: float | None
    newest_version: int | None
    staleness_bound: int | None
    lanes: Sequence[Lane]
    replicas: Sequence[ReplicaRow]
    restarts: Sequence[RestartRow]
    """Newest first."""
    queue: Sequence[QueuePoint]
    bottleneck: Bottleneck | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRow:
    """A group that is neither trained nor dropped."""

    group_id: int
    task_id: str
    state: Literal["waits for a replica", "is rolled out", "waits for its reward", "waits to be trained", "is lost"]
    where: str
    """The worker that has it; empty if none has."""
    age_s: float
    """Since it was first issued."""
    state_s: float
    """In this state."""
    num_attempts: int
    last_reason: str
    """Why it was issued again, the last time."""
    is_overdue: bool
    """Far longer than others take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer:
    """`/api/ledger?run=`: what is pending, where, for how long. Oldest first."""

    pending: Sequence[PendingRow]
    num_issued: int
    num_trained: int
    dropped: Mapping[str, int]
    """Reason -> groups."""
    num_reissued: int
    typical_s: float | None
    """Median seconds from issue to judgement of the groups that came through."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key of the configuration in which runs differ; null where a run has no such key."""

    key: str
    values: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class CompareAnswer:
    """`/api/compare?run=&run=`: what the curves cannot show."""

    runs: Sequence[RunSummary]
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True)
class Change:
    """`/api/stream?run=`: a server-sent event named `change`, whose id is `revision`; sent when a run has written
    something, at most three times a second. Without `run`: when anything in the list of runs changed."""

    revision: int
    step: int
    status: Status


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """With status 400, 401, 403 or 404."""

    error: str
