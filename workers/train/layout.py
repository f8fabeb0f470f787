"""The layout of a model in training over ranks: sharded with FSDP2, computing in one precision, with checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlsys.config.train_section import NO_SAVINGS, MemorySavings
from workers.model.context import ContextGroup
from workers.model.decoder_layers import checkpoint_layers, decoder_layers
from workers.model.split_layers import check_splits, experts_of, split_experts, split_tensors
from workers.train.rank_group import RankGroup


@dataclass(frozen=True)
class RankLayout:
    """Layout on one rank, by the mesh of `ranks`. The model computes in `dtype`; its shards, and those of its gradient,
    are in fp32.

    A fp32 model on one rank is not sharded: that would be the identity, at the cost of FSDP's hooks.
    """

    ranks: RankGroup
    dtype: torch.dtype
    device: torch.device
    savings: MemorySavings = NO_SAVINGS

    def apply(self, root: nn.Module, *, in_float32: Sequence[nn.Module] = ()) -> None:
        """Lay out `root`, the module that is called; its parameters may be on the meta device.

        Submodules `in_float32` always compute in fp32. Raises `ModelError` if the mesh cannot split the model.
        """
        mesh, model = self.ranks.mesh, _model_in(root)
        if model is not None:
            check_splits(model, mesh)
            if mesh.expert > 1:
                split_experts(model, self._expert_mesh["expert"], self._mesh["tensor"] if mesh.tensor > 1 else None)
            if mesh.tensor > 1:
                split_tensors(model, self._mesh["tensor"])
        checkpoint_layers(root, self.savings.activation_checkpointing)
        if self.ranks.num_ranks > 1 or self.dtype is not torch.float32 or self.savings.offload:
            self._shard(root, in_float32)

    @property
    def state_device(self) -> torch.device:
        """Device of shards, gradients and optimizer state."""
        return torch.device("cpu") if self.savings.offload else self.device

    @cached_property
    def context(self) -> ContextGroup | None:
        """Ranks that hold parts of the same rows. Collective."""
        mesh = self.ranks.mesh
        if mesh.context == 1:
            return None
        groups = self.ranks.device_mesh(self.device, batch=mesh.num_batches, context=mesh.context, tensor=mesh.tensor)[
            "context"
        ]
        return ContextGroup(groups.get_group(), groups.get_local_rank(), mesh.context)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return True on one of the ranks that hold the same part of a parameter, for sums over all ranks."""
        if not isinstance(parameter, DTensor):
            return self.ranks.rank == 0
        mesh = parameter.device_mesh
        names, own = cast("tuple[str, ...]", mesh.mesh_dim_names), cast("list[int]", mesh.get_coordinate())
        if any(place.is_replicate() and index for place, index in zip(parameter.placements, own, strict=True)):
            return False
        is_split = "tensor" in names or "expert" in names
        return is_split or self.ranks.rank % self.ranks.mesh.tensor == 0

    @cached_property
    def _mesh(self) -> DeviceMesh:
        mesh = self.ranks.mesh
        sizes = {"replicate": mesh.replicate, "shard": mesh.num_shards, "tensor": mesh.tensor}
        return self.ranks.device_mesh(self.device, **_without_ones(sizes))

    @cached_property
    def _expert_mesh(self) -> DeviceMesh:
        mesh = self.ranks.mesh
        of_copy = mesh.num_shards * mesh.tensor // mesh.expert
        sizes = {"replicate": mesh.replicate, "shard": of_copy, "expert": mesh.expert}
        return self.ranks.device_mesh(self.device, **_without_ones(sizes))

    def begin_pass(self, root: nn.Module, *, is_last: bool) -> None:
        """Prepare a forward and backward of a micro-batch, the last one of its update or not.

        With `gather_weights: update`, weights stay gathered and the gradient is not summed over ranks until the last.
        """
        if self.savings.gather_weights == "update" and isinstance(root, FSDPModule):
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_is_last_backward(is_last)

    def _shard(self, root: nn.Module, in_float32: Sequence[nn.Module]) -> None:
        """Shard with one all-gather per decoder layer; the rest (embeddings, output matrix) is with the root.

        Gradients are summed over ranks, not averaged: token weights refer to the loss of all ranks.
        """
        options: dict[str, Any] = {"mesh": _sharding(self._mesh)}
        if self.savings.gather_weights == "update":
            options["reshard_after_forward"] = False
        if self.savings.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        layers = decoder_layers(root)
        experts = experts_of(root) if self.ranks.mesh.expert > 1 else []
        for module in experts:
            of_experts: dict[str, Any] = {**options, "mesh": _sharding(self._expert_mesh)}
            fully_shard(module, mp_policy=policy, **of_experts)
        for module in list(root.modules()):
            if module in in_float32:
                fully_shard(module, **options)
            elif module in layers:
                fully_shard(module, mp_policy=policy, **options)
        # The root's input is a batch whose logprobs must stay fp32.
        root_policy = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard(root, mp_policy=root_policy, **options)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def _without_ones(sizes: dict[str, int]) -> dict[str, int]:
    """Leave out dimensions of one rank, except `shard`, which FSDP needs."""
    return {name: size for name, size in sizes.items() if size > 1 or name == "shard"}


def _sharding(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions that FSDP2 shards and replicates over."""
    names = tuple(name for name in cast("tuple[str, ...]", mesh.mesh_dim_names) if name in ("replicate", "shard"))
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def _model_in(root: nn.Module) -> PreTrainedModel | None:
    return next((module for module in root.modules() if isinstance(module, PreTrainedModel)), None)
