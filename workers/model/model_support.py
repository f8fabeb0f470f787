"""Refusal of models that the trainer or the engine `local` would compute wrongly, before any weights are read.

A model is judged by its configuration and by one forward without values, so that a family needs no entry in a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from rlsys.errors import ModelError
from workers.model.model_tensors import NoContent, memory_of
from workers.model.row_attention import AttentionBlock, AttentionRow, use_row_attention
from workers.model.token_distribution import has_known_change

LAYERS = {"full_attention", "sliding_attention"}
"""Supported kinds of layers, as the Transformers library names them."""
LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Kinds of rotary embeddings that change once a forward is longer than the original context."""
_FOUND: dict[tuple[type[PreTrainedModel], str], str | None] = {}
"""First problem of the models that were judged, by class and configuration; None: there is none."""
_META = torch.device("meta")
_NUM_TOKENS = 4


def check_supported(model: PreTrainedModel, name: str) -> None:
    """Raise `ModelError` if this model cannot be trained or sampled here; `name` is as `model 'tiny'`.

    The model is an outline on the meta device, which becomes one in bfloat16.
    """
    kind = type(model), model.config.to_json_string()
    nn.Module.to(model, torch.bfloat16)  # the meta device multiplies experts in bfloat16 only
    if kind not in _FOUND:
        _FOUND[kind] = next(_problems(model), None)
    if problem := _FOUND[kind]:
        raise ModelError(f"{name} is not supported: {type(model).__name__} {problem}")


def check_context(model: PreTrainedModel, max_context: int, name: str) -> None:
    """Raise `ModelError` if the rotary embeddings of a token would depend on the length of other samples."""
    text = model.config.get_text_config()
    for parameters in _rope_parameters(text):
        if parameters.get("rope_type") in LENGTH_DEPENDENT:
            original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
            if max_context > original:
                raise ModelError(
                    f"{name} has rotary embeddings of type {parameters['rope_type']}, which change for all tokens of a "
                    f"forward once it has more than {original} tokens, and the context of this run has {max_context}: "
                    f"set rollout.max_context_tokens to {original} or less, or choose another model"
                )


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401
    """Yield the parameters of all rotary embeddings; some models have several, by kind of layer."""
    given = getattr(text, "rope_parameters", None) or {}
    yield from (given,) if "rope_type" in given else (each for each in given.values() if isinstance(each, Mapping))


def _problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield what the model has that is not supported, with the remedy; later ones may rely on earlier ones."""
    config, text = model.config, model.config.get_text_config()
    remedy = "choose a model whose layers all attend to the tokens of their sample"
    kinds: set[str] = {*(getattr(text, "layer_types", None) or [])} - LAYERS
    if model._is_stateful or any("linear" in kind or "conv" in kind or "hybrid" in kind for kind in kinds):
        yield (
            f"has recurrent states ({', '.join(sorted(kinds)) or text.model_type}), which cannot be packed into rows "
            f"of samples that share prefixes; {remedy}"
        )
    if kinds or getattr(text, "attention_chunk_size", None):
        yield f"has layers of type {', '.join(sorted(kinds)) or 'chunked_attention'}; {remedy}"
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        yield "attends to later tokens; choose a causal model"
    if len({*_head_widths(config)}) > 1:
        yield f"has layers with heads of other widths (head_dim by layer); {remedy} with heads of one width"
        return
    if getattr(text, "num_kv_shared_layers", None):
        yield f"has layers that share the keys of others (num_kv_shared_layers); {remedy} with keys of its own"
    if getattr(config, "quantization_config", None) is not None:
        yield (
            "has quantized weights, which cannot be trained; give a copy in bfloat16, as Transformers writes it from a "
            "model that was loaded dequantized"
        )
    if "position_ids" not in signature(model.base_model.forward).parameters:
        yield "takes no positions of tokens, and those of a row are not its places; choose another model"
    yield from _problems_of_forward(model)


def _head_widths(config: PreTrainedConfig) -> Iterator[int | None]:
    """Yield the width of the heads of each layer, as far as the configuration has it."""
    text = config.get_text_config()
    of_layers: Sequence[Any] = text.per_layer_config
    yield from (getattr(of_layers[place], "head_dim", None) for place in range(len(of_layers)))


def _problems_of_forward(model: PreTrainedModel) -> Iterator[str]:
    """Compute a row without values, and compare what the layers asked for with the configuration."""
    use_row_attention(model)
    seen = _Seen()
    try:
        seen.compute(model)
    except ModelError as error:
        yield f"has a layer that cannot be computed: {error}"
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        yield f"does not compute a row of samples ({str(error).partition(chr(10))[0]}); choose another model"
    layers = DynamicCache(config=model.config).layers
    expected = [getattr(layer, "sliding_window", None) or None for layer in layers]
    if not seen.windows:
        yield "has attention of its own instead of that of the Transformers library; choose another model"
    calls = max(1, len(seen.windows) // max(1, len(expected)))  # DiffLlama attends twice in a layer
    if seen.windows != [window for window in expected for _ in range(calls)]:
        yield (
            f"has the sliding windows {_text(expected)} by its configuration, and its layers attend with "
            f"{_text(seen.windows)}; choose another model"
        )
    if not seen.is_output_known(model):
        yield "has more between its last states and its logits than an output matrix; choose another model"


def _text(windows: list[int | None]) -> str:
    return ", ".join(str(window or "none") for window in windows)


class _Seen(AttentionRow):
    """Row of one short sample that records what a model does with it."""

    def __init__(self) -> None:
        whole = slice(0, _NUM_TOKENS)
        self.context = self.routing_PW = None
        self._one = [AttentionBlock(whole, whole, is_causal=True)]
        self.windows: list[int | None] = []
        """Windows of the layers, in order."""
        self._states: list[Tensor] = []
        """Last states of the base model."""
        self._taken: list[Tensor] = []
        self._made: list[Tensor] = []
        """What goes into the output matrix, and what comes out."""
        self._logits: Tensor | None = None

    @torch.no_grad()
    def compute(self, model: PreTrainedModel) -> None:
        base, head = cast("nn.Module", model.base_model), cast("nn.Module", model.get_output_embeddings())
        hooks = [base.register_forward_hook(self._record_states), head.register_forward_hook(self._record_output)]
        tokens_1R = torch.arange(_NUM_TOKENS, device=_META)[None]
        mask = tokens_1R.new_ones(1, 1, 1, 1)  # given, so that the model builds none
        given = {"input_ids": tokens_1R, "position_ids": tokens_1R, "attention_mask": mask, "use_cache": False}
        try:
            with NoContent():
                self._logits = model(**given, row=self).logits
        finally:
            for hook in hooks:
                hook.remove()

    def blocks(self, window: int | None) -> list[AttentionBlock]:
        self.windows.append(window)
        return self._one

    def is_output_known(self, model: PreTrainedModel) -> bool:
        """Return True if the output matrix takes the last states, and `OutputLayer` makes any change after it."""
        memories = {memory_of(tensor) for tensor in (*self._states, *self._taken)}
        if not (len(self._taken) == len(memories) == 1 and len(self._states) <= 1):  # OPT computes beside its base
            return False
        is_as_made = self._logits is not None and memory_of(self._logits) == memory_of(self._made[0])
        return is_as_made or has_known_change(model.config.get_text_config())

    def _record_states(self, _module: nn.Module, _given: object, result: tuple[Tensor, ...]) -> None:
        self._states.append(result[0])

    def _record_output(self, _module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        self._taken.append(given[0])
        self._made.append(result)
