"""Requests that are cut and gone on with: here or elsewhere, on these weights or others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rlsys.routing.requests import Completion, Request
from rlsys.types import VersionSpan
from tests.contract.engines import (
    Kit,
    ask,
    change,
    cut,
    head,
    local,
    logprobs_by_hand,
    qwen,
    run,
    with_a_model,
)
from workers.engines.engine import Engine


def steady(kit: Kit, *, new: int = 40, name: str = "a") -> Request:
    """A request whose tokens do not hang on the state of a generator."""
    return ask(name, new=new, temperature=1.0 if kit.is_exact else 0.0)


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "elsewhere"])
def test_a_cut_request_resumes_to_the_same_completion(kit: Kit, is_elsewhere: bool) -> None:
    async def scenario(engine: Engine) -> None:
        request = steady(kit)
        whole = await engine.generate(request)
        begun = await cut(engine, request, 5)
        other = kit.another() if is_elsewhere else engine
        done = await other.generate(replace(request, begun=begun))
        assert done == whole
        assert done.versions == (VersionSpan(3, 40),)
        if other is not engine:
            await kit.finish(other)

    run(kit, scenario)


def test_segments_give_the_completion_of_an_uninterrupted_request(kit: Kit) -> None:
    """As in AgentMath (arXiv:2512.20745): each segment has a budget, and begins with the segments before."""

    async def scenario(engine: Engine) -> None:
        whole = await engine.generate(steady(kit, new=30))
        begun = None
        for budget in (7, 8, 29, 30):
            segment = await engine.generate(replace(steady(kit, new=budget), begun=begun))
            assert segment == replace(head(whole, budget), finish="length")
            begun = segment

    run(kit, scenario)


def test_a_request_cut_twice_keeps_what_was_begun_each_time(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        request = steady(kit, new=60)
        whole = await engine.generate(request)
        once = await cut(engine, request, 4)
        twice = await cut(engine, replace(request, begun=once), 4)
        assert len(twice.output_ids) >= len(once.output_ids) + 4
        assert twice == head(whole, len(twice.output_ids))
        assert await engine.generate(replace(request, begun=twice)) == whole

    run(kit, scenario)


def test_resuming_under_new_weights_keeps_tokens_and_adds_a_span(kit: Kit) -> None:
    async def scenario(engine: Engine) -> tuple[Completion, Completion]:
        begun = await cut(engine, ask(new=40), 5)
        await change(engine, 4, kit.weights(1))
        return begun, await engine.generate(ask(new=40, begun=begun))

    begun, done = run(kit, scenario)
    count = len(begun.output_ids)
    assert done.versions == (VersionSpan(3, count), VersionSpan(4, 40 - count))
    assert (done.output_ids[:count], done.logprobs[:count]) == (begun.output_ids, begun.logprobs)
    assert done.finish == "length"
    if kit.tied is not None:
        by_hand = logprobs_by_hand(kit.model(1), ask(), done.output_ids)
        assert done.logprobs[count:] == pytest.approx(by_hand[count:], abs=1e-4)


@with_a_model
def test_resumed_tokens_are_sampled_from_the_model_after_the_prefix(kit: Kit) -> None:
    async def scenario(engine: Engine) -> list[Completion]:
        begun = await cut(engine, ask(new=60), 5)
        requests = [ask(str(i), new=60, seed=i, begun=begun) for i in range(10)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    ends = run(kit, scenario)
    assert len({done.output_ids for done in ends}) == 10  # the seed decides
    for done in ends:
        assert done.logprobs == pytest.approx(logprobs_by_hand(kit.model(), ask(), done.output_ids), abs=1e-4)


def test_an_aborted_request_without_a_slot_returns_its_prefix(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        begun = head(await engine.generate(ask(new=20)), 8)
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask(new=20, begun=begun)))
        await asyncio.sleep(0)
        engine.abort("a")
        assert await task == begun
        await engine.resume()

    run(kit, scenario)


def test_nothing_begun_is_as_good_as_no_beginning(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        empty = Completion((), (), (), "abort")
        assert await engine.generate(ask(begun=empty)) == await engine.generate(ask())

    run(kit, scenario)


SPAN = (VersionSpan(3, 2),)


@pytest.mark.parametrize(
    ("begun", "why"),
    [
        (Completion((1, 2), (0.0,), SPAN, "abort"), "2 ids, 1 logprobs and versions of 2 tokens"),
        (Completion((1, 2), (0.0, 0.0), (VersionSpan(3, 3),), "abort"), "versions of 3 tokens"),
        (Completion((1, -2), (0.0, 0.0), SPAN, "abort"), r"ids in \[0, "),
        (Completion((1, 2), (0.0, 0.0), SPAN, "stop"), "ended with a stop token"),
        (Completion((1, 2, 1, 2, 1, 2), (0.0,) * 6, (VersionSpan(3, 6),), "abort"), "6 tokens, and max_new_tokens.* 6"),
    ],
)
def test_a_finished_or_malformed_prefix_is_refused(kit: Kit, begun: Completion, why: str) -> None:
    with pytest.raises(ValueError, match=f"request a has begun with .*{why}"):
        run(kit, lambda engine: engine.generate(ask(new=6, begun=begun)))


def test_a_prefix_that_ends_with_the_stop_token_is_refused() -> None:
    begun = Completion((1, 9), (0.0, 0.0), SPAN, "abort")
    with pytest.raises(ValueError, match="ended with a stop token"):
        run(lambda: local(stop=frozenset({9})), lambda engine: engine.generate(ask(begun=begun)))


@pytest.mark.parametrize("num_prompt", [1, 3, 60])
def test_a_request_resumes_beside_others_to_the_same_completion(num_prompt: int) -> None:
    request = ask(new=50, prompt=tuple(range(1, 1 + num_prompt)))

    async def scenario(source: Engine) -> None:
        whole = await source.generate(request)
        other = local(qwen(), num_slots=3)
        neighbours = [asyncio.create_task(other.generate(ask(str(i), seed=i, new=200))) for i in range(2)]
        begun = await cut(source, request, 20)
        assert await other.generate(replace(request, begun=begun)) == whole
        await asyncio.gather(*neighbours)
        await other.close()

    run(local, scenario)
