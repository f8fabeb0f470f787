"""What a session worker relies on of a replica: the same suite on the fake, on an engine, and through a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import pytest

from rlsys.errors import WorkerDied
from rlsys.routing.requests import Chunk, Completion, Hold, Replica, Request, WeightsWanted
from rlsys.types import Sampling, VersionSpan
from tests.replicas import Shelf, own_tokens, remote_of, replica_of, scripted
from tests.scripted_replica import ScriptedReplica
from workers.rollout.remote_replica import RemoteReplica
from workers.rollout.replica_worker import ReplicaWorker

T = TypeVar("T")
NUM_TOKENS = 12
Make = Callable[[bool], "Kit"]


@dataclass
class Kit:
    """A replica with version 0, and what happens to it. With holds, its weights change between groups."""

    replica: Replica
    publish: Callable[[int], None]
    """Let a pull bring this version from now."""
    drain: Callable[[], Coroutine[object, object, None]]
    die: Callable[[], Coroutine[object, object, None]]
    num_sampled: Callable[[], int]
    num_running: Callable[[], int]


def fake(has_holds: bool) -> Kit:
    replica = ScriptedReplica("rollout-0", holds=has_holds, per_chunk=1, reply=own_tokens)

    async def drain() -> None:
        replica.drain()

    async def die() -> None:
        replica.die()

    return Kit(
        replica, replica.publish, drain, die, lambda: replica.num_sampled, lambda: replica.load().stats.num_running
    )


def on_engine(has_holds: bool) -> Kit:
    shelf, engine = Shelf(), scripted("a")
    replica = replica_of(shelf, engine, when="between" if has_holds else "inflight")
    stats = engine.stats
    return Kit(replica, shelf.put, replica.drain, engine.close, lambda: stats().num_tokens, lambda: stats().num_running)


def through_a_process(has_holds: bool) -> Kit:
    kit = on_engine(has_holds)
    worker = remote_of("rollout-0", ReplicaWorker("rollout-0", {"policy": kit.replica}))  # type: ignore[dict-item]

    async def die() -> None:
        worker.actor.die()

    return replace(kit, replica=RemoteReplica(worker, "policy", "session-0"), die=die)


@pytest.fixture(params=[fake, on_engine, through_a_process])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def run(scenario: Coroutine[object, object, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 30))


def ask(hold: Hold | None = None, *, new: int = NUM_TOKENS, wanted: WeightsWanted | None = None) -> Request:
    """A request of a group with this hold."""
    if hold is not None and hold.held is not None and hold.id:
        wanted = WeightsWanted(hold.held.version, hold.held.hash)
    return Request("r", (3, 4, 5), Sampling(max_new_tokens=new), 1, wanted=wanted, hold=hold.id if hold else "")


def tokens(num: int) -> tuple[int, ...]:
    return tuple(own_tokens(ask())[:num])


async def held(kit: Kit, version: int = 0) -> Hold:
    hold = await kit.replica.hold(WeightsWanted(version))
    assert hold is not None
    return hold


async def sampled(kit: Kit, request: Request) -> list[Chunk]:
    return [chunk async for chunk in kit.replica.generate(request)]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  (nobody tells)
        await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize("is_read", [False, True])
def test_chunks_make_the_whole_reply_with_acknowledged_versions(make: Make, is_read: bool):
    async def scenario() -> None:
        kit = make(True)
        hold = await held(kit)
        *early, last = await sampled(kit, replace(ask(hold), is_read=is_read))
        done = Completion.join([chunk.more for chunk in (*early, last)])
        assert (done.output_ids, done.finish) == (tokens(NUM_TOKENS), "length")
        assert done.versions == (VersionSpan(0, NUM_TOKENS),)
        assert {w for chunk in (*early, last) for w in chunk.weights} == {hold.held}
        assert all(chunk.more.finish is None for chunk in early)
        assert (last.held, last.reason, last.load and last.load.replica) == (hold.held, None, "rollout-0")

    run(scenario())


def test_a_request_goes_on_from_the_tokens_it_brings(make: Make):
    async def scenario() -> None:
        kit = make(True)
        hold = await held(kit)
        begun = Completion(tokens(7), (0.0,) * 7, (VersionSpan(0, 7),), None)
        chunks = await sampled(kit, replace(ask(hold), begun=begun))
        assert begun.output_ids + Completion.join([c.more for c in chunks]).output_ids == tokens(NUM_TOKENS)
        assert kit.num_sampled() == NUM_TOKENS - 7

    run(scenario())


def test_closing_a_request_ends_it(make: Make):
    async def scenario() -> None:
        kit = make(True)
        running = asyncio.create_task(sampled(kit, ask(await held(kit), new=99)))
        await until(lambda: kit.num_running() == 1)
        running.cancel()
        await until(lambda: kit.num_running() == 0)
        assert kit.num_sampled() < 99

    run(scenario())


def test_a_drain_aborts_a_request_with_its_tokens(make: Make):
    async def scenario() -> None:
        kit = make(True)
        hold = await held(kit)
        running = asyncio.create_task(sampled(kit, ask(hold, new=99)))
        await until(lambda: kit.num_sampled() >= 3)
        await kit.drain()
        chunks = await running
        done = Completion.join([chunk.more for chunk in chunks])
        assert (done.finish, chunks[-1].reason) == ("abort", "drained")
        assert done.output_ids == tokens(kit.num_sampled())
        again = replace(ask(hold, new=99), begun=replace(done, finish=None))
        rest = Completion.join([chunk.more for chunk in await sampled(kit, again)])
        assert (done.output_ids + rest.output_ids, rest.finish) == (tokens(99), "length"), "it serves afterwards"

    run(scenario())


def test_scores_are_of_acknowledged_weights(make: Make):
    async def scenario() -> None:
        kit = make(True)
        hold = await held(kit)
        scored = await kit.replica.score((3, 4, 5))
        assert (len(scored.logprobs), scored.version, scored.weights) == (2, 0, (hold.held,))

    run(scenario())


def test_a_dead_replica_ends_requests_and_later_calls(make: Make):
    async def scenario() -> None:
        kit = make(True)
        hold = await held(kit)
        running = asyncio.create_task(sampled(kit, ask(hold, new=99)))
        await until(lambda: kit.num_sampled() >= 3)
        await kit.die()
        with pytest.raises(WorkerDied):
            await running
        for call in (sampled(kit, ask(hold)), kit.replica.score((3, 4))):
            with pytest.raises(WorkerDied):
                await call
        await kit.replica.release(hold)

    run(scenario())


# --------------------------------------------------------------------------------------------------------------- holds


def test_a_hold_names_replica_and_acknowledged_weights(make: Make):
    async def scenario() -> None:
        kit = make(True)
        first, second = await held(kit), await held(kit)
        assert first.held is not None
        assert (first.replica, first.held.replica, first.held.version) == ("rollout-0", "rollout-0", 0)
        assert first.held == second.held
        assert len({first.id, second.id, ""}) == 3

    run(scenario())


def test_newer_weights_wait_for_every_hold_and_are_then_held(make: Make):
    async def scenario() -> None:
        kit = make(True)
        first, second = await held(kit), await held(kit)
        kit.publish(1)
        newer = asyncio.create_task(held(kit, 1))
        await settle()
        await kit.replica.release(first)
        assert (await sampled(kit, ask(second)))[-1].more.finish == "length"
        await settle()
        assert not newer.done()
        await kit.replica.release(second)
        hold = await newer
        assert hold.held is not None and hold.held.version == 1
        assert hold.held.hash != (first.held and first.held.hash)

    run(scenario())


def test_releasing_twice_changes_nothing(make: Make):
    async def scenario() -> None:
        kit = make(True)
        first, second = await held(kit), await held(kit)
        for _ in range(2):
            await kit.replica.release(first)
        kit.publish(1)
        newer = asyncio.create_task(held(kit, 1))
        await settle()
        assert not newer.done()
        await kit.replica.release(second)
        await newer

    run(scenario())


@pytest.mark.parametrize("what", ["older", "other bytes", "not there yet"])
def test_weights_that_it_cannot_have_now_are_not_held(make: Make, what: Literal["older", "other bytes", "not there"]):
    async def scenario() -> None:
        kit = make(True)
        old = await held(kit)
        assert old.held is not None
        exactly = WeightsWanted(0, old.held.hash)
        if what == "older":
            kit.publish(1)
            await kit.replica.release(old)
            await held(kit, 1)
            assert await kit.replica.hold(exactly) is None
        elif what == "other bytes":
            assert await kit.replica.hold(replace(exactly, hash="others")) is None
        else:
            assert await kit.replica.hold(WeightsWanted(1), waits=False) is None
        assert (await kit.replica.hold(exactly) is None) == (what == "older")

    run(scenario())


def test_a_request_for_other_weights_is_aborted_without_a_token(make: Make):
    async def scenario() -> None:
        kit = make(True)
        old = await held(kit)
        kit.publish(1)
        await kit.replica.release(old)
        new = await held(kit, 1)
        *_, chunk = await sampled(kit, ask(replace(old, id="")))
        assert chunk.more.finish in ("stop", "length"), "nothing was wanted"
        (chunk,) = await sampled(kit, ask(old))
        assert (chunk.more.output_ids, chunk.more.finish, chunk.reason) == ((), "abort", "weights")
        assert chunk.held == new.held, "the router learns what it has"

    run(scenario())


def test_without_holds_weights_as_new_as_wanted_are_named_and_nothing_is_claimed(make: Make):
    async def scenario() -> None:
        kit = make(False)
        hold = await held(kit)
        assert (hold.id, hold.held and hold.held.version) == ("", 0)
        kit.publish(2)
        newer = await held(kit, 1)
        assert (newer.id, newer.held and newer.held.version) == ("", 2)
        chunks = await sampled(kit, ask(wanted=WeightsWanted(1)))
        assert {span.version for chunk in chunks for span in chunk.more.versions} == {2}
        await kit.replica.release(newer)

    run(scenario())
