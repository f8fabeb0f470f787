"""The layout of a model in training over ranks: sharded with FSDP2, computing in one precision, with checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlsys.config.schema import ActivationCheckpointing, GatherWeights
from workers.train.activations import checkpoint_layers, decoder_layers
from workers.train.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class RankLayout:
    """RankLayout on one rank. The model computes in `dtype`; its shards, and those of its gradient, are in fp32.

    A fp32 model on one rank is not sharded: that would be the identity, at the cost of FSDP's hooks.
    """

    ranks: RankGroup
    dtype: torch.dtype
    device: torch.device
    activation_checkpointing: ActivationCheckpointing = "none"
    gather_weights: GatherWeights = "micro_batch"

    def apply(self, root: nn.Module, *, in_float32: Sequence[nn.Module] = ()) -> None:
        """Lay out `root`, the module that is called; its parameters may be on the meta device.

        Submodules `in_float32` always compute in fp32.
        """
        checkpoint_layers(root, self.activation_checkpointing)
        if self.ranks.num_ranks > 1 or self.dtype is not torch.float32:
            self._shard(root, in_float32)

    def begin_pass(self, root: nn.Module, *, is_last: bool) -> None:
        """Prepare a forward and backward of a micro-batch, the last one of its update or not.

        With `gather_weights: update`, weights stay gathered and the gradient is not summed over ranks until the last.
        """
        if self.gather_weights == "update" and isinstance(root, FSDPModule):
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_is_last_backward(is_last)

    def _shard(self, root: nn.Module, in_float32: Sequence[nn.Module]) -> None:
        """Shard with one all-gather per decoder layer; the rest (embeddings, output matrix) is with the root.

        Gradients are summed over ranks, not averaged: token weights refer to the loss of all ranks.
        """
        options: dict[str, Any] = {"mesh": self.ranks.mesh(self.device)}
        if self.gather_weights == "update":
            options["reshard_after_forward"] = False
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        layers = decoder_layers(root)
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
