"""Data types that cross the boundaries between driver, workers and plug-ins.

Two families:

* *payload*: `Turn`, `Trajectory`, `Episode`. Token ids and logprobs; created by a rollout, read by rewards and by the
  actor's ranks. The driver has no payload, only an opaque reference to it.
* *metadata*: `SampleMeta`, `TrajectoryMeta`, `EpisodeMeta`, `Group`, `EngineStats`. Lengths, rewards, outcomes,
  versions, loads; a few hundred bytes that suffice for all decisions of the driver.

All types are immutable and picklable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import isclose, isfinite
from typing import Literal, NamedTuple, NotRequired, TypeAlias, TypedDict

from rlsys.errors import EndpointDown
from rlsys.number_arrays import FloatArray, IntArray
from rlsys.util.printing import encodable

Json: TypeAlias = "str | int | float | bool | None | list[Json] | dict[str, Json]"

POLICY = "policy"
"""Name of the policy in a run with a single policy."""

PolicyVersion: TypeAlias = int
"""Optimizer steps behind a set of weights. Only grows; starts at the resumed value."""

Ref: TypeAlias = object
"""An opaque reference to a payload (a Ray object reference; in tests, the payload itself)."""


class Message(TypedDict):
    """One chat message in the OpenAI form, e.g. `{"role": "user", "content": "Sort 312"}`."""

    role: str
    content: str
    tool_calls: NotRequired[list[Json]]
    """Of an assistant message from another source; a policy's completion here stays text, in `content`."""
    tool_call_id: NotRequired[str]
    """Of a message of role `tool`: id of the answered call."""
    name: NotRequired[str]


Prompt: TypeAlias = "str | tuple[Message, ...]"
"""Messages, rendered with the model's chat template, or text: a user's message where the model has a template, and
tokenized unchanged otherwise."""


Answers: TypeAlias = Literal["sampled", "recorded"]
"""Origin of the tokens that are trained: sampled by the policy, or read from the data."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Input of a chat template besides the messages."""

    tools: tuple[Mapping[str, Json], ...] = ()
    """Schemas of the tools on offer, in the OpenAI form."""
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)
    """Variables of the template, e.g. `{"enable_thinking": False}`."""
    system: str | None = None
    """System message of a conversation that does not begin with one; empty: none; None: that of the configuration."""


NO_OPTIONS = ChatOptions()


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row to solve, with the data that scores it."""

    id: str
    """Stable name of the row: its own `id` column, or a hash of its content."""
    prompt: Prompt
    answer: str | None = None
    tools: tuple[Mapping[str, Json], ...] = ()
    """Schemas of tools that `single_turn` offers: the reply's calls are for the reward to judge, nothing runs them."""
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)
    """Variables of the chat template in all conversations about this task."""
    system: str | None = None
    """System message of conversations about this task that do not begin with one; None: that of the configuration."""
    source: str = ""
    """Name of the source of data, if there are several; of an evaluation's task, the name of its data set."""
    info: Mapping[str, Json] = field(default_factory=dict)
    """Every other column of the row; reward functions pick from it by name."""

    def chat_options(self, tools: tuple[Mapping[str, Json], ...]) -> ChatOptions:
        """Options of conversations about this task in which an agent is offered these tools."""
        return ChatOptions(tools, self.template_kwargs, self.system)


class GroupKey(NamedTuple):
    """Group id and attempt: the one identity of a group from permit to gradient."""

    group_id: int
    """Number of the group in the run, 0, 1, 2, ...: its order in the queue and the root of its sampling seeds."""
    attempt: int
    """Counted from 1 over all attempts of this session; 0 for a group finished in an earlier session."""


