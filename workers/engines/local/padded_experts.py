"""Experts of the local engine: each computes a multiple of 16 rows, so that no token's sums depend on the batch.

Shape suffixes: `T` tokens, `K` experts chosen for a token, `P` pairs of these, `F` rows that fill, `E` experts, `H`
hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PADDED_EXPERTS = "rlsys_padded"
ROW_MULTIPLE = 16
"""Rows of a matrix product come in multiples of it; see `decoder`."""


def padded_experts(self: nn.Module, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute the K experts chosen for each token and sum their outputs by weight, as the library does; rows of zeros
    fill the rows of each expert. Returns (tokens, hidden size)."""
    num_tokens, num_chosen = chosen_TK.shape
    chosen_P, weights_P = chosen_TK.flatten(), weights_TK.flatten()
    lacking_E = -torch.bincount(chosen_P) % ROW_MULTIPLE
    filled_F = torch.repeat_interleave(torch.arange(len(lacking_E), device=chosen_P.device), lacking_E)
    hidden_PH = hidden_TH.repeat_interleave(num_chosen, dim=0)
    outputs_PH = grouped_mm_experts_forward(
        self,
        torch.cat([hidden_PH, hidden_TH.new_zeros(len(filled_F), hidden_TH.shape[1])]),
        torch.cat([chosen_P, filled_F])[:, None],
        torch.cat([weights_P, weights_P.new_zeros(len(filled_F))])[:, None],
    )
    return outputs_PH[: len(chosen_P)].view(num_tokens, num_chosen, -1).sum(1)


def pad_experts(model: PreTrainedModel) -> None:
    """Make the experts of a model on the CPU compute in padded rows, where the library lets its model choose how."""
    if model.device.type == "cpu" and model._can_set_experts_implementation():
        model.set_experts_implementation(PADDED_EXPERTS)


ExpertsInterface.register(PADDED_EXPERTS, padded_experts)
