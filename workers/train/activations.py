"""Memory of a forward for its backward: activation checkpointing, and the cache of shared prompts.

The cache differs from the one of the Transformers library in that a layer may be run twice with it, as activation
checkpointing does: a pass over prompts hands each layer's keys and values on, a pass over completions only reads them,
and neither changes what a second run of the layer finds.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from rlsys.config.schema import ActivationCheckpointing

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


class PromptLayer(DynamicLayer):
    """Keys and values of all prompts in one decoder layer, with gradient."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep the first keys and values, which the graph refers to; a second run has equal ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class ContinuedLayer(DynamicLayer):
    """Reads the keys and values of prompt `prompt_of_S[s]` for each sample `s`, and keeps nothing."""

    def __init__(self, prompts: PromptLayer, prompt_of_S: Tensor) -> None:
        super().__init__()
        self._prompts, self._prompt_of_S = prompts, prompt_of_S

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Put each sample's prompt before its completion."""
        keys, values = self._prompts.keys, self._prompts.values
        assert keys is not None and values is not None, "the prompts have run"
        return (
            torch.cat([keys.index_select(0, self._prompt_of_S), key_states], dim=-2),
            torch.cat([values.index_select(0, self._prompt_of_S), value_states], dim=-2),
        )

    def get_seq_length(self) -> int:
        return self._prompts.get_seq_length()


def prompt_cache() -> Cache:
    """Build the cache for a pass over prompts."""
    return Cache(layer_class_to_replicate=PromptLayer)


def continued(prompts: Cache, prompt_of_S: Tensor) -> Cache:
    """Build the cache for a pass over completions, where sample `s` continues prompt `prompt_of_S[s]`."""
    return Cache(layers=[ContinuedLayer(layer, prompt_of_S) for layer in prompts.layers])  # pyrefly: ignore
