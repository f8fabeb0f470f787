"""Attention over one row of tokens in which the samples of a micro-batch share prefixes (`PrefixRow`).

`AttentionRow` cuts the row into blocks: each run of new tokens attends causally to itself, and everything below a run
in the tree attends to all of it. On the CPU, PyTorch's flash attention computes each block, and the blocks of a query
are joined by their log-sum-exps, forward and backward. So no matrix over the whole row exists, keys and values are not
copied for each sample, and nothing is masked except by a sliding window, which counts positions of a sample and not of
the row. Scores with a soft cap and sinks are in `attention_kernels`. On CUDA, flex attention takes the same rule as a
mask; see `docs/measurements.md` for what ran.

Shape suffixes: `R` positions of the row, `M` blocks of flex attention's mask, `B` blocks computed together, `Q` and `L`
their queries and keys, `H` query heads, `K` key-value heads, `D` width of a head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from rlsys.errors import ModelError
from workers.model.attention_kernels import attend, attend_backward, dense_attention
from workers.model.context import ContextGroup

ROW_ATTENTION = "rlsys_row"
"""Name of this attention in the configuration of a model."""
_MASK_BLOCK = 128
"""Queries and keys of a block of flex attention's mask."""
_MOST_KERNELS = 64
"""Kernels that flex attention may compile: for each kind of layer, forward with and without gradient, and backward."""
_LEAST_WIDTH = 16
"""Least width of a head that flex attention has kernels for."""
_LONG = 128
"""Runs of at least so many tokens are blocks of their own; shorter ones are computed together."""
_KNOWN = {
    "position_ids", "is_causal", "cache_position", "use_cache", "output_attentions", "output_router_logits",
    "logits_to_keep",
}  # fmt: skip
"""Arguments of the Transformers library that change no result here. Others, as a bias of positions, are refused."""
_Rows: TypeAlias = "slice | Tensor"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of the row from `start` to `end`, to which positions up to `until` may attend."""

    start: int
    end: int
    until: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def num_below(self) -> int:
        return self.until - self.end

    def pieces(self, length: int) -> Iterator[Segment]:
        """Cut it into segments of at most so many tokens: each is below those before it."""
        for start in range(self.start, self.end, length):
            yield Segment(start, min(self.end, start + length), self.until)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Queries and keys of which all, or the causal half, attend to each other."""

    queries: _Rows
    """Part of the row, or `(B, Q)` positions."""
    keys: _Rows
    """Part of the row, or `(B, L)` positions."""
    is_causal: bool
    real: Tensor | None = None
    """Indices into the flattened queries without padding, which repeats a query; None without padding."""
    mask_QL: Tensor | None = None
    """0 where a query attends to a key, else minus infinity; None where it attends to all."""

    def rows(self) -> _Rows:
        """Return the positions of the queries, without padding."""
        if isinstance(self.queries, slice):
            return self.queries
        flat = self.queries.flatten()
        return flat if self.real is None else flat.index_select(0, self.real)

    def own(self, values_BQHD: Tensor) -> Tensor:
        """Return the values of `rows()`, `(rows, ...)`."""
        flat = values_BQHD.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)


