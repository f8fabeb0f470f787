"""Adaptive entropy-controlled policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient
from rlsys.algorithm import StepAdvantages, TrajectoryAdvantage
from rlsys.types import Group

ENTROPY = "policy/entropy"
TRAINS_NEGATIVES = "policy/trains_negatives"


@dataclass(frozen=True, kw_only=True, config=RULES)
class AEPO(ClippedSurrogate, PolicyGradient):
    """AEPO (QwenLong-L1.5, arXiv:2512.12967): GRPO that keeps the policy's entropy in a band.

    Negative advantages raise the entropy. Once it exceeds `entropy_high`, the following steps leave out the
    trajectories with a negative advantage. Once it falls below `entropy_low`, they are trained again. In between
    nothing changes. The entropy is that of the previous step, averaged over its trained tokens. The paper averages over
    sequences the means over tokens. Without negative advantages only the other trajectories count, and their entropy
    may be lower than that of all. The state is part of the step's metrics, and so of the checkpoint.
    """

    std_normalize: bool = True
    """Divide advantages by the group's standard deviation."""
    entropy_low: NonNegativeFloat = 0.2
    """Nats per token below which negative advantages are trained again. The paper gives no numbers: set both bounds
    from `policy/entropy` of your run."""
    entropy_high: NonNegativeFloat = 0.5
    """Nats per token above which negative advantages are left out."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.entropy_low >= self.entropy_high:
            yield f"entropy_low: should be less than entropy_high, {self.entropy_high:g} (got {self.entropy_low:g})"

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.group_relative(group, std_normalize=self.std_normalize)

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        """Drop negative advantages if the entropy requires it, unless nothing would be left to train."""
        every = super().finalize_advantages(groups, past).groups
        entropy, is_on = past.get(ENTROPY), past.get(TRAINS_NEGATIVES, 1.0) > 0
        if entropy is not None and entropy > self.entropy_high:
            is_on = False
        elif entropy is not None and entropy < self.entropy_low:
            is_on = True
        kept = every if is_on else tuple(tuple(a for a in assigned if a.advantage >= 0) for assigned in every)
        return StepAdvantages(kept if any(kept) else every, {TRAINS_NEGATIVES: float(is_on)})
