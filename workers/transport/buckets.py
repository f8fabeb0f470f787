"""Weights as buckets of plain bytes, and back without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from rlsys.types import PolicyVersion
from rlsys.weight_sync.sync import ALIGNMENT, Bucket, BucketPiece, Manifest, Probe, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


def lay_out(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[tuple[BucketPiece, ...]]:
    """Pieces of every bucket: tensors in name order, in buckets of up to `bucket_bytes`.

    A larger tensor gets its own buckets. The layout depends only on names, dtypes and shapes, so an unchanged tensor
    leaves its bucket unchanged.
    """
    bucket_bytes = padded(bucket_bytes)
    buckets: list[tuple[BucketPiece, ...]] = []
    room = 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        num_bytes = _num_bytes(spec)
        if num_bytes > bucket_bytes:
            starts = range(0, num_bytes, bucket_bytes)
            buckets += [(BucketPiece(spec, start, min(bucket_bytes, num_bytes - start)),) for start in starts]
            room = 0
        else:
            if not buckets or num_bytes > room:
                buckets.append(())
                room = bucket_bytes
            buckets[-1] += (BucketPiece(spec, 0, num_bytes),)
            room -= padded(num_bytes)
    return buckets


def padded(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Snapshot:
    """Host memory for one version, laid out in buckets: allocated once, written at every publish."""

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int, *, pin: bool = False) -> None:
        """`pin`: page-locked memory, into which a GPU copies faster."""
        import torch

        self._layout = lay_out(specs, bucket_bytes)
        sizes = [sum(padded(piece.num_bytes) for piece in pieces) for pieces in self._layout]
        self._bounds = [0, *accumulate(sizes)]
        whole = torch.zeros(self._bounds[-1], dtype=torch.uint8, pin_memory=pin)
        self._bytes: np.ndarray = whole.numpy()
        self.tensors: dict[str, Tensor] = {}
        """Tensors to write into, by name."""
        for begin, pieces in zip(self._bounds, self._layout, strict=False):
            offsets = accumulate((padded(piece.num_bytes) for piece in pieces), initial=begin)
            for offset, piece in zip(offsets, pieces, strict=False):
                if piece.start == 0:
                    spec = piece.tensor
                    flat = whole[offset : offset + _num_bytes(spec)]  # its other pieces follow without a gap
                    self.tensors[spec.name] = flat.view(getattr(torch, spec.dtype)).reshape(spec.shape)

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    def bucket(self, index: int) -> np.ndarray:
        """Bytes of a bucket, without a copy."""
        return self._bytes[self._bounds[index] : self._bounds[index + 1]]

    def manifest(self, version: PolicyVersion, probe: Probe | None = None, base: str | None = None) -> Manifest:
        """Manifest of the current content, as `version`. `base`: see `Manifest.base`."""
        buckets = [(self.bucket(i), pieces) for i, pieces in enumerate(self._layout)]
        named = tuple(Bucket(bucket_hash(data), data.nbytes, pieces) for data, pieces in buckets)
        return Manifest(version, content_hash(self.tensors), named, probe, base)


def unpack(manifest: Manifest, buckets: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Tensors of a version: read-only views of the buckets' bytes. Only a tensor in several buckets is copied."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        flat = [torch.from_numpy(bucket) for bucket in buckets]
    found: dict[TensorSpec, list[Tensor]] = {}
    for bucket, data in zip(manifest.buckets, flat, strict=True):
        offset = 0
        for piece in bucket.pieces:
            found.setdefault(piece.tensor, []).append(data[offset : offset + piece.num_bytes])
            offset += padded(piece.num_bytes)
    wholes = {spec: parts[0] if len(parts) == 1 else torch.cat(parts) for spec, parts in found.items()}
    return {spec.name: whole.view(getattr(torch, spec.dtype)).reshape(spec.shape) for spec, whole in wholes.items()}


def _num_bytes(spec: TensorSpec) -> int:
    import torch

    return prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def content_hash(weights: Mapping[str, Tensor]) -> str:
    """128-bit xxh3 over name, dtype, shape and bytes of every tensor, in name order; 32 hex digits.

    Tensors on a device are copied to the host.
    """
    import torch

    total = xxhash.xxh3_128()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def bucket_hash(data: np.ndarray) -> str:
    """128-bit xxh3 of the bytes of a bucket; 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)
