"""Clipped importance-sampling-weight policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Policies
from algorithms.fields import RULES
from algorithms.policy_gradient import PolicyGradient
from rlsys.algorithm import LossOutput, TrajectoryAdvantage
from rlsys.types import Group
from rlsys.util.number_ranges import Fraction


@dataclass(frozen=True, kw_only=True, config=RULES)
class CISPO(PolicyGradient):
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4): -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p per token.

    The loss is averaged over tokens. It clips the weight, not the gradient: every token keeps a gradient.

    The paper's ratio is against the sampler, so the default has no correction. With a weight among `correction`, the
    ratio is against the policy at the start of the step. Any staleness is safe: a weight is at most 1 + clip_high,
    whatever the age and the advantage of a token. The bound is a bias that grows with age.
    """

    clip_low: Fraction = 1.0
    """A token's weight is at least 1 - `clip_low`. From 0 to 1. The default is no lower bound, as in the paper."""
    clip_high: NonNegativeFloat = 4.0
    """A token's weight is at most 1 + `clip_high`. At least 0. The paper gives no number; ScaleRL (arXiv:2510.13786)
    found caps of 4 to 8 equally good."""
    correction: Corrections = ()
    std_normalize: bool = True
    """Divide advantages by the group's standard deviation."""

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.group_relative(group, std_normalize=self.std_normalize)

    def surrogate(self, policies: Policies) -> LossOutput:
        ratio_N = policies.ratio().detach()
        weights_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics_N = {
            "policy/ratio_mean": ratio_N,
            "policy/clip_frac_low": (ratio_N < 1 - self.clip_low).float(),
            "policy/clip_frac_high": (ratio_N > 1 + self.clip_high).float(),
        }
        return LossOutput(-(weights_N * policies.batch.advantages_N) * policies.current_N, metrics_N)
