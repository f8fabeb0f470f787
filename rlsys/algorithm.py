"""Plug-in interface of algorithms.

An algorithm is one frozen dataclass, configuration and code in one, and pure. It declares the extra per-token columns
it needs (`columns`), turns rewards into advantages (`advantages`), and gives a loss per token (`loss`). Most algorithms
need no more. Every other method has a default; the methods are called in this order:

    advantages            driver    a scored group          one number per trajectory to train
    finalize_advantages   driver    the groups of a step    the same, from all groups together
    token_advantages      ranks     a micro-batch           one number per token
    step_statistics       ranks     all tokens of a step    figures of the whole step for `loss`
    loss                  ranks     a micro-batch           a loss per token, with gradient
    value_loss            critic    a micro-batch           the critic's loss per token, with gradient

The framework owns normalisation: the split of a batch into micro-batches or over ranks cannot change a gradient.

Shape suffixes: `N` trained tokens of a micro-batch, in sample order; `S` samples of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from rlsys.errors import ConfigError
from rlsys.types import Answers, Group, PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class Column(StrEnum):
    """Extra per-token column that an algorithm needs; its worker starts only if it is declared."""

    REFERENCE_LOGPROBS = "reference_logprobs"
    """Logprobs of the sampled tokens under the reference: the frozen initial model, or another one (`reference`)."""
    REFERENCE_MISMATCHED = "reference_mismatched"
    """The same tokens under the reference, but after the prompt of another task of the step."""
    POLICY_MISMATCHED = "policy_mismatched"
    """The same tokens after that other prompt, under the trainer's weights at the start of the step."""
    VALUES = "values"
    """The critic's value of the state before each token, at the start of the step."""

    @property
    def is_made_in_training(self) -> bool:
        """True if the actor's ranks compute it in the step that reads it; every other column has an annotator."""
        return self is Column.POLICY_MISMATCHED

    @property
    def is_paired(self) -> bool:
        """True if it is computed on mismatched pairs: samples after another task's prompt."""
        return self in (Column.REFERENCE_MISMATCHED, Column.POLICY_MISMATCHED)


REFERENCE_COLUMNS = frozenset({Column.REFERENCE_LOGPROBS, Column.REFERENCE_MISMATCHED})
"""Columns of the reference."""


@dataclass(frozen=True, slots=True)
class TrajectoryAdvantage:
    """Advantage of one trajectory, or of one sample of it. Unassigned is not zero: it is not trained.

    An algorithm that overrides `token_advantages` or `loss` may use the number as a reward or a label instead.
    """

    episode: int
    trajectory: int
    advantage: float
    sample: int | None = None
    """Index of the sample in the trajectory; None for all samples."""
    turns: tuple[float, ...] = ()
    """Advantages of the turns of the trajectory, in order; a turn beyond them has `advantage`."""

    def of_turn(self, turn: int) -> float:
        """Advantage of the trained tokens of a turn."""
        return self.turns[turn] if turn < len(self.turns) else self.advantage


