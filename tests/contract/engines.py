"""The engines that the contract is run on, and what its tests do with them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlsys.config.lora_section import LoraSection
from rlsys.routing.requests import Completion, Request
from rlsys.types import PolicyVersion, Sampling, VersionSpan
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import Engine, EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.model.lora import adapter_of, add_adapter, published_tensors

torch.set_num_threads(1)

T = TypeVar("T")
NUM_VOCAB = 90
CONTEXT = 256


def qwen(*, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            intermediate_size=128, vocab_size=NUM_VOCAB, tie_word_embeddings=tied, initializer_range=0.2,
        )
    )  # fmt: skip


def llama(*, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=200,
            vocab_size=NUM_VOCAB, tie_word_embeddings=True, initializer_range=0.2,
        )
    )  # fmt: skip


def biased(*, seed: int = 0) -> PreTrainedModel:
    """A model with biases, which are not 0, and an output layer that is not tied."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
            vocab_size=NUM_VOCAB, tie_word_embeddings=False, initializer_range=0.2,
        )
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


def local(
    model: PreTrainedModel | None = None, *, num_slots: int = 8, stop: frozenset[int] = frozenset(), **choices: Any
) -> LocalEngine:
    spec = EngineSpec(model_path="", slots=num_slots, max_context=CONTEXT, **choices)
    return LocalEngine(model or qwen(), spec, stop_token_ids=stop, decode=spelled, name="rollout-0", version=3)


def spelled(ids: Sequence[int]) -> str:
    """Text of token ids, one letter each."""
    return "".join(chr(0x4E00 + token) for token in ids)


def scripted(**choices: Any) -> ScriptedEngine:
    """Its replies depend on seed and place."""
    return ScriptedEngine(
        lambda request: [(request.seed + place) % 7 for place in range(500)],
        num_slots=8, max_context=CONTEXT, shapes={"w": (2, 3), "b": (3,)}, version=3, **choices,
    )  # fmt: skip


LORA = LoraSection(rank=4, alpha=8.0)


def adapted(*, seed: int = 0) -> PreTrainedModel:
    """The tied model with an adapter: without effect for seed 0, random for others."""
    model = qwen()
    add_adapter(model, LORA, "tiny")
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_of(model).values():
        if seed:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


class Kit:
    """How to come by one engine, and what it takes."""

    def __init__(
        self, build: Callable[[], Engine], *, tied: bool | None, is_costly: bool = False, has_adapter: bool = False
    ) -> None:
        """`tied` None: there is no model. A costly engine is used by one test after the other. An exact one gives the
        same tokens and logprobs in the last bit, however it came by its keys and values. `has_adapter`: the engine
        takes adapters of its model."""
        self.tied, self.is_exact, self.has_adapter = tied, not is_costly, has_adapter
        self._build, self._is_costly = build, is_costly
        self._kept: Engine | None = None

    def model(self, seed: int = 0) -> PreTrainedModel:
        """The model that computes with `weights(seed)`; that of seed 0 is version 3."""
        return adapted(seed=seed) if self.has_adapter else qwen(tied=bool(self.tied), seed=seed)

    def weights(self, seed: int) -> Mapping[str, Tensor]:
        """Weights that the engine takes; those of seed 0 are version 3."""
        if self.tied is None:
            return {"w": torch.full((2, 3), seed), "b": torch.zeros(3)}
        return {k: p.detach() for k, p in published_tensors(self.model(seed)).items()}

    def make(self) -> Engine:
        """An engine that nobody uses, at version 3."""
        return self._costly() if self._is_costly else self._build()

    def another(self) -> Engine:
        """A second engine of the same weights; a costly one is its own second."""
        return self.make()

    def _costly(self) -> Engine:
        self._kept = self._kept or self._build()
        return self._kept

    async def reset(self, engine: Engine) -> None:
        """Take back what the test before did."""
        if engine.version != 3:
            await engine.pause()
            await engine.load(3, self.weights(0))
        if self._is_costly:
            await engine.resume()

    async def finish(self, engine: Engine) -> None:
        """End an engine, unless another test will want it."""
        if engine is not self._kept:
            await engine.close()

    async def close(self, engine: Engine) -> None:
        """End an engine for good."""
        self._kept = None
        await engine.close()

    def end(self) -> None:
        """After the last test."""
        if self._kept is not None:
            asyncio.run(self.close(self._kept))


def local_lora(**choices: Any) -> LocalEngine:
    """The local engine on a model with an adapter."""
    return local(adapted(), lora=LORA, **choices)


