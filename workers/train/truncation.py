"""The distribution that tokens are sampled from, computed alike by the sampler and the trainer.

Shape suffixes: `B` rows, one per token, and `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsys.types import Distribution


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
