"""Checksums of tensors that add up: over the rectangles of a tensor, in whatever layout it is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from rlsys.weight_sync.manifest import TensorSpec, content_hash

if TYPE_CHECKING:
    from torch import Tensor

WORD_BYTES = 4
CHUNK_WORDS = 1 << 16
"""Words that are summed at a time, so that they stay in a core's cache."""


def checksum(part: Tensor, shape: Sequence[int], offset: Sequence[int]) -> int:
    """Checksum of the rectangle `part`, which lies at `offset` in a tensor of `shape`.

    The tensor is a matrix of 32-bit words x_rw, whose rows are all dimensions but the last; the checksum is
    sum_rw a_r b_w x_rw mod 2^64, with odd pseudo-random a and b. So the checksums of the rectangles of a tensor add up
    to that of the tensor. A change of one element always changes it; two changes cancel each other with a probability
    of 2^-32 at the most.
    """
    import torch

    if not part.numel():
        return 0
    shape, offset, part = (1, *shape), (0, *offset), part.detach()[None]
    matrix = part.reshape(-1, part.shape[-1])
    lead = offset[-1] * part.element_size() % WORD_BYTES
    first_word = offset[-1] * part.element_size() // WORD_BYTES
    words = _words(matrix, lead)
    b_W = _multipliers(1, first_word + words.shape[1])[first_word:].to(part.device)
    a_R = _multipliers(0, prod(shape[:-1]))[_rows(shape, offset, part.shape)].to(part.device)
    total, step = torch.zeros((), dtype=torch.int64, device=part.device), max(1, CHUNK_WORDS // words.shape[1])
    for start in range(0, len(words), step):
        some = words[start : start + step].to(torch.int64)
        of_rows = torch.mv(some, b_W) if some.device.type == "cpu" else (some * b_W).sum(1)
        total += (of_rows * a_R[start : start + step]).sum()
    return int(total) % 2**64


def checksum_of(tensor: Tensor) -> int:
    """Checksum of a whole tensor."""
    return checksum(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Return the spec under which a whole tensor is published."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """Content hash of whole tensors by name: that of the version which consists of them."""
    return content_hash({spec_of(name, tensor): checksum_of(tensor) for name, tensor in weights.items()})


def _words(matrix: Tensor, lead: int) -> Tensor:
    """The rows as 32-bit words, of which the first begins `lead` bytes before the row; bytes around a row are 0."""
    import torch

    num_bytes = matrix.shape[1] * matrix.element_size()
    if not lead and num_bytes % WORD_BYTES == 0:
        is_aligned = matrix.storage_offset() * matrix.element_size() % WORD_BYTES == 0
        return (matrix.contiguous() if is_aligned else matrix.clone(memory_format=torch.contiguous_format)).view(
            torch.int32
        )
    width = -(-(lead + num_bytes) // WORD_BYTES) * WORD_BYTES
    padded = torch.zeros(len(matrix), width, dtype=torch.uint8, device=matrix.device)
    padded[:, lead : lead + num_bytes] = matrix.contiguous().view(torch.uint8)
    return padded.view(torch.int32)


def _rows(shape: Sequence[int], offset: Sequence[int], part: Sequence[int]) -> Tensor:
    """Indices, in the matrix of the whole tensor, of the rows of a part."""
    import torch

    rows = torch.zeros(1, dtype=torch.int64)
    for size, start, count in zip(shape[:-1], offset[:-1], part[:-1], strict=True):
        rows = (rows[:, None] * size + torch.arange(start, start + count)).reshape(-1)
    return rows


def _multipliers(kind: int, count: int) -> Tensor:
    """The first `count` odd multipliers of words (1) or rows (0)."""
    return _all_multipliers(kind, 1 << max(count - 1, 1).bit_length())[:count]


@lru_cache(maxsize=64)
def _all_multipliers(kind: int, count: int) -> Tensor:
    """SplitMix64 of the index."""
    import torch

    x = (np.arange(count, dtype=np.uint64) + np.uint64(1 + (kind << 40))) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64))
