"""A vLLM server that runs elsewhere keeps the promises of an engine, or is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_policy import build_tokenizer
from rlsys.batch.samples import Sample
from rlsys.errors import ModelError, TaskTooLong, WeightsMismatch, WorkerDied
from rlsys.routing.requests import Completion
from rlsys.types import Distribution, VersionSpan
from rlsys.weight_sync.manifest import content_hash
from tests.contract.engines import ask, change, in_bfloat16, logprobs_by_hand, spelled
from tests.vllm_servers import vllm_server
from workers.engines.engine import EngineSpec, ServerSpec
from workers.engines.vllm.vllm_server import VllmServerEngine
from workers.model.logprobs import score
from workers.model.lora import published_tensors
from workers.transport.checksums import checksum_of, hash_of, spec_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

T = TypeVar("T")
CONTEXT = 1024


def model_of(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    vocabulary = len(build_tokenizer())
    return Qwen3ForCausalLM(
        Qwen3Config(
            **size, head_dim=32, intermediate_size=128, vocab_size=vocabulary, tie_word_embeddings=True,
            initializer_range=0.2,
        )
    )  # fmt: skip


def weights_of(seed: int) -> Mapping[str, Tensor]:
    return {name: parameter.detach() for name, parameter in published_tensors(model_of(seed)).items()}


def saved(folder: Path) -> Path:
    model_of().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model_path: Path) -> Iterator[str]:
    with vllm_server(model_path, context=CONTEXT) as url:
        yield url


@pytest.fixture
def run(url: str, model_path: Path) -> Callable[[Callable[[VllmServerEngine], Awaitable[T]]], T]:
    """Run a scenario on an engine of the server that has loaded the first weights as version 3."""

    def run(scenario: Callable[[VllmServerEngine], Awaitable[T]]) -> T:
        async def main() -> T:
            engine = engine_at(url, model_path)
            try:
                await engine.start()
                await change(engine, 3, weights_of(0))
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(asyncio.wait_for(main(), 200))

    return run


def engine_at(
    url: str,
    model_path: Path | str,
    *,
    stop: frozenset[int] = frozenset(),
    context: int = CONTEXT,
    takes_weights: bool = True,
) -> VllmServerEngine:
    spec = EngineSpec(engine="vllm_server", model_path=str(model_path), slots=8, max_context=context, step_s=60.0)
    server = ServerSpec(url=url, takes_weights=takes_weights)
    return VllmServerEngine(spec, server, stop_token_ids=stop, decode=spelled, name="rollout-0")


async def sampled(engine: VllmServerEngine, num_tokens: int) -> None:
    """Return once so many more tokens arrived; nothing notifies of that."""
    goal = engine.stats().num_tokens + num_tokens
    while engine.stats().num_tokens < goal:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "distribution",
    [Distribution(), Distribution(0.7, 0.9), Distribution(0.7, top_k=5), Distribution(1.2, min_p=0.1)],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(run, distribution: Distribution) -> None:
    request = ask(new=40, temperature=distribution.temperature, top_p=distribution.top_p, top_k=distribution.top_k,
                  min_p=distribution.min_p)  # fmt: skip
    done = run(lambda engine: engine.generate(request))
    num = len(done.output_ids)
    sample = Sample((5, 6, 7), done.output_ids, (True,) * num, done.logprobs, (VersionSpan(3, num),))
    (trained,) = score(model_of(), [sample], distribution, max_tokens=100)
    assert done.logprobs == pytest.approx(trained, abs=1e-4) and done.versions == (VersionSpan(3, num),)


def test_the_same_request_gives_the_same_tokens_whatever_runs_beside_it(run) -> None:
    async def scenario(engine: VllmServerEngine) -> list[Completion]:
        first = await engine.generate(ask(new=30))
        others = [engine.generate(ask(str(i), new=20 + i, seed=i)) for i in range(9)]
        return [first, (await asyncio.gather(engine.generate(ask(new=30)), *others))[0]]

    first, again = run(scenario)
    assert first.output_ids == again.output_ids and first.finish == "length"


def test_tokens_before_and_after_a_weight_change_have_their_own_version_and_logprobs(run) -> None:
    request = ask(new=1000)

    async def scenario(engine: VllmServerEngine) -> Completion:
        task = asyncio.create_task(engine.generate(request))
        await sampled(engine, 10)
        await change(engine, 4, weights_of(1))
        return await task

    done = run(scenario)
    before, after = done.versions
    assert (before.version, after.version) == (3, 4) and before.num_tokens + after.num_tokens == 1000
    for seed, part in ((0, slice(None, before.num_tokens)), (1, slice(before.num_tokens, None))):
        by_hand = logprobs_by_hand(model_of(seed), request, done.output_ids)
        assert done.logprobs[part] == pytest.approx(by_hand[part], abs=1e-4)


def test_a_request_made_during_a_pause_is_sampled_from_the_new_weights_alone(run) -> None:
    async def scenario(engine: VllmServerEngine) -> Completion:
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask(new=20)))
        await engine.load(4, weights_of(1))
        assert engine.stats().num_running == 0 and not task.done()
        await engine.resume()
        return await task

    done = run(scenario)
    assert done.versions == (VersionSpan(4, 20),)
    assert done.logprobs == pytest.approx(logprobs_by_hand(model_of(1), ask(), done.output_ids), abs=1e-4)


def test_requests_on_their_way_to_the_server_when_a_pause_begins_go_on_after_it(run) -> None:
    async def scenario(engine: VllmServerEngine) -> list[Completion]:
        done: list[Completion] = []
        for turn in range(60):
            tasks = [asyncio.create_task(engine.generate(ask(f"{turn}.{i}", new=4, seed=i))) for i in range(8)]
            while engine.stats().num_running < len(tasks):  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(turn / 4000)  # the pause comes at another moment of a request each time
            await engine.pause()
            await engine.resume()
            done += await asyncio.gather(*tasks)
        return done

    assert {len(one.output_ids) for one in run(scenario)} == {4}


def test_a_pause_keeps_what_arrived_and_greedy_tokens_are_unchanged(run) -> None:
    async def scenario(engine: VllmServerEngine) -> tuple[Completion, Completion]:
        whole = await engine.generate(ask(new=600, temperature=0.0))
        task = asyncio.create_task(engine.generate(ask(new=600, temperature=0.0)))
        for _ in range(3):
            await sampled(engine, 5)
            await engine.pause()
            num = engine.stats().num_tokens
            assert (await engine.progress({"a": 0}))["a"].output_ids if engine.stats().num_running else True
            await engine.resume()
            assert num >= 5
        return whole, await task

    whole, cut = run(scenario)
    assert cut.output_ids == whole.output_ids and cut.logprobs == whole.logprobs == (0.0,) * 600


def test_an_abort_returns_what_was_sampled_and_it_can_be_continued(run) -> None:
    async def scenario(engine: VllmServerEngine) -> tuple[Completion, Completion]:
        task = asyncio.create_task(engine.generate(ask(new=900)))
        await sampled(engine, 5)
        assert (await engine.progress({"a": 0}))["a"].output_ids
        engine.abort("nobody")
        engine.abort("a")
        cut = await task
        return cut, await engine.generate(ask(new=900, begun=cut))

    cut, whole = run(scenario)
    assert cut.finish == "abort" and 5 <= len(cut.output_ids) < 900 and len(whole.output_ids) == 900
    assert whole.output_ids[: len(cut.output_ids)] == cut.output_ids
    assert whole.logprobs == pytest.approx(logprobs_by_hand(model_of(), ask(), whole.output_ids), abs=1e-4)


def test_cancelling_a_call_ends_its_request_only(run) -> None:
    async def scenario(engine: VllmServerEngine) -> Completion:
        doomed = asyncio.create_task(engine.generate(ask("doomed", new=900)))
        kept = asyncio.create_task(engine.generate(ask("kept", new=40)))
        await sampled(engine, 4)
        doomed.cancel()
        with suppress(asyncio.CancelledError):
            await doomed
        return await kept

    assert len(run(scenario).output_ids) == 40


def test_more_requests_than_slots_are_served_in_turn(run) -> None:
    async def scenario(engine: VllmServerEngine) -> list[Completion]:
        work = asyncio.gather(*(engine.generate(ask(str(i), new=20, seed=i)) for i in range(20)))
        await sampled(engine, 1)
        stats = engine.stats()
        assert stats.num_running <= 8 and stats.num_running + stats.num_waiting >= 12
        return await work

    assert [len(done.output_ids) for done in run(scenario)] == [20] * 20


def test_a_reply_ends_with_a_stop_token_or_a_stop_text(run, url: str, model_path: Path) -> None:
    whole = run(lambda engine: engine.generate(ask(new=40)))
    word = spelled(whole.output_ids[9:12])
    done = run(lambda engine: engine.generate(ask(new=40, stop=("never there", word))))
    assert done.finish == "stop" and done.output_ids == whole.output_ids[: spelled(whole.output_ids).index(word) + 3]

    async def stopped() -> Completion:
        engine = engine_at(url, model_path, stop=frozenset({whole.output_ids[6]}))
        await engine.start()
        try:
            return await engine.generate(ask(new=40))
        finally:
            await engine.close()

    done, end = asyncio.run(stopped()), whole.output_ids.index(whole.output_ids[6]) + 1
    assert done.finish == "stop" and done.output_ids == whole.output_ids[:end]


def test_scores_and_checksums_are_of_the_weights_that_the_server_computes_with(run) -> None:
    ids = tuple(range(3, 40))

    async def scenario(engine: VllmServerEngine) -> None:
        running = asyncio.create_task(engine.generate(ask(new=1000)))
        for version, seed, weights in ((4, 1, weights_of(1)), (5, 2, in_bfloat16(weights_of(2)))):
            await change(engine, version, weights)
            held = await engine.checksums()
            assert held.keys() == {spec_of(name, tensor) for name, tensor in weights.items()}
            assert content_hash(held) == hash_of(weights)
            model = model_of(seed)
            for name, parameter in published_tensors(model).items():
                parameter.data = weights[name].float()
            by_hand = logprobs_by_hand(model, ask(prompt=ids[:1]), ids[1:])
            assert await engine.score(ids) == pytest.approx(by_hand, abs=1e-4)
        engine.abort("a")
        await running

    run(scenario)


def test_a_stale_element_is_named(run) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    async def scenario(engine: VllmServerEngine) -> list[str]:
        weights = weights_of(1)
        stale = weights[name].clone()
        stale[3, 5] += 1e-6
        await change(engine, 4, {**weights, name: stale})
        held = await engine.checksums()
        return [spec.name for spec, value in held.items() if value != checksum_of(weights[spec.name])]

    assert run(scenario) == [name]


def test_weights_that_do_not_fit_change_nothing(run) -> None:
    async def scenario(engine: VllmServerEngine) -> Completion:
        wrong = {**weights_of(1), "model.norm.weight": torch.zeros(3)}
        del wrong["model.layers.0.mlp.up_proj.weight"]
        await engine.pause()
        with pytest.raises(WeightsMismatch, match=r"missing model.layers.0.mlp.up_proj.weight; model.norm.weight has"):
            await engine.load(4, wrong)
        await engine.resume()
        return await engine.generate(ask(new=20))

    done = run(scenario)
    assert done.versions == (VersionSpan(3, 20),)
    assert done.logprobs == pytest.approx(logprobs_by_hand(model_of(), ask(), done.output_ids), abs=1e-4)


def test_a_request_beyond_the_context_is_refused(run) -> None:
    with pytest.raises(TaskTooLong, match=r"3 prompt tokens \+ 1022 new tokens"):
        run(lambda engine: engine.generate(ask(new=1022)))


def test_closing_ends_every_call_and_leaves_the_server_to_a_successor(run) -> None:
    async def closed(engine: VllmServerEngine) -> list[Completion | BaseException]:
        calls = [asyncio.create_task(engine.generate(ask(str(i), new=900))) for i in range(12)]
        await sampled(engine, 3)
        await engine.pause()
        await engine.close()
        await engine.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    ends = run(closed)
    assert all(isinstance(end, WorkerDied) and "was closed" in end.detail for end in ends)
    assert len(run(lambda engine: engine.generate(ask(new=20))).output_ids) == 20


def refusal(url: str, model_path: Path | str, *, context: int = CONTEXT, takes_weights: bool = True) -> str:
    async def begun() -> None:
        engine = engine_at(url, model_path, context=context, takes_weights=takes_weights)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises((ModelError, WorkerDied)) as caught:
        asyncio.run(begun())
    return str(caught.value)


def test_a_server_that_does_not_fit_is_refused(run, url: str, model_path: Path, tmp_path: Path) -> None:
    assert f"{url} serves {model_path}, and model.path is" in refusal(url, saved(tmp_path / "other"))
    run(lambda engine: engine.score((1, 2)))
    assert "were changed since it started" in refusal(url, model_path, takes_weights=False)
    assert "has a context of 1024 tokens, and the run needs 1025" in refusal(url, model_path, context=1025)
    assert "http://127.0.0.1:9 does not answer" in refusal("http://127.0.0.1:9", model_path)


def test_a_plain_server_evaluates_and_takes_no_weights(model_path: Path) -> None:
    with vllm_server(model_path, context=CONTEXT, is_open=False) as url:
        assert "takes no new weights, so it can only evaluate" in refusal(url, model_path)

        async def evaluated() -> Completion:
            engine = engine_at(url, model_path, takes_weights=False)
            await engine.start()
            try:
                return await engine.generate(ask(new=20))
            finally:
                await engine.close()

        done = asyncio.run(evaluated())
        assert done.logprobs == pytest.approx(logprobs_by_hand(model_of(), ask(), done.output_ids), abs=1e-4)


def test_a_server_of_raw_logprobs_is_refused(model_path: Path) -> None:
    with vllm_server(model_path, context=CONTEXT, is_open=False, processed=False) as url:
        assert "start it with --logprobs-mode processed_logprobs" in refusal(url, model_path, takes_weights=False)
