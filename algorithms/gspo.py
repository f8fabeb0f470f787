"""Group sequence policy optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections
from algorithms.fields import RULES, ShareBelowOne
from algorithms.functional import log_ratio, sample_means
from algorithms.grpo import GRPO
from rlsys.algorithm import LossInputs

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_SEQUENCE_RATIO = 10.0
"""log s is clamped to this, either way."""


@dataclass(frozen=True, kw_only=True, config=RULES)
class GSPO(GRPO):
    """GSPO (arXiv:2507.18071): one ratio per sequence, s = (p(y) / mu(y))^(1 / |y|), clipped as PPO clips a token's.

    A token's ratio is sg[s] · p / sg[p] (GSPO-token): the value of s for the clip, and the token's own gradient, so
    that a sequence's tokens share its weight. log s is clamped to ±10. The paper's ratio is against the sampler, so
    that the default has no correction; with a weight it is against the policy the step starts from.
    """

    clip_low: ShareBelowOne = 3e-4
    """A sequence's ratio may fall to 1 - this before its gradient stops. At least 0, less than 1. Ratios of sequences
    are geometric means, and differ from 1 by far less than those of tokens."""
    clip_high: NonNegativeFloat = 4e-4
    """A sequence's ratio may rise to 1 + this before its gradient stops. At least 0."""
    correction: Corrections = ()
    over: Literal["tokens", "sequences", "budget", "agents"] = "sequences"

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: the ratio is against the sampler, and a geometric mean, so that it stays near 1 however old a token is.
        It bounds what a stale sequence can do rather than weighting it rightly: of sequences the policy has drifted
        away from, those with a negative advantage are clipped, and those with a positive one count in full."""
        return None

    def log_ratios(self, logprobs_N: Tensor, base_logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        held_N = logprobs_N.detach()
        means_N = sample_means(log_ratio(held_N, base_logprobs_N), batch.lengths_S)
        return means_N.clamp(-MAX_LOG_SEQUENCE_RATIO, MAX_LOG_SEQUENCE_RATIO) + (logprobs_N - held_N)
