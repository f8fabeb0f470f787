"""Experts that an engine chose are recorded with its tokens, and trained on (`train.routing_replay`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlsys import Config
from rlsys.algorithm import Column
from rlsys.batch.samples import NOT_RECORDED, Sample, samples_of, without_repeats
from rlsys.batch.tensors import MicroBatch
from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
from rlsys.config.train_section import NO_SAVINGS, MemorySavings
from rlsys.errors import ModelError, TrainingError
from rlsys.routing.requests import Completion
from rlsys.types import Distribution, Episode, Trajectory, Turn, VersionSpan
from tests.by_day import first_by_day
from tests.contract.engines import CONTEXT, VLLM, ask, change, cut, run
from tests.families import tiny
from tests.models import save_model
from tests.training import PLAIN, SETTINGS, JoinedRanks, Outcome, assert_alike, data_of, planned
from workers.engines.engine import Engine, EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.model.decoder_layers import checkpoint_layers
from workers.model.logprobs import trained_logprobs
from workers.model.model_loading import CPU, load_model
from workers.model.routers import Routers, RoutingReplay
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup

NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 16, 4, 2
MANY: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN}
NUM_BYTES = NUM_LAYERS * NUM_CHOSEN
PROMPT = (5, 6, 7, 8, 9)
ONE = MeshSection()


def moe(**sizes: Any) -> PreTrainedModel:
    return tiny("qwen3_moe", **(MANY | sizes))


def engine_of(model: PreTrainedModel, **choices: Any) -> LocalEngine:
    spec = EngineSpec(model_path="", slots=8, max_context=CONTEXT, records_routing=True, **choices)
    return LocalEngine(model, spec, stop_token_ids=frozenset(), name="rollout-0", version=3)


def chosen_by_hand(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Sorted experts by position, layer and rank, from the router's logits as the Transformers library returns them."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([of_layer.topk(NUM_CHOSEN).indices.sort().values for of_layer in logits], 1)


def recorded(completion: Completion) -> Tensor:
    """The same as it was recorded."""
    flat = np.frombuffer(b"".join(completion.routing), np.uint8).reshape(-1, NUM_LAYERS, NUM_CHOSEN)
    return torch.from_numpy(flat.astype(np.int64)).sort().values


# ---------------------------------------------------------------------------------------------------------- recording


def test_an_engine_records_what_its_routers_choose() -> None:
    """In a batch of prompts of several lengths, some of them equal."""
    requests = [ask(str(i), prompt=PROMPT[: 3 + i % 3], seed=i, new=9) for i in range(6)]

    async def scenario(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    model = moe()
    for request, done in zip(requests, run(lambda: engine_of(moe()), scenario), strict=True):
        ids = request.prompt_ids + done.output_ids[:-1]
        assert list(map(len, done.routing)) == [NUM_BYTES * len(request.prompt_ids), *[NUM_BYTES] * 8]
        assert torch.equal(recorded(done), chosen_by_hand(model, ids))


def test_a_continued_request_keeps_what_was_recorded() -> None:
    async def scenario(engine: Engine) -> tuple[Completion, Completion, Completion]:
        whole = await engine.generate(ask(new=12))
        begun = await cut(engine, ask(new=12), 4)
        return whole, begun, await engine.generate(ask(new=12, begun=begun))

    whole, begun, continued = run(lambda: engine_of(moe()), scenario)
    assert continued.routing == whole.routing
    assert begun.routing == whole.routing[: len(begun.output_ids)]


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_tokens_of_older_weights_keep_their_experts(kv_cache: Literal["keep", "recompute"]) -> None:
    async def scenario(engine: Engine) -> tuple[Completion, Completion]:
        begun = await cut(engine, ask(new=12), 4)
        task = asyncio.create_task(engine.generate(ask(new=12, begun=begun)))
        await asyncio.sleep(0)
        await change(engine, 4, {n: p.detach() * 1.5 for n, p in moe(initializer_range=0.3).named_parameters()})
        return begun, await task

    begun, done = run(lambda: engine_of(moe(), kv_cache=kv_cache), scenario)
    assert done.versions[-1].version == 4
    assert done.routing[: len(begun.output_ids)] == begun.routing
    assert len(done.routing) == len(done.output_ids) == 12


def test_parts_of_a_completion_have_their_part_of_the_records() -> None:
    whole = Completion((1, 2, 3), (0.0,) * 3, (VersionSpan(0, 3),), "stop", (b"prompt", b"a", b"b"))
    first = replace(whole, output_ids=(1,), logprobs=(0.0,), versions=(VersionSpan(0, 1),), routing=(b"prompt",))
    assert whole.since(1).routing == (b"a", b"b")
    assert first.then(whole.since(1)) == whole


def test_an_engine_that_is_not_asked_records_nothing() -> None:
    spec = EngineSpec(model_path="", slots=8, max_context=CONTEXT)
    engine = lambda: LocalEngine(moe(), spec, stop_token_ids=frozenset(), name="r", version=3)  # noqa: E731
    assert run(engine, lambda e: e.generate(ask())).routing == ()


@VLLM
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_vllm_on_a_gpu_records_what_its_routers_choose(tmp_path: Path) -> None:
    """Never ran."""
    from workers.engines.vllm.vllm_engine import VllmEngine

    path = save_model(tmp_path, moe(hidden_size=128, head_dim=32, moe_intermediate_size=64))
    spec = EngineSpec(model_path=path, slots=8, max_context=CONTEXT, records_routing=True)

    def build() -> Engine:
        return VllmEngine(spec, stop_token_ids=frozenset(), version=3, device=torch.device("cuda"), name="r")

    async def scenario(engine: Engine) -> Completion:
        begun = replace(await engine.generate(ask(new=8)), finish="abort")
        return await engine.generate(ask(new=16, begun=begun))

    done = run(build, scenario)
    by_hand = chosen_by_hand(load_model(path, torch.float32), ask().prompt_ids + done.output_ids[:-1])
    assert len(done.routing) == 16
    assert float((recorded(done) == by_hand).double().mean()) > 0.95


# ---------------------------------------------------------------------------------------------------------- samples


def turn(prompt: tuple[int, ...], output: tuple[int, ...], experts: Callable[[int], int] | None) -> Turn:
    """A turn in which position `p` has the expert `experts(p)`, in one byte."""
    marks = bytes(map(experts, range(len(prompt) + len(output) - 1))) if experts else b""
    cuts = [0, *range(len(prompt), len(marks) + 1)]
    routing = tuple(marks[a:b] for a, b in pairwise(cuts)) if experts else ()
    return Turn(prompt, output, (-1.0,) * len(output), (VersionSpan(0, len(output)),), "stop", "", routing=routing)


def test_a_position_has_the_experts_of_the_turn_that_sampled_after_it() -> None:
    first, second = turn((1, 2), (3, 4), lambda p: 10 + p), turn((1, 2, 3, 4, 5), (6, 7), lambda p: 20 + p)
    (sample,) = samples_of(Trajectory("lead", (first, second)))
    assert b"".join(sample.routing) == bytes([10, 11, 12, 23, 24, 25])
    assert len(b"".join(sample.routing)) == len(sample.run_ids)


def test_a_turn_without_records_leaves_a_gap() -> None:
    """As one that was recited, not sampled. A later turn may record what it left out."""
    first, last = turn((1, 2), (3, 4), lambda p: 10 + p), turn((1, 2, 3, 4, 5, 6), (7,), None)
    (sample,) = samples_of(Trajectory("lead", (first, last)))
    assert b"".join(sample.routing) == bytes([10, 11, 12, *[NOT_RECORDED] * 3])
    (sample,) = samples_of(Trajectory("lead", (replace(first, routing=()), turn((1, 2, 3, 4), (5,), lambda p: p))))
    assert b"".join(sample.routing) == bytes([0, 1, 2, 3])
    (sample,) = samples_of(Trajectory("lead", (last,)))
    assert sample.routing == ()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.sampled_from("rrrn"), st.booleans()), max_size=6))
def test_records_of_what_is_repeated_can_be_left_out(plan: list[tuple[int, int, str, bool]]) -> None:
    """Whatever turns there are: recorded, recited, without output, and with a rewritten context."""
    turns, said = [], ()
    for number, (new, output, kind, is_rewritten) in enumerate(plan):
        prompt = (*(() if is_rewritten else said), *range(100 * number, 100 * number + new))
        turns.append(
            turn(prompt, tuple(range(50, 50 + output)), (lambda p, n=number: 10 * n + p) if kind == "r" else None)
        )
        said = prompt + turns[-1].output_ids
    whole = Trajectory("lead", tuple(turns))
    short = without_repeats(whole)
    assert [b"".join(s.routing) for s in samples_of(short)] == [b"".join(s.routing) for s in samples_of(whole)]
    stored = sum(len(b"".join(one.routing)) for one in short.turns)
    assert stored <= sum(len(sample.run_ids) for sample in samples_of(whole))


def test_a_row_has_the_records_of_its_samples() -> None:
    """Shared positions once, also if the last sample there has none."""
    prompt = tuple(range(20))
    runs = [((30, 31, 32), lambda p: 100 + p), ((40, 41), lambda p: 150 + p), ((50, 51), None)]
    samples = [next(samples_of(Trajectory("lead", (turn(prompt, output, experts),)))) for output, experts in runs]
    mb = MicroBatch.of(samples)
    assert mb.tokens_R.tolist() == [*prompt, 30, 31, 40, 50]
    assert mb.routing_RW is not None
    assert mb.routing_RW[:, 0].tolist() == [*range(150, 170), 120, 121, 170, NOT_RECORDED]
    assert MicroBatch.of(samples[2:]).routing_RW is None


# ---------------------------------------------------------------------------------------------------------- replay


def routed(model: PreTrainedModel, choices_PLC: Tensor) -> None:
    """Let the model's routers take these experts, by a router written for this test."""

    def forward_of(place: int) -> Callable[[nn.Module, Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            scores = torch.stack([row[own].softmax(-1) for row, own in zip(logits, choices_PLC[:, place], strict=True)])
            return logits, scores, choices_PLC[:, place]

        return forward

    for place, router in enumerate(Routers(model).routers):
        router.forward = MethodType(forward_of(place), router)


def random_choices(num_positions: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(num_positions, NUM_LAYERS, NUM_EXPERTS, generator=generator)
    return noise.argsort(-1)[..., :NUM_CHOSEN]


def one_sample(choices_PLC: Tensor | None, num: int = 12) -> Sample:
    ids, spans = tuple(range(3, 3 + num)), (VersionSpan(0, num),)
    routing = () if choices_PLC is None else (choices_PLC.to(torch.uint8).numpy().tobytes(),)
    return Sample(PROMPT, ids, (True,) * num, (0.0,) * num, spans, routing)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_a_trainer_computes_with_the_recorded_experts(how: Literal["none", "selective", "full"]) -> None:
    """Logprobs and gradients are those of a model whose routers are written to take these experts."""
    choices = random_choices(len(PROMPT) + 11, seed=1)
    ours, by_hand = moe(norm_topk_prob=True), moe(norm_topk_prob=True)
    replay = RoutingReplay(ours, CPU)
    checkpoint_layers(ours, how)
    routed(by_hand, choices)
    found, _ = trained_logprobs(ours, MicroBatch.of([one_sample(choices)]), Distribution(1.0))
    ids = torch.tensor([[*PROMPT, *range(3, 15)]])
    logits = by_hand(ids[:, :-1]).logits[0, len(PROMPT) - 1 :]
    expected = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    for (name, one), other in zip(ours.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")
    assert replay.reduce_over(RankGroup().sum_over_ranks)["sampler/experts_differ"] > 0.5


def test_without_records_a_router_chooses_itself() -> None:
    replayed, plain = moe(), moe()
    replay, known = RoutingReplay(replayed, CPU), chosen_by_hand(plain, [*PROMPT, *range(3, 14)])
    gap = known.clone()
    gap[4:9] = NOT_RECORDED
    expected, _ = trained_logprobs(plain, MicroBatch.of([one_sample(None)]), Distribution(1.0))
    for choices in (None, gap, known):
        batch = MicroBatch.of([one_sample(choices)])
        found, _ = trained_logprobs(replayed, batch, Distribution(1.0))
        torch.testing.assert_close(found, expected)
        replay.count(batch)
    told = replay.reduce_over(RankGroup().sum_over_ranks)
    assert told == {"sampler/experts_recorded": (0 + 11 + 16) / 48, "sampler/experts_differ": 0.0}
    assert replay.reduce_over(RankGroup().sum_over_ranks) == {}


def test_records_are_counted_without_a_wait_for_the_device() -> None:
    """Tensors of the meta device have no values: what reads one fails."""
    meta = torch.device("meta")
    replay, choices = RoutingReplay(moe(), meta), random_choices(len(PROMPT) + 11, seed=1)
    for sample in (one_sample(choices), one_sample(None)):
        replay.count(MicroBatch.of([sample]).to(meta))


def test_records_of_another_model_are_refused() -> None:
    model = moe()
    RoutingReplay(model, CPU)
    choices = random_choices(len(PROMPT) + 11, seed=1)[..., :3]
    with pytest.raises(TrainingError, match=r"take 6 bytes, and those that the trainer's model chooses 8"):
        trained_logprobs(model, MicroBatch.of([one_sample(choices)]), Distribution(1.0))


def test_two_bytes_number_many_experts() -> None:
    routers = Routers(moe(num_experts=300, num_experts_per_tok=2))
    choices = torch.tensor([[[299, 0], [255, 256]]])
    packed = routers.pack(choices)
    assert packed.shape == (1, routers.num_bytes) == (1, 8)
    both = torch.cat([packed, torch.full_like(packed, NOT_RECORDED)])
    assert [routers.unpack(both, layer).tolist() for layer in (0, 1)] == [
        [[299, 0], [-1, -1]],
        [[255, 256], [-1, -1]],
    ]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Two steps on random trees of samples with random records, of which some are missing."""

    model_path: str
    mesh: MeshSection = ONE
    savings: MemorySavings = NO_SAVINGS
    max_tokens: int = 1
    lora: LoraSection | None = None


def do(job: Job, ranks: RankGroup) -> Outcome:
    ranks = ranks.with_mesh(job.mesh)
    backend = FsdpBackend(job.model_path, SETTINGS, ranks, savings=job.savings, lora=job.lora, replays_routing=True)
    metrics = []
    for step in range(2):
        plan, payloads = planned(step, job.mesh.num_batches, PLAIN, max_tokens=job.max_tokens)
        data = data_of([with_records(payload) for payload in payloads])
        metrics.append(backend.train_step(plan[ranks.batch], data, PLAIN, distribution=Distribution(1.0)))
    return backend.full_weights(torch.float32), metrics


def with_records(payload: tuple[Episode, ...]) -> tuple[Episode, ...]:
    """Give each position experts that depend on the tokens up to it, so that samples agree on what they share."""
    return tuple(
        replace(
            episode,
            trajectories=tuple(replace(t, turns=tuple(map(_with_records, t.turns))) for t in episode.trajectories),
        )
        for episode in payload
    )


def _with_records(turn: Turn) -> Turn:
    ids = (*turn.prompt_ids, *turn.output_ids)
    if not turn.output_ids or ids[0] % 3 == 0:  # the first token: samples that share any agree
        return turn
    rows = [_experts_after(ids[: place + 1]) for place in range(len(ids) - 1)]
    first = len(turn.prompt_ids)
    return replace(turn, routing=(b"".join(rows[:first]), *rows[first:]))


def _experts_after(ids: tuple[int, ...]) -> bytes:
    rng = random.Random(str(ids))
    return bytes(expert for _ in range(NUM_LAYERS) for expert in rng.sample(range(NUM_EXPERTS), NUM_CHOSEN))


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("moe"), moe())


@pytest.fixture(scope="module")
def alone(moe_path: str) -> Outcome:
    """One rank with a row for each sample."""
    return do(Job(model_path=moe_path), RankGroup())


@pytest.mark.parametrize(
    ("mesh", "savings"),
    first_by_day(
        [
            (MeshSection(shard=2, tensor=2, expert=4), MemorySavings("full", "update")),
            (MeshSection(), MemorySavings("full")),
            (MeshSection(shard=2), MemorySavings("selective", "update")),
            (MeshSection(context=2), MemorySavings("full")),
            (MeshSection(tensor=2, expert=2), NO_SAVINGS),
        ]
    ),
    ids=str,
)
def test_records_are_replayed_in_every_layout(
    mesh: MeshSection,
    savings: MemorySavings,
    moe_path: str,
    alone: Outcome,
    two_ranks: JoinedRanks,
    four_ranks: JoinedRanks,
) -> None:
    job = Job(model_path=moe_path, mesh=mesh, savings=savings, max_tokens=60)
    if mesh.num_ranks == 1:
        weights, metrics = do(job, RankGroup())
    else:
        weights, metrics = (two_ranks if mesh.num_ranks == 2 else four_ranks)(do, job)[0]
    for step in metrics:
        assert 0 < step["sampler/experts_recorded"] < 1
        assert step["sampler/experts_differ"] > 0.5
    # Some experts have few tokens, and AdamW divides their small gradients by their size.
    assert_alike((weights, without_shares(metrics)), (alone[0], without_shares(alone[1])), within=0.02)


def test_an_adapter_is_trained_on_recorded_experts_and_its_reference_on_its_own(moe_path: str) -> None:
    """An adapter begins without effect, so its first step has the logprobs of the step that trains all weights."""
    job = Job(model_path=moe_path, max_tokens=60)
    _, (first, _) = do(replace(job, lora=LoraSection(rank=2)), RankGroup())
    _, (of_all, _) = do(job, RankGroup())
    for name in ("sampler/experts_recorded", "sampler/experts_differ", "sampler/mismatch_kl"):
        assert first[name] == pytest.approx(of_all[name], rel=1e-5)
    backend = FsdpBackend(moe_path, SETTINGS, RankGroup(), lora=LoraSection(rank=2), replays_routing=True)
    plan, payloads = planned(0, 1, PLAIN, max_tokens=60)
    columns = [
        backend.reference(plan[0], data_of(given_records), Column.REFERENCE_LOGPROBS, Distribution())
        for given_records in (payloads, [with_records(payload) for payload in payloads])
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*columns, strict=True))


def without_shares(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out what counts a position that samples share once, or as often as there are samples."""
    return [{name: value for name, value in each.items() if "experts" not in name} for each in metrics]


def test_replay_brings_a_trainer_closer_to_an_engine_that_rounds(tmp_path: Path) -> None:
    """An engine in bfloat16 and a trainer in fp32 choose differently where two experts are nearly equal."""
    model = moe(hidden_size=64, initializer_range=0.2)
    for router in Routers(model).routers:
        next(router.parameters()).data.mul_(0.01)  # nearly equal probabilities: rounding decides
    path = save_model(tmp_path, model)
    spec = EngineSpec(model_path=path, slots=16, max_context=CONTEXT, records_routing=True, dtype="bfloat16")
    requests = [ask(str(i), prompt=PROMPT[: 2 + i % 4], seed=i, new=100) for i in range(16)]

    async def scenario(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    rounding = load_model(path, torch.bfloat16)
    done = run(
        lambda: LocalEngine(rounding, spec, stop_token_ids=frozenset(), name="r", version=3),
        scenario,
    )
    samples = [
        Sample(r.prompt_ids, d.output_ids, (True,) * 100, d.logprobs, d.versions, d.routing)
        for r, d in zip(requests, done, strict=True)
    ]
    trainer = load_model(path, torch.float32)
    replay = RoutingReplay(trainer, CPU)
    off = {}
    for what, those in (("with", samples), ("without", [replace(s, routing=()) for s in samples])):
        mb = MicroBatch.of(those)
        with torch.no_grad():
            logprobs, _ = trained_logprobs(trainer, mb, Distribution(1.0))
        off[what] = float((logprobs - mb.behavior_logprobs_N).abs().mean())
    assert replay.reduce_over(RankGroup().sum_over_ranks)["sampler/experts_differ"] > 0.001
    assert off["with"] < 0.9 * off["without"]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match=r"train\.routing_replay: Qwen3ForCausalLM has no experts that are chosen by"):
        Routers(tiny("qwen3"))


@pytest.mark.parametrize("family", ["phimoe", "glm4_moe", "minimax_m2"])
def test_routers_that_choose_otherwise_are_refused(family: str) -> None:
    """They select in groups or in rounds, or need more than states."""
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
        "first_k_dense_replace": 0, "num_local_experts": 4, "num_experts": 4,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with pytest.raises(
        ModelError, match=r"train\.routing_replay: \w+ has routers of type \w+, which do not select all"
    ):
        Routers(model)


def test_vllm_on_a_cpu_is_refused_before_anything_starts() -> None:
    given = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rollout": {"engine": "vllm"},
        "train": {"routing_replay": True},
    }
    with pytest.raises(ValidationError, match=r"routing_replay: vllm records no experts on a CPU: set rollout.engine"):
        Config(**given)
    assert Config(**given, resources={"rollout": {"gpus": 1}}).train.routing_replay
