"""Token sampling: deterministic per request, independent of the other requests in the batch.

Token t of a request is the inverse of its distribution's CDF at one uniform number, which is a hash of (seed, t). No
random generator is used, so tokens do not depend on the order of requests or on the rest of the batch.

Shape suffixes: `B` rows, one request each; `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNIFORM_BITS = 24  # all that float32 represents exactly, so that a number just below 1 stays below 1


def as_int64(number: int) -> int:
    """The signed 64-bit integer with the same low 64 bits, for tensors of seeds."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = as_int64(0x9E3779B97F4A7C15)
_MIX_1 = as_int64(0xBF58476D1CE4E5B9)
_MIX_2 = as_int64(0x94D049BB133111EB)


def uniform(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Numbers in [0, 1), float32: the hash of each (seed, position), both int64.

    SplitMix64 by counter (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
    mixed seed selects the stream, and the position is the counter.
    """
    bits = _mix(_mix(seeds_B) + (positions_B + 1) * _GAMMA)
    return _shift(bits, 64 - _UNIFORM_BITS).float() * 2.0**-_UNIFORM_BITS


def draw(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with its logprob under the sampling distribution, computed in float32.

    The distribution is softmax(logits / temperature), cut to its nucleus and renormalised where top_p < 1. Temperature
    0 takes the most likely token, with logprob 0.
    """
    is_greedy_B = temperature_B == 0
    logits_BV = logits_BV.float() / torch.where(is_greedy_B, 1.0, temperature_B)[:, None]
    if bool((top_p_B < 1).any()):
        logits_BV = _nucleus(logits_BV, top_p_B)
    logprobs_BV = logits_BV.log_softmax(-1)
    cdf_BV = logprobs_BV.exp().cumsum(-1)
    tokens_B1 = torch.searchsorted(cdf_BV, uniform_B[:, None] * cdf_BV[:, -1:], right=True)
    logprobs_B = logprobs_BV.gather(1, tokens_B1).squeeze(1)
    tokens_B = tokens_B1.squeeze(1)
    if bool(is_greedy_B.any()):
        tokens_B = torch.where(is_greedy_B, logits_BV.argmax(-1), tokens_B)
        logprobs_B = torch.where(is_greedy_B, 0.0, logprobs_B)
    return tokens_B, logprobs_B


def _nucleus(logits_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Set logits outside the smallest set of top tokens with probability >= top_p to -inf (arXiv:1904.09751)."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probs_BV = sorted_BV.softmax(-1)
    is_cut_BV = (probs_BV.cumsum(-1) - probs_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
    is_cut_BV[:, 0] = False
    return logits_BV.scatter(1, order_BV, sorted_BV.masked_fill(is_cut_BV, -torch.inf))


def _mix(state_B: Tensor) -> Tensor:
    """Finalizer of SplitMix64; int64 arithmetic wraps."""
    state_B = (state_B ^ _shift(state_B, 30)) * _MIX_1
    state_B = (state_B ^ _shift(state_B, 27)) * _MIX_2
    return state_B ^ _shift(state_B, 31)


def _shift(bits_B: Tensor, by: int) -> Tensor:
    """Logical shift to the right: `>>` of int64 copies the sign."""
    return (bits_B >> by) & ((1 << (64 - by)) - 1)
