"""Adapters in vLLM, through its own LoRA support: computed beside the frozen model, one for each version.

vLLM reads adapters from folders in the format of `peft`. An adapter is small, so each version is written to a folder
in memory, from which every shard reads it. Ran on the CPU only; on CUDA it never ran.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors.torch import load_file

from rlsys.config.lora_section import LoraSection
from rlsys.errors import ConfigError
from rlsys.types import PolicyVersion
from workers.engines.vllm.vllm_layout import PartSum, View, memory_of, rectangle_of
from workers.model.adapter_files import WEIGHTS, write_adapter
from workers.model.lora import PREFIX, A, B, peft_config, targets_in
from workers.transport.checksums import checksum, spec_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    from workers.engines.vllm.vllm_shards import Shards


class VllmAdapters:
    """The adapters of an engine, one for each loaded version.

    With one version, its adapter keeps its id in vLLM, so that running requests continue under new content. With
    several, every version has an adapter with an id of its own, which its requests name.
    """

    def __init__(self, model: PreTrainedModel, lora: LoraSection, path: str, max_versions: int) -> None:
        """`model` is the outline of the model at `path`, without an adapter. Raises `ModelError`, `ConfigError`."""
        self._config, self._rank = peft_config(model, lora, path), _rank_of_vllm(lora.rank)
        self._scale, self._max_versions = lora.alpha / lora.rank, max_versions
        self._targets = targets_in(model, lora, path)
        self._ids: dict[PolicyVersion, int] = {}  # replaced, not mutated: another thread reads it
        self._num_ids = 0
        memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(prefix="rlsys-adapter-", dir=memory if memory.is_dir() else None)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine.

        It prepares only the adapted layers. Else it prepares the output matrix too, and then fails to compute logprobs
        of a prompt.
        """
        layers = sorted({target.rpartition(".")[2] for target in self._targets})
        return {
            "enable_lora": True,
            "max_loras": self._max_versions,
            "max_lora_rank": self._rank,
            "lora_target_modules": layers,
        }

    def request(self, version: PolicyVersion, *, reads_again: bool = False) -> LoRARequest:
        """The adapter of a version as a request names it. With `reads_again`, vLLM reads its content from the folder
        again."""
        from vllm.lora.request import LoRARequest

        number = self._ids[version]
        return LoRARequest(f"adapter {number}", number, str(self._folder_of(number)), load_inplace=reads_again)

    def load(self, llm: LLMEngine, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        """Load the adapter of a version. No step may be running."""
        if self._max_versions == 1:
            self._ids = {version: 1}
        elif version not in self._ids:
            self._num_ids += 1
            self._ids = {**self._ids, version: self._num_ids}
        folder = self._folder_of(self._ids[version])
        folder.mkdir(exist_ok=True)
        write_adapter(folder, weights, self._config, base="")
        llm.add_lora(self.request(version, reads_again=True))

    def evict_all_but(self, llm: LLMEngine, versions: Collection[PolicyVersion]) -> None:
        """Evict the adapters of all other versions, which no request names. No step may be running."""
        evicted = [number for version, number in self._ids.items() if version not in versions]
        self._ids = {version: number for version, number in self._ids.items() if version in versions}
        for number in evicted:
            llm.remove_lora(number)
            rmtree(self._folder_of(number))

    async def part_sums(self, shards: Shards, version: PolicyVersion) -> Sequence[list[PartSum]]:
        """Checksums of every shard's part of the adapter of a version."""
        number = self._ids[version]
        arguments = (str(self._folder_of(number)), number, self._scale)
        return await shards.call("computing checksums", "rlsys_adapter_checksums", *arguments)

    def close(self) -> None:
        self._folder.cleanup()

    def _folder_of(self, number: int) -> Path:
        return Path(self._folder.name, str(number))


def _rank_of_vllm(rank: int) -> int:
    """The smallest rank that vLLM allocates for, and that is at least `rank`."""
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    if rank > ranks[-1]:
        raise ConfigError(
            f"train.lora.rank: {rank} is above {ranks[-1]}, the largest of vLLM; lower it, or set rollout.engine=local"
        )
    return next(each for each in ranks if each >= rank)


def adapter_sums(manager: Any, folder: str, adapter_id: int, scale: float) -> Iterator[PartSum]:  # noqa: ANN401  (vLLM's)
    """Checksums of this shard's part of an adapter, as its slot in vLLM's `manager` has it.

    vLLM multiplies B by `scale` while it loads an adapter, and that cannot be undone exactly. So the tensors of the
    file, from which vLLM loaded, are cut and multiplied again: what then equals the slot is what the slot has.
    """
    given, slot = load_file(Path(folder, WEIGHTS)), manager.lora_index_to_id.index(adapter_id)
    for layer_name, layer in manager.modules.items():
        parts = manager.packed_modules.get(layer_name, [layer_name])  # `qkv_proj` has three
        for end, stacked, cut, factor in (
            (A, layer.lora_a_stacked, layer.slice_lora_a, 1.0),
            (B, layer.lora_b_stacked, layer.slice_lora_b, scale),
        ):
            names = [f"{PREFIX}{part}{end}" for part in parts]
            wholes = [given.get(name) for name in names]
            if layer.tp_size > 1:
                pieces = cut(wholes) if len(wholes) > 1 else [cut(wholes[0])]
            else:
                pieces = wholes
            for name, whole, piece, of_slots in zip(names, wholes, pieces, stacked, strict=True):
                if whole is not None and piece is not None and memory_of(piece) == memory_of(whole):
                    yield _part_sum(name, whole, piece, of_slots[slot, 0], factor)


def _part_sum(name: str, whole: Tensor, piece: Tensor, in_slot: Tensor, factor: float) -> PartSum:
    """Checksum of a piece of the tensor `whole`, whose product with `factor` should be in a slot."""
    held = in_slot[: piece.shape[0], : piece.shape[1]]
    has_it = torch.equal(held, piece.to(held.device, held.dtype) * factor)
    rectangle = rectangle_of(View.of(piece, whole), spec_of(name, whole))
    assert rectangle is not None, "vLLM cuts adapters along one dimension"
    value = checksum(piece if has_it else held.to(piece.dtype), whole.shape, rectangle.offset)
    return PartSum(name, rectangle.offset, rectangle.shape, value)
