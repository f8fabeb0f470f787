"""REINFORCE++: no critic and no group baseline, advantages normalised over the whole step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.kl import Estimator, rewards_to_go
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient, rewarded_peers
from rlsys.algorithm import LossInputs, TokenAdvantages, TrajectoryAdvantage
from rlsys.types import Group


@dataclass(frozen=True, kw_only=True, config=RULES)
class ReinforcePP(ClippedSurrogate, PolicyGradient):
    """REINFORCE++ (arXiv:2501.03262): A_t = R - kl_coef · (sum of the KL from t on), whitened over the step's tokens.

    R is the trajectory's reward; every sample of a trajectory ends in it. The KL is that of the sampling policy, so
    that older tokens have the KL of older weights.
    """

    group_size: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Episodes per task. They are not compared, so that 1 is allowed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward: `k1`, log p - log ref, is unbiased, and the paper's."""

    kl_in_reward: ClassVar[bool] = True
    allows_early_ends: ClassVar[bool] = False

    @property
    def whitens(self) -> bool:
        return True

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """Assign each trajectory its reward, without comparison."""
        return self.assign_credit(group, {peer.place: peer.reward for peer in rewarded_peers(group)})

    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        return TokenAdvantages(rewards_to_go(inputs, self.kl_coef, self.kl_estimator))


@dataclass(frozen=True, kw_only=True, config=RULES)
class ReinforcePPBaseline(ClippedSurrogate, PolicyGradient):
    """REINFORCE++-baseline (arXiv:2501.03262): A = R - mean of the group, whitened over all trained tokens of the step,
    with the KL in the loss, by k2."""

    allows_early_ends: ClassVar[bool] = False
    kl_estimator: Estimator = "k2"

    @property
    def whitens(self) -> bool:
        return True

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.group_relative(group, std_normalize=False)
