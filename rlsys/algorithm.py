"""The algorithm door: what a plug-in provides, and what the framework keeps for itself.

An algorithm is one frozen dataclass, config and code in one, and pure: it says which extra per-token columns it needs
(`signals`), turns rewards into advantages (`advantages`), and gives a loss per token (`loss`). That is all most need;
every other method has a default, and each is called in the order in which they stand here:

    advantages    driver    a scored group              one number per trajectory to train
    settle        driver    the groups of a step        the same, seen together
    shape         ranks     a micro-batch               one number per token
    measure       ranks     all tokens of a step        what `loss` must know of the whole step
    loss          ranks     a micro-batch               a loss per token, with gradient
    value_loss    critic    a micro-batch               the critic's loss per token, with gradient

The framework owns normalisation: how a batch is split into micro-batches or over ranks cannot change a gradient.

Shape suffixes: `N` trained tokens of a micro-batch, in sample order; `S` samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

from rlsys.errors import ConfigError
from rlsys.types import Group, PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class Signal(StrEnum):
    """An extra per-token column an algorithm declares it needs; the worker that makes it starts only then."""

    REFERENCE_LOGPROBS = "reference_logprobs"
    """Logprobs of the sampled tokens under the frozen initial model."""
    REFERENCE_MISMATCHED = "reference_mismatched"
    """The same tokens under the frozen initial model, but after the prompt of another task of the step."""
    POLICY_MISMATCHED = "policy_mismatched"
    """The same tokens after that other prompt, under the trainer's weights at the start of the step."""
    VALUES = "values"
    """What the critic, as it is at the start of the step, expects of the state before each token."""

    @property
    def made(self) -> Literal["stream", "step", "actor"]:
        """When, and by whom: as groups come, by an annotator; once a step is put together, by an annotator or the
        critic; or by the actor's own ranks."""
        return _MADE[self]

    @property
    def is_paired(self) -> bool:
        """Is it made from mismatched pairs, samples after another task's prompt?"""
        return self in (Signal.REFERENCE_MISMATCHED, Signal.POLICY_MISMATCHED)


_MADE: dict[Signal, Literal["stream", "step", "actor"]] = {
    Signal.REFERENCE_LOGPROBS: "stream",
    Signal.REFERENCE_MISMATCHED: "step",
    Signal.POLICY_MISMATCHED: "actor",
    Signal.VALUES: "step",
}


