"""GRPO without its bias towards long wrong answers and towards questions whose rewards vary little."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES, Over
from algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True, config=RULES)
class DrGRPO(GRPO):
    """Dr. GRPO (arXiv:2503.20783): A = R - mean, and a sample's loss is its sum over tokens divided by a constant."""

    clip_high: NonNegativeFloat = 0.2
    std_normalize: bool = False
    """Divide advantages by the group's standard deviation."""
    over: Over = "budget"
