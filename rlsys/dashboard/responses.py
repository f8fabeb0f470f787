"""Answers of the dashboard's server, one class per address: the contract between `readings` and the pages.

Every answer is JSON with the names of the fields below. Times are Unix seconds, durations seconds. A number that is not
finite is null. `run` is always the id of a run, see `RunSummary.id`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlsys.monitoring.alerts import Alert
from rlsys.types import EpisodeSpan, Json

Status = Literal["starting", "running", "silent", "finished", "interrupted", "failed"]
"""`silent`: no event for long, and no end event; the run was killed, or is stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationScore:
    """Score of the last evaluation on a data set, with what it leaves out."""

    dataset: str
    step: int
    mean: float | None
    mean_ci95: float | None
    """Half width of the 95 % confidence interval; None: a single task."""
    failed_frac: float | None
    """Share of its samples that failed, so that the mean is of the others alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of the list of runs."""

    id: str
    """Its folder relative to the served folder, with `/`; `.` for the served folder itself."""
    name: str
    status: Status
    model: str
    algorithm: str
    step: int
    total_steps: int | None
    started_s: float | None
    updated_s: float | None
    """Time of its last write."""
    step_s: float | None
    """Median seconds of its last 20 steps."""
    eta_s: float | None
    """Estimated seconds left; only for status `running`."""
    reward: float | None
    """Mean reward of its last 20 steps, because that of one step is noisy."""
    rewards: Sequence[float | None]
    """Mean reward over its steps, thinned to about 40 points, for a small chart."""
    evaluations: Sequence[EvaluationScore]
    """Last score on each data set."""
    last_error: str | None
    """Error that ended it, or the last failure of a worker."""
    num_alerts: int
    """Open alerts."""


@dataclass(frozen=True, slots=True)
class RunsAnswer:
    """`/api/runs`"""

    folder: str
    runs: Sequence[RunSummary]
    """Newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswer:
    """`/api/run?run=`"""

    summary: RunSummary
    folder: str
    config: str
    """`config.resolved.yaml`; empty if it does not exist."""
    phases: Mapping[str, float]
    """Start-up phases: name -> seconds."""
    engines: Mapping[str, str]
    """Worker -> engine and reason."""
    num_corrupt: int
    """Unreadable lines of its files, which were skipped."""
    num_unknown: int
    """Events of a kind that this version does not know."""
    has_groups: bool
    """True if its events contain groups; older versions wrote none."""
    has_spans: bool
    """True if its events contain the busy times of workers."""
    steps_written: tuple[int, int] | None
    """First and last step with readable rollouts."""
    policies: Sequence[RunSummary]
    """Summaries of the policies, each of which is also a run; empty for one policy."""


Axis = Literal["step", "time", "tokens", "samples"]
"""Unit in which a chart counts steps: seconds since the run began, or trained tokens or episodes, summed up."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over steps, reduced to the points of a chart, with extremes preserved."""

    name: str
    unit: str
    help: str
    steps: Sequence[int]
    values: Sequence[float | None]
    num_points: int
    """Points of the stretch before the reduction."""
    xs: Sequence[float] | None = None
    """Steps counted as `SeriesAnswer.x` says; None: `x` is `step`."""


@dataclass(frozen=True, slots=True)
class SeriesAnswer:
    """`/api/series?run=&name=&name=&points=&x=&from=&to=`: one series for each requested name that the run reported.

    A name may end in `*`, such as `eval/*` or `reward/by/*`, to match all names with that prefix. With `from` or `to`
    only the points of that stretch of x are answered, so a shorter stretch has a finer resolution.
    """

    series: Sequence[Series]
    x: Axis = "step"
    """Unit of x: the requested one, or `step` if the run does not record what that needs."""


@dataclass(frozen=True, slots=True)
class MetricName:
    """Metric with its last value."""

    name: str
    unit: str
    help: str
    last: float | None


@dataclass(frozen=True, slots=True)
class MetricsAnswer:
    """`/api/metrics?run=`: every metric that the run reported."""

    metrics: Sequence[MetricName]


