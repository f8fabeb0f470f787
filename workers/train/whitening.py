"""Whitening of advantages over a whole step, on any split into micro-batches, updates and ranks.

Shape suffixes: as in `rlsys.batch.tensors`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.train.rank_group import RankGroup


def whiten(advantages_N: Tensor, parts_N: Sequence[Tensor], ranks: RankGroup) -> list[Tensor]:
    """Return the advantages of each part less their mean, then divided by their population standard deviation.

    `advantages_N` are those of this rank's trained tokens that count; mean and deviation are over all ranks. Sums are
    in fp64, so that the split changes nothing.
    """
    own_N = advantages_N.double()
    moments = torch.stack([torch.ones_like(own_N).sum(), own_N.sum(), own_N.square().sum()])
    num, total, squares = ranks.sum(moments).unbind()
    mean = total / num
    std = (squares / num - mean.square()).clamp(min=0).sqrt()
    return [((part_N.double() - mean) / (std + 1e-8)).float() for part_N in parts_N]
