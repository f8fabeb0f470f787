"""Tensors of a model as ranks have them: persistent buffers, shards, and the part of a tensor that a rank has; and a
mode for models whose tensors have no content."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.weight_sync.manifest import Rectangle, TensorSpec


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Live buffers that belong to the module's state, by name, as the bias of a router: every rank has them whole, and
    training keeps their values. Rotary frequencies do not belong to it: they are computed."""
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, child in module.named_modules()
        for name, buffer in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
    }


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, in the same memory; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owned_part(name: str, dtype: str, tensor: Tensor) -> tuple[Rectangle, Tensor]:
    """Return the rectangle of a tensor that this rank has, and its elements, which share the tensor's memory.

    `dtype` is that in which it is published. A rank with none of the tensor has a rectangle without elements.
    """
    spec = TensorSpec(name, dtype, tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return Rectangle.whole(spec), tensor
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tensor.to_local()
    assert tuple(part.shape) == tuple(shape), f"{name}: torch keeps {tuple(part.shape)} of it here, not {shape}"
    return Rectangle(spec, tuple(offset), tuple(shape)), part


def memory_of(tensor: Tensor) -> int:
    """Identity of the memory that a tensor is a view of."""
    return tensor.untyped_storage()._cdata


class NoContent(TorchDispatchMode):
    """Lets a module on the meta device read numbers from tensors, as some rotary embeddings read the largest position:
    each is 0."""

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):  # noqa: ANN001, ANN204, ANN401  (torch's own)
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0.0
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
