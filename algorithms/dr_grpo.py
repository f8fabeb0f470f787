"""GRPO without its bias towards long wrong answers and towards questions whose rewards vary little."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.advantage import centred, compared
from algorithms.fields import RULES, Over
from algorithms.policy_gradient import PolicyGradient
from algorithms.surrogate import ClippedSurrogate
from rlsys.algorithm import LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.types import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=RULES)
class DrGRPO(ClippedSurrogate, PolicyGradient):
    """Dr. GRPO (arXiv:2503.20783): A = R - mean, and a sample's loss is its sum over tokens divided by a constant."""

    clip_high: NonNegativeFloat = 0.2
    std_normalize: bool = False
    """Divide advantages by the group's standard deviation."""
    over: Over = "budget"

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.credited(group, compared(group, partial(centred, std_normalize=self.std_normalize)))

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        policies = self.policies(logprobs_N, batch)
        surrogate = self.clipped_surrogate(policies.ratio(), batch.advantages_N)
        return self.corrected(policies, surrogate, self.kl(policies))
