"""On-policy distillation: the policy's own answers, judged token by token by a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES, ShareBelowOne
from algorithms.policy_gradient import clipped_objective
from algorithms.sample_math import log_ratio
from rlsys.algorithm import Algorithm, Column, LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.types import Group
from rlsys.util.number_ranges import ManyFrom1

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=RULES)
class Distill(Algorithm):
    """On-policy distillation: policy gradient of the reverse KL to a teacher, on tokens that the policy sampled.

    A token's advantage is A = log teacher - log policy of that token given the tokens before it, so that E[A ∇log p]
    over the policy is the negative gradient of KL(policy || teacher) for the next token. The policy is the current
    one: with an old sampler mu, it would be the gradient of KL(policy || teacher) - KL(policy || mu). Later tokens do
    not count (discount 0), as in GKD on the student's own outputs with the reverse KL (arXiv:2306.13649) and in
    Thinking Machines' "On-Policy Distillation" (2025), which uses this estimator. An importance ratio against the
    sampler, clipped as PPO's, corrects for older weights.

    The teacher is the reference worker, `reference.path`, with the vocabulary of the policy. Rewards are not used.
    """

    group_size: ManyFrom1 = 4
    """Episodes per task. They are not compared, so 1 is enough."""
    max_advantage: PositiveFloat = 20.0
    """Largest size of a token's advantage, in nats: one that the teacher finds almost impossible does not dominate."""
    clip_low: ShareBelowOne = 0.2
    """A token's probability ratio may fall to 1 - `clip_low` before its gradient stops."""
    clip_high: NonNegativeFloat = 0.28
    """A token's probability ratio may rise to 1 + `clip_high` before its gradient stops."""

    @property
    def columns(self) -> frozenset[Column]:
        return frozenset({Column.REFERENCE_LOGPROBS})

    @property
    def max_safe_staleness(self) -> int | None:
        """Any, by the clipped ratio against the sampler; see `PolicyGradient.max_safe_staleness`."""
        return None

    @property
    def uses_rewards(self) -> bool:
        return False

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """Assign 1 to each trajectory; `loss` has the advantages of tokens."""
        for (e, t), _ in group.trajectories():
            yield TrajectoryAdvantage(e, t, 1.0)

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """-min(r A, clip(r) A) of each token."""
        teacher_N = batch.columns_N[Column.REFERENCE_LOGPROBS]
        advantages_N = (teacher_N - logprobs_N.detach()).clamp(-self.max_advantage, self.max_advantage)
        ratio_N = log_ratio(logprobs_N, batch.behavior_logprobs_N).exp()
        result = clipped_objective(ratio_N, advantages_N, self.clip_low, self.clip_high)
        metrics_N = {
            "distill/kl": batch.behavior_logprobs_N - teacher_N,
            "policy/clip_frac_low": result.is_low_N.float(),
            "policy/clip_frac_high": result.is_high_N.float(),
        }
        return LossOutput(-result.objective_N, metrics_N)
