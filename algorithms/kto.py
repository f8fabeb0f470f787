"""Kahneman-Tversky optimisation: training on single completions labelled desirable or undesirable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.sample_math import per_sample, sample_totals
from rlsys.algorithm import (
    Aggregation,
    Algorithm,
    Column,
    LossInputs,
    LossOutput,
    Ranks,
    StepAdvantages,
    TrajectoryAdvantage,
)
from rlsys.types import Answers, Group
from rlsys.util.number_ranges import ManyFrom1

if TYPE_CHECKING:
    from torch import Tensor

BAND = 4 / 3
"""No balancing where desirable samples together weigh 1 to this many times as much as undesirable ones."""
SATURATED = 0.1
"""A sample is saturated where its gradient is below this share of the gradient at a margin of 0."""


@dataclass(frozen=True, kw_only=True, config=RULES)
class KTO(Algorithm):
    """Kahneman-Tversky optimisation (arXiv:2402.01306), online on verifier labels or offline on recorded ones.

    With r = log pi(y|x) - log ref(y|x), summed over the trained tokens of a sample, and a reference point z0, the loss
    of a sample is (eq. 7, without its constant)

        desirable      desirable_weight   (1 - sigmoid(beta (r - z0)))
        undesirable    undesirable_weight (1 - sigmoid(beta (z0 - r)))

    averaged over trajectories. The samples of a trajectory share its weight equally: it has one label and one weight,
    as in ToolSelf (arXiv:2602.07883), whatever the number of its stages. z0 estimates KL(pi || ref): the mean of r over
    the samples of a step, each after the prompt of another task, at least 0, and without gradient. It is 0 where all
    tasks of a step have the same prompt.

    Labels come from single rewards, without comparison within a group, so a group of equal rewards trains as well. A
    trajectory without a reward takes its episode's, that of the root. All turns of all agents then share one label.
    Tool results are not trained and do not count in r. Turns of frozen agents do not count in the balance either.
    """

    group_size: ManyFrom1 = 8
    """Episodes per task; 1 is enough."""
    beta: PositiveFloat = 0.1
    """Slope of the sigmoid: at a distance of 4 / beta nats between r and z0 a sample has almost no gradient. A larger
    value keeps the policy closer to the reference. Short recorded answers need that, because they are trained again
    each epoch."""
    desirable_above: float = 0.5
    """A sample with a reward above this is desirable, any other undesirable."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable samples (lambda_D)."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable samples (lambda_U)."""
    balance: bool = True
    """Lower the weight of the heavier label in a step, then rescale both labels to the original total. All desirable
    trajectories then weigh 1 to 4/3 times as much as all undesirable ones (section 4.2). So one success among many
    failures changes their shares, not the size of the step. With one label only, nothing changes."""
    full_length: PositiveInt | None = 512
    """Trained tokens up to which r is a sum. For a longer sample it is the mean times this, in z0 too: sums over
    thousands of tokens saturate the sigmoid. 1: the mean; null: the sum, as in the paper."""
    variant: Literal["kto", "apo_zero_unpaired"] = "kto"
    """apo_zero_unpaired: z0 is 0 (APO-zero, arXiv:2408.06266, for single completions). It saves the passes over
    mismatched pairs. Desirable samples then become likelier than before, rather than likelier than the other
    samples."""
    clip: PositiveFloat | None = 0.25
    """Largest move of r, in nats, in the direction of a sample's label since it was sampled; beyond it the gradient is
    0, as with PPO's clip. In a synchronous step of one update nothing has moved. A recorded sample counts as sampled by
    the weights that first scored it. null: no limit, the loss of the paper."""

    @property
    def columns(self) -> frozenset[Column]:
        matched = frozenset({Column.REFERENCE_LOGPROBS})
        return (
            matched | {Column.REFERENCE_MISMATCHED, Column.POLICY_MISMATCHED} if self.has_step_statistics else matched
        )

    @property
    def answers(self) -> frozenset[Answers]:
        """Both: the loss has no ratio against the sampler."""
        return frozenset({"sampled", "recorded"})

    @property
    def max_safe_staleness(self) -> int | None:
        """Any with `clip`, 0 without.

        The label of an old sample stays true, and KTO trains on samples of any origin. But later steps have already
        answered what older weights sampled. Without the clip, undesirable samples are pushed down again and again, far
        below the point where `beta` ends their gradient, until the policy collapses. Measured on `examples/sort` at
        `max_staleness: 4`, for a `beta` of 0.1 and of 0.5.
        """
        return 0 if self.clip is None else None

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("sequences")

    @property
    def has_step_statistics(self) -> bool:
        return self.variant == "kto"

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """Weight of a trajectory's samples, negative where they are undesirable. A trajectory whose reward is missing
        or not finite gets none."""
        for (e, t), trajectory in group.trajectories():
            root = group.episodes[e].trajectories[0]
            reward = root.reward if trajectory.reward is None else trajectory.reward
            if reward is not None and isfinite(reward):
                is_desirable = reward > self.desirable_above
                yield TrajectoryAdvantage(e, t, self.desirable_weight if is_desirable else -self.undesirable_weight)

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        """Share each trajectory's weight among its samples, balance the labels, and report the share of desirable
        trajectories."""
        assigned = [self.assign(group) for group in groups]
        counts = [[_num_samples(group, a) for a in own] for group, own in zip(groups, assigned, strict=True)]
        is_desirable = [
            a.advantage > 0
            for own, nums in zip(assigned, counts, strict=True)
            for a, num in zip(own, nums, strict=True)
            if num
        ]
        num_desirable, num_undesirable = sum(is_desirable), len(is_desirable) - sum(is_desirable)
        num = num_desirable + num_undesirable
        metrics = {"kto/desirable_frac": num_desirable / num} if num else {}
        if self.balance and num_desirable and num_undesirable:
            desirable, undesirable = self.desirable_weight * num_desirable, self.undesirable_weight * num_undesirable
            ratio = desirable / undesirable
            scales = min(1.0, BAND / ratio), min(1.0, ratio)  # at least one of them is 1
            back = (desirable + undesirable) / (scales[0] * desirable + scales[1] * undesirable)
            assigned = [
                tuple(_scale_advantage(a, back * scales[0], back * scales[1]) for a in of_group)
                for of_group in assigned
            ]
        # The framework averages over samples. Together, those of a step weigh as much as before.
        share = sum(map(sum, counts)) / (num or 1)
        shared = (
            tuple(_scale_advantage(a, share / (num or 1), share / (num or 1)) for a, num in zip(own, nums, strict=True))
            for own, nums in zip(assigned, counts, strict=True)
        )
        return StepAdvantages(tuple(shared), metrics)

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """Compute `z0`, in nats, and the mean of beta r over desirable and over undesirable samples, where there are
        any."""
        columns_N, lengths_S = step.columns_N, step.lengths_S
        mismatched_N = columns_N[Column.POLICY_MISMATCHED] - columns_N[Column.REFERENCE_MISMATCHED]
        matched_N = step.proximal_logprobs_N - columns_N[Column.REFERENCE_LOGPROBS]
        reward_S = self.beta * self._total(matched_N, lengths_S)
        is_desirable_S = per_sample(step.advantages_N, lengths_S) > 0
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
        """Give every token the loss of its sample, which the mean over samples then counts once."""
        lengths_S, num_tokens = batch.lengths_S, len(logprobs_N)
        weight_S = per_sample(batch.advantages_N, lengths_S)
        ratio_S = self._total(logprobs_N - batch.columns_N[Column.REFERENCE_LOGPROBS], lengths_S)
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
        """Sum over each sample, in nats; for a sample longer than `full_length`, the mean times `full_length`."""
        total_S = sample_totals(log_ratios_N, lengths_S)
        if self.full_length is None:
            return total_S
        return total_S * (self.full_length / lengths_S.clamp(min=1)).clamp(max=1)


def _spread(values_S: Tensor, lengths_S: Tensor, num_tokens: int) -> Tensor:
    return values_S.repeat_interleave(lengths_S, output_size=num_tokens)


def _num_samples(group: Group, assigned: TrajectoryAdvantage) -> int:
    """Number of samples of a trajectory that are trained."""
    samples = group.episodes[assigned.episode].trajectories[assigned.trajectory].samples
    return sum(sample.num_trained > 0 for sample in samples)


def _scale_advantage(assigned: TrajectoryAdvantage, desirable: float, undesirable: float) -> TrajectoryAdvantage:
    scale = desirable if assigned.advantage > 0 else undesirable
    return TrajectoryAdvantage(assigned.episode, assigned.trajectory, assigned.advantage * scale)
