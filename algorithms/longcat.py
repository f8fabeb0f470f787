"""The loss of LongCat-Flash-Thinking."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Tis
from algorithms.fields import RULES, Over
from algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True, config=RULES)
class LongCat(GRPO):
    """LongCat-Flash-Thinking (arXiv:2509.18883, eq. 4): GRPO with three clips, summed over tokens, over a constant.

    -min(rho, C) · max(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), dual_clip A), the outer maximum only where A <
    0: for A > 0 the printed equation would replace the objective by a constant. C is the `cap` of the correction `tis`.
    There is no KL, because the gradient of k3 is biased; trajectories cut by length are masked.

    With `tis` and one update per step r is 1, so that only C acts; the other two clips act with
    `train.updates_per_step` above 1 or `proximal: interpolated`. With `correction: none` r is against the sampler.
    """

    correction: Corrections = (Tis(),)
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    mask_truncated: bool = True
    over: Over = "budget"