@dataclass(frozen=True, slots=True)
class TrajectoryAdvantage:
    """The advantage of one trajectory, or of one sample of it. What nobody assigns is not trained: unassigned is not
    zero.

    An algorithm that has its own `token_advantages` or `loss` may mean something else by the number: a reward, or a
    label.
    """

    episode: int
    trajectory: int
    advantage: float
    sample: int | None = None
    """Which of the trajectory's samples this is for; None for all of them."""


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """The advantages of a step, one tuple per group, and metrics to report about them."""

    groups: tuple[tuple[TrajectoryAdvantage, ...], ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """What the loss of tokens is averaged over; denominators are those of the whole update, over all ranks.

    `tokens`: every trained token weighs the same. `sequences`: every sample weighs the same, its tokens share that
    weight. `budget`: every sample's sum is divided by the same number of tokens, `budget`, then averaged over samples
    (Dr. GRPO). `agents`: every episode weighs the same, in it every agent's trajectory, in it every token (WideSeek).
    """

    over: Literal["tokens", "sequences", "budget", "agents"] = "tokens"
    budget: int | None = None
    """Tokens; for `budget` only. None: the longest completion of a turn, `rollout.max_new_tokens`."""

    def with_budget(self, default: int | None) -> Aggregation:
        """The same, with `default` tokens where it names none."""
        return self if self.budget is not None else Aggregation(self.over, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What an algorithm sees of samples besides the policy's own logprobs: one entry per trained token."""

    behavior_logprobs_N: Tensor
    """Logprobs under the distribution the tokens were sampled from, as the engine recorded them."""
    proximal_logprobs_N: Tensor
    """Logprobs under the trainer's weights at the start of the step, without gradient. What they differ by from
    `behavior_logprobs_N` is all that lies between engine and trainer: older weights, other kernels, other precision."""
    advantages_N: Tensor
    """As assigned to the trajectory in `token_advantages`, as shaped afterwards."""
    staleness_N: Tensor
    """Versions between the weights a token was sampled from and those at the start of the step."""
    lengths_S: Tensor
    """Trained tokens of each sample: the first sample has the first `lengths_S[0]` entries, and so on."""
    columns_N: Mapping[Signal, Tensor] = field(default_factory=dict)
    returns_N: Tensor | None = None
    """What the critic should have expected, if `token_advantages` gave it."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What `step_statistics` returned for this step."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages per token, and the critic's targets where there is a critic."""

    advantages_N: Tensor
    returns_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss per token, which the framework averages as `Algorithm.aggregation` says."""

    loss_N: Tensor
    metrics_N: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached per-token values; reported as means over the step's tokens, e.g. `policy/clip_frac_high`."""


class Ranks(Protocol):
    """Collectives over the ranks of a step, for `step_statistics`. Every rank calls the same ones, in the same
    order."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        ...

    def gather(self, values_N: Tensor) -> Tensor:
        """The entries of all ranks in one tensor, in rank order; ranks may have different numbers of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of every algorithm. Fields are its configuration (each followed by its docstring), methods its maths."""

    group_size: int = 8
    """Episodes rolled out per task and compared with each other."""
    frozen_agents: tuple[str, ...] = ()
    """Names of agents that are not trained, such as `lead`, though the policy that is trained speaks for them. Their
    rewards count as those of any other: in baselines, and as what agents without a reward of their own go by."""

    @property
    def signals(self) -> frozenset[Signal]:
        """The extra columns its methods read."""
        return frozenset()

    @property
    def max_safe_staleness(self) -> int | None:
        """How many versions behind a trained token may be before this loss is unsafe; None if it corrects for any."""
        return 0

    @property
    def aggregation(self) -> Aggregation:
        """What the loss is averaged over."""
        return Aggregation()

    @property
    def whitens(self) -> bool:
        """Are shaped advantages normalised to mean 0 and standard deviation 1 over all trained tokens of the step?"""
        return False

    @property
    def has_step_statistics(self) -> bool:
        """Does `loss` need `step_statistics`? It costs a pass over the whole step before the first update."""
        return False

    def trains_policy(self, version: PolicyVersion) -> bool:
        """Does the step that starts from `version` train the policy? False while a critic warms up alone."""
        return True

    def has_signal(self, group: Group) -> bool:
        """Is there anything to learn from this scored group? If not it is dropped as `no_signal`, and another one is
        rolled out in its place."""
        return True

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """One advantage per trajectory to train. Failed episodes are not offered and must not count in any
        statistic."""
        raise NotImplementedError(f"{type(self).__name__} gives no advantages: implement `advantages`")

    def assign(self, group: Group) -> tuple[TrajectoryAdvantage, ...]:
        """`advantages`, without those of frozen agents: what `finalize_advantages` goes by, and whether a group is of
        use.

        What failed, or another policy said, is never trained, and left out too. Raises `ConfigError` for a trajectory
        that is not there.
        """
        places = {(e, t) for e, episode in enumerate(group.episodes) for t in range(len(episode.trajectories))}
        trained = {place for place, meta in group.trajectories() if meta.agent not in self.frozen_agents}
        assigned = tuple(self.advantages(group))
        if strange := next((a for a in assigned if (a.episode, a.trajectory) not in places), None):
            raise ConfigError(
                f"{type(self).__name__} gives an advantage to trajectory {strange.trajectory} of episode "
                f"{strange.episode}, which group {group.group_id} does not have: go by `group.trajectories()`"
            )
        return tuple(a for a in assigned if (a.episode, a.trajectory) in trained)

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        """The advantages of a step's groups, for what depends on all of them.

        `past` are the metrics of the step before, by their full names, that the actor, the critic and this method
        reported, and none of the others, such as rewards and times; empty at first. They are in the checkpoint, so what
        is reported here is remembered. A name that another part of rlsys reports is refused. Whoever overrides it asks
        `assign`, or this method, for advantages.
        """
        return StepAdvantages(tuple(self.assign(group) for group in groups))

    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        """Advantages per token; samples are whole. Without gradient, and before any whitening.

        It is called before the policy's first pass over the step: `proximal_logprobs_N` are NaN here, since nobody
        knows them yet.
        """
        return TokenAdvantages(inputs.advantages_N)

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """Figures of the whole step, equal on all ranks, that every `loss` finds in `facts`. Without gradient.

        `step` holds all samples that this rank trains in the step. Their `proximal_logprobs_N` are the policy's.
        """
        raise NotImplementedError(f"{type(self).__name__} measures nothing: implement `step_statistics`")

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """The loss of each trained token, given its logprob under the current policy (with gradient)."""
        raise NotImplementedError(f"{type(self).__name__} gives no loss: implement `loss`")

    def value_loss(self, values_N: Tensor, batch: LossInputs) -> LossOutput:
        """The critic's loss of each trained token, given its present value (with gradient)."""
        raise NotImplementedError(f"{type(self).__name__} has no critic: implement `value_loss`")


def version_after(algorithm: Algorithm, num_trained: int, *, start: PolicyVersion, end: PolicyVersion) -> PolicyVersion:
    """The version at which `num_trained` of the steps from `start` on have trained the policy; `end` if fewer do so
    before it."""
    version = start
    while num_trained > 0 and version < end:
        num_trained -= algorithm.trains_policy(version)
        version += 1
    return version
