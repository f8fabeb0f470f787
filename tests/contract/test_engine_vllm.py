"""What only vLLM does, or is refused."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlsys.config.lora_section import LoraSection
from rlsys.errors import ConfigError, ModelError
from rlsys.routing.requests import Completion, Request
from rlsys.types import PolicyVersion
from rlsys.weight_sync.manifest import TensorSpec, content_hash
from tests.contract.engines import (
    CONTEXT,
    LORA,
    NUM_VOCAB,
    OVERLAPPING,
    VLLM,
    Kit,
    ask,
    biased,
    change,
    in_bfloat16,
    logprobs_by_hand,
    run,
    stale,
    turns,
    vllm,
)
from workers.engines.engine import Engine, EngineSpec
from workers.transport.checksums import checksum_of, hash_of


@VLLM
def test_vllm_keeps_prefixes_within_a_version_and_forgets_them_after() -> None:
    prompt = tuple(range(1, 70))
    kit = Kit(lambda: vllm(tied=True), tied=True)

    async def scenario(engine: Engine) -> list[int]:
        counts = []
        for version in (3, 3, 4):
            if version != engine.version:
                await engine.pause()
                await engine.load(version, kit.weights(1))
                await engine.resume()
            before = engine.stats().num_cached_tokens
            await engine.generate(ask(prompt=prompt))
            counts.append(engine.stats().num_cached_tokens - before)
        return counts

    assert run(kit, scenario) == [0, 64, 0]


@VLLM
def test_prompts_beyond_one_step_together_change_no_token() -> None:
    kit = Kit(lambda: vllm(tied=True, vllm_args={"max_num_batched_tokens": CONTEXT}), tied=True)
    requests = [ask(str(i), prompt=tuple((i + 3 * k) % NUM_VOCAB for k in range(150)), seed=i) for i in range(6)]

    async def scenario(engine: Engine) -> None:
        together = await asyncio.gather(*(engine.generate(request) for request in requests))
        for request, done in zip(requests, together, strict=True):
            alone = await engine.generate(request)
            assert (alone.output_ids, alone.finish) == (done.output_ids, done.finish)

    run(kit, scenario)


@VLLM
def test_vllm_takes_further_arguments_but_not_those_that_are_ours() -> None:
    kit = Kit(lambda: vllm(tied=True, vllm_args={"block_size": 64}), tied=True)

    async def scenario(engine: Engine) -> int:
        for _ in range(2):
            await engine.generate(ask(prompt=tuple(range(1, 51))))
        return engine.stats().num_cached_tokens

    assert run(kit, scenario) == 0  # a prompt of 50 tokens fills no block of 64
    with pytest.raises(ConfigError, match=r"rollout\.vllm_args: logprobs_mode is set by rlsys itself"):
        vllm(tied=True, vllm_args={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(ConfigError, match=r"rollout\.vllm_args: .*'blok_size'"):
        vllm(tied=True, vllm_args={"blok_size": 64})


OVERLAPPED = [
    pytest.param({}, id="whole"),
    pytest.param({"lora": LORA}, id="lora"),
    pytest.param({"tensor_parallel": 2}, id="sharded"),
]


@VLLM
@pytest.mark.parametrize("choices", OVERLAPPED)
def test_tokens_of_overlapping_steps_carry_the_version_that_sampled_them(choices: dict[str, Any]) -> None:
    """A change begins while one step is submitted, and the tokens of the one before are not taken."""
    kit = Kit(lambda: vllm(tied=True, vllm_args=OVERLAPPING, **choices), tied=True, has_adapter="lora" in choices)
    requests = [ask(str(seed), new=100, seed=seed) for seed in range(5)]
    models = {version: kit.model(version - 3) for version in range(3, 9)}
    weights = {version: kit.weights(version - 3) for version in models}

    async def scenario(engine: Any) -> list[Completion]:
        assert engine._core.batch_queue is not None
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        for version in range(4, 9):
            goal = engine.stats().num_tokens + 40
            while engine.stats().num_tokens < goal:
                await turns(1)
            await change(engine, version, weights[version])
        return await asyncio.gather(*tasks)

    for request, done in zip(requests, run(kit, scenario), strict=True):
        versions = [span.version for span in done.versions]
        assert versions == list(models)[: len(versions)]
        assert len(versions) > 1, "replies went on through a change at least"
        assert done.logprobs == pytest.approx(logprobs_across_changes(models, request, done), abs=1e-4)


def logprobs_across_changes(
    models: Mapping[PolicyVersion, PreTrainedModel], request: Request, done: Completion
) -> list[float]:
    """Logprobs by hand of tokens of several versions, where keys and values stay those of the version before."""
    ids, cache, logprobs = torch.tensor([request.prompt_ids + done.output_ids]), DynamicCache(), []
    begin, end = 0, len(request.prompt_ids) - 1
    for span in done.versions:
        begin, end, sampled = end if logprobs else 0, end + span.num_tokens, ids[0, end + 1 : end + span.num_tokens + 1]
        with torch.no_grad():
            logits = models[span.version](ids[:, begin:end], past_key_values=cache).logits[0, -span.num_tokens :]
        logprobs += logits.log_softmax(-1).gather(1, sampled[:, None]).flatten().tolist()
    return logprobs


SHARDED = [
    pytest.param({}, id="whole"),
    pytest.param({"lora": LoraSection(rank=4, alpha=6.0)}, id="lora"),  # a scale that is no power of two
]


@VLLM
@pytest.mark.parametrize("choices", SHARDED)
def test_a_sharded_vllm_takes_weights_like_any_other(choices: dict[str, Any]) -> None:
    """A shard has half of the attention heads, and the only head of keys is on both."""
    kit = Kit(lambda: vllm(tied=True, tensor_parallel=2, **choices), tied=True, has_adapter="lora" in choices)
    others = set(multiprocessing.active_children())
    run(kit, lambda engine: _changes(engine, kit))
    assert set(multiprocessing.active_children()) <= others


async def _changes(engine: Engine, kit: Kit) -> None:
    assert await engine.checksums() == {}
    weights = in_bfloat16(kit.weights(1))
    running = asyncio.create_task(engine.generate(ask(new=200)))
    for version, name in enumerate(sorted(weights)[:5], start=4):
        await change(engine, version, {**weights, name: stale(weights[name])})
        held = await engine.checksums()
        assert [spec.name for spec, value in held.items() if value != checksum_of(weights[spec.name])] == [name]
    await change(engine, 10, kit.weights(1))
    assert content_hash(await engine.checksums()) == hash_of(kit.weights(1))
    engine.abort("a")
    await running
    if not kit.has_adapter:
        done = await engine.generate(ask(new=20))
        assert done.logprobs == pytest.approx(logprobs_by_hand(kit.model(1), ask(), done.output_ids), abs=1e-4)


@VLLM
def test_sharded_biases_and_an_output_layer_in_bfloat16_are_summed() -> None:
    model = biased().bfloat16()
    weights = {name: p.detach() for name, p in biased(seed=1).bfloat16().named_parameters()}
    assert {"model.layers.0.self_attn.k_proj.bias", "lm_head.weight"} < weights.keys()

    async def scenario(engine: Engine) -> None:
        for version in (4, 5):  # twice: packing widens a bias
            await change(engine, version, weights)
            assert await wrong_in(engine, weights) == []

    run(lambda: vllm(tied=False, model=model, dtype="bfloat16", tensor_parallel=2), scenario)


@VLLM
def test_a_packed_copy_that_stays_behind_is_named() -> None:
    """Also that of the embedding as the output layer."""
    kit = Kit(lambda: vllm(tied=True), tied=True)

    async def scenario(engine: Any) -> None:
        model = engine._llm.model_executor.driver_worker.worker.model_runner.get_model()
        for version, (layer, names) in enumerate(LAYERS.items(), start=4):
            module = model.get_submodule(layer)
            before = module.cpu_linear
            await change(engine, version, kit.weights(version))
            module.cpu_linear = before
            assert [spec.name for spec in await wrong_in(engine, kit.weights(version))] == names

    run(kit, scenario)


LAYERS = {
    "model.layers.1.mlp.down_proj": ["model.layers.1.mlp.down_proj.weight"],
    "model.layers.0.self_attn.qkv_proj": [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"],
    "lm_head": ["model.embed_tokens.weight"],
}
"""Layers of vLLM's model, and the published tensors of each."""


