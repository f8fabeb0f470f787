"""Every family that people train: trained, published to an engine, sampled, exported; and all logprobs agree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from examples.tiny_policy import build_tokenizer
from rlsys.batch.samples import Sample
from rlsys.routing.requests import Completion
from rlsys.types import ChatOptions, Distribution, Json, Message, VersionSpan
from tests.by_day import first_by_day
from tests.contract.engines import CONTEXT, VLLM, ask, logprobs_by_hand, run
from tests.families import FAMILIES, SERVED_FAMILIES, VLLM_FAMILIES, WIDE, tiny
from tests.models import save_model
from tests.training import PLAIN, SETTINGS, data_of, differing, planned
from workers.engines.engine import Engine, EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.engines.vllm.vllm_layout import Placement, record_layout
from workers.model.logprobs import score
from workers.model.model_loading import load_model
from workers.model.model_tensors import persistent_buffers
from workers.text.tokenizer import TextTokenizer
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup
from workers.transport.checksums import checksum_of, spec_of

LONG = 512
"""Context of a conversation with tools, a token per character."""
MakeEngine = Callable[[str], Engine]


def check(family: str, sizes: dict[str, Any], make: MakeEngine, folder: Path) -> None:
    """Train a step, publish it to an engine, sample, and compare with the trainer and with the exported model.

    The prompts share prefixes, and every sample is longer than a sliding window. The trainer's buffers differ from
    those of the initial model, which the engine starts with.
    """
    path, exported = save_model(folder / "initial", tiny(family, **sizes)), folder / "exported"
    backend = FsdpBackend(path, SETTINGS, RankGroup(), probe_length=4)
    plan, payloads = planned(0, 1, PLAIN)
    backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(1.0))
    for buffer in persistent_buffers(backend._model).values():
        buffer += 0.1
    weights = backend.full_weights(torch.float32)
    backend.export(exported)
    plain, found = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    plain.save_pretrained(folder / "saved")
    assert names_in(exported) == names_in(folder / "saved"), "engines that read checkpoints know those names"
    assert differing(weights, {name: tensor for name, tensor in plain.state_dict().items() if name in weights}) == []
    initial = tiny(family, **sizes).state_dict()
    assert differing(weights, {name: initial[name] for name in weights}) == sorted(weights)

    requests = [ask(str(i), prompt=tuple(range(3, 9 + i)), seed=i, new=20) for i in range(3)]

    async def scenario(engine: Engine) -> tuple[list[Completion], tuple[float, ...]]:
        await engine.stage(weights)
        await engine.pause()
        await engine.load(4, weights)
        await engine.resume()
        expected = {spec_of(name, tensor): checksum_of(tensor) for name, tensor in weights.items()}
        sums = await engine.checksums()
        assert sums == expected if isinstance(engine, LocalEngine) else sums.items() <= expected.items()
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        return done, await engine.score(requests[0].prompt_ids + done[0].output_ids)

    done, scored = run(lambda: make(path), scenario)
    samples = [
        Sample(request.prompt_ids, one.output_ids, (True,) * 20, one.logprobs, (VersionSpan(4, 20),))
        for request, one in zip(requests, done, strict=True)
    ]
    trained = score(load_model(str(exported), torch.float32), samples, Distribution(1.0), max_tokens=1000)
    assert is_uncertain(done)
    for request, one, of_trainer in zip(requests, done, trained, strict=True):
        assert one.logprobs == pytest.approx(of_trainer, abs=1e-4), "the logprobs of engine and trainer differ"
        assert one.logprobs == pytest.approx(logprobs_by_hand(plain, request, one.output_ids), abs=1e-4)
    assert scored[-20:] == pytest.approx(done[0].logprobs, abs=1e-4)


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    '{% if tools %}<tools>{{ tools | tojson }}</tools> Call with <tool_call> and "arguments".{% endif %}'
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {"name": "f", "description": "g", "parameters": {"type": "object"}},
}
DRAWN = Distribution(0.7, top_p=0.9)
ENDS = range(20, 40)
"""End tokens of the generation configuration: a random model says one of them in most replies."""


def chat_model(family: str, sizes: dict[str, Any], folder: Path) -> tuple[str, TextTokenizer]:
    """A model that speaks a chat template with tools, and has end tokens in each of the three places."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([*"{}_"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.chat_template = CHAT
    model = tiny(family, vocab_size=len(tokenizer), max_position_embeddings=LONG, **sizes)
    model.generation_config.eos_token_id = [*ENDS]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), TextTokenizer.load(folder)