@dataclass(frozen=True)
class Assignment:
    """One Task handed out for rollout, on a Permit."""

    key: GroupKey
    task: Task
    size: int
    """Episodes to roll out."""
    version: PolicyVersion
    """Policy version of the permit: no token may be sampled from older weights."""
    seed: int
    """Sampling seed of the group; the same seed and weights give the same tokens on any replica."""
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """In a run of several policies: the value of `version` for each trained policy, by name."""
    token_limit: int | None = None
    """Most tokens that an episode may sample, over all its agents; None: that of the workflow."""

    @property
    def group_id(self) -> int:
        """Number of the group in the run."""
        return self.key.group_id

    def version_of(self, policy: str) -> PolicyVersion:
        """Return the minimum version of the tokens of this policy."""
        return self.versions.get(policy, self.version)


@dataclass(frozen=True)
class Distribution:
    """Distribution over the next token, given logits. Logprobs are those of this distribution, not of the raw logits.

    See `workers.model.token_distribution` for its computation.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """True if some tokens have probability 0."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Sampling(Distribution):
    """Sampling parameters of a request."""

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Texts that end a completion, and belong to it."""


@dataclass(frozen=True)
class VersionSpan:
    """A run of consecutive tokens sampled from one policy version."""

    version: PolicyVersion
    num_tokens: int


class OutcomeKind(StrEnum):
    """Kind of end of a trajectory."""

    OK = "ok"
    TRUNCATED = "truncated"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """End of a trajectory. A failure is never a reward of 0: it is left out of the group's statistics."""

    kind: OutcomeKind
    reason: str = ""

    @property
    def is_failed(self) -> bool:
        return self.kind is OutcomeKind.FAILED


OK = Outcome(OutcomeKind.OK)
TRUNCATED = Outcome(OutcomeKind.TRUNCATED)


def failed(reason: str) -> Outcome:
    """Return the outcome of a trajectory that is left out of training for this reason. It is never a reward of 0."""
    return Outcome(OutcomeKind.FAILED, encodable(reason))


# ------------------------------------------------------------------------------------------------------------ payload


@dataclass(frozen=True)
class Turn:
    """One policy call: prompt ids in; output ids with a logprob and a policy version per token out.

    Ids and logprobs are kept as an `IntArray` and a `FloatArray`, whatever sequence they are given as.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural log of the probability of each output token under the distribution it was sampled from."""
    versions: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"]
    text: str
    """`output_ids` decoded, without the token that ended it."""
    sampling: Sampling = Sampling()
    """Sampling parameters of the tokens, which define the distribution of `logprobs`."""
    routing: tuple[bytes, ...] = ()
    """Experts that the engine chose, one entry per output token: at the positions that it computed for this token,
    which are the last ones of the prompt for the first, and that of the token before for others. A position has as many
    bytes as all others, see `workers.model.routers`. Empty if not recorded."""
    template_opening: str = ""
    """`<think>` or the like, if the chat template begins the reply with it: it is in `prompt_ids`, not in `text`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", IntArray(self.prompt_ids))
        object.__setattr__(self, "output_ids", IntArray(self.output_ids))
        object.__setattr__(self, "logprobs", FloatArray(self.logprobs))


@dataclass(frozen=True)
class Trajectory:
    """Ordered turns of one agent."""

    agent: str
    turns: tuple[Turn, ...]
    outcome: Outcome = OK
    reward: float | None = None
    """Reward from the workflow; None leaves it to the reward worker."""
    parent: int | None = None
    """Index of the trajectory that spawned this one; None for the root."""
    policy: str = POLICY
    """Name of the policy that sampled the turns."""
    is_judged: bool = False
    """True if the reward functions judge its last turn, as they judge that of a root."""


SpanKind: TypeAlias = Literal["turn", "tool", "environment"]


@dataclass(frozen=True, slots=True)
class EpisodeSpan:
    """Time that a part of an episode took."""

    kind: SpanKind
    name: str
    """Name of the tool, or `reset`, `step` or `close` of an environment; empty for a turn."""
    trajectory: int
    """Index of the trajectory that it belongs to. Its spans of kind `turn` are those of its turns, in order."""
    start_s: float
    """Seconds from the start of the episode."""
    seconds: float


@dataclass(frozen=True)
class Episode:
    """All trajectories of one session: a tree with the lead at index 0."""

    trajectories: tuple[Trajectory, ...]
    num_tool_calls: int = 0
    """Tool calls of all its agents."""
    num_sequential: int = 0
    """Sampled tokens on the longest chain of dependent tokens: it determines the duration if parallel agents have
    enough engines."""
    proposals: tuple[Mapping[str, Json], ...] = ()
    """Tasks that it proposes for the run, as rows of data."""
    weight: float = 1.0
    """Weight among the episodes of its group: more than 1 if it also stands for some that were ended early."""
    began_s: float = field(default=0.0, compare=False)
    """Start of the session, Unix seconds on the clock of its worker; 0 if not recorded."""
    spans: tuple[EpisodeSpan, ...] = field(default=(), compare=False)
    """Times of its turns, tool calls and environments, by start; empty if not recorded. They are for people:
    episodes with equal tokens are equal."""

    @property
    def seconds(self) -> float | None:
        """Seconds from its start to the end of its last span; None if not recorded."""
        return max((span.start_s + span.seconds for span in self.spans), default=None)


# ----------------------------------------------------------------------------------------------------------- metadata


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of the load of a replica's engine, for schedulers."""

    num_running: int
    num_waiting: int
    """Requests received and not started."""
    kv_used: float
    """Share of cache slots in use, 0 to 1."""
    num_tokens: int
    """Tokens sampled since start."""
    num_cached_tokens: int = 0
    """Prompt tokens since start with keys and values from a prefix cache."""
    step_age_s: float = 0.0
    """Seconds since the running step began; 0 between steps."""


