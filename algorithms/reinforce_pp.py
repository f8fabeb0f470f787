"""REINFORCE++: no critic and no group baseline, advantages normalised over the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.functional import centred
from algorithms.kl import Estimator, rewards_to_go
from algorithms.policy_gradient import ClippedPolicyGradient
from rlsys.algorithm import LossInputs, Shaped


@dataclass(frozen=True, kw_only=True, config=RULES)
class ReinforcePP(ClippedPolicyGradient):
    """REINFORCE++ (arXiv:2501.03262): A_t = R - kl_coef · (sum of the KL from t on), whitened over the step's tokens.

    R is the trajectory's reward; every sample of a trajectory ends in it. The KL is that of the policy a token was
    sampled from, so that older tokens carry the KL of older weights.
    """

    group_size: Annotated[int, Field(ge=1)] = 8
    """Episodes per task. They are not compared, so that 1 is allowed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How the KL in the reward is estimated from a token: `k1`, log p - log ref, is unbiased, and the paper's."""

    needs_peers: ClassVar[bool] = False
    kl_in_reward: ClassVar[bool] = True

    @property
    def whitens(self) -> bool:
        return True

    def compare(self, rewards_G: Sequence[float]) -> list[float]:
        """Nothing: a trajectory's number is its reward."""
        return list(rewards_G)

    def shape(self, inputs: LossInputs) -> Shaped:
        return Shaped(rewards_to_go(inputs, self.kl_coef, self.kl_estimator))


@dataclass(frozen=True, kw_only=True, config=RULES)
class ReinforcePPBaseline(ClippedPolicyGradient):
    """REINFORCE++-baseline (arXiv:2501.03262): A = R - mean of the group, whitened over all trained tokens of the step,
    with the KL in the loss, by k2."""

    kl_estimator: Estimator = "k2"

    @property
    def whitens(self) -> bool:
        return True

    def compare(self, rewards_G: Sequence[float]) -> list[float]:
        return centred(rewards_G, std_normalize=False)
