"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.functional import left_out
from algorithms.kl import rewards_to_go
from algorithms.policy_gradient import ClippedPolicyGradient
from rlsys.algorithm import LossInputs, Shaped


@dataclass(frozen=True, kw_only=True, config=RULES)
class RLOO(ClippedPolicyGradient):
    """RLOO (arXiv:2402.14740, eq. 6): A = R minus the mean of the others' rewards, on the sum over a sample's tokens.

    `budget` only scales that sum. The KL is in the reward, as in the paper: A_t = A - kl_coef · (sum of the KL from t
    on), whose expected gradient on-policy is that of the sequence's KL. The paper's baseline has the KL of the others
    as well. Here it is of their rewards only, because it is taken where groups are together, before the KL is known:
    that changes the variance, and not what is expected.
    """

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How the KL in the reward is estimated from a token: `k1`, log p - log ref, is unbiased, and the paper's."""

    over: Literal["tokens", "sequences", "budget", "agents"] = "budget"

    kl_in_reward: ClassVar[bool] = True

    def compare(self, rewards_G: Sequence[float]) -> list[float]:
        return left_out(rewards_G)

    def shape(self, inputs: LossInputs) -> Shaped:
        return Shaped(rewards_to_go(inputs, self.kl_coef, self.kl_estimator))
