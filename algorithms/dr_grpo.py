"""GRPO done right: without what favours long wrong answers and questions of small spread."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True, config=RULES)
class DrGRPO(GRPO):
    """Dr. GRPO (arXiv:2503.20783): A = R - mean, and a sample's loss is its sum over tokens divided by a constant."""

    clip_high: NonNegativeFloat = 0.2
    std_normalize: bool = False
    over: Literal["tokens", "sequences", "budget", "agents"] = "budget"
