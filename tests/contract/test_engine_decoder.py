"""The laws of the local engine's decoder: what a request gives depends on its seed, its prompt and its weights only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rlsys.errors import ConfigError
from rlsys.routing.requests import Completion, Request
from rlsys.types import PolicyVersion, Sampling
from tests.by_day import first_by_day
from tests.contract.engines import NUM_VOCAB, head, llama, qwen
from tests.families import tiny
from workers.engines.engine import EngineSpec
from workers.engines.local.decoder import Decoder
from workers.engines.local.local_engine import LocalEngine, Residents
from workers.engines.stepping import EngineJob

PROMPTS = [
    tuple((7 * i + 3 * k) % NUM_VOCAB for k in range(length)) for i, length in enumerate((1, 2, 7, 7, 8, 31, 33, 90))
]
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.8, 1.0]),
    max_new_tokens=st.integers(1, 20),
)
requests = st.builds(Request, st.just(""), st.sampled_from(PROMPTS), samplings, st.integers(0, 1 << 64))
arrivals = st.tuples(st.integers(0, 12), requests, st.sampled_from([0, 1]))
LOOP = asyncio.new_event_loop()


class Bench:
    """A decoder with two versions of its weights."""

    def __init__(
        self, make: Callable[..., PreTrainedModel], num_slots: int = 12, *, keeps_replies: bool = True
    ) -> None:
        model = make()
        self.decoder = Decoder(
            model, num_slots=num_slots, max_context=160, stop_token_ids={5}, keeps_replies=keeps_replies
        )
        self.decoder.warm_up()
        self.residents = Residents(model, 0)
        self.residents.add(1, self.residents.lay_out(dict(make(seed=1).named_parameters())))

    def decode(self, arrivals: list[tuple[int, Request, PolicyVersion]]) -> list[Completion]:
        """Run requests that arrive at the given steps under the given version, as slots allow."""
        jobs = [EngineJob(request, LOOP.create_future(), [(0, version)]) for _, request, version in arrivals]
        waiting = sorted(zip(jobs, arrivals, strict=True), key=lambda item: item[1][0])
        done: dict[EngineJob, Completion] = {}
        step = 0
        while len(done) < len(jobs):
            free = self.decoder.num_slots - len(self.decoder.jobs)
            batch = [job for job, (arrival, *_) in waiting if arrival <= step][:free]
            del waiting[: len(batch)]
            for version in (0, 1):
                if some := [job for job in batch if job.version == version]:
                    self.residents.use(version)
                    self.decoder.admit(some)
                    done |= self.decoder.release(self.decoder.ended_slots())
            self.step()
            done |= self.decoder.release(self.decoder.ended_slots())
            step += 1
        return [done[job] for job in jobs]

    def alone(self, request: Request, version: PolicyVersion) -> Completion:
        """What the request gives when nobody else is there."""
        return self.decode([(0, request, version)])[0]

    def step(self) -> None:
        """One token for everybody."""
        for run in self.decoder.runs():
            self.residents.use(self.decoder.jobs[run.start].version)
            self.decoder.step(run)


def gemma(*, seed: int = 0) -> PreTrainedModel:
    """Sliding windows of 8 tokens in every other layer, and soft caps."""
    return changed(tiny("gemma2", vocab_size=NUM_VOCAB), seed)


def mixture(*, seed: int = 0) -> PreTrainedModel:
    """A model with experts."""
    return changed(tiny("qwen3_moe", vocab_size=NUM_VOCAB), seed)


def changed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.1 * seed * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module", params=first_by_day([qwen, gemma, mixture, llama], 3))
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@given(arrivals=st.lists(arrivals, min_size=2, max_size=16))
@settings(max_examples=settings().max_examples // 2)
def test_tokens_and_logprobs_do_not_depend_on_the_batch(
    bench: Bench, arrivals: list[tuple[int, Request, PolicyVersion]]
) -> None:
    together = bench.decode(arrivals)
    for (_, request, version), done in zip(arrivals, together, strict=True):
        assert bench.alone(request, version) == done


@given(arrivals=st.lists(arrivals, min_size=2, max_size=12), data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_a_request_cut_anywhere_resumes_to_the_same_completion(
    bench: Bench, arrivals: list[tuple[int, Request, PolicyVersion]], data: st.DataObject
) -> None:
    whole = [bench.alone(request, version) for _, request, version in arrivals]
    resumed: list[tuple[int, Request, PolicyVersion]] = []
    for (arrival, request, version), done in zip(arrivals, whole, strict=True):
        count = data.draw(st.integers(0, len(done.output_ids) - 1))
        resumed.append((arrival, replace(request, begun=head(done, count)), version))
    assert bench.decode(resumed) == whole


dialogues = st.lists(
    st.tuples(st.sampled_from(PROMPTS[:5]), samplings, st.integers(0, 1 << 64)), min_size=2, max_size=4
)


def talk(
    bench: Bench,
    turns: list[tuple[tuple[int, ...], Sampling, int]],
    version: PolicyVersion,
    beside: list[tuple[int, Request, PolicyVersion]],
    *,
    forgets: bool,
) -> list[Completion]:
    """The replies of a dialogue: each prompt is the one before with its reply and more context."""
    prompt, sampled, replies = (), (), []
    for context, sampling, seed in turns:
        prompt += context
        request = Request("", prompt, sampling, seed, sampled=sampled)
        reply, *_ = bench.decode([(0, request, version), *beside])
        replies.append(reply)
        sampled += ((len(prompt), len(prompt) + len(reply.output_ids)),)
        prompt += reply.output_ids
        if forgets:
            bench.decoder.forget_prefixes()
    return replies


@given(turns=dialogues, others=st.lists(arrivals, max_size=6), version=st.sampled_from([0, 1]))
@settings(max_examples=settings().max_examples // 2)
def test_a_dialogue_that_goes_on_from_kept_keys_is_the_one_that_computes_all(bench, turns, others, version) -> None:
    bench.decoder.forget_prefixes()
    assert talk(bench, turns, version, others, forgets=False) == talk(bench, turns, version, [], forgets=True)


def test_a_dialogue_computes_each_token_once(bench: Bench) -> None:
    decoder = bench.decoder
    decoder.forget_prefixes()
    before, cached = decoder.num_computed, decoder.num_cached
    turns = [(PROMPTS[2], Sampling(max_new_tokens=9), seed) for seed in range(7)]
    replies = talk(bench, turns, 0, [], forgets=False)
    num_tokens = sum(len(context) + len(reply.output_ids) for (context, *_), reply in zip(turns, replies, strict=True))
    assert decoder.num_computed - before == num_tokens - 1, "but the last, which no token follows"
    assert decoder.num_cached > cached


def test_prefixes_of_other_weights_are_not_used(bench: Bench) -> None:
    turns = [(PROMPTS[3], Sampling(max_new_tokens=9), seed) for seed in range(3)]
    fresh = talk(bench, turns, 1, [], forgets=True)
    talk(bench, turns, 0, [], forgets=False)
    assert talk(bench, turns, 1, [], forgets=False) == fresh


def test_a_decoder_that_keeps_no_replies_computes_the_same_tokens_anew() -> None:
    turns = [(PROMPTS[2], Sampling(max_new_tokens=9), seed) for seed in range(3)]
    keeping, forgetful = Bench(llama), Bench(llama, keeps_replies=False)
    assert talk(forgetful, turns, 0, [], forgets=False) == talk(keeping, turns, 0, [], forgets=False)
    assert forgetful.decoder.num_cached == 0 < keeping.decoder.num_cached


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("num_prompt", first_by_day([8, 90, 1, 700], 2))
def test_a_long_completion_is_gone_on_with_bit_for_bit(make: Callable[..., PreTrainedModel], num_prompt: int) -> None:
    decoder = Decoder(make(), num_slots=2, max_context=1024, stop_token_ids=())
    prompt = tuple(3 * k % NUM_VOCAB for k in range(num_prompt))

    def decoded(begun: Completion | None) -> Completion:
        request = Request("", prompt, Sampling(max_new_tokens=150), 1, begun)
        decoder.admit([EngineJob(request, LOOP.create_future(), [(0, 0)])])
        while not (ended := decoder.ended_slots()):
            for run in decoder.runs():
                decoder.step(run)
        return decoder.release(ended)[0][1]

    whole = decoded(None)
    for count in (1, 9, 140):
        assert decoded(head(whole, count)) == whole


def test_a_cache_that_this_machine_has_no_room_for_is_refused_before_it_is_allocated():
    spec = EngineSpec(model_path="", slots=10**6, max_context=10**6)
    with pytest.raises(ConfigError, match=r"keys and values of 1000000 sequences .* GB free: lower rollout\.slots"):
        LocalEngine(qwen(), spec, stop_token_ids=frozenset(), name="r")
