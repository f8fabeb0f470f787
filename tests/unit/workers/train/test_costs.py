"""Cost of attention against that of the rest of a model."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from tests.families import SIZES, tiny
from workers.model.decoder_layers import pair_cost


@pytest.mark.parametrize("family", ["llama3", "qwen3", "phi3", "gemma3"])
def test_it_is_what_a_counter_of_operations_counts(family: str) -> None:
    """A counter takes attention as if every token attended to all."""
    model = tiny(family)
    model.set_attn_implementation("eager")
    counted = []
    for size in (32, 64):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.arange(size)[None] % 40, use_cache=False)
        counted.append(counter.get_total_flops())
    quadratic = (counted[1] - 2 * counted[0]) / (64**2 - 2 * 32**2)
    linear = counted[0] / 32 - quadratic * 32
    assert pair_cost(model) == pytest.approx(quadratic / linear, rel=0.02)


def test_only_experts_that_compute_are_counted() -> None:
    dense, sparse = (
        MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=size, num_experts_per_tok=2)) for size in (2, 8)
    )
    assert pair_cost(dense) == pytest.approx(pair_cost(sparse), rel=0.05)  # the router has more columns
