"""Group sequence policy optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.corrections import Policies
from algorithms.fields import RULES, Over, ShareBelowOne
from algorithms.grpo import GRPO
from algorithms.sample_math import sample_means
from rlsys.algorithm import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_SEQUENCE_RATIO = 10.0
"""log s is clamped to ± this."""


@dataclass(frozen=True, kw_only=True, config=RULES)
class GSPO(GRPO):
    """GSPO (arXiv:2507.18071): one ratio per sequence, s = (p(y) / mu(y))^(1 / |y|), clipped as PPO clips a token's.

    A token's ratio is sg[s] · p / sg[p] (GSPO-token). The clip uses the value of s; the gradient is the token's, so
    that all tokens of a sequence have the same weight. log s is clamped to ±10. The paper's ratio is against the
    sampler, so the default has no correction. With a weight it is against the policy at the start of the step.

    Any staleness is safe: a geometric mean stays near 1 however old a token is. It bounds the effect of a stale
    sequence instead of weighting it correctly. Where the policy has drifted away from a sequence, the sequence is
    clipped if its advantage is negative, and counts in full if it is positive.
    """

    clip_low: ShareBelowOne = 3e-4
    """A sequence's ratio may fall to 1 - `clip_low` before its gradient stops. At least 0, less than 1. Ratios of
    sequences are geometric means, and differ from 1 by far less than those of tokens."""
    clip_high: NonNegativeFloat = 4e-4
    """A sequence's ratio may rise to 1 + `clip_high` before its gradient stops. At least 0."""
    over: Over = "sequences"

    def surrogate(self, policies: Policies) -> LossOutput:
        return self.clipped_surrogate(sequence_ratio(policies), policies.batch.advantages_N)


def sequence_ratio(policies: Policies) -> Tensor:
    """sg[s] · p / sg[p] per token."""
    means_N = sample_means(policies.log_ratio().detach(), policies.batch.lengths_S)
    log_s_N = means_N.clamp(-MAX_LOG_SEQUENCE_RATIO, MAX_LOG_SEQUENCE_RATIO)
    return (log_s_N + (policies.current_N - policies.current_N.detach())).exp()
