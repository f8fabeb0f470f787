"""Loading a causal language model from disk or the hub, with checks that it can be trained correctly.

A model is built without memory, laid out over ranks, and then filled: each rank reads only its shards of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils.hub import cached_file

from rlsys.errors import ModelError
from rlsys.util.files import can_be_hub_name
from workers.model.model_support import check_context, check_supported
from workers.model.model_tensors import local, persistent_buffers

ModelClass: TypeAlias = type[AutoModelForCausalLM | AutoModelForSequenceClassification | PreTrainedModel]
LayOut: TypeAlias = Callable[[PreTrainedModel], None]
"""Lays a model out over ranks, while its parameters are on the meta device: each becomes a shard, a `DTensor`."""

CPU = torch.device("cpu")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Without one of them, the library makes an empty tokenizer of the model's kind."""


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device = CPU,
    lay_out: LayOut | None = None,
    *,
    state_device: torch.device | None = None,
) -> PreTrainedModel:
    """Load the model of a local folder or hub name, e.g. `Qwen/Qwen3-0.6B`; safetensors only, no remote code.

    It stays in eval mode even in training. Sampling uses no dropout, so a forward with dropout would compare the
    sampler's logprobs with those of another network. Its logits are those of the ids that the tokenizer of the path
    knows: matrices may be larger, and no text has the ids beyond. Raises `ModelError`.
    """
    kind = _with_exact_buffers(supported_outline(path))
    model = load_pretrained(kind, path, dtype, key="model", what="causal language model", lay_out=lay_out)
    limit_ids(model, num_known_ids(path))
    return on_device(model, device, state_device)


def num_known_ids(path: str) -> int | None:
    """Return the number of ids up to the largest that a model's tokenizer has; None without files of a tokenizer.

    Raises `ModelError` for a tokenizer that does not load.
    """
    found = (cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in _TOKENIZER_FILES)
    try:
        has_tokenizer = any(found)
    except OSError as error:
        raise ModelError(f"model {path!r}: its tokenizer cannot be read: {error}") from error
    return 1 + max(load_tokenizer(path).get_vocab().values()) if has_tokenizer else None


def limit_ids(model: PreTrainedModel, num_ids: int | None) -> None:
    """Let a model compute logits of the ids below `num_ids` alone, so that no other can be sampled or has a share in
    the distribution."""
    head = cast("nn.Module", model.get_output_embeddings())
    if num_ids is not None and num_ids < head.get_parameter("weight").shape[0]:
        head.register_forward_hook(partial(_first_logits, num_ids))


def _first_logits(num_ids: int, _module: nn.Module, _given: object, logits: torch.Tensor) -> torch.Tensor:
    return logits[..., :num_ids]


def load_base_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device = CPU,
    lay_out: LayOut | None = None,
    *,
    key: str,
    state_device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal language model without its output matrix. Raises `ModelError`, which calls the path `key`.

    The matrix is read and dropped: the library cannot convert the files of experts for a base model alone.
    """

    def of_base(model: PreTrainedModel) -> None:
        if lay_out is not None:
            lay_out(cast("PreTrainedModel", model.base_model))

    kind = _with_exact_buffers(supported_outline(path, key))
    model = load_pretrained(
        kind, path, dtype, key=key, what="causal language model", lay_out=of_base if lay_out else None
    )
    return on_device(cast("PreTrainedModel", model.base_model), device, state_device)


def _with_exact_buffers(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of a model, but one that loads persistent buffers in fp32 into a model of any dtype.

    So trainer, engines and exports have the same ones. In bfloat16, a router's biases of 8.53 and 8.51 are both 8.5.
    """
    names = {name for name, buffer in persistent_buffers(model).items() if buffer.is_floating_point()}
    kept = names | {*(model._keep_in_fp32_modules_strict or ())}
    return _subclass(type(model), {"_keep_in_fp32_modules_strict": kept})


