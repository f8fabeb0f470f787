"""Asynchronous importance-weighted policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from algorithms.advantage import centred, compared
from algorithms.corrections import Corrections
from algorithms.fields import RULES, AtLeastOne
from algorithms.policy_gradient import PolicyGradient
from rlsys.algorithm import LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.types import Group

if TYPE_CHECKING:
    from torch import Tensor


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
        return self.credited(group, compared(group, partial(centred, std_normalize=False)))

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        policies = self.policies(logprobs_N, batch)
        ratio_N = policies.ratio().detach()
        metrics_N = {"policy/ratio_mean": ratio_N, "policy/aipo_truncated_frac": (ratio_N > self.rho).float()}
        surrogate = LossOutput(-(ratio_N.clamp(max=self.rho) * batch.advantages_N) * logprobs_N, metrics_N)
        return self.corrected(policies, surrogate, self.kl(policies))
