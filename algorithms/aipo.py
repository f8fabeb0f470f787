"""Asynchronous importance-weighted policy optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections
from algorithms.fields import RULES, AtLeastOne
from algorithms.functional import centred, log_ratio
from algorithms.policy_gradient import PolicyGradient
from rlsys.algorithm import LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=RULES)
class AIPO(PolicyGradient):
    """AIPO (LlamaRL, arXiv:2505.24034): -sg[min(p / mu, rho)] A log p per token, A = R - mean of the group.

    A one-sided bound, and none from below: what the policy has moved away from counts less, and nothing counts much
    more.
    """

    rho: AtLeastOne = 4.0
    """Largest weight of a token. At least 1; the paper recommends 2 to 10."""
    correction: Corrections = ()
    """Masks only, such as `geometric`: the weight against the sampler is the algorithm's own."""

    takes_weights: ClassVar[bool] = False

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: made for it. A token's weight is against the sampler, whatever its age, and at most `rho`."""
        return None

    def compare(self, rewards_G: Sequence[float]) -> list[float]:
        return centred(rewards_G, std_normalize=False)

    def surrogate(self, logprobs_N: Tensor, base_logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        ratio_N = log_ratio(logprobs_N.detach(), base_logprobs_N).exp()
        metrics_N = {"policy/ratio_mean": ratio_N, "policy/aipo_truncated_frac": (ratio_N > self.rho).float()}
        return LossOutput(-(ratio_N.clamp(max=self.rho) * batch.advantages_N) * logprobs_N, metrics_N)
