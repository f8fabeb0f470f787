"""Second-moment trust policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Policies
from algorithms.fields import RULES
from algorithms.policy_gradient import PolicyGradient
from algorithms.sample_math import log_ratio
from rlsys.algorithm import LossInputs, LossOutput, Ranks, TrajectoryAdvantage
from rlsys.types import Group

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_KEPT = "m2po/largest_kept"


@dataclass(frozen=True, kw_only=True, config=RULES)
class M2PO(PolicyGradient):
    """M2PO (arXiv:2510.01161, Algorithm 1): -r A per token, unclipped, r = p / mu, with the most drifted trust-region
    tokens masked.

    A trust-region token is one that the policy has already moved in the direction of its advantage: A > 0 and r > 1, or
    A < 0 and r < 1. Among these, the tokens of the largest (log r)² are masked until the mean of (log r)² over the
    others is at most `tau`. All other tokens, such as those that undo a drift, do not count in the mean and are never
    masked. The authors' code uses the same tokens, but computes the mask in each micro-batch and includes masked tokens
    in the mean, at the largest kept (log r)². AReaL computes mean and mask over all tokens.

    The mask is computed at the start of the step, over all ranks, so that no split of the step changes it. Trust-region
    tokens that tie are kept or masked together. Masked tokens stay in the denominator. Several updates per step share
    the mask.
    """

    tau: NonNegativeFloat = 0.04
    """Largest mean of (log r)² over the trained trust-region tokens, in nats². At least 0, which masks all of them."""
    correction: Corrections = ()
    """Masks only, such as `geometric`: the loss itself takes the ratio against the sampler."""
    std_normalize: bool = True
    """Divide advantages by the group's standard deviation."""

    takes_weights: ClassVar[bool] = False

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: designed for staleness, and measured by its authors up to 256 updates. The second moment of log r is
        bounded over the trust-region tokens of the step, at the price of masking more of older data. As in PPO, a token
        of negative advantage that has become likelier has no bound."""
        return None

    @property
    def has_step_statistics(self) -> bool:
        return True

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.group_relative(group, std_normalize=self.std_normalize)

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """Compute the largest (log r)² of a kept trust-region token; -1 if none is kept."""
        shared = super().step_statistics(step, ranks)
        drift_N, is_trust_region_N = _drift(step)
        squares_N = ranks.gather(drift_N[is_trust_region_N]).sort().values
        if len(squares_N) == 0:
            return {**shared, LARGEST_KEPT: -1.0}
        counts_N = squares_N.new_ones(len(squares_N)).double().cumsum(0)
        is_small_N = squares_N.double().cumsum(0) <= self.tau * counts_N
        is_small_N[:-1] &= squares_N[:-1] < squares_N[1:]
        return {**shared, LARGEST_KEPT: squares_N.masked_fill(~is_small_N, -1.0).max().item()}

    def surrogate(self, policies: Policies) -> LossOutput:
        ratio_N = policies.ratio()
        drift_N, is_trust_region_N = _drift(policies.batch)
        is_masked_N = is_trust_region_N & (drift_N > policies.batch.facts[LARGEST_KEPT])
        metrics_N = {"policy/ratio_mean": ratio_N.detach(), "policy/m2po_masked_frac": is_masked_N.float()}
        return LossOutput(-(~is_masked_N * policies.batch.advantages_N) * ratio_N, metrics_N)


def _drift(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Compute (log r)² of each token at the start of the step, and a mask of the trust-region tokens."""
    log_ratio_N = log_ratio(inputs.proximal_logprobs_N, inputs.behavior_logprobs_N)
    return log_ratio_N.square(), log_ratio_N.sign() * inputs.advantages_N.sign() > 0
