"""LoRA adapters (arXiv:2106.09685) through `peft`: added to a model, left out of a forward, merged into weights.

Published tensors have the names of `peft`'s files. So a file, a published version and vLLM agree on them, as in
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlsys.config.config_problems import nearest
from rlsys.config.lora_section import LoraSection
from rlsys.errors import ConfigError, ModelError
from workers.model.model_tensors import persistent_buffers

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import Linear as LoraLayer

NAME = "default"
"""Name of the adapter in its model; a model has one."""
PREFIX = "base_model.model."
"""Beginning of every name in a file of `peft`."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the published names."""


def add_adapter(model: PreTrainedModel, lora: LoraSection, path: str, dtype: torch.dtype | None = None) -> None:
    """Freeze the model of `path` and add an adapter without effect, on the model's device; `dtype` None: in its type.

    Raises `ModelError` for targets that match no layer, `ConfigError` without `peft`.
    """
    try:
        from peft import inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError("train.lora needs peft: pip install 'rlsys[lora]', or set train.lora=null") from error
    inject_adapter_in_model(peft_config(model, lora, path), model, NAME)
    for parameter in adapter_of(model).values():
        parameter.data = parameter.data.to(dtype or model.dtype)


def peft_config(model: PreTrainedModel, lora: LoraSection, path: str) -> LoraConfig:
    """The configuration of the adapter for `peft`, also for its file. Raises `ModelError` as `add_adapter`.

    `model` has no adapter yet, and may be on the meta device.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyrefly: ignore[bad-argument-type]  (it is only divided)
        target_modules=targets_in(model, lora, path),
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        inference_mode=False,
    )


def targets_in(model: PreTrainedModel, lora: LoraSection, path: str) -> list[str]:
    """Ends of the names of the adapted layers, e.g. `[k_proj, q_proj]`. Raises `ModelError` for one without a layer."""
    output = model.get_output_embeddings()
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    known = sorted({name.rpartition(".")[2] for name in layers})
    if lora.targets is None:
        return known
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            there = f"its linear layers are {', '.join(known)}"
            raise ModelError(
                f"train.lora.targets: {target!r} matches no linear layer of {path!r}; {nearest(target, known, there)}"
            )
    return list(lora.targets)


def adapter_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the model's adapter by their published names; empty without an adapter."""
    every = model.named_parameters()
    return {PREFIX + name.replace(f".{NAME}.", "."): p for name, p in every if f".{NAME}." in name}


def published_tensors(model: nn.Module, *, has_aliases: bool = False) -> dict[str, Tensor]:
    """Live tensors that a version consists of, by their published names: the adapter; without one, all parameters and
    persistent buffers.

    With `has_aliases`, a tied parameter has each of its names, else the first.
    """
    if adapter := adapter_of(model):
        return {**adapter}
    return {**dict(model.named_parameters(remove_duplicate=not has_aliases)), **persistent_buffers(model)}


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Layers of the model that have an adapter, by name."""
    from peft.tuners.lora import Linear as LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen model alone. For forwards without gradient."""
    layers = adapted_layers(model).values()
    own = list(adapter_of(model).values())
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        for parameter in own:
            parameter.requires_grad_(True)  # FSDP asks for it at the first forward, and never again
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


@torch.no_grad()
def merge(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], lora: LoraSection) -> None:
    """Add `alpha / rank * B A` to weights, in place and in their type. `adapter` has the published names."""
    for name in adapter:
        if name.endswith(B):
            layer = name.removeprefix(PREFIX).removesuffix(B)
            change = adapter[name].float() @ adapter[name.removesuffix(B) + A].float()
            weights[f"{layer}.weight"].add_(change * (lora.alpha / lora.rank))
