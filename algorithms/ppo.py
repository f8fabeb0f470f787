"""Proximal policy optimisation with a critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.kl import penalised_rewards
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient, rewarded_peers
from algorithms.sample_math import gae
from rlsys.algorithm import Column, LossInputs, LossOutput, TokenAdvantages, TrajectoryAdvantage
from rlsys.types import Group, PolicyVersion
from rlsys.util.number_ranges import Fraction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=RULES)
class PPO(ClippedSurrogate, PolicyGradient):
    """PPO (arXiv:1707.06347) as for language models: the reward at the last token, minus the KL of every token
    (arXiv:2203.02155), advantages by GAE (arXiv:1506.02438) over trained tokens, whitened over the step.

    Each sample of a trajectory counts as a separate episode and ends in the trajectory's reward: the state after a
    sample is not the state at which the next sample begins, so no value passes between them. A trajectory cut by length
    ends in its reward, not in a value. An agent without a reward ends in its root's; one with a reward ends in the two
    mixed by `team_share`.
    """

    group_size: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Episodes per task. They are not compared, so that 1 is allowed."""
    clip_high: NonNegativeFloat = 0.2
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward: `k1`, log p - log ref, is unbiased."""
    gamma: Fraction = 1.0
    """Discount per trained token. From 0 to 1."""
    gae_lambda: Fraction = 0.95
    """Decay of GAE per trained token: 0 trusts the critic, 1 the rewards. From 0 to 1."""
    whiten: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over all trained tokens of the step."""
    value_clip: PositiveFloat | None = 0.2
    """Largest change of a value from that at the start of the step before its gradient stops; None: no limit."""
    critic_warmup: NonNegativeInt = 0
    """Steps at the start of a run that train only the critic. They count in `run.steps` and in `train.warmup_steps`, of
    which the policy gets only the remainder."""

    kl_in_reward: ClassVar[bool] = True
    allows_early_ends: ClassVar[bool] = False

    @property
    def columns(self) -> frozenset[Column]:
        return super().columns | {Column.VALUES}

    @property
    def max_safe_staleness(self) -> int | None:
        """8, which is our choice: AReaL (arXiv:2505.24298) measured decoupled PPO at 8 and beyond, but had no critic.
        The policy's loss corrects for any age; the critic's targets do not. They are returns of the sampling policies,
        whose mixture the critic fits. The older they are, the further advantages are from those of the trained
        policy."""
        return 8

    @property
    def whitens(self) -> bool:
        return self.whiten

    def trains_policy(self, version: PolicyVersion) -> bool:
        return version >= self.critic_warmup

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """Assign each trajectory its reward, without comparison."""
        return self.assign_credit(group, {peer.place: peer.reward for peer in rewarded_peers(group)})

    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        """Compute GAE; the critic's target is A + V."""
        values_N = inputs.columns_N[Column.VALUES]
        rewards_N = penalised_rewards(inputs, self.kl_coef, self.kl_estimator)
        advantages_N = gae(rewards_N, values_N, inputs.lengths_S, self.gamma, self.gae_lambda)
        return TokenAdvantages(advantages_N, advantages_N + values_N)

    def value_loss(self, values_N: Tensor, batch: LossInputs) -> LossOutput:
        """max((V - R)², (clip(V, V_old ± value_clip) - R)²) / 2 per token."""
        if batch.returns_N is None:
            raise ValueError("the critic's loss needs the returns that `token_advantages` gives")
        errors_N = (values_N - batch.returns_N).square()
        if self.value_clip is None:
            return LossOutput(errors_N / 2)
        old_N = batch.columns_N[Column.VALUES]
        clipped_N = old_N + (values_N - old_N).clamp(-self.value_clip, self.value_clip)
        clipped_errors_N = (clipped_N - batch.returns_N).square()
        metrics_N = {"critic/clip_frac": (clipped_errors_N > errors_N).float()}
        return LossOutput(errors_N.maximum(clipped_errors_N) / 2, metrics_N)
