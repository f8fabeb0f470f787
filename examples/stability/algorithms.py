"""Algorithms that the lab compares, by name; they differ in their correction for a token's age."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from algorithms.cispo import CISPO
from algorithms.corrections import Geometric, SequenceTis, Tis
from algorithms.fields import RULES
from algorithms.grpo import GRPO
from algorithms.gspo import GSPO
from algorithms.m2po import M2PO
from algorithms.policy_gradient import PolicyGradient
from rlsys.algorithm import LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = "none"
"""GRPO with its defaults: no correction, because its clipped ratio is against the sampler."""
BLIND = "age ignored"


@dataclass(frozen=True, kw_only=True, config=RULES)
class Blind(GRPO):
    """GRPO that treats every sample as fresh: its gradient is the advantage times that of the logprob, at any age."""

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        return super().loss(logprobs_N, replace(batch, behavior_logprobs_N=batch.proximal_logprobs_N))


ALGORITHMS: Mapping[str, PolicyGradient] = {
    DEFAULT: GRPO(),
    "tis": GRPO(correction=(Tis(),)),
    "sequence_tis": GRPO(correction=(SequenceTis(),)),
    "geometric .8 to 1.25, tis": GRPO(correction=(Geometric(low=0.8, high=1.25), Tis())),
    "cispo": CISPO(),
    "m2po": M2PO(),
    "gspo": GSPO(),
    BLIND: Blind(),
}
"""GRPO with the correction of that name, or another algorithm with its defaults."""
