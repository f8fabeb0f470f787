"""The part of a tensor that a rank has, as a rectangle of the whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlsys.weight_sync.manifest import Rectangle, TensorSpec


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