def _subclass(kind: type[PreTrainedModel], members: dict[str, Any]) -> type[PreTrainedModel]:
    """Return a subclass of `kind` with its name and module: the Transformers library converts checkpoint files only for
    classes of its own modules, and finds the conversion by the name."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


def load_pretrained(
    kind: ModelClass, path: str, dtype: torch.dtype, *, key: str, what: str, lay_out: LayOut | None = None
) -> PreTrainedModel:
    """Load a model with all of its weights, on the CPU or laid out; safetensors only, no remote code.

    The Transformers library reads slices for parameters that are `DTensor`s, and merges files' tensors where a model
    fuses them, as the experts of one layer. A rank needs memory for its shards and for one such tensor.

    Raises `ModelError`, which calls the path `key` and the model `what`. Missing weights raise: they would be random.
    """
    check_exists(path, key)
    options: dict[str, Any] = {}
    if lay_out is not None:
        kind = _with_layout(cast("type[PreTrainedModel]", kind), lay_out)
        options["distributed_config"] = DistributedConfig()
    try:
        options |= {"config": read_config(path), "use_safetensors": True, "trust_remote_code": False}
        loaded = kind.from_pretrained(path, dtype=dtype, output_loading_info=True, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{key} {path!r} does not load as a {what}: {error}") from error
    model, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{key} {path!r} is incomplete: it lacks {len(missing)} of the weights of a {what}, as {missing[0]!r}"
        )
    if lay_out is not None:
        _check_ties(model, f"{key} {path!r}")
        model._apply(_in_memory)
    return model


def _with_layout(kind: type[PreTrainedModel], lay_out: LayOut) -> type[PreTrainedModel]:
    """Return a class whose `from_pretrained` lays the model out after it is built, and before its weights are read.

    The library has the same two methods for layouts of its own, which need environment variables of `torchrun`.
    """

    def prepare(_: object, config: DistributedConfig, device_map: object = None) -> tuple[object, object, None]:
        return config, device_map, None

    def apply(_: object, model: PreTrainedModel, *__: object) -> PreTrainedModel:
        model.tie_weights()  # before it is laid out: a tied weight is one shard
        lay_out(model)
        return model

    methods = {"prepare_distribute_model": classmethod(prepare), "maybe_distribute_model": classmethod(apply)}
    return _subclass(kind, methods)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in memory of its own, if it lies in a mapped file."""
    return tensor if local(tensor).untyped_storage().resizable() else tensor.clone()


def _check_ties(model: PreTrainedModel, name: str) -> None:
    """Raise `ModelError` if the files hold two different weights where the configuration ties them."""
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(target) is not model.get_parameter(source):
            raise ModelError(
                f"{name} ties {target} to {source} by its configuration, and its files hold two different weights: set "
                "`tie_word_embeddings` to false in its config.json"
            )


def on_device(
    model: PreTrainedModel, device: torch.device, state_device: torch.device | None = None
) -> PreTrainedModel:
    """Move the model to the device, in eval mode; its parameters to `state_device`, if that is another."""
    cast("nn.Module", model).to(state_device or device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model.eval()


def read_config(path: str) -> PreTrainedConfig:
    """Read a model's configuration, without code of its own, and without the kernels that it names: the library would
    fetch them from the hub, and run them. Raises `OSError` or `ValueError`."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None
    return config


def outline(path: str, key: str = "model") -> PreTrainedModel:
    """Load the model of a path without weights: names, shapes and configuration, on the meta device.

    Raises `ModelError`, which calls the path `key`.
    """
    check_exists(path, key)
    try:
        config = read_config(path)
        if senses := [name for name in ("vision", "audio") if getattr(config, f"{name}_config", None)]:
            raise ModelError(
                f"{key} {path!r} ({config.model_type}) also has encoders for {' and '.join(senses)}, and rlsys trains "
                "models of text alone: choose one, or save its language model by itself"
            )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ModelError(f"{key} {path!r} does not load as a causal language model: {why}") from error


def supported_outline(path: str, key: str = "model", *, max_context: int | None = None) -> PreTrainedModel:
    """Return the `outline` of a model in bfloat16. Raises `ModelError` too if it is of a kind that is not supported, or
    not for samples of `max_context` tokens."""
    model, name = outline(path, key), f"{key} {path!r}"
    check_supported(model, name)
    if max_context is not None:
        check_context(model, max_context, name)
    return model


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
