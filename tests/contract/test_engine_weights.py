"""How engines take in weights: what every engine promises, then what only a real model can show."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
import torch

from rlsys.config.schema import PROBE_TOLERANCE
from rlsys.errors import WeightsMismatch
from rlsys.routing.requests import Completion
from rlsys.types import VersionSpan
from rlsys.weight_sync.manifest import Probe, content_hash
from tests.contract.engines import (
    NIGHTLY,
    NUM_VOCAB,
    OVERLAPPING,
    VLLM,
    Kit,
    ask,
    change,
    in_bfloat16,
    local,
    logprobs_by_hand,
    pause_after,
    qwen,
    run,
    stale,
    vllm,
    with_a_model,
)
from workers.engines.engine import Engine
from workers.model.lora import published_tensors
from workers.transport.checksums import checksum_of, hash_of, spec_of


def test_tokens_after_a_weight_change_carry_the_new_version(kit: Kit) -> None:
    async def scenario(engine: Engine) -> Completion:
        task = asyncio.create_task(engine.generate(ask(new=50)))
        await asyncio.sleep(0)
        await pause_after(engine, 4)
        assert engine.version == 3
        await engine.load(4, kit.weights(1))
        assert engine.version == 4
        await engine.resume()
        return await task

    done = run(kit, scenario)
    old, new = done.versions
    assert (old.version, new.version) == (3, 4)
    assert old.num_tokens >= 4
    assert old.num_tokens + new.num_tokens == len(done.output_ids) == 50


def test_a_request_made_after_a_weight_change_has_one_version(kit: Kit) -> None:
    async def scenario(engine: Engine) -> Completion:
        await engine.pause()
        await engine.load(7, kit.weights(1))
        await engine.resume()
        return await engine.generate(ask())

    assert run(kit, scenario).versions == (VersionSpan(7, 6),)


def test_checksums_add_up_to_the_published_content_hash(kit: Kit) -> None:
    """Also while requests run, and of weights published in a narrower dtype."""

    async def scenario(engine: Engine) -> None:
        running = asyncio.create_task(engine.generate(ask(new=200)))
        for version, weights in ((4, kit.weights(1)), (5, in_bfloat16(kit.weights(2)))):
            await change(engine, version, weights)
            held = await engine.checksums()
            assert held.keys() == {spec_of(name, tensor) for name, tensor in weights.items()}
            assert content_hash(held) == hash_of(weights)
        engine.abort("a")
        await running

    run(kit, scenario)


@with_a_model
def test_a_tensor_stale_in_few_elements_is_named_although_the_probe_tolerates_it(kit: Kit) -> None:
    """As after a step at a learning rate of 1e-6, which changes .37 % of the elements by one bit."""
    model, ids = kit.model(1), tuple(range(1, 40))
    weights = in_bfloat16(kit.weights(1))
    for name, parameter in published_tensors(model).items():
        parameter.data = weights[name].float()
    probe = Probe(ids, tuple(logprobs_by_hand(model, ask(prompt=ids[:1]), ids[1:])))

    async def scenario(engine: Engine) -> None:
        for version, name in enumerate(sorted(weights), start=4):
            await change(engine, version, {**weights, name: stale(weights[name])})
            held = await engine.checksums()
            wrong = [spec.name for spec, value in held.items() if value != checksum_of(weights[spec.name])]
            assert wrong == [name]
            assert probe.difference(await engine.score(ids)) < PROBE_TOLERANCE["bfloat16"]

    run(kit, scenario)


def test_weights_that_would_be_narrowed_are_refused_by_name() -> None:
    async def scenario(engine: Engine) -> None:
        await engine.pause()
        weights = {name: p.detach() for name, p in qwen().bfloat16().named_parameters()}
        with pytest.raises(
            WeightsMismatch, match=r"model\.norm\.weight is torch\.float32, .* narrow to torch\.bfloat16"
        ):
            await engine.load(4, weights | {"model.norm.weight": weights["model.norm.weight"].float()})
        assert engine.version == 3

    run(lambda: local(qwen().bfloat16()), scenario)


def test_mismatched_weights_are_all_named_and_change_nothing(kit: Kit) -> None:
    weights = dict(kit.weights(1))
    missing, misshapen = sorted(weights)[:2]
    del weights[missing]
    weights |= {misshapen: torch.zeros(1, 9), "stranger": torch.zeros(2)}

    async def scenario(engine: Engine) -> None:
        before = await engine.generate(ask())
        await engine.pause()
        with pytest.raises(WeightsMismatch) as refusal:
            await engine.load(4, weights)
        for name in (missing, misshapen, "stranger", "(1, 9)"):
            assert name in str(refusal.value)
        await engine.resume()
        assert engine.version == 3
        assert await engine.generate(ask()) == before

    run(kit, scenario)


def test_staging_ahead_changes_nothing_until_the_load(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        weights = kit.weights(1)
        before = await engine.generate(ask(new=200))
        running = asyncio.create_task(engine.generate(ask(new=200)))
        await asyncio.sleep(0)
        for _ in range(5):
            await engine.stage(weights)
        assert await running == before
        await engine.pause()
        await engine.load(4, weights)
        await engine.resume()
        assert content_hash(await engine.checksums()) == hash_of(weights)
        assert (await engine.generate(ask(new=40))).versions == (VersionSpan(4, 40),)

    run(kit, scenario)


@with_a_model
def test_a_request_after_a_load_uses_only_the_new_weights(kit: Kit) -> None:
    """Also where the prompt was cached under the old weights, and where an output matrix is tied."""
    prompt = tuple(range(1, 70))

    async def scenario(engine: Engine) -> Completion:
        await engine.generate(ask(prompt=prompt))
        await engine.pause()
        await engine.load(4, kit.weights(1))
        await engine.resume()
        return await engine.generate(ask(prompt=prompt, new=20))

    done = run(kit, scenario)
    model = kit.model(1)
    assert done.logprobs == pytest.approx(logprobs_by_hand(model, ask(prompt=prompt), done.output_ids), abs=1e-4)


@VLLM
@pytest.mark.parametrize(
    "make",
    [
        lambda: local(kv_cache="recompute"),
        lambda: vllm(tied=True, kv_cache="recompute"),
        pytest.param(lambda: vllm(tied=True, kv_cache="recompute", vllm_args=OVERLAPPING), marks=NIGHTLY),
    ],
)
def test_with_a_recomputed_cache_later_logprobs_match_the_new_weights(make: Callable[[], Engine]) -> None:
    kit = Kit(make, tied=True)

    async def scenario(engine: Engine) -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(ask(str(i), new=60, seed=i))) for i in range(5)]
        await asyncio.sleep(0)
        await pause_after(engine, 20)
        await engine.load(4, kit.weights(1))
        await engine.resume()
        return await asyncio.gather(*tasks)

    for i, done in enumerate(run(kit, scenario)):
        count = done.versions[0].num_tokens
        assert 0 < count < 60
        by_hand = logprobs_by_hand(qwen(seed=1), ask(seed=i), done.output_ids)
        assert done.logprobs[count:] == pytest.approx(by_hand[count:], abs=1e-4)


def test_tokens_after_a_weight_change_come_from_the_new_weights() -> None:
    flat = {k: p.detach() for k, p in qwen(tied=False).named_parameters()}
    flat["lm_head.weight"] = torch.zeros(NUM_VOCAB, 64)

    async def scenario(engine: Engine) -> Completion:
        task = asyncio.create_task(engine.generate(ask(new=50)))
        await asyncio.sleep(0)
        await pause_after(engine, 4)
        await engine.load(4, flat)
        await engine.resume()
        return await task

    done = run(lambda: local(qwen(tied=False)), scenario)
    count = done.versions[0].num_tokens
    plain = logprobs_by_hand(qwen(tied=False), ask(), done.output_ids[:count])
    assert done.logprobs[:count] == pytest.approx(plain, abs=1e-5)
    assert done.logprobs[count:] == pytest.approx([-math.log(NUM_VOCAB)] * (50 - count), abs=1e-6)


@VLLM
@pytest.mark.parametrize("make", [local, lambda: vllm(tied=True)])
def test_a_tied_output_layer_may_be_published_or_left_out(make: Callable[[], Engine]) -> None:
    weights = {k: p.detach() for k, p in qwen(seed=1).named_parameters()}
    assert "lm_head.weight" not in weights

    async def scenario(engine: Engine) -> list[Completion]:
        outputs = []
        for extra in ({}, {"lm_head.weight": weights["model.embed_tokens.weight"]}):
            await engine.pause()
            await engine.load(4, weights | extra)
            await engine.resume()
            assert content_hash(await engine.checksums()) == hash_of(weights | extra)
            outputs.append(await engine.generate(ask()))
        return outputs

    left_out, named = run(make, scenario)
    assert left_out.logprobs == named.logprobs
    assert left_out.logprobs == pytest.approx(logprobs_by_hand(qwen(seed=1), ask(), left_out.output_ids), abs=1e-4)