def vllm(*, tied: bool, model: PreTrainedModel | None = None, **choices: Any) -> Engine:
    """vLLM on a folder with `model`, or that of `Kit.model`; with `lora`, that model is the base."""
    from workers.engines.vllm.vllm_engine import VllmEngine

    with tempfile.TemporaryDirectory() as folder:
        (model or qwen(tied=tied)).save_pretrained(folder)
        return VllmEngine(
            EngineSpec(model_path=folder, slots=8, max_context=CONTEXT, **choices),
            stop_token_ids=frozenset(), decode=spelled, version=3, device=torch.device("cpu"), name="rollout-0",
        )  # fmt: skip


VLLM = pytest.mark.vllm
NIGHTLY = pytest.mark.nightly
OVERLAPPING = {"async_scheduling": True}
"""Arguments of a vLLM that submits a step while the one before is computed."""
REAL = [
    pytest.param(Kit(local, tied=True), id="local-tied"),
    pytest.param(Kit(lambda: local(qwen(tied=False)), tied=False), id="local-untied"),
    pytest.param(Kit(local_lora, tied=True, has_adapter=True), id="local-lora"),
    pytest.param(Kit(lambda: vllm(tied=True), tied=True, is_costly=True), id="vllm-tied", marks=VLLM),
    pytest.param(
        Kit(lambda: vllm(tied=False, vllm_args=OVERLAPPING), tied=False, is_costly=True),
        id="vllm-overlapping",
        marks=[VLLM, NIGHTLY],
    ),
    pytest.param(
        Kit(lambda: vllm(tied=True, lora=LORA), tied=True, is_costly=True, has_adapter=True),
        id="vllm-lora",
        marks=[VLLM, NIGHTLY],
    ),
]
ALL = [pytest.param(Kit(scripted, tied=None), id="scripted"), *REAL]
with_a_model = pytest.mark.parametrize("kit", REAL, indirect=True)


def ask(
    name: str = "a",
    *,
    new: int = 6,
    prompt: tuple[int, ...] = (5, 6, 7),
    seed: int = 11,
    begun: Completion | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop: tuple[str, ...] = (),
) -> Request:
    return Request(name, prompt, Sampling(temperature, top_p, top_k, min_p, new, stop), seed, begun)


def run(source: Kit | Callable[[], Engine], scenario: Callable[[Engine], Awaitable[T]]) -> T:
    kit = source if isinstance(source, Kit) else Kit(source, tied=None)

    async def main() -> T:
        engine = kit.make()
        try:
            await kit.reset(engine)
            return await scenario(engine)
        finally:
            await kit.finish(engine)

    return asyncio.run(asyncio.wait_for(main(), 200))


async def pause_after(engine: Engine, num_tokens: int) -> None:
    """Pause once that many tokens, or some more, were sampled from now."""
    goal = engine.stats().num_tokens + num_tokens
    await engine.pause()
    while engine.stats().num_tokens < goal:
        await engine.resume()
        await turns(2)
        await engine.pause()


async def cut(engine: Engine, request: Request, num_tokens: int) -> Completion:
    """What there is of a request that is aborted after that many tokens, or some more."""
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0)
    await pause_after(engine, num_tokens)
    engine.abort(request.id)
    done = await task
    await engine.resume()
    assert done.finish == "abort"
    assert num_tokens <= len(done.output_ids) < request.sampling.max_new_tokens
    return done


async def change(engine: Engine, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
    """New weights, in the order in which they are taken in."""
    await engine.stage(weights)
    await engine.pause()
    await engine.load(version, weights)
    await engine.resume()


def in_bfloat16(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights as they are published for a model in bfloat16."""
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def stale(tensor: Tensor) -> Tensor:
    """The bfloat16 tensor before a step at a learning rate of 1e-6: .37 % of the elements differ, by one bit."""
    count = max(1, round(0.0037 * tensor.numel()))
    changed = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0))[:count]
    before = tensor.clone()
    before.view(-1).view(torch.int16)[changed] ^= 1
    return before


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def head(whole: Completion, num_tokens: int) -> Completion:
    """The first tokens of a completion of one version, as if it had been cut there."""
    spans = (VersionSpan(whole.versions[0].version, num_tokens),)
    return Completion(whole.output_ids[:num_tokens], whole.logprobs[:num_tokens], spans, "abort")


def logprobs_by_hand(model: PreTrainedModel, request: Request, output_ids: tuple[int, ...]) -> list[float]:
    ids = torch.tensor([request.prompt_ids + output_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / request.sampling.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(output_ids)[:, None]).flatten().tolist()