@dataclass(frozen=True, slots=True)
class AlertRule:
    """Rule of an alert."""

    alert: str
    threshold: float | None
    """None: turned off."""
    unit: str
    meaning: str
    """Condition and remedy."""


@dataclass(frozen=True, slots=True)
class AlertsAnswer:
    """`/api/alerts?run=`: open alerts first, then newest first; and every rule."""

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
    """True if all rewards are equal, so that group-relative advantages are zero."""
    length_mean: float | None
    """Mean tokens sampled in an episode."""
    staleness: int | None
    """Versions between its oldest token and the weights that it trained."""
    has_rollouts: bool
    """True if its rollouts can be shown. They are written every `record.rollouts_every` steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsAnswer:
    """`/api/groups?run=&step=`: groups trained by a step; without `step`, by the newest."""

    step: int | None
    """None: no trained group was reported or written."""
    previous_step: int | None
    next_step: int | None
    first_step: int | None
    last_step: int | None
    groups: Sequence[GroupRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One evaluation of a version."""

    dataset: str
    step: int
    """Optimizer steps behind the evaluated weights."""
    scores: Mapping[str, float | None]
    """Measure -> value, such as `mean`, `pass@4` and `failed_frac`, see `eval/{dataset}/*` in metrics.md."""
    failures: Mapping[str, float]
    """Reason for which samples failed -> number of them."""
    seconds: float | None
    has_samples: bool
    """True if the samples were written: the table `samples` lists them, and `/api/group` and `/api/episode` take their
    `dataset` and `step`."""


