"""Attention of queries to keys, in the forms that flash attention on the CPU lacks: scores with a soft cap, and sinks.

A soft cap replaces a score s by cap * tanh(s / cap) (Gemma 2, arXiv:2408.00118). A sink is a learned score of a head
that takes part in the softmax and has no value (gpt-oss, arXiv:2508.10925).

Shape suffixes: `B` sequences or blocks, `H` query heads, `K` key-value heads, `G` query heads of one of them, `Q`
queries, `L` keys, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_SCORES = 2**23
"""Scores of a block that are computed at a time (32 MiB in fp32): no block is a whole matrix in memory."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def dense_attention(
    query_BHQD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    mask_BHQL: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return attention as `(B, Q, H, D)`, with all scores in memory; the mask is added to the scores."""
    num_kv, num_queries, num_keys = key_BKLD.shape[1], query_BHQD.shape[2], key_BKLD.shape[2]
    query_BKQD = query_BHQD.unflatten(1, (num_kv, -1)).flatten(2, 3)  # the queries of all heads of a group
    scores_BHQL = (query_BKQD @ key_BKLD.mT * scale).unflatten(2, (-1, num_queries)).flatten(1, 2)
    if softcap is not None:
        scores_BHQL = softcap * (scores_BHQL / softcap).tanh()
    if mask_BHQL is not None:
        scores_BHQL = scores_BHQL + mask_BHQL
    if sinks_H is not None:
        sinks_BHQ1 = sinks_H[:, None, None].expand(len(query_BHQD), -1, num_queries, 1)
        scores_BHQL = torch.cat([scores_BHQL, sinks_BHQ1.to(scores_BHQL.dtype)], -1)
    weights_BHQL = scores_BHQL.softmax(-1, torch.promote_types(scores_BHQL.dtype, torch.float32))
    weights_BHQL = weights_BHQL[..., :num_keys].to(value_BKLD.dtype)
    weights_BKQL = weights_BHQL.unflatten(1, (num_kv, -1)).flatten(2, 3)
    return (weights_BKQL @ value_BKLD).unflatten(2, (-1, num_queries)).flatten(1, 2).transpose(1, 2)


def attend(
    query_BGQD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    mask_QL: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return attention of a block, and the log-sum-exp of each query's scores, `(B, G, Q)`."""
    if softcap is None:
        return _flash(query_BGQD, key_BGLD, value_BGLD, 0.0, is_causal, attn_mask=mask_QL, scale=scale)
    outs, sums = [], []
    for rows in _pieces(query_BGQD, key_BGLD):
        capped = _capped_scores(query_BGQD[:, :, rows], key_BGLD, scale, softcap)
        scores = _masked_scores(capped, mask_QL, rows, is_causal=is_causal)
        sums.append(scores.logsumexp(-1))
        outs.append((scores - sums[-1][..., None]).exp() @ value_BGLD.to(scores.dtype))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def attend_backward(
    gradient_BGQD: Tensor,
    query_BGQD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    result_BGQD: Tensor,
    lse_BGQ: Tensor,
    mask_QL: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. Result and log-sum-exp may be those of more keys and of sinks.

    With weights p = exp(score - lse) and their gradients g, the gradient of a score is p * (g - gradient . result).
    """
    if softcap is None:
        return _flash_backward(
            gradient_BGQD, query_BGQD, key_BGLD, value_BGLD, result_BGQD, lse_BGQ, 0.0, is_causal,
            attn_mask=mask_QL, scale=scale,
        )  # fmt: skip
    dtype = torch.promote_types(query_BGQD.dtype, torch.float32)
    key, value = key_BGLD.to(dtype), value_BGLD.to(dtype)
    of_query, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
    for rows in _pieces(query_BGQD, key_BGLD):
        query, gradient = query_BGQD[:, :, rows].to(dtype), gradient_BGQD[:, :, rows].to(dtype)
        capped = _capped_scores(query, key, scale, softcap)
        weights = (_masked_scores(capped, mask_QL, rows, is_causal=is_causal) - lse_BGQ[:, :, rows, None]).exp()
        inner = (gradient * result_BGQD[:, :, rows].to(dtype)).sum(-1, keepdim=True)
        of_scores = weights * (gradient @ value.mT - inner) * (1 - (capped / softcap).square()) * scale
        of_query.append(of_scores @ key)
        of_key += of_scores.mT @ query
        of_value += weights.mT @ gradient
    return torch.cat(of_query, 2), of_key, of_value


def _pieces(query_BGQD: Tensor, key_BGLD: Tensor) -> Iterator[slice]:
    """Yield parts of the queries whose scores are at most `MAX_SCORES`, or one query."""
    num_queries = query_BGQD.shape[2]
    num_rows = max(1, MAX_SCORES // (query_BGQD.shape[0] * query_BGQD.shape[1] * key_BGLD.shape[2]))
    for first in range(0, num_queries, num_rows):
        yield slice(first, min(num_queries, first + num_rows))


def _capped_scores(query_BGQD: Tensor, key_BGLD: Tensor, scale: float, softcap: float) -> Tensor:
    dtype = torch.promote_types(query_BGQD.dtype, torch.float32)
    return softcap * (query_BGQD.to(dtype) @ key_BGLD.to(dtype).mT * (scale / softcap)).tanh()


def _masked_scores(scores_BGQL: Tensor, mask_QL: Tensor | None, rows: slice, *, is_causal: bool) -> Tensor:
    if mask_QL is not None:
        return scores_BGQL + mask_QL[rows]
    if not is_causal:
        return scores_BGQL
    num_queries, num_keys = scores_BGQL.shape[-2:]
    is_later_QL = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores_BGQL.device).triu(rows.start + 1)
    return scores_BGQL.masked_fill(is_later_QL, -torch.inf)