def check_chat(family: str, sizes: dict[str, Any], make: Callable[..., Engine], folder: Path) -> None:
    """Sample replies to a conversation with a system message and tools, and compare with the trainer."""
    path, codec = chat_model(family, sizes, folder)
    places = [codec.tokenizer.get_vocab()[token] for token in ("<eos>", "<|end|>")]
    assert codec.stop_ids == {*places, *ENDS}
    said = (Message(role="system", content="Be brief."), Message(role="user", content="Sort 3 1 2."))
    prompt = codec.encode(said, ChatOptions((TOOL,), {}))
    shown = "".join(codec.spell(prompt).split())  # the tokenizer class of some families drops whitespace of this one
    assert shown.startswith("<|start|>systemBebrief.<|end|>") and '"name":"f"' in shown
    requests = [
        ask(str(i), prompt=prompt, seed=i, new=30, temperature=DRAWN.temperature, top_p=DRAWN.top_p) for i in range(8)
    ]

    async def scenario(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    done = run(lambda: make(path, stop_ids=codec.stop_ids, max_context=LONG), scenario)
    ended = [one for one in done if one.finish == "stop"]
    assert ended and all(one.output_ids[-1] in codec.stop_ids for one in ended)
    assert all(codec.stop_ids.isdisjoint(one.output_ids[:-1]) for one in done)
    samples = [
        Sample(prompt, one.output_ids, (True,) * (num := len(one.output_ids)), one.logprobs, (VersionSpan(3, num),))
        for one in done
    ]
    trained = score(load_model(path, torch.float32), samples, DRAWN, max_tokens=LONG)
    assert is_uncertain(done)
    for one, of_trainer in zip(done, trained, strict=True):
        assert one.logprobs == pytest.approx(of_trainer, abs=1e-4), "the logprobs of engine and trainer differ"


def is_uncertain(done: list[Completion]) -> bool:
    """True if the tokens were no foregone conclusion, whose logprobs are 0 in any model."""
    return fmean(logprob for one in done for logprob in one.logprobs) < -1


def local_of(path: str, *, stop_ids: frozenset[int] = frozenset(), max_context: int = CONTEXT) -> LocalEngine:
    spec = EngineSpec(model_path=path, slots=4, max_context=max_context)
    return LocalEngine(load_model(path, torch.float32), spec, stop_token_ids=stop_ids, name="r", version=3)


def vllm_of(path: str, *, stop_ids: frozenset[int] = frozenset(), max_context: int = CONTEXT) -> Engine:
    from workers.engines.vllm.vllm_engine import VllmEngine

    spec = EngineSpec(model_path=path, slots=4, max_context=max_context)
    return VllmEngine(spec, stop_token_ids=stop_ids, version=3, device=torch.device("cpu"), name="r")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_published_sampled_and_exported(family: str, tmp_path: Path) -> None:
    check(family, {}, local_of, tmp_path)


def test_a_model_whose_rotary_embeddings_change_beyond_its_context_agrees_below_it(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.2] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    check("phi3", {"rope_parameters": rope, "original_max_position_embeddings": 64}, local_of, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_to_a_conversation_with_tools_agree_and_end(family: str, tmp_path: Path) -> None:
    check_chat(family, {}, local_of, tmp_path)


@VLLM
@pytest.mark.parametrize("family", VLLM_FAMILIES)
def test_vllm_samples_a_family_as_it_is_trained(family: str, tmp_path: Path) -> None:
    check(family, WIDE, vllm_of, tmp_path / "steps")
    check_chat(family, WIDE, vllm_of, tmp_path / "chat")


@VLLM
@pytest.mark.parametrize("family", first_by_day(SERVED_FAMILIES))
def test_vllm_serves_the_export_of_a_family(family: str, tmp_path: Path) -> None:
    path, exported = save_model(tmp_path / "initial", tiny(family, **WIDE)), str(tmp_path / "exported")
    backend = FsdpBackend(path, SETTINGS, RankGroup(), probe_length=4)
    backend.export(Path(exported))
    specs = [spec_of(name, tensor) for name, tensor in backend.full_weights(torch.float32).items()]
    plain = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
    tokens = tuple(range(3, 30))

    async def scenario(engine: Any) -> tuple[tuple[float, ...], list[tuple[Placement, ...]]]:
        place = partial(engine._llm.collective_rpc, partial(record_layout, specs=specs, config=engine._outline.config))
        return await engine.score(tokens), await engine._ask("reading names", place, 60)

    scored, (placements,) = run(lambda: vllm_of(exported), scenario)
    assert placements, "its loader knows the names that versions of the model get"
    expected = logprobs_by_hand(plain, ask("0", prompt=tokens[:1], seed=0, new=26), tokens[1:])
    assert scored[-26:] == pytest.approx(expected, abs=1e-4)
