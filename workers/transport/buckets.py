"""Buckets of plain bytes that a rank publishes, and tensors of received buckets, without a copy where possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from rlsys.errors import WeightsMismatch
from rlsys.weight_sync.manifest import (
    BUCKET_BYTES,
    Bucket,
    Manifest,
    Rectangle,
    TensorSpec,
    VersionPart,
    pack,
    padded_size,
)
from workers.transport.checksums import checksum, spec_of

if TYPE_CHECKING:
    from torch import Tensor


class PartLayout:
    """Places of a rank's rectangles in its buckets."""

    def __init__(self, rectangles: Iterable[Rectangle], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._buckets = pack((rectangle for rectangle in rectangles if rectangle.num_bytes), bucket_bytes)
        sizes = [sum(padded_size(piece.num_bytes) for piece in pieces) for pieces in self._buckets]
        self.bounds = [0, *accumulate(sizes)]
        """Begin of every bucket, and the end of the last."""

    @property
    def num_bytes(self) -> int:
        return self.bounds[-1]

    def write(self, memory: np.ndarray, shards: Mapping[str, tuple[Rectangle, Tensor]]) -> None:
        """Copy this rank's shards, by tensor name, into its buckets; they are cast to the published dtype.

        A shard is the rectangle that the rank has, which may be more than it publishes.
        """
        import torch

        for pieces, data in self._each(memory):
            for piece, view in _views(pieces, data):
                rectangle, shard = shards[piece.tensor.name]
                view.copy_(shard[piece.within(rectangle)], non_blocking=True)
        for device in {shard.device for _, shard in shards.values() if shard.is_cuda}:
            torch.cuda.synchronize(device)

    def part(self, memory: np.ndarray, empty: VersionPart) -> VersionPart:
        """The part `empty` with what is in `memory`."""
        buckets: list[Bucket] = []
        checksums: dict[str, int] = {}
        for pieces, data in self._each(memory):
            buckets.append(Bucket(bucket_hash(data), data.nbytes, pieces))
            for piece, view in _views(pieces, data):
                own = checksum(view, piece.tensor.shape, piece.offset)
                checksums[piece.tensor.name] = (checksums.get(piece.tensor.name, 0) + own) % 2**64
        return replace(empty, buckets=tuple(buckets), checksums=checksums)

    def _each(self, memory: np.ndarray) -> Iterator[tuple[tuple[Rectangle, ...], np.ndarray]]:
        for pieces, start, end in zip(self._buckets, self.bounds[:-1], self.bounds[1:], strict=True):
            yield pieces, memory[start:end]


class ReceivedWeights(Mapping[str, "Tensor"]):
    """Tensors of a version by name, read-only.

    A tensor that came in one piece is a view of its bucket; others are put together at each access, so that no more
    than the tensors in use are in memory twice.
    """

    def __init__(self, manifest: Manifest, buckets: Sequence[np.ndarray], source: str) -> None:
        """Raises `WeightsMismatch` that names `source` if the ranks' parts lack some of a tensor."""
        self._pieces: dict[str, list[tuple[Rectangle, Tensor]]] = {}
        for bucket, data in zip(manifest.buckets, buckets, strict=True):
            for piece, view in _views(bucket.pieces, data):
                self._pieces.setdefault(piece.tensor.name, []).append((piece, view))
        lacking = [
            name
            for name, pieces in self._pieces.items()
            if sum(prod(piece.shape) for piece, _ in pieces) != prod(pieces[0][0].tensor.shape)
        ]
        if lacking:
            detail = f"{len(lacking)} tensors are not whole, as {min(lacking)}"
            raise WeightsMismatch(source, f"serving version {manifest.version}", detail)

    def __getitem__(self, name: str) -> Tensor:
        import torch

        pieces = self._pieces[name]
        if len(pieces) == 1:
            return pieces[0][1]
        spec = pieces[0][0].tensor
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for piece, view in pieces:
            whole[piece.slices] = view
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Spec of every tensor; no tensor is put together for it."""
        return {name: pieces[0][0].tensor for name, pieces in self._pieces.items()}

    def __len__(self) -> int:
        return len(self._pieces)


def specs_in(weights: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Specs of whole tensors by name."""
    if isinstance(weights, ReceivedWeights):
        return weights.specs
    return {name: spec_of(name, tensor) for name, tensor in weights.items()}


def bucket_hash(data: np.ndarray) -> str:
    """128-bit xxh3 of the bytes of a bucket; 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


def _views(pieces: Iterable[Rectangle], data: np.ndarray) -> Iterator[tuple[Rectangle, Tensor]]:
    """Pieces of a bucket, and their elements in its bytes."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        flat = torch.from_numpy(data)
    offset = 0
    for piece in pieces:
        view = flat[offset : offset + piece.num_bytes].view(getattr(torch, piece.tensor.dtype))
        yield piece, view.reshape(piece.shape)
        offset += padded_size(piece.num_bytes)
