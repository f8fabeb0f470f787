"""Kahneman-Tversky optimisation: learning from labels, wanted or not, one completion at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.functional import sample_totals
from rlsys.algorithm import (
    Aggregation,
    Algorithm,
    LossInputs,
    LossOutput,
    Ranks,
    Signal,
    StepAdvantages,
    TrajectoryAdvantage,
)
from rlsys.types import Group

if TYPE_CHECKING:
    from torch import Tensor

BAND = 4 / 3
"""Where desirable samples together weigh 1 to this times as much as undesirable ones, nothing is balanced."""
SATURATED = 0.1
"""A sample is saturated where its gradient is below this share of what it is at a margin of 0."""


@dataclass(frozen=True, kw_only=True, config=RULES)
class KTO(Algorithm):
    """Kahneman-Tversky optimisation (arXiv:2402.01306), online on verifier labels or offline on recorded ones.

    With r = log pi(y|x) - log ref(y|x), summed over the trained tokens of a sample, and a reference point z0, the loss
    of a sample is (eq. 7, less its constant)

        desirable      desirable_weight   (1 - sigmoid(beta (r - z0)))
        undesirable    undesirable_weight (1 - sigmoid(beta (z0 - r)))

    averaged over samples. z0 stands for KL(pi || ref): the mean of r over the samples of a step, each after the prompt
    of another task, at least 0, and without gradient. It is 0 where all tasks of a step have the same prompt.

    Labels come from rewards, one by one: no member of a group is compared with another, and a group whose members are
    all alike teaches as well. A trajectory without a reward of its own has its episode's, the root's, so that all turns
    of all agents share one label, as in ToolSelf (arXiv:2602.07883); what tools said is not trained and counts in no r.
    What frozen agents said is in no balance either.
    """

    group_size: PositiveInt = 8
    """Episodes per task; 1 will do."""
    beta: PositiveFloat = 0.1
    """How soon a sample stops to teach as r leaves z0: at a distance of 4 / beta nats hardly anything is left. More
    keeps the policy closer to the reference, which short recorded answers need: they are pushed again each epoch."""
    desirable_above: float = 0.5
    """A reward above this makes a sample desirable, any other undesirable."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable samples (lambda_D)."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable samples (lambda_U)."""
    balance: bool = True
    """Lower the weight of the kind that weighs more in a step, until all desirable samples together weigh 1 to 4/3
    times as much as all undesirable ones (section 4.2), then scale both so that the step weighs what it did: what one
    success among many failures changes is their share, not how far the step goes. With one kind only nothing
    changes."""
    full_length: PositiveInt | None = 512
    """Trained tokens up to which r is a sum. For a longer sample it is the mean times this, in z0 too: sums over
    thousands of tokens leave the range in which the sigmoid teaches. 1: the mean; null: the sum, as in the paper."""
    variant: Literal["kto", "apo_zero_unpaired"] = "kto"
    """apo_zero_unpaired: z0 is 0 (APO-zero, arXiv:2408.06266, for single completions). It saves the passes over
    mismatched pairs; what is desirable is then to become likelier than it was, and not likelier than the rest."""
    clip: PositiveFloat | None = 0.25
    """How far r may move, in nats, in the direction that a sample's label asks, since the sample was drawn; then it
    stops to teach, as with PPO's clip. In a synchronous step of one update nothing has moved. A recorded sample counts
    as drawn by the weights that it was first scored under. null: however far, the loss of the paper."""

    @property
    def signals(self) -> frozenset[Signal]:
        matched = frozenset({Signal.REFERENCE_LOGPROBS})
        return (
            matched | {Signal.REFERENCE_MISMATCHED, Signal.POLICY_MISMATCHED} if self.has_step_statistics else matched
        )

    @property
    def max_safe_staleness(self) -> int | None:
        """Any with `clip`, 0 without.

        The label of an old sample is as true as ever, and KTO learns from samples of any origin. But what older weights
        liked to say is what the steps since have answered already: without the clip the same undesirable samples are
        pushed down again and again, far below where `beta` stops to teach, and the policy collapses; as measured on
        `examples/sort` at `max_staleness: 4`, for a `beta` of 0.1 and of 0.5.
        """
        return 0 if self.clip is None else None

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("sequences")

    @property
    def has_step_statistics(self) -> bool:
        return self.variant == "kto"

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """The weight of a trajectory's samples, negative where they are undesirable. One without a reward, or with one
        that is not finite, is assigned nothing."""
        for (e, t), trajectory in group.trajectories():
            root = group.episodes[e].trajectories[0]
            reward = root.reward if trajectory.reward is None else trajectory.reward
            if reward is not None and isfinite(reward):
                is_desirable = reward > self.desirable_above
                yield TrajectoryAdvantage(e, t, self.desirable_weight if is_desirable else -self.undesirable_weight)

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        """The same weights, balanced, and the share of desirable samples."""
        assigned = [self.assign(group) for group in groups]
        num_desirable, num_undesirable = _counted(groups, assigned)
        num = num_desirable + num_undesirable
        metrics = {"kto/desirable_frac": num_desirable / num} if num else {}
        if self.balance and num_desirable and num_undesirable:
            desirable, undesirable = self.desirable_weight * num_desirable, self.undesirable_weight * num_undesirable
            ratio = desirable / undesirable
            scales = min(1.0, BAND / ratio), min(1.0, ratio)  # at least one of them is 1
            back = (desirable + undesirable) / (scales[0] * desirable + scales[1] * undesirable)
            assigned = [
                tuple(_scaled(a, back * scales[0], back * scales[1]) for a in of_group) for of_group in assigned
            ]
        return StepAdvantages(tuple(assigned), metrics)

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """`z0`, in nats; and the mean of beta r over desirable and over undesirable samples, where there are any."""
        columns_N, lengths_S = step.columns_N, step.lengths_S
        mismatched_N = columns_N[Signal.POLICY_MISMATCHED] - columns_N[Signal.REFERENCE_MISMATCHED]
        matched_N = step.proximal_logprobs_N - columns_N[Signal.REFERENCE_LOGPROBS]
        reward_S = self.beta * self._total(matched_N, lengths_S)
        is_desirable_S = _per_sample(step.advantages_N, lengths_S) > 0
        terms_5S = reward_S.new_ones(5, len(reward_S)).double()
        terms_5S[1] = self._total(mismatched_N, lengths_S)
        terms_5S[2] = is_desirable_S
        terms_5S[3] = reward_S.where(is_desirable_S, 0.0)
        terms_5S[4] = reward_S.where(~is_desirable_S, 0.0)
        num, mismatched, num_desirable, desirable, undesirable = ranks.sum(terms_5S.sum(1)).tolist()
        facts = {
            "z0": mismatched / (num or 1.0) if not mismatched < 0 else 0.0
        }  # not max(0, ...), which would hide a NaN
        if num_desirable:
            facts["reward_desirable"] = desirable / num_desirable
        if num > num_desirable:
            facts["reward_undesirable"] = undesirable / (num - num_desirable)
        return facts

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """Every token carries the loss of its sample, which the mean over samples then counts once."""
        lengths_S, num_tokens = batch.lengths_S, len(logprobs_N)
        weight_S = _per_sample(batch.advantages_N, lengths_S)
        ratio_S = self._total(logprobs_N - batch.columns_N[Signal.REFERENCE_LOGPROBS], lengths_S)
        margin_S = weight_S.sign() * self.beta * (ratio_S - batch.facts.get("z0", 0.0))
        miss_S = (-margin_S).sigmoid()  # 1 - sigmoid(margin)
        metrics_S = {
            "kto/margin": margin_S.detach(),
            "kto/saturated_frac": (4 * miss_S * (1 - miss_S) < SATURATED).to(miss_S.dtype),
        }
        if self.clip is not None:
            moved_S = self._total(logprobs_N.detach() - batch.behavior_logprobs_N, lengths_S)
            is_clipped_S = weight_S.sign() * moved_S > self.clip
            miss_S = miss_S.where(~is_clipped_S, miss_S.detach())
            metrics_S["kto/clip_frac"] = is_clipped_S.to(miss_S.dtype)
        loss_S = weight_S.abs() * miss_S
        spread = {name: _spread(value_S, lengths_S, num_tokens) for name, value_S in metrics_S.items()}
        facts = {f"kto/{name}": logprobs_N.new_full((num_tokens,), value) for name, value in batch.facts.items()}
        return LossOutput(_spread(loss_S, lengths_S, num_tokens), {**spread, **facts})

    def _total(self, log_ratios_N: Tensor, lengths_S: Tensor) -> Tensor:
        """The sum over each sample, in nats; of one longer than `full_length` the mean times that."""
        total_S = sample_totals(log_ratios_N, lengths_S)
        if self.full_length is None:
            return total_S
        return total_S * (self.full_length / lengths_S.clamp(min=1)).clamp(max=1)


def _per_sample(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """What all tokens of a sample share, once per sample; every sample has tokens."""
    return values_N.index_select(0, lengths_S.cumsum(0) - 1)


def _spread(values_S: Tensor, lengths_S: Tensor, num_tokens: int) -> Tensor:
    """A sample's value at each of its tokens."""
    return values_S.repeat_interleave(lengths_S, output_size=num_tokens)


def _counted(groups: Sequence[Group], assigned: Sequence[Sequence[TrajectoryAdvantage]]) -> tuple[int, int]:
    """Desirable and undesirable samples that have a trained token."""
    is_desirable = [
        a.advantage > 0
        for group, of_group in zip(groups, assigned, strict=True)
        for a in of_group
        for sample in group.episodes[a.episode].trajectories[a.trajectory].samples
        if sample.num_trained
    ]
    return sum(is_desirable), len(is_desirable) - sum(is_desirable)


def _scaled(assigned: TrajectoryAdvantage, desirable: float, undesirable: float) -> TrajectoryAdvantage:
    scale = desirable if assigned.advantage > 0 else undesirable
    return TrajectoryAdvantage(assigned.episode, assigned.trajectory, assigned.advantage * scale)
