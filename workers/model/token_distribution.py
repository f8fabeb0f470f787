"""The distribution that tokens are sampled from, computed alike by sampler and trainer: from the last hidden states to
logits, with what a family does to them after the matrix, then temperature and cuts.

Shape suffixes: `N` and `B` tokens, `H` width of a hidden state, `V` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlsys.types import Distribution

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


def cut_off(logits_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Return True for every token that cannot be sampled, `(B, V)`. `logits_BV` are tempered, in fp32.

    The rules apply one after the other, as in vLLM: tokens below `min_p` times the largest probability are cut
    (arXiv:2407.01082); then those below the `top_k` largest logits, where ties stay; then those outside the smallest
    set of the remaining top tokens with a probability of `top_p` among them (arXiv:1904.09751). A `top_k` of 0 cuts
    nothing. The most likely token stays.
    """
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    is_cut_BV = sorted_BV < sorted_BV[:, :1] + min_p_B.log()[:, None]
    last_B1 = (top_k_B.clamp(max=logits_BV.shape[1]) - 1).clamp(min=0)[:, None]
    is_cut_BV |= (sorted_BV < sorted_BV.gather(1, last_B1)) & (top_k_B > 0)[:, None]
    probs_BV = sorted_BV.masked_fill(is_cut_BV, -torch.inf).softmax(-1)
    is_cut_BV |= (probs_BV.cumsum(-1) - probs_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
    is_cut_BV[:, 0] = False
    return torch.empty_like(is_cut_BV).scatter_(1, order_BV, is_cut_BV)


def distribution_logits(logits_NV: Tensor, tokens_N: Tensor, distribution: Distribution) -> Tensor:
    """Logits whose softmax is the distribution that `tokens_N` were sampled from: tempered, and -inf where cut off.

    The cut is that of these logits, and has no gradient. A sampled token is never cut off: another version of the
    weights, or rounding, may have cut elsewhere, and its logprob stays finite.
    """
    logits_NV = logits_NV.float() / distribution.temperature
    if not distribution.is_truncated:
        return logits_NV
    with torch.no_grad():
        number = logits_NV.new_ones(len(logits_NV))
        top_k_N = torch.full_like(tokens_N, distribution.top_k)
        is_cut_NV = cut_off(logits_NV, number * distribution.top_p, top_k_N, number * distribution.min_p)
        is_cut_NV.scatter_(1, tokens_N[:, None], False)
    return logits_NV.masked_fill(is_cut_NV, -torch.inf)
