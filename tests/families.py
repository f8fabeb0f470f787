"""Tiny random models of the families that people train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.models import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
WINDOW = 8
"""Sliding window of the families that have one; shorter than the samples of tests."""


def _with_heads(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"head_dim": 16, **sizes}


def _with_experts(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **sizes}


_MAKERS: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "llama3": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=LONG_ROPE)),
    "qwen2": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)),
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(**_with_heads(sizes))),
    "qwen3_moe": lambda sizes: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_with_experts(sizes))),
    "gemma3": lambda sizes: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_with_heads(sizes), sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "mistral": lambda sizes: MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW)),
    "mixtral": lambda sizes: MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)),
    "phi3": lambda sizes: Phi3ForCausalLM(Phi3Config(**sizes)),
}
FAMILIES = sorted(_MAKERS)


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """Build a model of a family, always the same, of other sizes with `changes`."""
    torch.manual_seed(0)
    return _MAKERS[family](SIZES | changes).eval()
