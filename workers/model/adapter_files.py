"""Adapters on disk: the folder that `peft` reads and writes, and the hash of a base.

An adapter belongs to one base: added to other weights it computes something else, without an error. So its file, its
checkpoint and its published versions name the hash of the base.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlsys.config.lora_section import LoraSection
from rlsys.errors import ModelError
from workers.model.lora import A, adapted_layers, adapter_of, add_adapter
from workers.model.model_loading import check_exists

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import Linear as LoraLayer
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter's folder."""
BASE = "base_hash"
"""Key of the base's hash in the metadata of `WEIGHTS`."""
UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
"""Keys of an adapter's configuration that change what it computes, and that no worker here supports."""


def base_hash(path: str) -> str:
    """Hash of the weights in a model's safetensors files: names, types, shapes and bytes; 32 hex digits.

    The split into files does not matter. Raises `ModelError`.
    """
    check_exists(path)
    total = xxhash.xxh3_128()
    try:
        with ExitStack() as opened:
            files = [opened.enter_context(safe_open(each, "pt")) for each in _weight_files(path)]
            for name, i in sorted((name, i) for i, each in enumerate(files) for name in each.keys()):  # noqa: SIM118
                tensor = files[i].get_tensor(name)
                total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
                total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"model {path!r} has no safetensors files that can be read: {error}") from error
    return total.hexdigest()


def _weight_files(path: str) -> list[Path]:
    local = Path(path)
    folder = local if local.is_dir() else Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


class Adapter:
    """The adapter of a model in training, on its way into a model that is laid out before its weights are read."""

    def __init__(self, lora: LoraSection, path: str) -> None:
        """`path` is that of the model."""
        self._lora, self._path = lora, path
        self._layers: dict[str, LoraLayer] = {}
        """Adapted layers by their names in the model."""

    @contextmanager
    def temporary_layers(self, model: PreTrainedModel) -> Iterator[None]:
        """Add the adapter, in fp32; take it out after the block, which lays the model out with it.

        The files of a model name its layers, and an adapted layer has another name. The layout stays: it belongs to
        modules, whatever their names. Raises `ModelError` for targets that match no layer.
        """
        add_adapter(model, self._lora, self._path, torch.float32)
        self._layers = adapted_layers(model)
        yield
        for name, layer in self._layers.items():
            model.set_submodule(name, layer.get_base_layer())

    @torch.no_grad()
    def start(self, model: PreTrainedModel) -> str:
        """Put the adapter back into the loaded model, with the weights that training starts from.

        They are the same in every process: A comes from a fixed seed. Returns the hash of the base. Raises
        `ModelError` if `train.lora.path` contains no adapter of this base, rank, scale or kind.
        """
        model.requires_grad_(False)  # parameters that were read are new
        for name, layer in self._layers.items():
            model.set_submodule(name, layer)
            for kind in layer.adapter_layer_names:
                layer.get_submodule(kind).to_empty(device=model.device)
        generator = torch.Generator().manual_seed(0)
        adapter = adapter_of(model)
        for name, parameter in adapter.items():
            parameter.requires_grad_(True)
            whole = torch.zeros(parameter.shape)
            if name.endswith(A):
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)  # as `peft` does
            write(parameter, whole)
        base = base_hash(self._path)
        if self._lora.path is not None:
            read_adapter(self._lora.path, adapter, self._lora, base)
        return base


def write(parameter: Tensor, whole: Tensor) -> None:
    """Write a whole tensor into a parameter, or this rank's part of it into a shard. Not collective."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None)
    parameter.copy_(whole)


def write_adapter(folder: Path, adapter: Mapping[str, Tensor], config: LoraConfig, base: str) -> None:
    """Write an adapter for `peft.PeftModel.from_pretrained`; `adapter` has the published names."""
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file({name: t.contiguous() for name, t in adapter.items()}, folder / WEIGHTS, {"format": "pt", BASE: base})


@torch.no_grad()
def read_adapter(path: str, into: Mapping[str, Tensor], lora: LoraSection, base: str) -> None:
    """Read the adapter in the folder `path` into these tensors, by published name.

    Raises `ModelError` if there is none, or if it is one of another base, rank, scale or kind.
    """
    folder = Path(path)
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise ModelError(
            f"train.lora.path: {path} contains no adapter: it has no {' and no '.join(missing)}; give a folder that "
            "peft or `rlsys export --adapter` has written"
        )
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        with safe_open(folder / WEIGHTS, "pt") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"train.lora.path: the adapter in {path} cannot be read: {error}") from error
    problems = [*_config_problems(config, lora), *_tensor_problems(found, into)]
    if metadata.get(BASE, base) != base:
        problems.insert(0, f"it belongs to the base {metadata[BASE]}, and the weights of model.path are {base}")
    if problems:
        raise ModelError(f"train.lora.path: the adapter in {path} does not fit: {'; '.join(problems)}")
    for name, tensor in found.items():
        write(into[name], tensor)


def _config_problems(config: Any, lora: LoraSection) -> Iterator[str]:  # noqa: ANN401  (of a foreign file)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        yield f"its {CONFIG} describes no LoRA adapter"
        return
    if config.get("r") != lora.rank:
        yield f"its rank is {config.get('r')}, and train.lora.rank is {lora.rank}"
    if config.get("lora_alpha") != lora.alpha:
        yield f"its alpha is {config.get('lora_alpha')}, and train.lora.alpha is {lora.alpha:g}"
    if used := [key for key in UNSUPPORTED if config.get(key)]:
        yield f"{', '.join(used)} of its {CONFIG} is not supported"
    if (bias := config.get("bias", "none")) != "none":
        yield f"bias {bias} of its {CONFIG} is not supported"


def _tensor_problems(found: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> Iterator[str]:
    if unknown := sorted(found.keys() - into.keys()):
        yield f"train.lora.targets does not include {len(unknown)} of its tensors, as {unknown[0]}"
    if missing := sorted(into.keys() - found.keys()):
        yield f"it lacks {len(missing)} tensors of train.lora.targets, as {missing[0]}"
    shared = sorted(found.keys() & into.keys())
    if differing := [name for name in shared if found[name].shape != into[name].shape]:
        name = differing[0]
        yield f"{name} has shape {tuple(found[name].shape)}, and the model's has {tuple(into[name].shape)}"
