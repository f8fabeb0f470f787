"""Every family that people train: trained, published to an engine, sampled, exported; and all logprobs agree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlsys.batch.samples import Sample
from rlsys.types import Distribution, VersionSpan
from tests.contract.engines import CONTEXT, VLLM, ask, logprobs_by_hand, run
from tests.families import FAMILIES, VLLM_FAMILIES, WIDE, tiny
from tests.models import save_model
from tests.training import PLAIN, SETTINGS, data_of, differing, planned
from workers.engines.engine import Completion, Engine, EngineSpec
from workers.engines.local import LocalEngine
from workers.train.fsdp import FsdpBackend
from workers.train.logprobs import score
from workers.train.model_loading import load_model
from workers.train.rank_group import RankGroup

MakeEngine = Callable[[str], Engine]


def check(family: str, sizes: dict[str, Any], make: MakeEngine, folder: Path) -> None:
    """Train a step, publish it to an engine, sample, and compare with the trainer and with the exported model.

    The prompts share prefixes, and every sample is longer than a sliding window.
    """
    path, exported = save_model(folder / "initial", tiny(family, **sizes)), folder / "exported"
    backend = FsdpBackend(path, SETTINGS, RankGroup(), probe_length=4)
    plan, payloads = planned(0, 1, PLAIN)
    backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(1.0))
    weights = backend.full_weights(torch.float32)
    backend.export(exported)
    plain = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager").eval()
    assert differing(weights, dict(plain.named_parameters())) == []
    assert differing(weights, dict(tiny(family, **sizes).named_parameters())) != []

    requests = [ask(str(i), prompt=tuple(range(3, 9 + i)), seed=i, new=20) for i in range(3)]

    async def scenario(engine: Engine) -> tuple[list[Completion], tuple[float, ...]]:
        await engine.stage(weights)
        await engine.pause()
        await engine.load(4, weights)
        await engine.resume()
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        return done, await engine.score(requests[0].prompt_ids + done[0].output_ids)

    done, scored = run(lambda: make(path), scenario)
    samples = [
        Sample(request.prompt_ids, one.output_ids, (True,) * 20, one.logprobs, (VersionSpan(4, 20),))
        for request, one in zip(requests, done, strict=True)
    ]
    trained = score(load_model(str(exported), torch.float32), samples, Distribution(1.0), max_tokens=1000)
    for request, one, of_trainer in zip(requests, done, trained, strict=True):
        assert one.logprobs == pytest.approx(of_trainer, abs=1e-4), "the logprobs of engine and trainer differ"
        assert one.logprobs == pytest.approx(logprobs_by_hand(plain, request, one.output_ids), abs=1e-4)
    assert scored[-20:] == pytest.approx(done[0].logprobs, abs=1e-4)


def local_of(path: str) -> LocalEngine:
    spec = EngineSpec(model_path=path, slots=4, max_context=CONTEXT)
    return LocalEngine(load_model(path, torch.float32), spec, stop_token_ids=frozenset(), name="r", version=3)


def vllm_of(path: str) -> Engine:
    from workers.engines.vllm import VllmEngine

    spec = EngineSpec(model_path=path, slots=4, max_context=CONTEXT)
    return VllmEngine(spec, stop_token_ids=frozenset(), version=3, device=torch.device("cpu"), name="r")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_published_sampled_and_exported(family: str, tmp_path: Path) -> None:
    check(family, {}, local_of, tmp_path)


@VLLM
@pytest.mark.parametrize("family", VLLM_FAMILIES)
def test_vllm_samples_a_family_as_it_is_trained(family: str, tmp_path: Path) -> None:
    check(family, WIDE, vllm_of, tmp_path)