class AttentionRow:
    """Rule of a row, and the blocks that it consists of."""

    def __init__(self, until_R: Tensor, positions_R: Tensor, context: ContextGroup | None = None) -> None:
        self._until_R, self._positions_R = until_R, positions_R
        self.context: ContextGroup | None = context
        """Ranks that hold parts of the row; None if this rank holds all of it."""
        self.routing_PW: Tensor | None = None
        """Recorded experts of this rank's positions, see `MicroBatch.routing_RW`; None if there are none."""
        self._blocks: dict[int | None, list[AttentionBlock]] = {}
        self._masks: dict[int | None, BlockMask] = {}

    @classmethod
    def of(cls, until_R: Tensor, positions_R: Tensor, context: ContextGroup | None = None) -> AttentionRow:
        """Build the rule from `MicroBatch.until_R` and `MicroBatch.positions_R`, of a whole row in any case."""
        return cls(until_R, positions_R, context)

    def blocks(self, window: int | None) -> list[AttentionBlock]:
        """Return the blocks; with a `window`, tokens attend only to that many of their newest ones, themselves
        included."""
        if window is not None and window > int(self._positions_R.max()):
            window = None
        if window not in self._blocks:
            device, runs = self._until_R.device, segments_of(self._until_R.tolist())
            found = _blocks(runs, device) if window is None else self._window_blocks(runs, window)
            self._blocks[window] = list(found)
        return self._blocks[window]

    def _window_blocks(self, runs: list[Segment], window: int) -> Iterator[AttentionBlock]:
        positions_R = self._positions_R
        length = max(window, _LONG)
        for run in chain.from_iterable(whole.pieces(length) for whole in runs):
            own = slice(run.start, run.end)
            if run.length <= window:
                yield AttentionBlock(own, own, is_causal=True)
            else:
                distance_QL = positions_R[own, None] - positions_R[own]
                is_seen_QL = (distance_QL >= 0) & (distance_QL < window)
                yield AttentionBlock(own, own, is_causal=False, mask_QL=_bias(is_seen_QL))
            # Only queries that see the last key: others see none, and the sum of their weights is 0.
            below_Q = torch.arange(run.end, run.until, device=positions_R.device)
            near_Q = below_Q[positions_R[below_Q] - positions_R[run.end - 1] < window]
            if len(near_Q):
                distance_QL = positions_R[near_Q, None] - positions_R[own]
                keys_1L = torch.arange(run.start, run.end, device=positions_R.device)[None]
                yield AttentionBlock(near_Q[None], keys_1L, is_causal=False, mask_QL=_bias(distance_QL < window))

    def mask(self, window: int | None) -> BlockMask:
        """Return the rule as a mask of flex attention."""
        if window not in self._masks:
            until_R, positions_R = self._until_R, self._positions_R

            def attends(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                is_on_path = (key <= query) & (query < until_R[key])
                return is_on_path if window is None else is_on_path & (positions_R[query] - positions_R[key] < window)

            is_any_MM, is_all_MM = block_pairs(until_R, positions_R, window)
            self._masks[window] = BlockMask.from_kv_blocks(
                *_block_order(is_any_MM & ~is_all_MM), *_block_order(is_all_MM), _MASK_BLOCK, attends,
                seq_lengths=(len(until_R), len(until_R)),
            )  # fmt: skip
        return self._masks[window]


def block_pairs(until_R: Tensor, positions_R: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return for each block of `_MASK_BLOCK` queries, and of as many keys, whether some query attends to some key (this
    can be True where none does), and whether all attend to all, `(M, M)`.

    No mask over the whole row is built for it.
    """
    num = -(-len(until_R) // _MASK_BLOCK)
    place_M = torch.arange(num, device=until_R.device)
    (low_until_M, high_until_M), (low_M, high_M) = (_extremes(x_R, num) for x_R in (until_R, positions_R))
    is_before_MM = place_M[:, None] > place_M
    ends_M1 = ((place_M + 1) * _MASK_BLOCK).clamp(max=len(until_R))[:, None]
    is_any_MM = (place_M[:, None] == place_M) | (is_before_MM & (high_until_M > place_M[:, None] * _MASK_BLOCK))
    is_all_MM = is_before_MM & (low_until_M >= ends_M1)
    if window is not None:
        is_any_MM = is_any_MM & (low_M[:, None] - high_M < window)
        is_all_MM = is_all_MM & (high_M[:, None] - low_M < window)
    return is_any_MM, is_all_MM


def _extremes(x_R: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each of `num` blocks."""
    padded = torch.cat([x_R, x_R[-1:].expand(num * _MASK_BLOCK - len(x_R))]).view(num, _MASK_BLOCK)
    return padded.amin(1), padded.amax(1)


def _block_order(is_in_MM: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the blocks of keys for each block of queries, `(1, 1, M)`, and the indices of all blocks of keys, those
    first, `(1, 1, M, M)`."""
    indices_MM = torch.argsort(is_in_MM.int(), dim=1, descending=True, stable=True)
    return is_in_MM.sum(1, dtype=torch.int32)[None, None], indices_MM.int()[None, None].contiguous()


def segments_of(until: list[int]) -> list[Segment]:
    """Cut a row into runs of tokens to which the same positions may attend.

    >>> segments_of([5, 5, 3, 5, 5])  # a prompt of two tokens, then completions of one and two
    [Segment(start=0, end=2, until=5), Segment(start=2, end=3, until=3), Segment(start=3, end=5, until=5)]
    """
    starts = [i for i in range(len(until)) if i == 0 or until[i] != until[i - 1]]
    return [Segment(start, end, until[start]) for start, end in zip(starts, [*starts[1:], len(until)], strict=True)]


def _blocks(runs: list[Segment], device: torch.device) -> Iterator[AttentionBlock]:
    """Blocks of all runs; short ones of similar size together."""
    own: dict[int, list[Segment]] = defaultdict(list)
    below: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for run in runs:
        if run.length >= _LONG:
            yield AttentionBlock(slice(run.start, run.end), slice(run.start, run.end), is_causal=True)
        else:
            own[run.length.bit_length()].append(run)
    for alike in own.values():
        queries_BQ, real = _pad_spans([(run.start, run.end) for run in alike], device)
        yield AttentionBlock(queries_BQ, queries_BQ, is_causal=True, real=real)
    for run in runs:
        if run.num_below and run.length * run.num_below >= _LONG * _LONG:
            yield AttentionBlock(slice(run.end, run.until), slice(run.start, run.end), is_causal=False)
        elif run.num_below:
            below[run.length, run.num_below.bit_length()].append(run)
    for alike in below.values():
        queries_BQ, real = _pad_spans([(run.end, run.until) for run in alike], device)
        keys_BL, _ = _pad_spans([(run.start, run.end) for run in alike], device)
        yield AttentionBlock(queries_BQ, keys_BL, is_causal=False, real=real)


def _pad_spans(spans: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Positions of each span, the last one repeated up to the length of the longest; and where nothing is repeated."""
    starts_B1, ends_B1 = torch.tensor(spans)[:, :1], torch.tensor(spans)[:, 1:]
    positions_BQ = starts_B1 + torch.arange(int((ends_B1 - starts_B1).max()))
    is_real_BQ = positions_BQ < ends_B1
    real = None if is_real_BQ.all() else is_real_BQ.flatten().nonzero()[:, 0].to(device)
    return positions_BQ.minimum(ends_B1 - 1).to(device), real


def _bias(is_seen_QL: Tensor) -> Tensor:
    return torch.zeros(is_seen_QL.shape, device=is_seen_QL.device).masked_fill_(~is_seen_QL, -torch.inf)


class _JoinedBlocks(torch.autograd.Function):
    """Attention of a row as its blocks, on the CPU.

    Softmax over the keys of several blocks is the average of the blocks' results with weights exp(lse_b - lse), where
    lse is the log-sum-exp over all keys. The backward pass of flash attention needs only the joined result and lse:
    given them, each block's gradients are its shares of the whole gradients (ring attention, arXiv:2310.01889). A sink
    is one more block, whose value is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query_RHD: Tensor,
        key_RKD: Tensor,
        value_RKD: Tensor,
        sinks_H: Tensor | None,
        blocks: list[AttentionBlock],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        num_kv, summed = key_RKD.shape[1], torch.promote_types(query_RHD.dtype, torch.float32)
        joined_RHD = query_RHD.new_zeros(query_RHD.shape, dtype=summed)
        lse_RH = query_RHD.new_full(query_RHD.shape[:2], -torch.inf, dtype=summed)
        for block in blocks:
            out, lse = attend(
                _heads(query_RHD, block.queries, num_kv), _heads(key_RKD, block.keys, num_kv, query_RHD.shape[1]),
                _heads(value_RKD, block.keys, num_kv, query_RHD.shape[1]), _cast(block.mask_QL, query_RHD.dtype),
                is_causal=block.is_causal, scale=scale, softcap=softcap,
            )  # fmt: skip
            rows, own = block.rows(), block.own(_tokens(out, num_kv)).to(summed)
            own_lse = block.own(_tokens(lse[..., None], num_kv))[..., 0]
            before = _take_rows(lse_RH, rows)
            total = torch.logaddexp(before, own_lse)
            share, own_share = (before - total).exp_(), (own_lse - total).exp_()
            _put(lse_RH, rows, total)
            _put(
                joined_RHD, rows, (_take_rows(joined_RHD, rows) * share[..., None]).addcmul_(own, own_share[..., None])
            )
        if sinks_H is not None:
            total = torch.logaddexp(lse_RH, sinks_H.to(summed))
            joined_RHD *= (lse_RH - total).exp_()[..., None]
            lse_RH = total
        result_RHD = joined_RHD.to(query_RHD.dtype)
        ctx.save_for_backward(query_RHD, key_RKD, value_RKD, sinks_H, result_RHD, lse_RH)
        ctx.blocks, ctx.scale, ctx.softcap = blocks, scale, softcap
        return result_RHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gradient_RHD,) = gradients
        query_RHD, key_RKD, value_RKD, sinks_H, result_RHD, lse_RH = ctx.saved_tensors
        num_kv, num_heads = key_RKD.shape[1], query_RHD.shape[1]
        sums = [t.new_zeros(t.shape, dtype=lse_RH.dtype) for t in (query_RHD, key_RKD, value_RKD)]
        for block in ctx.blocks:
            gradient = _heads(gradient_RHD, block.queries, num_kv, real=block.real)
            lse = _heads(lse_RH[..., None], block.queries, num_kv)[..., 0]
            shares = attend_backward(
                gradient, _heads(query_RHD, block.queries, num_kv),
                _heads(key_RKD, block.keys, num_kv, num_heads), _heads(value_RKD, block.keys, num_kv, num_heads),
                _heads(result_RHD, block.queries, num_kv), lse, _cast(block.mask_QL, query_RHD.dtype),
                is_causal=block.is_causal, scale=ctx.scale, softcap=ctx.softcap,
            )  # fmt: skip
            for whole, share, rows in zip(sums, shares, (block.queries, block.keys, block.keys), strict=True):
                one_each = _tokens(share, num_kv)
                if whole is not sums[0]:
                    one_each = one_each.unflatten(2, (num_kv, -1)).sum(3)
                if isinstance(rows, slice):
                    whole[rows] += one_each[0]
                else:
                    whole.index_add_(0, rows.flatten(), one_each.flatten(0, 1).to(whole.dtype))
        of_sinks_H = None
        if sinks_H is not None:
            inner_RH = (gradient_RHD.to(lse_RH.dtype) * result_RHD.to(lse_RH.dtype)).sum(-1)
            of_sinks_H = -((sinks_H.to(lse_RH.dtype) - lse_RH).exp() * inner_RH).sum(0).to(sinks_H.dtype)
        return *(t.to(query_RHD.dtype) for t in sums), of_sinks_H, None, None, None


def _take_rows(x_RHD: Tensor, rows: _Rows) -> Tensor:
    return x_RHD[rows] if isinstance(rows, slice) else x_RHD.index_select(0, rows)


def _put(x_RHD: Tensor, rows: _Rows, values: Tensor) -> None:
    if isinstance(rows, slice):
        x_RHD[rows] = values
    else:
        x_RHD.index_copy_(0, rows, values)


def _heads(x_RHD: Tensor, rows: _Rows, num_kv: int, num_heads: int = 0, real: Tensor | None = None) -> Tensor:
    """Rows as `(B * K, H / K, Q, D)`. Key-value heads are repeated to `num_heads` without a copy. All rows but the
    `real` ones become 0."""
    if isinstance(rows, slice):
        x_BQHD = x_RHD[rows][None]
    else:
        x_BQHD = x_RHD.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        if real is not None:
            is_padding = torch.ones(rows.numel(), dtype=torch.bool).index_fill_(0, real, False)
            x_BQHD = x_BQHD.masked_fill(is_padding.view(rows.shape)[..., None, None], 0.0)
    x = x_BQHD.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return x.expand(-1, num_heads // num_kv, -1, -1) if num_heads else x


def _tokens(x: Tensor, num_kv: int) -> Tensor:
    """`(B, Q, H, D)` from `(B * K, H / K, Q, D)`."""
    return x.unflatten(0, (-1, num_kv)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _cast(mask_QL: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask_QL is None else mask_QL.to(dtype)


@cache
def _compiled_flex(*, is_capped: bool) -> Callable[..., tuple[Tensor, AuxOutput]]:
    """Compile once for rows of any length. With a soft cap, PyTorch cannot, and begins with a kernel for one length."""
    # Beyond this limit, flex attention would silently compute all scores of a row at once.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_KERNELS)
    return torch.compile(flex_attention, dynamic=None if is_capped else True)


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row: AttentionRow | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention of a model's layer, in the form of the Transformers library; by the mask without a `row`.

    `s_aux` are sinks, one for each head. Raises `ModelError` for a model whose attention has parts that are not known
    here.
    """
    if row is None:
        given = {"scale": scaling, "softcap": softcap, "sinks_H": s_aux}
        return dense_attention(query, key, value, attention_mask, **given), None
    if unknown := sorted(name for name, given in others.items() if name not in _KNOWN and given is not None):
        raise ModelError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown)}, which is not supported: choose "
            "another model"
        )
    if attention_mask is not None and attention_mask.numel() > 1:
        raise ModelError(
            f"{type(module).__name__} makes a mask of its own, which rows do not take part in: choose another model"
        )
    if key.shape[-1] != value.shape[-1]:
        raise ModelError(
            f"{type(module).__name__} has values of another width than keys, which is not supported: choose another "
            "model"
        )
    rule = _Rule(sliding_window or None, scaling, softcap)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if row.context is None:
        return _attention(q, k, v, s_aux, row, rule)[None], None
    q, k, v = map(row.context.to_heads, (q, k, v))
    sinks = None if s_aux is None else row.context.own(s_aux)
    return row.context.to_positions(_attention(q, k, v, sinks, row, rule))[None], None