Assigned: TypeAlias = Sequence[Sequence[TrajectoryAdvantage]]
"""Advantages assigned in a step: for each of its groups those of trajectories."""


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """Advantages of a step, one tuple per group, and metrics to report with them."""

    groups: tuple[tuple[TrajectoryAdvantage, ...], ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class SampleSize(NamedTuple):
    """Place of a sample, and the numbers that set the weight of its tokens in the loss."""

    group: int
    episode: int
    trajectory: int
    num_trained: int
    weight: float
    """That of its episode: the number of times that the sample counts, see `Episode.weight`."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Averaging of the token losses; denominators are those of the whole update, over all ranks.

    `tokens`: every trained token weighs the same. `sequences`: every sample weighs the same, shared by its tokens.
    `budget`: every sample's sum is divided by the same number of tokens, `budget`, then averaged over samples (Dr.
    GRPO). `agents`: every episode weighs the same, in it every agent's trajectory, in it every token (WideSeek).
    """

    over: Literal["tokens", "sequences", "budget", "agents"] = "tokens"
    budget: int | None = None
    """Tokens; for `budget` only. None: the longest completion of a turn, `rollout.max_new_tokens`."""

    def with_budget(self, default: int | None) -> Aggregation:
        """Return this aggregation, with `default` tokens if it has no budget."""
        return self if self.budget is not None else Aggregation(self.over, default)

    def token_weights(self, samples: Sequence[SampleSize]) -> list[float]:
        """Return the weight of each trained token, per sample of an update. Over all tokens the weights sum to 1,
        except for `budget`. Raises `ValueError` for a budget that is not set."""
        num = sum(sample.weight for sample in samples)
        match self.over:
            case "tokens":
                num_tokens_in_all = sum(sample.weight * sample.num_trained for sample in samples)
                return [sample.weight / num_tokens_in_all for sample in samples]
            case "sequences":
                return [sample.weight / (num * sample.num_trained) for sample in samples]
            case "budget":
                if self.budget is None:
                    raise ValueError("the loss is averaged over a budget of tokens, and no budget is set")
                return [sample.weight / (num * self.budget) for sample in samples]
            case "agents":
                num_tokens = Counter[tuple[int, int, int]]()
                weights: dict[tuple[int, int], float] = {}
                for sample in samples:
                    num_tokens[sample[:3]] += sample.num_trained
                    weights[sample[:2]] = sample.weight
                agents = Counter((g, e) for g, e, _ in num_tokens)
                every = sum(weights.values())
                shares = {(g, e, t): weights[g, e] / (every * agents[g, e] * n) for (g, e, t), n in num_tokens.items()}
                return [shares[sample[:3]] for sample in samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of an algorithm besides the policy's current logprobs: one entry per trained token."""

    behavior_logprobs_N: Tensor
    """Logprobs under the distribution the tokens were sampled from, as the engine recorded them."""
    proximal_logprobs_N: Tensor
    """Logprobs under the trainer's weights at the start of the step, without gradient. Their difference to
    `behavior_logprobs_N` has three causes: older weights, other kernels, other precision."""
    advantages_N: Tensor
    """Advantage of the token's trajectory in `token_advantages`; its result in later methods."""
    staleness_N: Tensor
    """Versions between the weights a token was sampled from and those at the start of the step."""
    lengths_S: Tensor
    """Trained tokens of each sample: the first sample has the first `lengths_S[0]` entries, and so on."""
    groups_S: Tensor
    """Position in the step of each sample's group; a group may be spread over micro-batches and ranks."""
    columns_N: Mapping[Column, Tensor] = field(default_factory=dict)
    entropies_N: Tensor | None = None
    """Entropy of the distribution of each token, in nats: in `step_statistics` with `scores_ahead` under the weights at
    the start of the step, in `loss` under the current ones, with gradient if the algorithm `differentiates_entropy`."""
    returns_N: Tensor | None = None
    """Targets of the critic, if `token_advantages` returned them."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Result of `step_statistics` for this step."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages per token, and the critic's targets if there is a critic."""

    advantages_N: Tensor
    returns_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Loss per token, averaged by the framework according to `Algorithm.aggregation`."""

    loss_N: Tensor
    metrics_N: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached per-token values; reported as means over the step's tokens, e.g. `policy/clip_frac_high`."""


class Ranks(Protocol):
    """Collectives over the ranks of a step, for `step_statistics`. All ranks call the same ones in the same order."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""

    def gather(self, values_N: Tensor) -> Tensor:
        """Concatenate the entries of all ranks, in rank order; ranks may have different numbers of them."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of every algorithm. Fields are its configuration (each with a docstring below), methods its maths."""

    group_size: int = 8
    """Episodes rolled out per task and compared with each other."""
    passes: int = 1
    """Passes over the groups of a step, from 1 to 100, each of `train.updates_per_step` updates: PPO's K epochs. In
    later ones, the policy has moved away from what sampled the tokens."""
    frozen_agents: tuple[str, ...] = ()
    """Names of agents that are not trained, such as `lead`, although the trained policy samples for them. Their rewards
    still count: in baselines, and for agents without a reward."""

    @property
    def columns(self) -> frozenset[Column]:
        """Extra columns that its methods read."""
        return frozenset()

    @property
    def answers(self) -> frozenset[Answers]:
        """Origins of answers for which the loss is right. Importance ratios need answers that the policy sampled."""
        return frozenset({"sampled"})

    @property
    def max_safe_staleness(self) -> int | None:
        """Maximum staleness of a trained token for which this loss is safe, in versions; None if it corrects for
        any."""
        return 0

    def staleness_caution(self, staleness: int, num_updates: int) -> str:
        """Return what tokens of this staleness, safe as they are, cost with `num_updates` updates a step, and the
        remedy; empty if nothing is known."""
        return ""

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation()

    allows_early_ends: ClassVar[bool] = False
    """True if its advantages are right for a group of which some episodes were ended early, see
    `rollout.early_ends`."""

    @property
    def whitens(self) -> bool:
        """True if token advantages are normalised to mean 0 and standard deviation 1 over all trained tokens of the
        step."""
        return False

    @property
    def leaves_out_truncated(self) -> bool:
        """True if trajectories that were cut by length get no advantage."""
        return False

    @property
    def uses_rewards(self) -> bool:
        """False if rewards change nothing: then no reward function is needed, and each episode counts as scored."""
        return True

    @property
    def has_step_statistics(self) -> bool:
        """True if `loss` needs `step_statistics`."""
        return False

    @property
    def skips_zero_advantages(self) -> bool:
        """True if the loss of a sample is 0 where its advantages are, whatever its tokens: then it goes through no
        model. Such samples still count in the averages of the loss."""
        return False

    @property
    def differentiates_entropy(self) -> bool:
        """True if `loss` needs the gradient of `entropies_N`, which costs about as much memory as that of logprobs."""
        return False

    @property
    def scores_ahead(self) -> bool:
        """True if `step_statistics` reads `proximal_logprobs_N`, which costs a pass over the whole step before the
        first update."""
        return self.has_step_statistics

    def trains_policy(self, version: PolicyVersion) -> bool:
        """Return True if the step from `version` trains the policy; False while only a critic warms up."""
        return True

    def can_learn_from(self, group: Group) -> bool:
        """Return True if this scored group can be learned from; else it is dropped as `zero_advantage` and replaced."""
        return True

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """Yield one advantage per trajectory to train. Failed episodes must not count in any statistic."""
        raise NotImplementedError(f"{type(self).__name__} gives no advantages: implement `advantages`")

    def assign(self, group: Group) -> tuple[TrajectoryAdvantage, ...]:
        """Return `advantages` without frozen agents, failures and other policies, as `finalize_advantages` uses them.

        Raises `ConfigError` for a trajectory that does not exist.
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
        """Return the advantages of a step's groups, for algorithms that need all groups together.

        `past` are metrics of the previous step by full name; empty at first. They include only those that the actor,
        the critic and this method reported, not rewards or times. They are saved in the checkpoint, so this method can
        keep state in its metrics. A name that another part of rlsys reports is refused. An override gets its advantages
        from `assign`, or from `super()`.
        """
        return StepAdvantages(tuple(self.assign(group) for group in groups))

    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        """Return advantages per token of whole samples, without gradient, and before any whitening.

        The call comes before the policy's first pass over the step, so `proximal_logprobs_N` are NaN here.
        """
        return TokenAdvantages(inputs.advantages_N)

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """Return figures of the whole step, equal on all ranks, for `facts` of every `loss`. Without gradient.

        `step` contains all samples of this rank in the step. Its `proximal_logprobs_N` are the policy's with
        `scores_ahead`, and may be NaN without.
        """
        raise NotImplementedError(f"{type(self).__name__} measures nothing: implement `step_statistics`")

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """Return the loss of each trained token, given its logprob under the current policy (with gradient)."""
        raise NotImplementedError(f"{type(self).__name__} gives no loss: implement `loss`")

    def value_loss(self, values_N: Tensor, batch: LossInputs) -> LossOutput:
        """Return the critic's loss of each trained token, given its current value (with gradient)."""
        raise NotImplementedError(f"{type(self).__name__} has no critic: implement `value_loss`")


def version_after(algorithm: Algorithm, num_trained: int, *, start: PolicyVersion, end: PolicyVersion) -> PolicyVersion:
    """Return the version at which `num_trained` steps since `start` have trained the policy; at most `end`."""
    version = start
    while num_trained > 0 and version < end:
        num_trained -= algorithm.trains_policy(version)
        version += 1
    return version
