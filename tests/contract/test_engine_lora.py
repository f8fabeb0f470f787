"""Adapters in an engine, beyond the contract that every engine passes with them."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from rlsys.config.lora_section import LoraSection
from rlsys.errors import ConfigError, WeightsMismatch
from tests.contract.engines import LORA, VLLM, Kit, adapted, ask, change, local_lora, qwen, run, vllm
from workers.engines.engine import Engine
from workers.model.lora import merge, published_tensors

KITS = [
    pytest.param(Kit(local_lora, tied=True, has_adapter=True), id="local"),
    pytest.param(
        Kit(lambda: vllm(tied=True, lora=LORA), tied=True, is_costly=True, has_adapter=True), id="vllm", marks=VLLM
    ),
]
each_engine = pytest.mark.parametrize("kit", KITS, indirect=True)
IDS = tuple((7 * k) % 80 for k in range(40))


@each_engine
def test_an_adapter_computes_the_same_whatever_was_loaded_before(kit: Kit) -> None:
    """Bit for bit: nothing is merged into the base, from which it could not be taken out exactly."""

    async def scenario(engine: Engine) -> None:
        scores = {}
        for version, seed in enumerate((1, 2, 1, 0, 2, 1), start=4):
            await change(engine, version, kit.weights(seed))
            score = await engine.score(IDS)
            assert scores.setdefault(seed, score) == score
        assert len({*scores.values()}) == 3

    run(kit, scenario)


@each_engine
def test_an_adapter_computes_as_its_merged_weights(kit: Kit) -> None:
    weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in qwen().named_parameters()}
    merge(weights, kit.weights(1), LORA)
    merged = qwen()
    merged.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logprobs = merged(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()

    async def scenario(engine: Engine) -> tuple[float, ...]:
        await change(engine, 4, kit.weights(1))
        return await engine.score(IDS)

    assert run(kit, scenario) == pytest.approx(expected, abs=1e-4)


@each_engine
def test_whole_weights_are_refused_by_an_engine_of_adapters(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        before = await engine.generate(ask())
        await engine.pause()
        with pytest.raises(WeightsMismatch, match=r"missing base_model.*unknown model\.embed_tokens\.weight"):
            await engine.load(4, {name: p.detach() for name, p in qwen().named_parameters()})
        await engine.resume()
        assert await engine.generate(ask()) == before

    run(kit, scenario)


@each_engine
def test_running_requests_continue_under_the_new_adapter(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        tasks = [asyncio.create_task(engine.generate(ask(str(i), new=40, seed=i))) for i in range(3)]
        await asyncio.sleep(0)
        await change(engine, 4, kit.weights(1))
        for task in tasks:
            done = await task
            assert len(done.output_ids) == 40
            assert done.versions[-1].version == 4
        assert len(published_tensors(adapted())) == len(kit.weights(1))

    run(kit, scenario)


@VLLM
def test_a_rank_above_those_of_vllm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.rank: 513 is above 512"):
        vllm(tied=True, lora=LoraSection(rank=513))
