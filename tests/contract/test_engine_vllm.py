"""What only vLLM does, or is refused."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path

import pytest
import torch

from rlsys.errors import ConfigError, ModelError
from rlsys.weight_sync.manifest import content_hash
from tests.contract.engines import (
    CONTEXT,
    NUM_VOCAB,
    VLLM,
    Kit,
    ask,
    logprobs_by_hand,
    qwen,
    run,
    vllm,
)
from workers.engines.engine import Engine, EngineSpec
from workers.transport.checksums import hash_of


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


@VLLM
def test_a_sharded_vllm_takes_weights_like_any_other() -> None:
    kit = Kit(lambda: vllm(tied=True, tensor_parallel=2), tied=True)
    others = set(multiprocessing.active_children())
    run(kit, lambda engine: _changes(engine, kit))
    assert set(multiprocessing.active_children()) <= others


async def _changes(engine: Engine, kit: Kit) -> None:
    await engine.stage(kit.weights(1))
    await engine.pause()
    await engine.load(4, kit.weights(1))
    await engine.resume()
    assert content_hash(await engine.checksums()) == hash_of(kit.weights(1))
    done = await engine.generate(ask(new=20))
    assert done.logprobs == pytest.approx(logprobs_by_hand(qwen(seed=1), ask(), done.output_ids), abs=1e-4)


@VLLM
def test_layers_other_than_plain_packed_ones_are_refused() -> None:
    from workers.engines.vllm_weights import can_be_swapped

    packed, experts = torch.nn.Linear(2, 2), torch.nn.Module()
    packed.__dict__["cpu_linear"] = torch.nn.functional.linear
    assert can_be_swapped(torch.nn.Sequential(packed))
    assert not can_be_swapped(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    experts.__dict__["quant_method"] = object()
    with pytest.raises(ModelError, match=r"the weights of 1 \(Module\); use rollout\.engine=local, or a GPU"):
        can_be_swapped(torch.nn.Sequential(packed, experts))


@VLLM
def test_a_model_unknown_to_vllm_is_refused_by_name(tmp_path: Path) -> None:
    from workers.engines.vllm import VllmEngine

    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ModelError, match=str(tmp_path)):
        VllmEngine(
            EngineSpec(model_path=str(tmp_path), slots=1, max_context=8),
            stop_token_ids=frozenset(), device=torch.device("cpu"), name="rollout-0",
        )  # fmt: skip
