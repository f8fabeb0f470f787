"""Persistent buffers: tensors of a model's files that are not trained, as the bias of a router.

Every rank has them whole, and training keeps their values.
"""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Live buffers that belong to the module's state, by name. Rotary frequencies do not: they are computed."""
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, child in module.named_modules()
        for name, buffer in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
    }
