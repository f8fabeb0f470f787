"""GRPO without its bias towards long wrong answers and towards questions whose rewards vary little."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES, Over
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient
from rlsys.algorithm import TrajectoryAdvantage
from rlsys.types import Group


@dataclass(frozen=True, kw_only=True, config=RULES)
class DrGRPO(ClippedSurrogate, PolicyGradient):
    """Dr. GRPO (arXiv:2503.20783): A = R - mean, and a sample's loss is its sum over tokens divided by a constant."""

    clip_high: NonNegativeFloat = 0.2
    std_normalize: bool = False
    """Divide advantages by the group's standard deviation."""
    over: Over = "budget"

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.group_relative(group, std_normalize=self.std_normalize)
