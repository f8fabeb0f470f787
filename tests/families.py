"""Tiny random models of the families that people train."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models import VOCAB
from workers.model.model_tensors import persistent_buffers

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
WINDOW = 8
"""Sliding window of the families that have one; shorter than the samples of tests."""
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
ALTERNATING: dict[str, Any] = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
HEADS: dict[str, Any] = {"head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
BIASED_EXPERTS: dict[str, Any] = {
    **HEADS, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
"""Their routers have a bias, which is a buffer."""
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}

_SETTINGS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": LONG_ROPE},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**ALTERNATING, "logit_scale": 0.25},
    "diffllama": {},
    "dots1": {**BIASED_EXPERTS, "n_shared_experts": 1},
    "exaone_moe": BIASED_EXPERTS,
    "gemma2": {**HEADS, **ALTERNATING, **CAPPED, "query_pre_attn_scalar": 16},
    "gemma3": {**HEADS, **ALTERNATING, "query_pre_attn_scalar": 16},
    "glm4_moe": BIASED_EXPERTS,
    "gpt_neox": {},
    "gpt_oss": {**HEADS, **ALTERNATING, **LOCAL_EXPERTS},
    "granite": {
        "logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
    },
    "granitemoe": {**LOCAL_EXPERTS, "logits_scaling": 4.0, "attention_multiplier": 0.2},
    "hy_v3": {
        **HEADS, **EXPERTS, "first_k_dense_replace": 1, "expert_hidden_dim": 24, "route_norm": True, "qk_norm": True,
    },
    "llama3": {"rope_parameters": LONG_ROPE},
    "minimax_m2": {
        **HEADS, **LOCAL_EXPERTS, "rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    "mistral": SLIDING,
    "mixtral": LOCAL_EXPERTS,
    "olmo2": {},
    "olmo3": ALTERNATING,
    "phi": {},
    "phi3": SLIDING,
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": HEADS,
    "qwen3_moe": {**HEADS, **EXPERTS},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": BIASED_EXPERTS,
}  # fmt: skip
_MODEL_TYPES = {"llama3": "llama", "gemma3": "gemma3_text"}
"""Names of families in the Transformers library, where they differ."""
FAMILIES = sorted(_SETTINGS)
VLLM_FAMILIES = ["gemma3", "llama3", "mistral", "phi3", "qwen2"]
"""Families that are sampled by vLLM in the tests: a start takes most of a minute."""
SERVED_FAMILIES = [
    "mixtral", "cohere", "exaone_moe", "gemma2", "gemma3", "glm4_moe", "gpt_oss", "granite", "granitemoe", "hy_v3",
    "llama3", "mistral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
]  # fmt: skip
"""Families that vLLM has models of its own for, which compute on a CPU what the trainer does."""
SPLIT_FAMILIES = [
    "gemma3", "llama3", "qwen3_moe", "gemma2", "gpt_oss", "granite", "mistral", "mixtral", "olmo2", "phi3", "qwen2",
    "qwen3",
]  # fmt: skip
"""Families that the tests split over ranks."""
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.05}
"""Sizes that vLLM has kernels for on a CPU. With larger weights, a wide model is certain of each token."""


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """Build a model of a family, always the same, of other sizes with `changes`. No weight is 0 or 1: norms, biases,
    sinks and buffers are random too."""
    torch.manual_seed(0)
    kind = _MODEL_TYPES.get(family, family)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | _SETTINGS[family] | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        for buffer in persistent_buffers(model).values():
            buffer += 0.3 * torch.randn_like(buffer)
    return model.eval()