@dataclass(frozen=True)
class Busy:
    """Busy interval of one worker, in seconds of its machine's monotonic clock, comparable only for the same worker."""

    worker: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Pull(Busy):
    """Change of a replica's weights, from the pull to the open gate."""

    version: PolicyVersion
    policy: str = POLICY
    """Policy whose weights they are: a replica may have those of several."""


@dataclass(frozen=True)
class RolloutReport:
    """Report of a replica on the rollout of one group."""

    busy: Busy
    """The rollout, from its start to its end."""
    stats: EngineStats | None = None
    """Statistics of the replica's engine at the end; None if it reports none."""
    waited_s: float = 0.0
    """Seconds from the assignment's arrival at the replica to its start: waiting for weights and for loading them."""
    pulls: tuple[Pull, ...] = ()
    """Weight changes of the replica that it has not reported before, on the clock of `busy`."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica, as input of the repack planner."""

    replica: str
    version: PolicyVersion
    """Version from which its trajectories are sampled."""
    stats: EngineStats
    is_loading: bool = False
    """True while it loads weights; it is then neither source nor destination of moves."""
    num_groups: int = 0
    """Groups that hold its weights, also those that wait for their tools."""
    weight: int = 0
    """Total weight of its requests, see `rlsys.routing.request_router.request_weight`."""
    num_slots: int = 0
    """Requests that its engine runs at a time; 0 if unknown."""
    tokens_per_s: float = 0.0
    """Measured speed of one of its running requests; 0 if unknown."""

    @property
    def num_present(self) -> int:
        """Requests of the engine, or groups if those are more."""
        return max(self.stats.num_running, self.num_groups)


@dataclass(frozen=True)
class SampleMeta:
    """Lengths of one sample: a prompt that is not trained, then a completion that is trained in part."""

    num_prompt: int
    num_completion: int
    num_trained: int
    prompt_key: int
    """Equal for samples whose prompt ids are equal."""
    order: int = 0
    """Place of the sample in its group by its tokens."""
    num_shared: int = 0
    """Leading tokens that it has in common with the sample before it in that order."""


