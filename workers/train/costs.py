"""Cost of attention against that of the rest of a model, by which samples are balanced over ranks."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from workers.train.activations import decoder_layers


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
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * len(layers) * text.num_attention_heads * width / weights
