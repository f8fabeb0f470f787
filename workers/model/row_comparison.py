"""Comparison of rows with plain forwards, on a small random copy of a model, before any weights are read.

The comparison finds every layer that computes other results in a row of samples than in a sequence of its own.

    compare_rows(outline, "model 'tiny'")

The copy has the model's kinds of layers, heads and rotary embeddings, but few and narrow layers, a small vocabulary and
short sliding windows. Its samples share prefixes, and are longer than the windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlsys.batch.samples import Sample
from rlsys.errors import ModelError
from rlsys.types import Distribution, VersionSpan
from workers.model.decoder_layers import head_width
from workers.model.logprobs import score

MOST_DIFFERENCE = 1e-3
"""Most difference of logprobs in fp32, in nats. Rounding differs by 5e-6 at most, over the 67 kinds of models that are
accepted with default settings."""
_NARROW = {
    "vocab_size": 40, "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "sliding_window": 6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MOST_LAYERS, _MOST_EXPERTS, _MOST_HEADS = 6, 16, 4
_MOST_PARAMETERS = 2**28
_SAMPLES = ((5, 6, 7, 8), 13), ((5, 6, 7, 8), 9), ((5, 6, 9), 3), ((4,), 11)
"""Prompts, and lengths of completions."""
_FOUND: dict[tuple[type[PreTrainedModel], str], float] = {}
"""Differences of the models that were compared, by class and configuration."""


def compare_rows(outline: PreTrainedModel, name: str) -> None:
    """Raise `ModelError` if rows compute other logprobs than plain forwards, for a model like this one; `name` is as
    `model 'tiny'`."""
    kind = type(outline), outline.config.to_json_string()
    if kind not in _FOUND:
        _FOUND[kind] = _measure_difference(outline.config)
    if not _FOUND[kind] <= MOST_DIFFERENCE:  # also if it is no number
        raise ModelError(
            f"{name} is not supported: {type(outline).__name__} computes logprobs in rows of samples that differ by up "
            f"to {_FOUND[kind]:.3g} nats from those of a plain forward; choose another model"
        )


def _measure_difference(config: PreTrainedConfig) -> float:
    """Return the largest difference of a logprob in nats, for samples that share a row and for each in its own row."""
    model = build_small_copy(config)
    samples = [_sample(place, prompt, length) for place, (prompt, length) in enumerate(_SAMPLES)]
    together = score(model, samples, Distribution(), max_tokens=1000)
    alone = [score(model, [sample], Distribution(), max_tokens=1000)[0] for sample in samples]
    model.set_attn_implementation("eager")
    worst = torch.zeros(())
    for sample, *of_rows in zip(samples, together, alone, strict=True):
        plain = _plain_logprobs(model, sample)
        worst = torch.stack([worst, *((plain - torch.tensor([*own])).abs().max() for own in of_rows)]).max()
    return float(worst)


def build_small_copy(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a random model in fp32 with the kinds of layers of a configuration. Raises `ModelError` if it cannot be
    made small."""
    problem: Exception | None = None
    text = config.get_text_config()
    for changes in (_reduce_heads(text), _reduce_layers(text)):  # not every kind of model takes other numbers of heads
        try:
            small = _apply_changes(config, changes)
            with torch.device("meta"):
                if (num := _num_parameters(AutoModelForCausalLM.from_config(small))) > _MOST_PARAMETERS:
                    raise ValueError(f"it has {num} parameters")
            return _fill_weights(
                AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager")
            )
        except (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
            problem = error
    raise ModelError(f"no small copy of a {config.model_type} can be made to compare its rows: {problem}")


def _apply_changes(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a copy of a configuration with changes to its language model, which may be a section of it."""
    given = config.to_dict()
    sections = [name for name in ("text_config", "decoder") if getattr(config, name, None) is config.get_text_config()]
    for name in sections:
        given[name] |= changes
    return type(config).from_dict(given if sections else {**given, **changes})


def _reduce_layers(text: PreTrainedConfig) -> dict[str, Any]:
    """Return changes to a configuration that reduce everything but the number and the width of heads."""
    num_layers, kept, given = text.num_hidden_layers, _num_kept_layers(text), text.to_dict()
    of_layers = {key: value[:kept] for key, value in given.items() if _is_of_layers(value, num_layers)}
    experts = {key: min(given[key], _MOST_EXPERTS) for key in _EXPERTS if given.get(key)}
    narrow = {key: value for key, value in _NARROW.items() if given.get(key) is not None}
    return of_layers | experts | narrow | {"num_hidden_layers": kept}


def _reduce_heads(text: PreTrainedConfig) -> dict[str, Any]:
    """Return the changes of `_reduce_layers`, and changes to fewer heads of the same width."""
    heads, pairs = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    num_pairs = min(pairs or heads, 2)
    num_heads = num_pairs * min(heads // (pairs or heads), _MOST_HEADS // num_pairs)
    changes = {"num_attention_heads": num_heads, "hidden_size": num_heads * head_width(text)}
    return _reduce_layers(text) | changes | ({} if pairs is None else {"num_key_value_heads": num_pairs})


def _num_kept_layers(text: PreTrainedConfig) -> int:
    """Return the number of first layers that has every kind of layer, at least two."""
    kinds: Sequence[str] = getattr(text, "layer_types", None) or []
    last_new = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    dense = getattr(text, "first_k_dense_replace", None) or 0
    return min(max(2, last_new, dense + 1 if dense < _MOST_LAYERS else 0), text.num_hidden_layers)


def _is_of_layers(value: object, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def _fill_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Fill a model with random weights of a fixed seed, large enough that every layer changes the logprobs."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter += 0.1 * noise
    return cast("PreTrainedModel", model.eval())


def _sample(place: int, prompt: tuple[int, ...], length: int) -> Sample:
    ids = tuple(3 + (7 * place + 5 * i * i) % 37 for i in range(length))
    return Sample(prompt, ids, (True,) * length, (0.0,) * length, (VersionSpan(0, length),))


@torch.no_grad()
def _plain_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logprobs_TV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    after = torch.arange(len(sample.prompt_ids), ids.shape[1])
    return logprobs_TV[after - 1, ids[0, after]]
