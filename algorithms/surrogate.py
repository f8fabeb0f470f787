"""PPO's clipped surrogate: its maths and its configuration keys.

Shape suffix: `N` trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Policies, carries_ratio
from algorithms.fields import RULES, ShareBelowOne
from rlsys.algorithm import LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor


@plain_dataclass(frozen=True, slots=True)
class Clipped:
    """A clipped surrogate: the objective to maximise, and masks of the tokens without gradient."""

    objective_N: Tensor
    is_low_N: Tensor
    """True where the ratio is below 1 - clip_low and the advantage negative."""
    is_high_N: Tensor
    """True where the ratio is above 1 + clip_high and the advantage positive."""


def clipped(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token: PPO's objective (arXiv:1707.06347, eq. 7).

    Two bounds are DAPO's clip-higher (arXiv:2503.14476, eq. 10): a token's probability may rise by more than it may
    fall.
    """
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return Clipped(
        objective_N=(ratio_N * advantages_N).minimum(bounded_N * advantages_N),
        is_low_N=(ratio_N < 1 - clip_low) & (advantages_N < 0),
        is_high_N=(ratio_N > 1 + clip_high) & (advantages_N > 0),
    )


def dual_floor(advantages_N: Tensor, dual_clip: float) -> Tensor:
    """c A where A < 0, else 0: the lower bound of the objective under dual clip (arXiv:1912.09729, eq. 5).

    A clipped objective with A >= 0 is never negative, so `objective.maximum(floor)` changes only tokens with A < 0. For
    A > 0 the outer maximum would replace the objective by a constant.
    """
    return dual_clip * advantages_N.clamp(max=0)


@dataclass(frozen=True, kw_only=True, config=RULES)
class ClippedSurrogate:
    """Keys of PPO's clipped surrogate (arXiv:1707.06347, eq. 7), a base class listed before `PolicyGradient`.

    By default the ratio is against the sampler, so that the clip bounds the effect of an old token. With a weight among
    its corrections it is decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5): -rho · min(u A, clip(u) A)
    with u against the proximal policy.
    """

    correction: Corrections = ()
    clip_low: ShareBelowOne = 0.2
    """A token's probability ratio may fall to 1 - `clip_low` before its gradient stops. At least 0, less than 1. With a
    weight among `correction` the ratio is against the policy at the start of the step. With one update per step it is
    then 1, and nothing is clipped, unless `proximal` is `interpolated`."""
    clip_high: NonNegativeFloat = 0.28
    """A token's probability ratio may rise to 1 + `clip_high` before its gradient stops. At least 0. Acts when
    `clip_low` does."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts for a token of negative advantage (arXiv:1912.09729); more than 1. None: no limit."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Target policy of a weight among `correction`. `recomputed`: the trainer's at the start of the step.
    `interpolated`: between sampler and current policy, by age, as AReaL's `loglinear`: a token of staleness s has log
    p_prox = log mu + s / (s + 1) (log p - log mu). Part of an old token's drift is then clipped, not weighted."""

    def problems(self) -> Iterator[str]:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield f"dual_clip: should be more than 1 + clip_high, {1 + self.clip_high:g} (got {self.dual_clip:g})"
        if self.proximal == "interpolated" and not carries_ratio(self.correction):
            yield "proximal: interpolated acts only with a weight among correction, such as tis"

    def proximal_logprobs(self, logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        """Recompute or interpolate: the version of the step is v_prox, that of the policy after it v_theta = v_prox +
        1, so that alpha = (v_prox - v_behav) / (v_theta - v_behav) = s / (s + 1)."""
        if self.proximal == "recomputed":
            return batch.proximal_logprobs_N
        alpha_N = batch.staleness_N / (batch.staleness_N + 1)
        behavior_N = batch.behavior_logprobs_N
        return behavior_N + alpha_N * (logprobs_N.detach() - behavior_N)

    def surrogate(self, policies: Policies) -> LossOutput:
        return self.clipped_surrogate(policies.ratio(), policies.batch.advantages_N)

    def clipped_surrogate(self, ratio_N: Tensor, advantages_N: Tensor) -> LossOutput:
        """-min(r A, clip(r) A), and with `dual_clip` c, -max(min(r A, clip(r) A), c A) where A < 0."""
        result = clipped(ratio_N, advantages_N, self.clip_low, self.clip_high)
        objective_N = result.objective_N
        metrics_N = {
            "policy/ratio_mean": ratio_N.detach(),
            "policy/clip_frac_low": result.is_low_N.float(),
            "policy/clip_frac_high": result.is_high_N.float(),
        }
        if self.dual_clip is not None:
            floor_N = dual_floor(advantages_N, self.dual_clip)
            metrics_N["policy/clip_frac_dual"] = (objective_N < floor_N).float()
            objective_N = objective_N.maximum(floor_N)
        return LossOutput(-objective_N, metrics_N)