@dataclass(frozen=True, slots=True)
class EvaluationsAnswer:
    """`/api/evaluations?run=`: every evaluation, newest first."""

    evaluations: Sequence[EvaluationRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode in the list of its group."""

    episode: int
    reward: float | None
    advantage: float | None
    """Advantage of its root; None: not trained, or one per token."""
    outcome: Literal["ok", "truncated", "failed"]
    reason: str
    parts: Mapping[str, float]
    """Components of its reward."""
    num_tokens: int
    num_turns: int
    seconds: float | None
    """From its start to its end; None if not recorded."""
    agents: Sequence[str]
    """Names of its agents, the root first."""
    num_tool_calls: int
    versions: tuple[int, int] | None
    """Oldest and newest version of its tokens."""
    text: str
    """Last reply of its root, at most 2,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """`/api/group?run=&step=&group_id=&dataset=`: the episodes of one task, of an evaluation if `dataset` is given."""

    step: int
    group_id: int
    previous_group_id: int | None
    next_group_id: int | None
    """Neighbour in the step; None for the last group."""
    task_id: str
    prompt: Sequence[Mapping[str, Json]]
    """Messages; a plain prompt is one message of role `prompt`."""
    answer: str | None
    info: Mapping[str, Json]
    replica: str
    is_zero_std: bool
    episodes: Sequence[EpisodeRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """One turn. Columns have an entry per token of `pieces`; an empty column was not recorded."""

    said: str
    """New part of its prompt, decoded with special tokens; empty if not recorded."""
    text: str
    """Reply of the policy."""
    pieces: Sequence[str]
    """`text` by token; one piece with all of it if tokens were not recorded."""
    logprobs: Sequence[float | None]
    """Logprobs as sampled."""
    ratios: Sequence[float | None]
    """Probability ratio of trainer to sampler."""
    entropies: Sequence[float | None]
    """Entropies in nats."""
    advantages: Sequence[float | None]
    """Null: not trained."""
    masks: Sequence[Literal["trained", "left_out", "context"]]
    """`left_out`: its trajectory has no advantage, or a correction masked it."""
    versions: Sequence[int]
    finish: str
    start_s: float | None
    """Seconds from the start of the episode; None if not recorded."""
    seconds: float | None
    tool_calls: Sequence[Mapping[str, Json]]
    """Calls found in `text`: `name`, `arguments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryAnswer:
    """Turns of one agent."""

    index: int
    agent: str
    policy: str
    parent: int | None
    """Index of the calling agent; None for the root."""
    reward: float | None
    advantage: float | None
    """Advantage of all its tokens; None: not trained, or one per token."""
    outcome: Literal["ok", "truncated", "failed"]
    reason: str
    turns: Sequence[TurnAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeAnswer:
    """`/api/episode?run=&step=&group_id=&episode=&dataset=`, see `GroupAnswer`."""

    step: int
    group_id: int
    episode: int
    num_episodes: int
    task_id: str
    prompt: Sequence[Mapping[str, Json]]
    answer: str | None
    parts: Mapping[str, float]
    reward: float | None
    began_s: float | None
    """Start, on the clock of the replica; None if not recorded."""
    seconds: float | None
    timeline: Sequence[EpisodeSpan]
    """Turns, tool calls and environments by start; empty if not recorded."""
    trajectories: Sequence[TrajectoryAnswer]
    """The root first."""
    replay: str
    """Command that computes its step again; empty if that is not possible, as for an episode of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPoint:
    """One rollout of a task."""

    group_id: int
    step: int | None
    """Step that trained it; None: not trained."""
    fate: Literal["trained", "pending", "dropped"]
    reason: str
    """Reason of the drop."""
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    num_episodes: int
    length_mean: float | None
    has_rollouts: bool
    """True if the rollouts of the group can be shown."""


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """`/api/task?run=&task=`: one task over time, oldest first."""

    task_id: str
    points: Sequence[TaskPoint]


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Time span in which a worker was busy."""

    activity: str
    """One of `rlsys.monitoring.events.ACTIVITIES`."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Activity of one worker in the time window. Spans closer than a pixel are merged."""

    worker: str
    kind: str
    """`actor`, `critic`, `rollout`, `reward`, `reference`, `eval`, `relay`."""
    spans: Sequence[LaneSpan]
    busy_share: float
    """Busy share of the time window."""
    by_activity: Mapping[str, float]
    """Activity -> share of the time window; `idle` is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """State of one rollout replica."""

    worker: str
    version: int | None
    behind: int | None
    """Versions between its weights at its last answer and the newest published then."""
    is_stale: bool
    """True if it is further behind than the run allows for a healthy replica, or does not answer."""
    answers: bool
    """False: no answer for 30 seconds in which others answered."""
    is_loading: bool
    num_running: int
    num_waiting: int
    kv_used: float
    tokens_per_s: float | None
    seen_s: float
    """Time of its last answer."""
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRow:
    """Failure of a worker."""

    worker: str
    phase: str
    detail: str
    failed_s: float
    back_s: float | None
    """Time of its replacement; None: not yet, or never."""


@dataclass(frozen=True, slots=True)
class QueuePoint:
    """State of the pipe at one moment."""

    time_s: float
    num_open: int
    num_finished: int


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """Speed of a replica over some groups."""

    time_s: float
    """End of the last of these groups."""
    tokens_per_s: float
    """Tokens sampled in these groups, per second that each was at the replica."""


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """Speed of one replica over time."""

    worker: str
    points: Sequence[SpeedPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Bottleneck of the run over the last 20 steps."""

    who: str
    """`rollout`, `reward`, `annotate`, `trainer`, `weights`, `evaluation`; `straggler`: one worker is far slower than
    its peers; `order`: ready groups wait for older ones; `environment`: episodes wait for tools or their environment;
    `lockstep`: a synchronous run, whose stages take turns; or `balanced`."""
    worker: str
    """Worker that holds the run up; empty if it is no single one, or not known."""
    sentence: str
    """Bottleneck in words, with its shares and the remedy."""
    shares: Mapping[str, float]
    """Shares of the time of a step: `rollout`, `reward`, `annotate` (their busiest worker); `train`, `fetch`,
    `columns`, `publish`, `record`, `checkpoint` (activities of the trainer); `trainer waits`, `rollouts wait`, `wait
    for weights`, `wait for evaluation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
    """`/api/cluster?run=&from=&to=&width=`: without `from` and `to`, the last 10 minutes. `width`: pixels."""

    begin_s: float | None
    """Time range of the whole run."""
    end_s: float | None
    from_s: float | None
    to_s: float | None
    newest_version: int | None
    staleness_bound: int | None
    lanes: Sequence[Lane]
    speeds: Sequence[WorkerSpeed]
    """Speed of each replica in the time window."""
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
    worker: str
    """Worker that is processing it; empty if there is none."""
    age_s: float
    """Seconds since it was first issued."""
    state_s: float
    """Seconds in its state."""
    num_attempts: int
    last_reason: str
    """Reason of the last reissue."""
    is_overdue: bool
    """True if it takes far longer than other groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """Last sample of a worker; a value that it does not have is null."""

    worker: str
    host: str
    pid: int
    seen_s: float
    cpu: float | None
    """Busy cores."""
    memory: float | None
    """Bytes."""
    gpu: float | None
    """Busy share."""
    gpu_memory: float | None


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """One number over time; null where it is not known."""

    name: str
    unit: str
    help: str
    times_s: Sequence[float]
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class MachineAnswer:
    """`/api/machine?run=&points=`: use of the machines by every worker and node. The names of series are in metrics.md,
    under `machine/` and `node/`."""

    workers: Sequence[MachineRow]
    series: Sequence[TimeSeries]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """Reason for which episodes of training failed."""

    reason: str
    """Text of the exception or of the failed check, cut to 2,000 characters."""
    num_episodes: int
    first_s: float
    last_s: float
    last_group_id: int
    last_task_id: str
    """Group and task of the last such episode."""


@dataclass(frozen=True, slots=True)
class FailuresAnswer:
    """`/api/failures?run=`: why episodes of training failed, the most frequent reason first.

    Those of evaluations are in `/api/evaluations`."""

    failures: Sequence[FailureRow]
    num_failed: int
    num_episodes: int
    """Failed or scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer:
    """`/api/ledger?run=`: pending groups with their workers and ages, oldest first."""

    pending: Sequence[PendingRow]
    num_issued: int
    num_trained: int
    dropped: Mapping[str, int]
    """Reason -> groups."""
    num_reissued: int
    typical_s: float | None
    """Median seconds from issue to score of completed groups."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Configuration key with different values; null where a run lacks the key."""

    key: str
    values: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class CompareAnswer:
    """`/api/compare?run=&run=`: comparison of runs, without their curves."""

    runs: Sequence[RunSummary]
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True)
class Change:
    """`/api/stream?run=`: a server-sent event named `change`, whose id is `revision`, sent after a run has written
    something, at most three times a second. Without `run`: sent after any change in the list of runs."""

    revision: int
    step: int
    status: Status


@dataclass(frozen=True, slots=True)
class TableColumn:
    """Column of a table."""

    name: str
    kind: Literal["int", "float", "text", "bool", "time"]
    """`time`: Unix seconds."""
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAnswer:
    """`/api/table?run=&table=&filter=&search=&order=&show=&group=&from=&to=&offset=&limit=` and `/api/query?run=&q=`:
    rows of a table; see `rlsys.dashboard.index.sql_query`."""

    table: str
    columns: Sequence[TableColumn]
    """Columns to show, in order."""
    rows: Sequence[Mapping[str, Json]]
    """Column -> value, null if it is empty. Rows also have the columns that links need, such as `step`, `group_id` and
    `episode`. Texts are cut to 200 characters around what was looked for."""
    num_rows: int
    """Rows on all pages."""
    offset: int
    indexed: float
    """Share of the run that the index covers; below 1 while it is built."""
    problem: str
    """Reason for which rows that the run wrote last are missing; empty if they are not."""


@dataclass(frozen=True, slots=True)
class TableDescription:
    """Table that can be queried."""

    name: str
    help: str
    columns: Sequence[TableColumn]
    shown: Sequence[str]
    """Columns shown by default."""


@dataclass(frozen=True, slots=True)
class TablesAnswer:
    """`/api/tables?run=`: every table with its columns; without `run`, only the table of runs."""

    tables: Sequence[TableDescription]


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Answer with status 400, 401, 403 or 404."""

    error: str
