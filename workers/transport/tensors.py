"""Weights as buckets of plain bytes, and back without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rlsys.types import PolicyVersion
from rlsys.weights import Manifest, TensorSpec
from workers.transport.hashing import content_hash

if TYPE_CHECKING:
    from torch import Tensor

Bucket: TypeAlias = list[np.ndarray]
"""The bytes of some tensors, each a flat uint8 array: pickles out of band, so that storing it copies it once."""

BUCKET_BYTES = 256 << 20


def pack(
    version: PolicyVersion, weights: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES
) -> tuple[Manifest, list[Bucket]]:
    """Describe and lay out `weights`, in name order, in buckets of about `bucket_bytes`; host tensors are not
    copied."""
    import torch

    specs: list[list[TensorSpec]] = []
    buckets: list[Bucket] = []
    room = 0
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        if data.nbytes > room:
            specs.append([])
            buckets.append([])
            room = bucket_bytes
        specs[-1].append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        buckets[-1].append(data)
        room -= data.nbytes
    return Manifest(version, content_hash(weights), tuple(map(tuple, specs))), buckets


def unpack(manifest: Manifest, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """The tensors of a version, views of the buckets' bytes: read only."""
    return dict(_tensors(manifest, buckets))


def _tensors(manifest: Manifest, buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        for specs, bucket in zip(manifest.buckets, buckets, strict=True):
            for spec, data in zip(specs, bucket, strict=True):
                yield spec.name, torch.from_numpy(data).view(getattr(torch, spec.dtype)).reshape(spec.shape)
