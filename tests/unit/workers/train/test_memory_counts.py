"""Counts of a model on the meta device equal those of real tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from algorithms.gac import GAC
from benchmarks.trainer import peak_of
from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch
from rlsys.config.memory_plan import rank_memory
from rlsys.errors import ModelError
from rlsys.types import Distribution, VersionSpan
from workers.model.decoder_layers import checkpoint_layers
from workers.model.logprobs import trained_logprobs
from workers.model.memory_counts import CountedModel, stabilizer_bytes

pytestmark = pytest.mark.slow

PUBLISHED = Path(__file__).parents[4] / "docs" / "plan"
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 5, "vocab_size": 300,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**SMALL, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2),
}


def folder_of(config: PreTrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_real_model(name: str, tmp_path: Path):
    sizes = CountedModel(folder_of(CONFIGS[name], tmp_path)).sizes
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.outside + 5 * sizes.largest_layer == sizes.parameters
    assert sizes.untied_head == (0 if name == "llama" else 300 * 64)
    assert (sizes.vocabulary, sizes.cached) == (300, 2 * 5 * 2 * 16)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.616), ("qwen2.5-32b", 32.76), ("qwen2.5-72b", 72.71),
     ("qwen3-30b-a3b", 30.53)],
)  # fmt: skip
def test_the_configurations_of_the_documentation_have_the_published_sizes(name: str, billions: float):
    sizes = CountedModel(str(PUBLISHED / name)).sizes
    assert sizes.parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_planned_step_needs_what_a_measured_one_does(name: str, how, tmp_path: Path):
    counted = CountedModel(folder_of(CONFIGS[name], tmp_path))
    planned = rank_memory(
        counted.sizes, counted.step("float32", how, 256, has_head=True), shards=1, positions=256, value_bytes=4
    )
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    checkpoint_layers(model, how)
    length = 255
    sample = Sample((1,), (2,) * length, (True,) * length, (0.0,) * length, (VersionSpan(0, length),))
    micro_batch = MicroBatch.of([sample])
    measured = peak_of(lambda: trained_logprobs(model, micro_batch, Distribution(1.0))[0].sum().backward())
    assert planned.activations + planned.logits == pytest.approx(measured, rel=0.03)


def test_bytes_are_linear_in_the_positions(tmp_path: Path):
    counted = CountedModel(folder_of(CONFIGS["qwen3"], tmp_path))
    short, long = (counted.step("bfloat16", "full", n, has_head=False) for n in (256, 512))
    assert short.layers.at(384) == pytest.approx(long.layers.at(384), rel=1e-3)


def test_a_model_of_one_layer_is_counted(tmp_path: Path):
    def counted(num_layers: int) -> CountedModel:
        sizes: dict[str, Any] = {**SMALL, "num_hidden_layers": num_layers}
        return CountedModel(folder_of(Qwen3Config(**sizes), tmp_path / str(num_layers)))

    one, two = (counted(num).step("float32", "none", 64, has_head=True) for num in (1, 2))
    assert 0 < one.activations.at(64) < two.activations.at(64)


def test_less_is_kept_with_more_checkpointing(tmp_path: Path):
    counted = CountedModel(folder_of(CONFIGS["llama"], tmp_path))
    none, selective, full = (
        counted.step("float32", how, 256, has_head=True).activations.at(256) for how in ("none", "selective", "full")
    )
    assert none > 1.2 * selective > 1.2 * full


def test_gac_keeps_one_gradient():
    assert stabilizer_bytes(GAC()) == 4.0
    assert stabilizer_bytes(None) == 0.0


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no_such"}', '{"model_type": "t5"}', "[]"])
def test_a_folder_without_a_usable_configuration_is_refused_by_name(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"^model\.path '.*' has no config\.json of a causal language model: "):
        CountedModel(str(tmp_path))


def test_a_checkpointed_layer_keeps_little_more_than_its_input() -> None:
    """Of a 7B model, whose 28 layers have inputs of 3,584 numbers."""
    folder = Path(__file__).parents[4] / "docs" / "plan" / "qwen2.5-7b"
    step = CountedModel(str(folder)).step("bfloat16", "full", 4096, has_head=True)
    assert 28 * 3584 * 2 < step.activations.per_position < 0.3e6
