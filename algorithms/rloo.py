"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from algorithms.fields import RULES, Over
from algorithms.kl import rewards_to_go
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient, leave_one_out, peer_advantages
from rlsys.algorithm import LossInputs, TokenAdvantages, TrajectoryAdvantage
from rlsys.types import Group


@dataclass(frozen=True, kw_only=True, config=RULES)
class RLOO(ClippedSurrogate, PolicyGradient):
    """RLOO (arXiv:2402.14740, eq. 6): A = R minus the mean of the others' rewards, on the sum over a sample's tokens.

    `budget` only scales that sum. The KL is in the reward, as in the paper: A_t = A - kl_coef · (sum of the KL from t
    on), whose expected gradient on-policy is that of the sequence's KL. The paper's baseline includes the KL of the
    others. Here it contains only their rewards, because groups are compared before the KL is known. This changes the
    variance, not the expectation.
    """

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward: `k1`, log p - log ref, is unbiased, and the paper's."""

    over: Over = "budget"

    kl_in_reward: ClassVar[bool] = True

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.assign_credit(group, peer_advantages(group, leave_one_out))

    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        return TokenAdvantages(rewards_to_go(inputs, self.kl_coef, self.kl_estimator))