class _Rule(NamedTuple):
    """What a layer does with scores."""

    window: int | None
    scale: float
    softcap: float | None


def _attention(
    query_RHD: Tensor, key_RKD: Tensor, value_RKD: Tensor, sinks_H: Tensor | None, row: AttentionRow, rule: _Rule
) -> Tensor:
    if query_RHD.device.type != "cuda":
        blocks = row.blocks(rule.window)
        joined = _JoinedBlocks.apply(query_RHD, key_RKD, value_RKD, sinks_H, blocks, rule.scale, rule.softcap)
        return cast("Tensor", joined)
    query, key, value = (x.transpose(0, 1)[None] for x in (query_RHD, key_RKD, value_RKD))
    return _flex(query, key, value, sinks_H, row.mask(rule.window), rule)[0].transpose(0, 1)


def _flex(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, mask: BlockMask, rule: _Rule) -> Tensor:
    """Flex attention of `(1, H, R, D)`."""
    cap, width = rule.softcap, query.shape[-1]
    if width < _LEAST_WIDTH:
        query, key, value = (nn.functional.pad(x, (0, _LEAST_WIDTH - width)) for x in (query, key, value))

    def cap_score(score: Tensor, *_indices: Tensor) -> Tensor:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    found, aux = _compiled_flex(is_capped=cap is not None)(
        query, key, value, block_mask=mask, scale=rule.scale, enable_gqa=True,
        score_mod=None if cap is None else cap_score, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    found = found[..., :width]
    if sinks_H is None:
        return found
    share = torch.sigmoid(cast("Tensor", aux.lse) - sinks_H[:, None].float())
    return found * share[..., None].to(found.dtype)


def use_row_attention(model: PreTrainedModel) -> None:
    """Let the model's layers attend by a row where they are given one, and by a mask where not."""
    if model.config._attn_implementation != ROW_ATTENTION:
        model.set_attn_implementation(ROW_ATTENTION)


AttentionInterface.register(ROW_ATTENTION, row_attention)
AttentionMaskInterface.register(ROW_ATTENTION, eager_mask)