@VLLM
def test_one_wrong_element_of_a_packed_copy_is_found_within_some_versions() -> None:
    """Of 64 columns, 8 are read back per version."""
    from workers.engines.vllm.vllm_weights import COLUMNS, Packed

    kit, layer, found = Kit(lambda: vllm(tied=True), tied=True), "model.layers.1.self_attn.o_proj", []
    weights = kit.weights(1)
    wrong = torch.nn.Linear(64, 64, bias=False)
    wrong.weight.data = weights[f"{layer}.weight"].clone()
    wrong.weight.data[5, 37] += 1e-3

    async def scenario(engine: Any) -> None:
        for turn in range(8):
            await engine.stage(weights)
            shadow = engine._llm.model_executor.driver_worker.worker.rlsys_shadow
            with torch.no_grad():
                shadow._staged[layer] = Packed.of(wrong, turn)
            await change(engine, 4 + turn, weights)
            found.extend((turn, spec.name) for spec in await wrong_in(engine, weights))

    run(kit, scenario)
    assert found == [(37 // COLUMNS, f"{layer}.weight")]


async def wrong_in(engine: Engine, weights: Mapping[str, Tensor]) -> list[TensorSpec]:
    """What the engine computes with that differs from the weights."""
    held = await engine.checksums()
    assert len(held) == len(weights)
    return [spec for spec, value in held.items() if value != checksum_of(weights[spec.name])]


@VLLM
def test_layers_other_than_plain_packed_ones_are_refused() -> None:
    from workers.engines.vllm.vllm_weights import can_be_swapped

    packed, experts = torch.nn.Linear(2, 2), torch.nn.Module()
    packed.__dict__["cpu_linear"] = torch.nn.functional.linear
    assert can_be_swapped(torch.nn.Sequential(packed))
    assert not can_be_swapped(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    experts.__dict__["quant_method"] = object()
    with pytest.raises(ModelError, match=r"the weights of 1 \(Module\); use rollout\.engine=local, or a GPU"):
        can_be_swapped(torch.nn.Sequential(packed, experts))


@VLLM
def test_a_model_unknown_to_vllm_is_refused_by_name(tmp_path: Path) -> None:
    from workers.engines.vllm.vllm_engine import VllmEngine

    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ModelError, match=str(tmp_path)):
        VllmEngine(
            EngineSpec(model_path=str(tmp_path), slots=1, max_context=8),
            stop_token_ids=frozenset(), device=torch.device("cpu"), name="rollout-0",
        )  # fmt: skip
