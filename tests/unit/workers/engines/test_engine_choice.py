"""Engine choice of `auto`: the cases, and their stated reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rlsys.config.lora_section import LoraSection
from rlsys.errors import ConfigError, ModelError
from workers.engines.engine import EngineChoice, EngineSpec
from workers.engines.engine_choice import choose, start_engine

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def spec(folder: Path, **sizes: Any) -> EngineSpec:
    """For a model of these sizes, of which nothing but the configuration is there."""
    LlamaConfig(vocab_size=32000, num_attention_heads=8, **sizes).save_pretrained(folder)
    return EngineSpec(
        engine="auto", model_path=str(folder), dtype="float32", slots=4, max_context=64, kv_cache="keep",
        tensor_parallel=1, step_s=60.0, load_s=60.0,
    )  # fmt: skip


def on(device: str | None) -> Callable[[], str | None]:
    """What an installed vLLM says of itself."""
    return lambda: device


@pytest.mark.slow
def test_on_a_cpu_only_large_models_choose_vllm(tmp_path: Path) -> None:
    small = spec(tmp_path / "small", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    large = spec(tmp_path / "large", hidden_size=1024, intermediate_size=2048, num_hidden_layers=8)
    assert choose(small, CPU, on("cpu")) == EngineChoice(
        "local", "4.2 million parameters on a CPU are not worth vLLM's start-up"
    )
    assert choose(large, CPU, on("cpu")) == EngineChoice("vllm", "149.4 million parameters on a CPU")
    assert choose(large, CPU) == choose(large, CPU, on("cpu"))  # the one that is installed here


def test_vllm_is_taken_only_where_it_runs_on_the_device(tmp_path: Path) -> None:
    small = spec(tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    assert choose(small, GPU, on("cuda")) == EngineChoice("vllm", "the device is cuda")
    assert choose(small, GPU, on("cpu")) == EngineChoice(
        "local", "the device is cuda, and the vLLM installed runs on cpu"
    )
    assert choose(small, GPU, on(None)) == EngineChoice("local", "the device is cuda, and vLLM is not installed")


def test_shards_choose_vllm_and_a_named_engine_is_used(tmp_path: Path) -> None:
    small = spec(tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    assert choose(replace(small, tensor_parallel=2), CPU) == EngineChoice("vllm", "local has no shards")
    assert choose(replace(small, engine="vllm"), CPU) == EngineChoice("vllm", "as configured")


def test_several_resident_versions_choose_local_and_vllm_refuses_them(tmp_path: Path) -> None:
    several = replace(spec(tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=2), resident_versions=2)
    alone = "vLLM keeps one version of whole weights at a time"
    assert choose(several, GPU, on("cuda")) == EngineChoice("local", alone)
    adapters = replace(several, lora=LoraSection(rank=4))
    assert choose(adapters, GPU, on("cuda")) == EngineChoice("vllm", "the device is cuda")
    with pytest.raises(ConfigError, match=r"rollout\.weight_change: beside: 2 .* set rollout\.engine=local, or"):
        asyncio.run(start_engine(several, "vllm", stop_token_ids=frozenset(), device=CPU, worker="rollout-0"))


def test_a_model_that_is_not_there_is_named() -> None:
    nowhere = EngineSpec(
        engine="auto", model_path="./nowhere", dtype="float32", slots=4, max_context=64, kv_cache="keep",
        tensor_parallel=1, step_s=60.0, load_s=60.0,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"\./nowhere"):
        choose(nowhere, CPU)
