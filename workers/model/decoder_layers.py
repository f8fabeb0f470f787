"""The decoder layers of a model: what their forward keeps for the backward, and what they cost."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel

from rlsys.config.train_section import ActivationCheckpointing

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def decoder_layers(root: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of the models in `root`, as the Transformers library names their classes."""
    models = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    return [module for module in root.modules() if type(module).__name__ in names]


def head_width(text: PreTrainedConfig) -> int:
    """Return the width of one attention head of a language model."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def num_key_value_heads(text: PreTrainedConfig) -> int:
    """Return the number of heads of keys and values; models without grouped queries have one for each query head."""
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def num_cached_values(text: PreTrainedConfig) -> int:
    """Return the number of key and value elements that a cache keeps for each token, over all layers."""
    return 2 * text.num_hidden_layers * num_key_value_heads(text) * head_width(text)


def checkpoint_layers(root: nn.Module, how: ActivationCheckpointing) -> None:
    """Let each decoder layer of `root` compute activations again in its backward. Must precede `fully_shard`."""
    if how == "none":
        return
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if how == "selective" else {}
    for layer in decoder_layers(root):
        # Inside of FSDP's hooks, so that a layer is gathered once for both runs. No layer is random: dropout is off.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **contexts)


def _policy(_context: object, operation: object, *_arguments: object, **_options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def pair_cost(model: PreTrainedModel) -> float:
    """Return the multiplications of attention for a pair of tokens, over those of the rest of the model for a token.

    In each layer a pair takes part in two products of the width of all heads, and a token in one product with each
    matrix, or with those of the experts that it is sent to. Sliding windows are not counted.
    """
    text, layers = model.config.get_text_config(), decoder_layers(model)
    shapes = [parameter.shape for layer in layers for parameter in layer.parameters()]
    of_experts = [shape for shape in shapes if len(shape) == 3]
    weights = sum(shape.numel() for shape in shapes if len(shape) == 2)
    weights += sum(text.num_experts_per_tok * shape[1:].numel() for shape in of_experts)
    weights += cast("nn.Linear", model.get_output_embeddings()).weight.numel()
    return 2 * len(layers) * text.num_attention_heads * head_width(text) / weights
