"""Loading a causal language model from disk or the hub, with checks that it can be trained correctly."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlsys.errors import ModelError
from rlsys.util.files import can_be_hub_name

AutoClass: TypeAlias = type[AutoModelForCausalLM | AutoModelForSequenceClassification]

CPU = torch.device("cpu")
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Configuration fields of models that change logits after the output matrix."""


def load_model(path: str, dtype: torch.dtype, device: torch.device = CPU) -> PreTrainedModel:
    """Load the model of a local folder or hub name, e.g. `Qwen/Qwen3-0.6B`; safetensors only, no remote code.

    It stays in eval mode even in training. Sampling uses no dropout, so a forward with dropout would compare the
    sampler's logprobs with those of another network. Raises `ModelError`.
    """
    model = pretrained(AutoModelForCausalLM, path, dtype, key="model", what="causal language model")
    for field in _LOGIT_TRANSFORMS:
        if getattr(model.config.get_text_config(), field, None) not in (None, 1, 1.0):
            raise ModelError(f"model {path!r} is not supported: it changes logits after the output matrix ({field})")
    return on_device(model, device)


def pretrained(kind: AutoClass, path: str, dtype: torch.dtype, *, key: str, what: str) -> PreTrainedModel:
    """Load a model with all of its weights, on the CPU; safetensors only, no remote code.

    Raises `ModelError`, which calls the path `key` and the model `what`. Missing weights raise: they would be random.
    """
    check_exists(path, key)
    try:
        loaded = kind.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{key} {path!r} does not load as a {what}: {error}") from error
    model, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{key} {path!r} is incomplete: it lacks {len(missing)} of the weights of a {what}, as {missing[0]!r}"
        )
    return model


def on_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move the model to the device, in eval mode."""
    cast("nn.Module", model).to(device)
    return model.eval()


def outline(path: str) -> PreTrainedModel:
    """Load the model of a path without weights: names, shapes and configuration, on the meta device.

    Raises `ModelError`.
    """
    check_exists(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path!r} does not load as a causal language model: {error}") from error


def load_tokenizer(path: str, key: str = "model") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Raises `ModelError`, which calls the path `key`."""
    check_exists(path, key)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # pyrefly: ignore[bad-return]
    except (OSError, ValueError) as error:
        raise ModelError(f"{key} {path!r} has no tokenizer that loads: {error}") from error


def check_exists(path: str, key: str = "model") -> None:
    """Raise `ModelError` if a local folder does not exist. A hub name is only checked when it is loaded."""
    if not can_be_hub_name(path) and not Path(path).is_dir():
        raise ModelError(f"{key} {path!r} does not exist: give a folder with config.json, or a hub name org/name")
