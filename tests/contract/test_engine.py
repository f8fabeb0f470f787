"""What every engine promises of requests, run on each; then what only a real model can show."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import suppress
from dataclasses import asdict, replace

import psutil
import pytest
import torch

from rlsys.batch.samples import Sample
from rlsys.errors import TaskTooLong, WorkerDied
from rlsys.routing.requests import Completion
from rlsys.types import Distribution, VersionSpan
from tests.contract.engines import (
    NUM_VOCAB,
    Kit,
    ask,
    head,
    llama,
    local,
    logprobs_by_hand,
    pause_after,
    qwen,
    run,
    spelled,
    turns,
    with_a_model,
)
from workers.engines.engine import Engine
from workers.model.logprobs import score


def test_every_token_has_a_logprob_and_a_version(kit: Kit) -> None:
    done = run(kit, lambda engine: engine.generate(ask(new=6)))
    assert len(done.output_ids) == len(done.logprobs) == 6
    assert all(logprob <= 0 for logprob in done.logprobs)
    assert done.versions == (VersionSpan(3, 6),)
    assert done.finish == "length"


def test_the_same_request_gives_the_same_tokens_again(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        first = await engine.generate(ask())
        assert await engine.generate(ask()) == first
        others = await asyncio.gather(*(engine.generate(ask(str(i), seed=i)) for i in range(20)))
        assert len({done.output_ids for done in others}) > 1

    run(kit, scenario)


def test_abort_returns_what_was_sampled_even_while_paused(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        whole = await engine.generate(ask(new=50))
        task = asyncio.create_task(engine.generate(ask(new=50)))
        await asyncio.sleep(0)
        await pause_after(engine, 3)
        engine.abort("a")
        cut = await task
        count = len(cut.output_ids)
        assert cut.finish == "abort"
        assert 3 <= count < 50
        assert cut.output_ids == whole.output_ids[:count]
        assert cut.logprobs == whole.logprobs[:count]
        assert cut.versions == (VersionSpan(3, count),)

    run(kit, scenario)


def test_an_immediate_abort_takes_effect_and_unknown_ids_are_ignored(kit: Kit) -> None:
    async def scenario(engine: Engine) -> Completion:
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask(new=50)))
        await asyncio.sleep(0)
        engine.abort("nobody")
        engine.abort("a")
        return await task

    assert run(kit, scenario) == Completion((), (), (), "abort")


def test_a_pause_stops_sampling_and_changes_no_token(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        whole = await engine.generate(ask(new=40))
        task = asyncio.create_task(engine.generate(ask(new=40)))
        await asyncio.sleep(0)
        await pause_after(engine, 3)
        num_tokens = engine.stats().num_tokens
        await turns(20)
        assert engine.stats().num_tokens == num_tokens
        assert not task.done()
        await engine.resume()
        assert await task == whole

    run(kit, scenario)


def test_cancelling_a_call_aborts_its_request_only(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        doomed = asyncio.create_task(engine.generate(ask("doomed", new=200)))
        kept = asyncio.create_task(engine.generate(ask("kept", new=40)))
        await asyncio.sleep(0)
        await pause_after(engine, 4)
        doomed.cancel()
        with suppress(asyncio.CancelledError):
            await doomed
        await engine.pause()
        assert engine.stats().num_running == 1
        await engine.resume()
        assert len((await kept).output_ids) == 40

    run(kit, scenario)


def test_a_request_beyond_the_context_is_refused_with_its_numbers(kit: Kit) -> None:
    with pytest.raises(TaskTooLong, match=r"3 prompt tokens \+ 254 new tokens.* 256"):
        run(kit, lambda engine: engine.generate(ask(new=254)))
    assert len(run(kit, lambda engine: engine.generate(ask(new=253))).output_ids) == 253


def test_close_ends_every_call_and_leaves_no_thread_behind(kit: Kit) -> None:
    threads = set(threading.enumerate())
    processes = set(psutil.Process().children(recursive=True))

    async def main() -> None:
        engine = kit.make()
        calls = [asyncio.create_task(engine.generate(ask(str(i), new=200))) for i in range(12)]
        await asyncio.sleep(0)
        await engine.pause()
        await kit.close(engine)
        await kit.close(engine)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, WorkerDied) for end in ends)
        later_calls = (engine.generate(ask()), engine.pause(), engine.load(9, {}), engine.resume(), engine.checksums())
        for later in later_calls:
            with pytest.raises(WorkerDied, match="closed"):
                await later
        engine.abort("a")

    asyncio.run(asyncio.wait_for(main(), 200))
    left = set(threading.enumerate())
    assert left <= threads
    assert not any(thread.name == "rollout-0 steps" for thread in left)
    assert set(psutil.Process().children(recursive=True)) <= processes


EVERYTHING = dict.fromkeys(["a", "r0", "r1", "r2", "waits"], 0)


def test_progress_contains_prefix_and_sampled_tokens_of_running_requests(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        assert await engine.progress(EVERYTHING) == {}
        whole = [await engine.generate(ask(new=60, seed=i, temperature=0.0)) for i in range(3)]
        begun = [None, None, head(whole[2], 5)]
        requests = [ask(f"r{i}", new=60, seed=i, begun=begun[i], temperature=0.0) for i in range(3)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await pause_after(engine, 12)
        while len(progress := await engine.progress(EVERYTHING)) < 3:
            await engine.resume()
            await pause_after(engine, 1)
        for i in range(3):
            done = progress[f"r{i}"]
            count = len(done.output_ids)
            assert (6 if i == 2 else 1) <= count < 60
            assert done == replace(head(whole[i], count), finish=None)
        for known in (2, 5, 6):
            later = await engine.progress({"r2": known})
            assert later == {"r2": progress["r2"].since(known)}
        assert await engine.progress({"r2": len(progress["r2"].output_ids), "other": 0}) == {}
        waiting = asyncio.create_task(engine.generate(ask("waits", begun=head(whole[0], 5))))
        await asyncio.sleep(0)
        assert await engine.progress(EVERYTHING) == progress
        await engine.resume()
        await asyncio.gather(waiting, *tasks)
        assert await engine.progress(EVERYTHING) == {}

    run(kit, scenario)


def test_progress_marks_the_versions_of_its_tokens(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate(ask(new=100)))
        await asyncio.sleep(0)
        await pause_after(engine, 4)
        before = (await engine.progress(EVERYTHING))["a"]
        await engine.load(4, kit.weights(1))
        assert (await engine.progress(EVERYTHING))["a"] == before
        await engine.resume()
        await pause_after(engine, 4)
        after = (await engine.progress(EVERYTHING))["a"]
        assert after.versions == (before.versions[0], VersionSpan(4, len(after.output_ids) - len(before.output_ids)))
        await engine.resume()
        assert (await task).output_ids[: len(after.output_ids)] == after.output_ids

    run(kit, scenario)


def test_statistics_count_what_runs_what_waits_and_what_was_sampled(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        before = engine.stats()
        assert (before.num_running, before.num_waiting, before.kv_used) == (0, 0, 0.0)
        calls = [asyncio.create_task(engine.generate(ask(str(i), new=100, seed=i))) for i in range(12)]
        await asyncio.sleep(0)
        await pause_after(engine, 20)
        during = engine.stats()
        assert (during.num_running, during.num_waiting) == (8, 4)
        for i in range(6):
            engine.abort(str(i))
        await asyncio.gather(*calls[:6])
        fewer = engine.stats()
        assert (fewer.num_running, fewer.num_waiting) == (2, 4)
        assert 0 < fewer.kv_used < during.kv_used <= 1
        await engine.resume()
        sampled = sum(len(done.output_ids) for done in await asyncio.gather(*calls))
        after = engine.stats()
        assert (after.num_running, after.num_waiting, after.kv_used) == (0, 0, 0.0)
        assert after.num_tokens - before.num_tokens == sampled

    run(kit, scenario)


@with_a_model
def test_logprobs_are_those_of_a_plain_forward(kit: Kit) -> None:
    requests = [
        ask(str(i), prompt=tuple(range(1, 2 + 5 * (i % 5))), new=5 + i, seed=i, temperature=0.5 + i / 20)
        for i in range(20)
    ]

    async def scenario(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    for request, done in zip(requests, run(kit, scenario), strict=True):
        assert done.logprobs == pytest.approx(logprobs_by_hand(kit.model(), request, done.output_ids), abs=1e-4)


@with_a_model
def test_logprobs_of_a_nucleus_are_those_after_the_cut(kit: Kit) -> None:
    done = run(kit, lambda engine: engine.generate(ask(new=40, top_p=0.5, temperature=0.7)))
    by_hand = logprobs_by_hand(kit.model(), ask(temperature=0.7), done.output_ids)
    gains = [cut - whole for cut, whole in zip(done.logprobs, by_hand, strict=True)]
    assert all(0 < gain <= math.log(2) + 1e-4 for gain in gains)  # what is left holds at least half


@with_a_model
@pytest.mark.parametrize(
    "distribution",
    [
        Distribution(0.7, top_p=0.9),
        Distribution(1.0, top_k=5),
        Distribution(0.8, min_p=0.3),
        Distribution(0.7, top_p=0.8, top_k=20, min_p=0.05),
    ],
    ids=str,
)
def test_the_trainer_computes_the_logprobs_of_a_truncated_distribution(kit: Kit, distribution: Distribution) -> None:
    done = run(kit, lambda engine: engine.generate(ask(new=40, **asdict(distribution))))
    num = len(done.output_ids)
    sample = Sample((5, 6, 7), done.output_ids, (True,) * num, done.logprobs, (VersionSpan(3, num),))
    (trained,) = score(kit.model(), [sample], distribution, max_tokens=100)
    (whole,) = score(kit.model(), [sample], Distribution(distribution.temperature), max_tokens=100)
    assert done.logprobs == pytest.approx(trained, abs=1e-4)
    assert any(cut > full + 0.01 for cut, full in zip(done.logprobs, whole, strict=True)), "something was cut off"


@with_a_model
def test_a_reply_ends_with_a_stop_text_and_keeps_its_tokens(kit: Kit) -> None:
    whole = run(kit, lambda engine: engine.generate(ask(new=40)))
    word = spelled(whole.output_ids[9:12])
    done, again = run(kit, lambda engine: asyncio.gather(
        engine.generate(ask(new=40, stop=("never there", word))),
        engine.generate(ask("b", new=40, stop=(word,), begun=head(whole, 10))),
    ))  # fmt: skip
    end = spelled(whole.output_ids).index(word) + 3
    assert done.finish == "stop" and done.output_ids == whole.output_ids[:end]
    assert done.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
    if end == 12 and kit.is_exact:
        assert again.finish == "stop" and again.output_ids == done.output_ids, "a text may begin before a move"


@with_a_model
def test_scores_match_a_plain_forward_of_the_current_weights(kit: Kit) -> None:
    ids = tuple((7 * k) % NUM_VOCAB for k in range(40))

    async def scenario(engine: Engine) -> list[tuple[float, ...]]:
        running = asyncio.create_task(engine.generate(ask(new=100)))
        old = await engine.score(ids)
        await engine.pause()
        await engine.load(4, kit.weights(1))
        await engine.resume()
        new = await engine.score(ids)
        await running
        return [old, new]

    for seed, scores in enumerate(run(kit, scenario)):
        model = kit.model(seed)
        assert scores == pytest.approx(logprobs_by_hand(model, ask(prompt=ids[:1]), ids[1:]), abs=1e-4)


@with_a_model
def test_a_request_the_engine_cannot_serve_is_refused_alone(kit: Kit) -> None:
    async def scenario(engine: Engine) -> Completion:
        other = asyncio.create_task(engine.generate(ask(new=40)))
        with pytest.raises(ValueError, match="temperature"):
            await engine.generate(ask(temperature=-1.0))
        return await other

    assert len(run(kit, scenario).output_ids) == 40


def test_logprobs_with_grouped_queries_match_a_plain_forward() -> None:
    requests = [ask(str(i), prompt=tuple(range(1, 2 + 5 * (i % 5))), new=5 + i, seed=i) for i in range(20)]

    async def scenario(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    for request, done in zip(requests, run(lambda: local(llama()), scenario), strict=True):
        assert done.logprobs == pytest.approx(logprobs_by_hand(llama(), request, done.output_ids), abs=1e-5)


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    done = run(local, lambda engine: engine.generate(ask(new=20, temperature=0.0)))
    with torch.no_grad():
        logits = qwen()(torch.tensor([(5, 6, 7, *done.output_ids)])).logits[0, 2:-1]
    assert done.output_ids == tuple(logits.argmax(-1).tolist())
    assert done.logprobs == (0.0,) * 20


def test_a_stop_token_ends_a_request_and_is_included() -> None:
    free = run(local, lambda engine: engine.generate(ask(new=20)))
    stop = free.output_ids[4]
    done = run(lambda: local(stop=frozenset({stop})), lambda engine: engine.generate(ask(new=20)))
    assert done.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]
    assert done.finish == "stop"


def test_more_requests_than_slots_are_served_in_turn() -> None:
    async def scenario(engine: Engine) -> list[Completion]:
        calls = [asyncio.create_task(engine.generate(ask(str(i), new=1 + i % 9, seed=i))) for i in range(30)]
        await asyncio.sleep(0)
        await engine.pause()
        stats = engine.stats()
        assert stats.num_running <= 3
        assert stats.kv_used == stats.num_running / 3
        await engine.resume()
        return await asyncio.gather(*calls)

    done = run(lambda: local(num_slots=3), scenario)
    assert [len(completion.output_ids) for completion in done] == [1 + i % 9 for i in range(30)]


def test_a_failed_step_fails_all_waiting_and_later_calls() -> None:
    model = qwen()

    def explode(*_: object) -> None:
        raise RuntimeError("out of memory")

    async def main() -> None:
        engine = local(model, num_slots=2)
        await engine.pause()
        calls = [asyncio.create_task(engine.generate(ask(str(i)))) for i in range(5)]
        await asyncio.sleep(0)
        model.register_forward_pre_hook(explode)
        await asyncio.gather(engine.resume(), return_exceptions=True)
        ends: list[object] = [*await asyncio.gather(*calls, return_exceptions=True)]
        ends += await asyncio.gather(engine.generate(ask()), engine.load(4, {}), return_exceptions=True)
        for end in ends:
            assert isinstance(end, WorkerDied)
            assert "out of memory" in str(end)
            assert isinstance(end.__cause__, RuntimeError)
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 200))


def test_a_prompt_of_another_tokenizer_is_refused_and_harms_nobody() -> None:
    async def scenario(engine: Engine) -> Completion:
        with pytest.raises(ValueError, match=r"\[0, 90\)"):
            await engine.generate(ask(prompt=(1, NUM_VOCAB)))
        return await engine.generate(ask())

    assert len(run(local, scenario).output_ids) == 6
