"""The layout of a model in training over ranks: sharded with FSDP2, computing in one precision, with checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlsys.config.schema import ActivationCheckpointing
from workers.train.activations import checkpoint_layers, decoder_layers
from workers.train.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout on one rank. The model computes in `dtype`; its shards, and those of its gradient, are in fp32.

    A fp32 model on one rank is not sharded: that would be the identity, at the cost of FSDP's hooks.
    """

    ranks: RankGroup
    dtype: torch.dtype
    device: torch.device
    activation_checkpointing: ActivationCheckpointing = "none"

    def apply(self, root: nn.Module, *, in_float32: Sequence[nn.Module] = ()) -> None:
        """Lay out `root`, the module that is called; its parameters may be on the meta device.

        Submodules `in_float32` always compute in fp32.
        """
        checkpoint_layers(root, self.activation_checkpointing)
        if self.ranks.num_ranks > 1 or self.dtype is not torch.float32:
            self._shard(root, in_float32)

    def _shard(self, root: nn.Module, in_float32: Sequence[nn.Module]) -> None:
        """Shard with one all-gather per decoder layer; the rest (embeddings, output matrix) is with the root.

        Gradients are summed over ranks, not averaged: token weights refer to the loss of all ranks.
        """
        mesh = self.ranks.mesh(self.device)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        layers = decoder_layers(root)
        for module in list(root.modules()):
            if module in in_float32:
                fully_shard(module, mesh=mesh)
            elif module in layers:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        # The root's input is a batch whose logprobs must stay fp32.
        root_policy = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard(root, mesh=mesh, mp_policy=root_policy)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
