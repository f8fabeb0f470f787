"""Asynchronous importance-weighted policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Policies
from algorithms.fields import RULES, AtLeastOne
from algorithms.policy_gradient import PolicyGradient
from rlsys.algorithm import LossOutput, TrajectoryAdvantage
from rlsys.types import Group


@dataclass(frozen=True, kw_only=True, config=RULES)
class AIPO(PolicyGradient):
    """AIPO (LlamaRL, arXiv:2505.24034): -sg[min(p / mu, rho)] A log p per token, A = R - mean of the group.

    The weight has an upper bound and no lower bound: tokens that the policy has moved away from weigh less. Any
    staleness is safe: the weight compares with the sampler, whatever the age of a token, and is at most `rho`.
    """

    rho: AtLeastOne = 4.0
    """Largest weight of a token. At least 1; the paper recommends 2 to 10."""
    correction: Corrections = ()
    """Masks only, such as `geometric`: the loss itself takes the weight against the sampler."""

    takes_weights: ClassVar[bool] = False

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.group_relative(group, std_normalize=False)

    def surrogate(self, policies: Policies) -> LossOutput:
        ratio_N = policies.ratio().detach()
        metrics_N = {"policy/ratio_mean": ratio_N, "policy/aipo_truncated_frac": (ratio_N > self.rho).float()}
        return LossOutput(-(ratio_N.clamp(max=self.rho) * policies.batch.advantages_N) * policies.current_N, metrics_N)
