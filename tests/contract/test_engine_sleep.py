"""How engines give their device away and take it back: for every engine, then what only a real model can show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from examples.tiny_policy import build_tokenizer
from rlsys.errors import WorkerDied
from rlsys.routing.requests import Completion
from tests.contract.engines import Kit, adapted, ask, change, local, pause_after, qwen, run, turns, with_a_model
from workers.engines.engine import Engine
from workers.engines.local.local_engine import LocalEngine
from workers.model.lora import published_tensors
from workers.model.model_loading import load_model

TWO = [ask("a", new=50), ask("b", new=40, prompt=(9, 8, 7, 6), seed=5)]


async def begin(engine: Engine, num_tokens: int = 6) -> list[asyncio.Task[Completion]]:
    """Two requests that have sampled some tokens."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in TWO]
    await turns(1)
    await pause_after(engine, num_tokens)
    await engine.resume()
    return tasks


async def undisturbed(engine: Engine) -> list[Completion]:
    return [await task for task in await begin(engine)]


def test_requests_sleep_with_their_tokens_and_go_on(kit: Kit) -> None:
    async def scenario(engine: Engine) -> list[Completion]:
        tasks = await begin(engine)
        for _ in range(2):
            await engine.sleep()
            num_tokens = engine.stats().num_tokens
            late = asyncio.create_task(engine.generate(ask("late")))
            await turns(20)
            assert engine.stats().num_tokens == num_tokens
            assert not late.done()
            await engine.wake()
            await late
        return [await task for task in tasks]

    slept, calm = run(kit, scenario), run(kit, undisturbed)
    assert [len(done.output_ids) for done in slept] == [50, 40]
    if kit.is_exact:
        assert slept == calm


@pytest.mark.parametrize("call", ["load", "checksums", "score"])
def test_what_needs_the_device_waits_for_it(kit: Kit, call: str) -> None:
    async def scenario(engine: Engine) -> None:
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "load": lambda: engine.load(4, kit.weights(1)),
            "checksums": engine.checksums,
            "score": lambda: engine.score((5, 6, 7)),
        }
        await engine.sleep()
        if call == "load":
            await engine.pause()
        asked = asyncio.ensure_future(calls[call]())
        await turns(20)
        assert not asked.done()
        await engine.wake()
        await asked
        await engine.resume()
        assert len((await engine.generate(ask())).output_ids) == 6

    run(kit, scenario)


def test_a_weight_change_that_has_paused_the_engine_goes_on_after_the_sleep(kit: Kit) -> None:
    async def scenario(engine: Engine) -> list[Completion]:
        tasks = await begin(engine)
        await engine.pause()
        await engine.sleep()
        await engine.wake()
        num_tokens = engine.stats().num_tokens
        await turns(20)
        assert engine.stats().num_tokens == num_tokens, "it is paused still"
        await engine.sleep()
        await engine.resume()
        await turns(20)
        assert engine.stats().num_tokens == num_tokens, "it sleeps"
        await engine.wake()
        return [await task for task in tasks]

    assert [len(done.output_ids) for done in run(kit, scenario)] == [50, 40]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_request_that_ends_in_a_sleep_disturbs_no_other(kit: Kit, is_cancelled: bool) -> None:
    """The first of three, whose place another takes."""
    requests = [*TWO, ask("c", new=45, prompt=(3, 3, 3), seed=8)]

    async def scenario(engine: Engine) -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await turns(1)
        await pause_after(engine, 9)
        await engine.resume()
        await engine.sleep()
        if is_cancelled:
            tasks[0].cancel()
            await turns(20)
        else:
            engine.abort("a")
            assert (await tasks[0]).finish == "abort"
        await engine.wake()
        return [await task for task in tasks[1:]]

    async def calm(engine: Engine) -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(request) for request in requests[1:])))

    done = run(kit, scenario)
    assert [len(each.output_ids) for each in done] == [40, 45]
    if kit.is_exact:
        assert done == run(kit, calm)


def test_scores_weight_changes_and_sleeps_never_wait_for_each_other_in_a_circle(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        for version in range(4, 10):
            await engine.stage(kit.weights(1))
            await engine.pause()
            score = asyncio.ensure_future(engine.score((5, 6, 7)))
            await turns(3)
            sleep = asyncio.ensure_future(engine.sleep())
            await turns(3)
            load = asyncio.ensure_future(engine.load(version, kit.weights(1)))
            done, _ = await asyncio.wait([load, sleep], return_when=asyncio.FIRST_COMPLETED)
            if load not in done:
                await engine.wake()
            await load
            await engine.resume()
            await asyncio.gather(score, sleep)
            await engine.wake()

    run(kit, scenario)


def test_sleep_and_wake_may_be_repeated(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.wake()
        for call in (engine.sleep, engine.sleep, engine.wake, engine.wake):
            await call()
        assert len((await engine.generate(ask())).output_ids) == 6

    run(kit, scenario)


def test_an_engine_that_is_closed_asleep_ends_what_waits() -> None:
    async def scenario(engine: Engine) -> None:
        await engine.sleep()
        waiting = [asyncio.ensure_future(call) for call in (engine.score((5, 6)), engine.generate(ask()))]
        await turns(5)
        await engine.close()
        for each in waiting:
            with pytest.raises(WorkerDied):
                await each

    run(local, scenario)


@with_a_model
def test_weights_are_what_they_were(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.pause()
        await engine.load(4, kit.weights(1))
        await engine.resume()
        before = await engine.checksums(), await engine.score((5, 6, 7, 8))
        await engine.sleep()
        await engine.wake()
        assert (await engine.checksums(), await engine.score((5, 6, 7, 8))) == before

    run(kit, scenario)


@pytest.mark.parametrize("model", [qwen, lambda: qwen(tied=False), adapted], ids=["tied", "untied", "lora"])
@pytest.mark.parametrize("num_versions", [1, 2])
def test_a_sleeping_engine_has_given_away_all_its_memory_of_a_shared_device(model, num_versions) -> None:
    """With both versions of two that requests run on, of which the second shares some tensors with the first."""
    own = model()

    async def scenario(engine: Engine) -> list[Completion]:
        assert isinstance(engine, LocalEngine)
        tasks = await begin(engine)
        before = weights_of(engine)
        await engine.sleep()
        assert sum(tensor.untyped_storage().nbytes() for tensor in engine._residents.tensors()) == 0
        assert sum(t.untyped_storage().nbytes() for t in engine._decoder._cache._tensors()) < 100
        await engine.wake()
        assert all(torch.equal(a, b) for a, b in zip(weights_of(engine), before, strict=True))
        return [await task for task in tasks]

    shared = run(lambda: local(own, resident_versions=num_versions, shares_device=True), scenario)
    assert shared == run(lambda: local(model()), undisturbed)


def test_weights_that_were_mapped_from_a_file_change_after_a_sleep(tmp_path: Path) -> None:
    """The tensors that a version is written to are those that the model computes with."""
    changed = {name: tensor.detach() for name, tensor in published_tensors(qwen(seed=1)).items()}
    qwen().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)

    async def scenario(engine: Engine) -> tuple[float, ...]:
        await engine.sleep()
        await engine.wake()
        await change(engine, 4, changed)
        return await engine.score((5, 6, 7, 8))

    mapped = load_model(str(tmp_path), torch.float32)
    own = run(lambda: local(qwen(seed=1)), lambda engine: engine.score((5, 6, 7, 8)))
    assert run(lambda: local(mapped, shares_device=True), scenario) == own


def weights_of(engine: LocalEngine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in engine._residents.tensors()]
