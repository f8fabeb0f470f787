"""Hashes of weights. They differ between the two sides only if a transfer failed.

They detect corruption and mix-ups, not an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def content_hash(weights: Mapping[str, Tensor]) -> str:
    """128-bit xxh3 over name, dtype, shape and bytes of every tensor, in name order; 32 hex digits.

    Tensors on a device are copied to the host.
    """
    import torch

    total = xxhash.xxh3_128()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return total.hexdigest()


def bucket_hash(data: np.ndarray) -> str:
    """128-bit xxh3 of the bytes of a bucket; 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(memoryview(data))  # pyright: ignore[reportArgumentType]
