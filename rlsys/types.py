"""The nouns of rlsys: what crosses every boundary between driver, workers and plug-ins.

Two families:

* *payload*: `Turn`, `Trajectory`, `Episode`. Token ids and logprobs; made by a rollout, read by rewards and by the
  actor's ranks. The driver never holds one, only an opaque reference to it.
* *metadata*: `SampleMeta`, `TrajectoryMeta`, `EpisodeMeta`, `Group`, `EngineStats`. Lengths, rewards, outcomes,
  versions, loads; a few hundred bytes, all the driver needs to decide who does and who trains what.

Everything here is immutable and picklable. This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import isfinite
from typing import Literal, NotRequired, TypeAlias, TypedDict

Json: TypeAlias = "str | int | float | bool | None | list[Json] | dict[str, Json]"

POLICY = "policy"
"""Name of the policy in a run that has one."""

PolicyVersion: TypeAlias = int
"""Optimizer steps behind a set of weights. Only grows; starts at the resumed value."""

Ref: TypeAlias = object
"""An opaque reference to a payload (a Ray object reference; in tests, the payload itself)."""


class Message(TypedDict):
    """One chat message in the OpenAI form, e.g. `{"role": "user", "content": "Sort 312"}`."""

    role: str
    content: str
    tool_calls: NotRequired[list[Json]]
    """Of an assistant's message that somebody else wrote; what a policy says here stays text, in `content`."""
    tool_call_id: NotRequired[str]
    """Of a message of role `tool`: the call that it answers."""
    name: NotRequired[str]


Prompt: TypeAlias = "str | tuple[Message, ...]"
"""Plain text, fed to the tokenizer as it is, or messages, rendered with the model's chat template."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row to solve and what judges it."""

    id: str
    """Stable name of the row: its own `id` column, or a hash of its content."""
    prompt: Prompt
    answer: str | None = None
    info: Mapping[str, Json] = field(default_factory=dict)
    """Every other column of the row; reward functions pick from it by name."""


@dataclass(frozen=True)
class Assignment:
    """One Task handed out for rollout: what a Permit turns into."""

    group_id: int
    """Number of this group in the run, 0, 1, 2, ...; the queue's order and the root of its sampling seeds."""
    task: Task
    size: int
    """Episodes to roll out."""
    version: PolicyVersion
    """Version the permit was released at: no token may be sampled from older weights."""
    seed: int
    """Sampling seed of the group; same seed and weights, same tokens, whatever replica runs it."""
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """In a run of several policies: of each trained one by name, what `version` is for it."""

    def version_of(self, policy: str) -> PolicyVersion:
        """The version that no token of this policy may be older than."""
        return self.versions.get(policy, self.version)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; logprobs are those of this distribution, not of the raw
    logits."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 256


@dataclass(frozen=True)
class VersionSpan:
    """A run of consecutive tokens sampled from one policy version."""

    version: PolicyVersion
    num_tokens: int


class OutcomeKind(StrEnum):
    """How a trajectory ended."""

    OK = "ok"
    TRUNCATED = "truncated"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """How a trajectory ended. A failure is never a reward of 0: it leaves the group's statistics altogether."""

    kind: OutcomeKind
    reason: str = ""

    @property
    def is_failed(self) -> bool:
        return self.kind is OutcomeKind.FAILED


OK = Outcome(OutcomeKind.OK)
TRUNCATED = Outcome(OutcomeKind.TRUNCATED)


def failed(reason: str) -> Outcome:
    """The outcome of a trajectory that something other than the policy broke."""
    return Outcome(OutcomeKind.FAILED, reason)


# ------------------------------------------------------------------------------------------------------------ payload


@dataclass(frozen=True)
class Turn:
    """One policy call: prompt ids in; output ids with a logprob and a policy version per token out."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log of the probability of each output token under the distribution it was sampled from."""
    versions: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"]
    text: str
    """`output_ids` decoded, special tokens left out."""
    sampling: Sampling = Sampling()
    """How the tokens were drawn: what distribution `logprobs` are of."""


@dataclass(frozen=True)
class Trajectory:
    """The ordered turns of one agent."""

    agent: str
    turns: tuple[Turn, ...]
    outcome: Outcome = OK
    reward: float | None = None
    """What the workflow assigned; None leaves it to the reward worker."""
    parent: int | None = None
    """Index of the trajectory that spawned this one; None for the root."""
    policy: str = POLICY
    """Name of the policy that spoke."""


@dataclass(frozen=True)
class Episode:
    """All trajectories of one session: a tree with the lead at index 0."""

    trajectories: tuple[Trajectory, ...]
    num_tool_calls: int = 0
    """Calls of tools, of all its agents."""
    num_sequential: int = 0
    """Sampled tokens on its longest chain, in which each had to wait for the one before: what its time depends on where
    agents that run side by side have engines enough."""


# ----------------------------------------------------------------------------------------------------------- metadata


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How loaded a replica's engine is, at one moment: a snapshot for schedulers."""

    num_running: int
    num_waiting: int
    """Requests it has taken and not begun."""
    kv_used: float
    """Share of cache slots in use, 0 to 1."""
    num_tokens: int
    """Tokens sampled since start."""
    num_cached_tokens: int = 0
    """Prompt tokens since start whose keys and values were in a prefix cache."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica is doing: what the repack planner sees."""

    replica: str
    version: PolicyVersion
    """Version its trajectories are sampled from."""
    stats: EngineStats
    is_loading: bool = False
    """Is it taking in weights at this moment? It then neither gives nor takes trajectories."""


