"""Context parallelism: ranks that each hold some positions of a row, and some of its heads during attention.

Before attention, ranks exchange positions for heads, and after it heads for positions (Ulysses, arXiv:2309.14509). So
each rank computes whole rows for its heads, and shared prefixes and windows work as on one rank. Ring attention would
instead pass keys and values around, and gives ranks unequal work under the causal rule.

Shape suffixes: as in `rlsys.batch.tensors`, and `P` positions of one rank, `H` heads, `G` heads of one rank, `D` width
of a head, `M` trained tokens whose preceding state one rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlsys.batch.samples import NOT_RECORDED
from rlsys.batch.tensors import MicroBatch


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that hold parts of the same rows, as one of them sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def pad_row(self, mb: MicroBatch) -> MicroBatch:
        """Extend the row so that all ranks hold equally many positions; nothing attends to the new ones."""
        missing = -len(mb.tokens_R) % self.size
        if not missing:
            return mb
        end = len(mb.tokens_R) + missing
        zeros, routing_RW = mb.tokens_R.new_zeros(missing), mb.routing_RW
        if routing_RW is not None:
            routing_RW = pad(routing_RW, (0, 0, 0, missing), value=NOT_RECORDED)
        return replace(
            mb,
            tokens_R=torch.cat([mb.tokens_R, zeros]),
            positions_R=torch.cat([mb.positions_R, zeros]),
            until_R=torch.cat([mb.until_R, zeros + end]),
            routing_RW=routing_RW,
        )

    def own(self, x_R: Tensor) -> Tensor:
        """Return this rank's part of a padded row."""
        return x_R.chunk(self.size)[self.rank]

    def own_tokens(self, mb: MicroBatch) -> Tensor:
        """Return which trained tokens of a padded micro-batch follow a state of this rank: M indices."""
        num_own = len(mb.tokens_R) // self.size
        return (mb.before_N // num_own == self.rank).nonzero()[:, 0]

    def gather_tokens(self, own_M: Tensor, mb: MicroBatch) -> Tensor:
        """Return values of all trained tokens, `(N,)`, from those that each rank has computed.

        Every rank computes the whole loss from them, so the gradient of `own_M` is this rank's part, and no sum.
        """
        return _Joined.apply(own_M, self.own_tokens(mb), len(mb.targets_N), self.group)

    def to_heads(self, x_PHD: Tensor) -> Tensor:
        """Give positions for heads: `(R, G, D)`. Fewer heads than ranks are repeated."""
        num_heads = x_PHD.shape[1]
        if num_heads < self.size:
            x_PHD = x_PHD.repeat_interleave(self.size // num_heads, 1)
        parts = x_PHD.unflatten(1, (self.size, -1)).transpose(0, 1)
        return _Exchange.apply(parts, self.group).flatten(0, 1)

    def to_positions(self, x_RGD: Tensor) -> Tensor:
        """Give heads for positions: `(P, H, D)`."""
        return _Exchange.apply(x_RGD.unflatten(0, (self.size, -1)), self.group).transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Send the i-th part of the first dimension to rank i, and receive one part of every rank."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_M: Tensor, indices_M: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        whole_N = own_M.new_zeros(size).index_copy_(0, indices_M, own_M)
        dist.all_reduce(whole_N, group=group)  # of each entry, all but one rank have 0
        ctx.save_for_backward(indices_M)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        (indices_M,) = ctx.saved_tensors
        return gradients[0].index_select(0, indices_M), None, None, None