@dataclass(frozen=True)
class TrajectoryMeta:
    """Metadata of a Trajectory."""

    agent: str
    parent: int | None
    outcome: Outcome
    reward: float | None
    samples: tuple[SampleMeta, ...]
    parts: Mapping[str, float] = field(default_factory=dict)
    """`Score.parts` of its score; empty where the workflow gave the reward."""
    policy: str = POLICY
    """Name of the policy that sampled it."""
    num_turns: int = 0
    """Its turns, also those without output."""

    @property
    def num_trained(self) -> int:
        """Tokens that carry gradient."""
        return self._num_trained

    @cached_property
    def _num_trained(self) -> int:
        return sum(sample.num_trained for sample in self.samples)


Origin: TypeAlias = Literal["own", "stored"]
"""Where the tokens of an episode come from: sampled for its group, or for an earlier group of the task."""


@dataclass(frozen=True)
class EpisodeMeta:
    """Metadata of an Episode."""

    trajectories: tuple[TrajectoryMeta, ...]
    num_tool_calls: int = 0
    num_sequential: int = 0
    proposals: tuple[Mapping[str, Json], ...] = ()
    weight: float = 1.0
    origin: Origin = "own"
    tools_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds that its agents waited, by tool; `environment`: for environments. Calls side by side count each."""

    @cached_property
    def is_failed(self) -> bool:
        """True if its root failed. A failed subagent is left out alone, and the rest of the episode is used."""
        return self.trajectories[0].outcome.is_failed

    def without_order(self) -> EpisodeMeta:
        """Return the same episode without order among the samples of its group: only equal prompts are then shared."""
        return replace(
            self,
            trajectories=tuple(
                replace(t, samples=tuple(replace(s, order=0, num_shared=0) for s in t.samples))
                for t in self.trajectories
            ),
        )


@dataclass(frozen=True)
class Acknowledged:
    """Acknowledgement of a replica that it sampled from exactly these weights."""

    replica: str
    version: PolicyVersion
    hash: str
    difference: float | None = None
    """Mean |difference| to the trainer's logprobs on the same tokens, right after loading, in nats; None without a
    probe."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Episodes of one task that are compared with each other: metadata and a reference to the payload.

    The unit that is queued, dropped or trained.
    """

    key: GroupKey
    task_id: str
    permit_version: PolicyVersion
    replica: str
    episodes: tuple[EpisodeMeta, ...]
    versions: tuple[VersionSpan, ...]
    """Trained tokens by policy version, oldest first; of its own episodes."""
    weights: tuple[Acknowledged, ...]
    """The replica's acknowledgement of every version in `versions`."""
    payload: Ref
    """Reference to `tuple[Episode, ...]`."""
    columns: Mapping[str, Ref] = field(default_factory=dict)
    """Column name -> reference to the extra per-token column (one array of fp32 per sample, in sample order)."""
    policy: str = POLICY
    """Name of the policy trained on this group; `versions` and `weights` are of this policy only."""
    source: str = ""
    """Source of data of its task, if there are several."""
    settled_reward: float | None = None
    """Reward of all episodes that had ended when others were ended early; None if none were."""
    num_ended_early: int = 0
    """Episodes that were ended early; they are not among `episodes`."""
    scores: tuple[Score, ...] | None = None
    """Scores that the replica gave, one per episode, with `reward.workers: 0`; None: not scored yet, or scored."""
    report: RolloutReport | None = field(default=None, compare=False)
    """Set on the first view of a rollout; files do not contain it."""

    @property
    def group_id(self) -> int:
        """Number of the group in the run."""
        return self.key.group_id

    @property
    def oldest_version(self) -> PolicyVersion:
        """Oldest version of any trained token that was sampled for this group; the permit's version if there is
        none."""
        return self.versions[0].version if self.versions else self.permit_version

    @property
    def num_trained(self) -> int:
        """Tokens that carry gradient, over all episodes."""
        return sum(trajectory.num_trained for _, trajectory in self.trajectories())

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples of its policy, prompts included, over all episodes: the cost of one pass over the
        group."""
        own = (t for e in self.episodes for t in e.trajectories if t.policy == self.policy)
        samples = (s for t in own for s in t.samples)
        return sum(s.num_prompt + s.num_completion for s in samples)

    def trajectories(self) -> Sequence[tuple[tuple[int, int], TrajectoryMeta]]:
        """Return the trajectories of this group's policy with their (episode, trajectory) index. Failed trajectories,
        and those of failed episodes, are left out."""
        return self._own

    def everyone(self) -> Sequence[tuple[tuple[int, int], TrajectoryMeta]]:
        """Return the same for all policies: an agent may be compared with another policy's, which may be its root."""
        return self._everyone

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is computed."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @cached_property
    def _own(self) -> Sequence[tuple[tuple[int, int], TrajectoryMeta]]:
        return tuple(found for found in self._everyone if found[1].policy == self.policy)

    @cached_property
    def _everyone(self) -> Sequence[tuple[tuple[int, int], TrajectoryMeta]]:
        return tuple(
            ((e, t), trajectory)
            for e, episode in enumerate(self.episodes)
            if not episode.is_failed
            for t, trajectory in enumerate(episode.trajectories)
            if not trajectory.outcome.is_failed
        )

    def rewards(self) -> dict[int, float]:
        """Return the rewards of the scored episodes, which are those of their roots, by episode index."""
        roots = {e: episode.trajectories[0] for e, episode in enumerate(self.episodes) if not episode.is_failed}
        return {e: root.reward for e, root in roots.items() if root.reward is not None}

    def with_scores(self, scores: tuple[Score, ...]) -> Group:
        """Return this group with one score per episode in its root trajectory; failed episodes are marked."""
        if len(scores) != len(self.episodes):
            raise ValueError(f"group {self.group_id}: {len(scores)} scores for {len(self.episodes)} episodes")
        scored = tuple(_with_score(e, s) for e, s in zip(self.episodes, scores, strict=True))
        return replace(self, episodes=scored, scores=None)