@dataclass(frozen=True)
class SampleMeta:
    """The lengths of one sample: a prompt that is not trained, then a completion of which some tokens are."""

    num_prompt: int
    num_completion: int
    num_trained: int
    prompt_key: int
    """Equal for samples whose prompt ids are equal: they share one prefix pass."""


@dataclass(frozen=True)
class TrajectoryMeta:
    """What the driver knows of a Trajectory."""

    agent: str
    parent: int | None
    outcome: Outcome
    reward: float | None
    samples: tuple[SampleMeta, ...]
    parts: Mapping[str, float] = field(default_factory=dict)
    """`Score.parts` of the judgement; empty where the workflow gave the reward."""
    policy: str = POLICY
    """Name of the policy that spoke."""


@dataclass(frozen=True)
class EpisodeMeta:
    """What the driver knows of an Episode."""

    trajectories: tuple[TrajectoryMeta, ...]
    num_tool_calls: int = 0
    num_sequential: int = 0

    @cached_property
    def is_failed(self) -> bool:
        """Did its root fail? A failed subagent is left out by itself, and the rest of the episode is used."""
        return self.trajectories[0].outcome.is_failed


@dataclass(frozen=True)
class Acknowledged:
    """A replica's word that it held exactly these weights when it sampled."""

    replica: str
    version: PolicyVersion
    hash: str
    difference: float | None = None
    """Mean |difference| of its logprobs to the trainer's own on the same tokens, right after it took these weights in,
    in nats; None if the weights came without a probe."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The episodes of one task that are compared with each other: metadata and a reference to the payload.

    The unit that is queued, dropped or trained.
    """

    group_id: int
    task_id: str
    permit_version: PolicyVersion
    replica: str
    episodes: tuple[EpisodeMeta, ...]
    versions: tuple[VersionSpan, ...]
    """Trained tokens by policy version, oldest first."""
    weights: tuple[Acknowledged, ...]
    """The replica's acknowledgement of every version in `versions`."""
    payload: Ref
    """Reference to `tuple[Episode, ...]`."""
    columns: Mapping[str, Ref] = field(default_factory=dict)
    """Signal name -> reference to the extra per-token column (one tuple of floats per sample, in sample order)."""
    policy: str = POLICY
    """Name of the policy that is trained on it; `versions` and `weights` are of this policy alone."""

    @property
    def oldest_version(self) -> PolicyVersion:
        """Oldest version of any trained token; the permit's own where nothing was sampled."""
        return self.versions[0].version if self.versions else self.permit_version

    @property
    def num_trained(self) -> int:
        """Tokens that carry gradient, over all episodes."""
        return sum(s.num_trained for _, t in self.trajectories() for s in t.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples of its policy, prompts included, over all episodes: what one pass over the group has to
        read."""
        own = (t for e in self.episodes for t in e.trajectories if t.policy == self.policy)
        samples = (s for t in own for s in t.samples)
        return sum(s.num_prompt + s.num_completion for s in samples)

    @property
    def num_ok(self) -> int:
        """Episodes without a failure."""
        return sum(not e.is_failed for e in self.episodes)

    def trajectories(self) -> Iterator[tuple[tuple[int, int], TrajectoryMeta]]:
        """What the policy of this group said: every trajectory of it that did not fail of every episode that did not,
        with its (episode, trajectory) index."""
        return (found for found in self.everyone() if found[1].policy == self.policy)

    def everyone(self) -> Iterator[tuple[tuple[int, int], TrajectoryMeta]]:
        """The same of all policies: whom an agent may be compared with, and its root, who may be another policy's."""
        for e, episode in enumerate(self.episodes):
            if not episode.is_failed:
                for t, trajectory in enumerate(episode.trajectories):
                    if not trajectory.outcome.is_failed:
                        yield (e, t), trajectory

    def with_scores(self, scores: tuple[Score, ...]) -> Group:
        """This group with one score per episode written into its root trajectory (and its failures marked)."""
        if len(scores) != len(self.episodes):
            raise ValueError(f"group {self.group_id}: {len(scores)} scores for {len(self.episodes)} episodes")
        return replace(self, episodes=tuple(_scored(e, s) for e, s in zip(self.episodes, scores, strict=True)))


@dataclass(frozen=True)
class Score:
    """What scoring one episode gave: a finite value, or None and the reason there is none."""

    value: float | None
    failure: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What it is made of, e.g. `{"exact": 1.0, "format": 0.5}`: the value of each reward function that applied, before
    its weight, and other numbers that one returned, e.g. `{"compute_score/acc": 1.0}`."""


def _scored(episode: EpisodeMeta, score: Score) -> EpisodeMeta:
    root, *others = episode.trajectories
    if score.value is None:
        root = replace(root, outcome=failed(score.failure))
    else:
        root = replace(root, reward=score.value, parts=score.parts)
    return replace(episode, trajectories=tuple(map(_finite, (root, *others))))


def _finite(trajectory: TrajectoryMeta) -> TrajectoryMeta:
    """The same, failed if its reward is NaN or infinite."""
    if trajectory.reward is None or isfinite(trajectory.reward):
        return trajectory
    return replace(trajectory, reward=None, outcome=failed(f"its reward is {trajectory.reward}"))
