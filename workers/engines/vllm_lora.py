"""An adapter in vLLM, through its own LoRA support: computed beside the frozen model, and replaced in place.

vLLM reads adapters from folders in the format of `peft`. An adapter is small, so each version is written to a folder
in memory, from which every shard reads it. Ran on the CPU only; on CUDA it never ran.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlsys.config.lora_section import LoraSection
from rlsys.errors import ConfigError
from workers.train.adapter_files import write_adapter
from workers.train.lora import peft_config, targets_in

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine


class VllmAdapter:
    """The only adapter of an engine: its id stays, so that running requests continue under new content."""

    def __init__(self, model: PreTrainedModel, lora: LoraSection, path: str) -> None:
        """`model` is the outline of the model at `path`, without an adapter. Raises `ModelError`, `ConfigError`."""
        self._config, self._rank = peft_config(model, lora, path), _rank_of_vllm(lora.rank)
        self._targets = targets_in(model, lora, path)
        memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(prefix="rlsys-adapter-", dir=memory if memory.is_dir() else None)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine.

        It prepares only the adapted layers. Else it prepares the output matrix too, and then fails to compute logprobs
        of a prompt.
        """
        layers = sorted({target.rpartition(".")[2] for target in self._targets})
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": self._rank, "lora_target_modules": layers}

    def request(self, *, reads_again: bool = False) -> LoRARequest:
        """The adapter as each request names it. With `reads_again`, vLLM replaces its content from the folder."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", 1, self._folder.name, load_inplace=reads_again)

    def load(self, llm: LLMEngine, weights: Mapping[str, Tensor]) -> None:
        """Replace the adapter's content. No step may be running."""
        write_adapter(Path(self._folder.name), weights, self._config, base="")
        llm.add_lora(self.request(reads_again=True))

    def close(self) -> None:
        self._folder.cleanup()


def _rank_of_vllm(rank: int) -> int:
    """The smallest rank that vLLM allocates for, and that is at least `rank`."""
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    if rank > ranks[-1]:
        raise ConfigError(
            f"train.lora.rank: {rank} is above {ranks[-1]}, the largest of vLLM; lower it, or set rollout.engine=local"
        )
    return next(each for each in ranks if each >= rank)
