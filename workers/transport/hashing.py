"""The content hash of a set of weights: equal on both sides of every transfer, or the transfer failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor


def content_hash(weights: Mapping[str, Tensor]) -> str:
    """128-bit xxh3 over name, dtype, shape and bytes of every tensor, in name order; 32 hex digits.

    Guards against corruption and mix-ups, not against an adversary. Tensors on a device are copied to the host.
    """
    import torch

    total = xxhash.xxh3_128()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return total.hexdigest()