@dataclass(frozen=True)
class Score:
    """Score of one episode: a finite value, or None and the reason."""

    value: float | None
    failure: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Components of the value, e.g. `{"exact": 1.0, "format": 0.5}`: the unweighted value of each reward function that
    applied, and other numbers a function returned, e.g. `{"compute_score/acc": 1.0}`."""
    others: Mapping[int, Score] = field(default_factory=dict)
    """Scores of other trajectories of the episode that are judged, by index, see `Trajectory.is_judged`."""
    down: EndpointDown | None = None
    """Error of a server that did not answer, if that is the failure."""


def is_success(reward: float, least: float) -> bool:
    """True for a reward of `least` or more, but for rounding: 0.7 + 0.2 + 0.1 is less than 1."""
    return reward >= least or isclose(reward, least, rel_tol=1e-9, abs_tol=1e-9)


def _with_score(episode: EpisodeMeta, score: Score) -> EpisodeMeta:
    scores = {0: score, **score.others}
    judged = (_with_trajectory_score(t, scores[i]) if i in scores else t for i, t in enumerate(episode.trajectories))
    return replace(episode, trajectories=tuple(map(_finite, judged)))


def _with_trajectory_score(trajectory: TrajectoryMeta, score: Score) -> TrajectoryMeta:
    if score.value is None:
        return replace(trajectory, outcome=failed(score.failure))
    return replace(trajectory, reward=score.value, parts=score.parts)


def _finite(trajectory: TrajectoryMeta) -> TrajectoryMeta:
    """Return the trajectory, marked as failed if its reward is NaN or infinite."""
    if trajectory.reward is None or isfinite(trajectory.reward):
        return trajectory
    return replace(trajectory, reward=None, outcome=failed(f"its reward is {trajectory.reward}"))
