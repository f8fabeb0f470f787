"""Logits of a causal language model from its last hidden states, with what a family does to them after the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SOFTCAP, _FACTOR, _DIVISOR = "final_logit_softcapping", "logit_scale", "logits_scaling"
"""Fields of configurations: Gemma 2's, Cohere's, Granite's."""


class OutputLayer(NamedTuple):
    """Output matrix of a model, a factor of its logits, and their soft cap.

    The factor is `logit_scale` (Cohere) or 1 / `logits_scaling` (Granite). With the cap `final_logit_softcapping`
    (Gemma 2), a logit x becomes cap * tanh(x / cap).
    """

    head: nn.Linear
    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputLayer:
        """Build it from a model and its configuration. `check_supported` refuses models whose logits need more."""
        text = model.config.get_text_config()
        factor = (getattr(text, _FACTOR, None) or 1.0) / (getattr(text, _DIVISOR, None) or 1.0)
        return cls(cast("nn.Linear", model.get_output_embeddings()), factor, getattr(text, _SOFTCAP, None))

    @property
    def num_vocab(self) -> int:
        return self.head.out_features

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return `(N, V)`, before the temperature."""
        logits_NV = self.head(hidden_NH)
        if self.factor != 1.0:
            logits_NV = logits_NV * self.factor
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV


def has_known_change(text: PreTrainedConfig) -> bool:
    """Return True if the configuration asks for a change of logits that `OutputLayer` makes."""
    return any(getattr(text, field, None) is not None for field in (_SOFTCAP, _FACTOR, _DIVISOR))
