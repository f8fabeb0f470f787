"""Models whose matrices have more rows than their tokenizer has ids: no engine samples what no text has, and the
trainer computes the same distribution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_policy import build_tokenizer
from rlsys.batch.samples import Sample
from rlsys.routing.requests import Completion
from rlsys.types import Distribution, VersionSpan
from tests.contract.engines import VLLM, ask, spelled
from tests.training import PLAIN, SETTINGS, data_of, planned
from tests.vllm_servers import vllm_server
from workers.engines.engine import Engine, EngineSpec, ServerSpec
from workers.engines.local.local_engine import LocalEngine
from workers.engines.vllm.vllm_server import VllmServerEngine
from workers.model.logprobs import score
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup

NUM_KNOWN, NUM_ROWS, CONTEXT = len(build_tokenizer()), 160, 256
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            intermediate_size=128, vocab_size=NUM_ROWS, tie_word_embeddings=False, initializer_range=0.1,
        )
    )  # fmt: skip
    model.save_pretrained(folder := tmp_path_factory.mktemp("padded"))
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def check(path: str, make: Callable[[], Engine]) -> None:
    """Sample, with and without cuts; compare with the trainer, and with a forward by hand that leaves the rest out."""
    drawn = (Distribution(1.0), Distribution(0.7, top_p=0.9))
    requests = [
        [
            ask(f"{i}-{seed}", prompt=PROMPT, seed=seed, new=20, temperature=d.temperature, top_p=d.top_p)
            for seed in range(6)
        ]
        for i, d in enumerate(drawn)
    ]

    async def main() -> tuple[list[list[Completion]], tuple[float, ...]]:
        engine = make()
        try:
            if isinstance(engine, VllmServerEngine):
                await engine.start()
            done = [await asyncio.gather(*(engine.generate(request) for request in each)) for each in requests]
            return done, await engine.score((*PROMPT, *done[0][0].output_ids))
        finally:
            await engine.close()

    done, scored = asyncio.run(main())
    plain, trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), load_model(path, torch.float32)
    for distribution, completions in zip(drawn, done, strict=True):
        samples = [
            Sample(PROMPT, one.output_ids, (True,) * 20, one.logprobs, (VersionSpan(3, 20),)) for one in completions
        ]
        for one, own in zip(completions, score(trainer, samples, distribution, max_tokens=1000), strict=True):
            assert max(one.output_ids) < NUM_KNOWN
            assert one.logprobs == pytest.approx(own, abs=1e-4)
    ids = (*PROMPT, *done[0][0].output_ids)
    with torch.no_grad():
        logits = plain(torch.tensor([ids])).logits[0, 2:-1, :NUM_KNOWN]
    by_hand = logits.log_softmax(-1).gather(1, torch.tensor(ids[3:])[:, None]).flatten().tolist()
    assert done[0][0].logprobs == pytest.approx(by_hand, abs=1e-4)
    assert scored[-20:] == pytest.approx(by_hand, abs=1e-4)


def test_local_samples_known_ids_alone(path: str) -> None:
    spec = EngineSpec(model_path=path, slots=4, max_context=CONTEXT)
    check(
        path,
        lambda: LocalEngine(load_model(path, torch.float32), spec, stop_token_ids=frozenset(), name="r", version=3),
    )


@VLLM
def test_vllm_samples_known_ids_alone(path: str) -> None:
    from workers.engines.vllm.vllm_engine import VllmEngine

    spec = EngineSpec(model_path=path, slots=4, max_context=CONTEXT)
    check(path, lambda: VllmEngine(spec, stop_token_ids=frozenset(), version=3, device=torch.device("cpu"), name="r"))


@VLLM
def test_a_vllm_server_samples_known_ids_alone(path: str) -> None:
    with vllm_server(Path(path), context=CONTEXT) as url:
        server = ServerSpec(url=url)
        spec = EngineSpec(model_path=path, slots=4, max_context=CONTEXT, server=server)
        check(path, lambda: VllmServerEngine(spec, server, stop_token_ids=frozenset(), decode=spelled, name="r"))


def test_rows_of_unknown_ids_are_not_trained_and_are_exported(path: str, tmp_path: Path) -> None:
    backend = FsdpBackend(path, replace(SETTINGS, weight_decay=0.0), RankGroup())
    before = load_model(path, torch.float32).get_parameter("lm_head.weight").detach()
    plan, payloads = planned(0, 1, PLAIN)
    backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(1.0))
    backend.export(tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).get_parameter("lm_head.weight").detach()
    assert torch.equal(after[NUM_KNOWN:], before[NUM_KNOWN:])
    assert not torch.equal(after[:NUM_KNOWN], before[:NUM_KNOWN])
