"""Engines that hold several versions side by side: requests end on the weights that they began with."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlsys.errors import WeightsMismatch, WorkerDied, WorkerError
from rlsys.routing.requests import Completion
from rlsys.types import VersionSpan
from rlsys.weight_sync.manifest import content_hash
from tests.contract.engines import (
    LORA,
    NIGHTLY,
    VLLM,
    Kit,
    ask,
    change,
    cut,
    local,
    local_lora,
    logprobs_by_hand,
    pause_after,
    qwen,
    run,
    scripted,
    turns,
    vllm,
)
from workers.engines.engine import Engine
from workers.transport.checksums import hash_of

KITS = [
    pytest.param(Kit(lambda: scripted(resident_versions=2), tied=None), id="scripted"),
    pytest.param(Kit(lambda: local(resident_versions=2), tied=True), id="local-tied"),
    pytest.param(
        Kit(lambda: local(qwen(tied=False), resident_versions=2), tied=False), id="local-untied", marks=NIGHTLY
    ),
    pytest.param(Kit(lambda: local_lora(resident_versions=2), tied=True, has_adapter=True), id="local-lora"),
    pytest.param(
        Kit(lambda: vllm(tied=True, lora=LORA, resident_versions=2), tied=True, is_costly=True, has_adapter=True),
        id="vllm-lora",
        marks=VLLM,
    ),
]
pytestmark = pytest.mark.parametrize("kit", KITS, indirect=True)
SEEDS = range(4)


async def started(engine: Engine, name: str = "a", *, new: int = 200) -> list[asyncio.Task[Completion]]:
    """Some requests of which a few tokens are sampled; the engine goes on."""
    tasks = [asyncio.create_task(engine.generate(ask(f"{name}{i}", new=new, seed=i))) for i in SEEDS]
    await asyncio.sleep(0)
    await pause_after(engine, 2 * len(tasks))
    await engine.resume()
    return tasks


async def run_alone(engine: Engine) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(ask(seed=i, new=200)) for i in SEEDS))


def test_two_versions_at_once_sample_as_each_would_alone(kit: Kit) -> None:
    async def one_after_the_other(engine: Engine) -> list[list[Completion]]:
        old = await run_alone(engine)
        await change(engine, 4, kit.weights(1))
        return [old, await run_alone(engine)]

    async def at_once(engine: Engine) -> list[list[Completion]]:
        old = await started(engine, "old")
        await engine.stage(kit.weights(1))
        await engine.pause()
        await engine.load(4, kit.weights(1))
        await engine.resume()
        assert content_hash(await engine.checksums()) == hash_of(kit.weights(1))
        new = await started(engine, "new")
        await engine.pause()
        assert (engine.version, engine.versions) == (4, (3, 4))
        assert engine.stats().num_running == len(old + new) == 8
        await engine.resume()
        ends = [await asyncio.gather(*old), await asyncio.gather(*new)]
        assert engine.versions == (4,)
        return ends

    old, new = apart = run(kit, one_after_the_other)
    assert {done.versions for done in old} == {(VersionSpan(3, 200),)}
    assert {done.versions for done in new} == {(VersionSpan(4, 200),)}
    assert run(kit, at_once) == apart


def test_a_version_is_released_when_its_last_request_ends(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        *others, last = await started(engine)
        await change(engine, 4, kit.weights(1))
        for i in SEEDS[:-1]:
            engine.abort(f"a{i}")
        await asyncio.gather(*others)
        assert engine.versions == (3, 4)
        engine.abort(f"a{SEEDS[-1]}")
        await last
        assert engine.versions == (4,)

    run(kit, scenario)


def test_staging_waits_for_room_and_the_oldest_requests_make_it(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        oldest = await started(engine, "oldest")
        await change(engine, 4, kit.weights(1))
        older = await started(engine, "older")
        staging = asyncio.create_task(engine.stage(kit.weights(2)))
        await engine.pause()
        await turns(20)
        assert not staging.done()
        await engine.resume()
        for i in SEEDS:
            engine.abort(f"oldest{i}")
        await staging
        assert all(done.versions[-1].version == 3 for done in await asyncio.gather(*oldest))
        await change(engine, 5, kit.weights(2))
        assert engine.versions == (4, 5)
        assert all(done.versions == (VersionSpan(4, 200),) for done in await asyncio.gather(*older))
        assert engine.versions == (5,)

    run(kit, scenario)


def test_weights_beyond_resident_versions_are_refused_naming_those_in_use(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        await started(engine, "old")
        await change(engine, 4, kit.weights(1))
        new = await started(engine, "new")
        await engine.pause()
        with pytest.raises(WorkerError, match=r"while loading version 5.*held: 3, 4; .*raise resident_versions"):
            await engine.load(5, kit.weights(2))
        await engine.resume()
        assert engine.versions == (3, 4)
        assert (await new[0]).versions == (VersionSpan(4, 200),)

    run(kit, scenario)


def test_mismatched_weights_are_refused_before_there_is_room(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        await started(engine, "old")
        await change(engine, 4, kit.weights(1))
        with pytest.raises(WeightsMismatch, match="unknown stranger"):
            await engine.stage({**kit.weights(2), "stranger": torch.zeros(2)})

    run(kit, scenario)


def test_closing_ends_a_wait_for_room(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        tasks = await started(engine, "old")
        await change(engine, 4, kit.weights(1))
        staging = asyncio.create_task(engine.stage(kit.weights(2)))
        await asyncio.sleep(0)
        await kit.close(engine)
        for end in await asyncio.gather(staging, *tasks, return_exceptions=True):
            assert isinstance(end, WorkerDied)

    run(kit, scenario)


def test_a_resumed_request_keeps_its_version_while_that_is_resident(kit: Kit) -> None:
    async def scenario(engine: Engine) -> None:
        whole = (await run_alone(engine))[0]
        begun = await cut(engine, ask("cut", seed=0, new=200), 5)
        others = await started(engine)
        await change(engine, 4, kit.weights(1))
        await engine.pause()  # so that both get their slots in one turn
        resumed = asyncio.create_task(engine.generate(ask("resumed", seed=0, new=200, begun=begun)))
        fresh = asyncio.create_task(engine.generate(ask("fresh", seed=0, new=200)))
        await asyncio.sleep(0)
        await engine.resume()
        ended = await resumed
        assert ended.versions == (VersionSpan(3, 200),)
        if kit.is_exact:
            assert ended == whole
        assert await fresh == await engine.generate(ask(seed=0, new=200))
        for i in SEEDS:
            engine.abort(f"a{i}")
        await asyncio.gather(*others)
        count = len(begun.output_ids)
        done = await engine.generate(ask(seed=0, new=200, begun=begun))
        assert done.versions == (VersionSpan(3, count), VersionSpan(4, 200 - count))

    run(kit, scenario)


def test_scores_use_the_newest_version_and_disturb_no_older_request(kit: Kit) -> None:
    ids = tuple(range(1, 30))
    by_hand = logprobs_by_hand(kit.model(1), ask(prompt=ids[:1]), ids[1:]) if kit.tied is not None else [0.0] * 28

    async def scenario(engine: Engine) -> None:
        whole = await run_alone(engine)
        old = await started(engine)
        await change(engine, 4, kit.weights(1))
        scores = await engine.score(ids)
        assert engine.versions == (3, 4)
        assert scores == pytest.approx(by_hand, abs=1e-4)
        assert await asyncio.gather(*old) == whole

    run(kit, scenario)
