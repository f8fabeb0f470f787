"""A replica changes its weights between, under or beside its requests, and samples on no unverified weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Any, Literal

import pytest
from torch import Tensor

from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.routing.requests import Chunk, Completion, Hold, Request, WeightsWanted
from rlsys.types import Acknowledged, Sampling, VersionSpan
from rlsys.weight_sync.manifest import Manifest, Probe, TensorSpec
from tests.replicas import DIGIT, Shelf, hash_of, own_tokens, played, replica_of, scripted, until
from tests.scripted_engine import ScriptedEngine
from workers.rollout.replica import EngineReplica
from workers.rollout.replica_weights import ACKNOWLEDGEMENTS_KEPT

NUM_TOKENS = 12
NUMBERS = count()


def ask(hold: Hold | None = None, *, new: int = NUM_TOKENS, **options: Any) -> Request:
    """A request of a group with this hold."""
    if hold is not None and hold.id:
        assert hold.held is not None
        options |= {"hold": hold.id, "wanted": WeightsWanted(hold.held.version, hold.held.hash)}
    return Request(f"r-{next(NUMBERS)}", (3, 4, 5), Sampling(max_new_tokens=new), 1, **options)


async def held(replica: EngineReplica, version: int = 0) -> Hold:
    hold = await replica.hold(WeightsWanted(version))
    assert hold is not None
    return hold


def acknowledged(version: int) -> Acknowledged:
    return Acknowledged("rollout-0", version, hash_of(version))


def spans(chunk: Chunk) -> list[int]:
    return [span.version for span in chunk.more.versions]


async def turns(num: int = 20) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------------------ requests


def test_the_last_chunk_has_tokens_acknowledgement_load_and_weights():
    replica = replica_of(Shelf(version=4), scripted("a"))

    async def scenario() -> None:
        request = ask(await held(replica, 2))
        (chunk,) = [chunk async for chunk in replica.generate(request)]
        ids = tuple(own_tokens(request)[:NUM_TOKENS])
        assert chunk.more == Completion(ids, (0.0,) * NUM_TOKENS, (VersionSpan(4, NUM_TOKENS),), "length")
        assert (chunk.weights, chunk.held, chunk.reason) == ((acknowledged(4),), acknowledged(4), None)
        assert chunk.load is not None
        assert (chunk.load.replica, chunk.load.version, chunk.load.num_slots) == ("rollout-0", 4, 64)

    played([replica], scenario)


def test_without_a_puller_the_first_weights_stay():
    replica = replica_of(None, scripted("a"))

    async def scenario() -> None:
        assert await replica.hold(WeightsWanted(7)) == Hold("", "rollout-0", None)
        chunk = await replica.finish(ask(wanted=WeightsWanted(7)))
        assert (spans(chunk), chunk.weights) == ([-1], ())

    played([replica], scenario)


def test_a_dead_engine_ends_its_requests_and_is_reported():
    engine = scripted("a")
    replica = replica_of(None, engine)
    losses: list[WorkerError] = []
    replica.on_loss = losses.append

    async def scenario() -> None:
        running = asyncio.create_task(replica.finish(ask()))
        await until(lambda: engine.stats().num_tokens > 0)
        await engine.close()
        with pytest.raises(WorkerDied):
            await running
        with pytest.raises(WorkerDied):
            await replica.score((1, 2))
        assert [type(loss) for loss in losses] == [WorkerDied] * 2
        assert replica.load().weight == 0

    played([replica], scenario)


def test_its_load_counts_requests_holds_and_speed():
    engine = scripted("a")
    replica = replica_of(Shelf(), engine)

    async def scenario() -> None:
        assert replica.load().version == -1
        hold = await held(replica)
        running = asyncio.create_task(replica.finish(ask(hold)))
        await until(lambda: engine.stats().num_tokens > 0)
        load = replica.load()
        assert (load.version, load.stats.num_running, load.weight, load.num_present) == (0, 1, 1, 1)
        await running
        await replica.release(hold)
        load = replica.load()
        assert (load.weight, load.num_present) == (0, 0)
        assert load.tokens_per_s > 0

    played([replica], scenario)


# ------------------------------------------------------------------------------------------------------ weight changes


def test_a_hold_waits_for_weights_as_new_as_wanted():
    shelf = Shelf()
    replica = replica_of(shelf, scripted("a"))

    async def scenario() -> None:
        waiting = asyncio.create_task(held(replica, 2))
        for version in (1, 2):
            await turns()
            assert not waiting.done()
            shelf.put(version)
        assert (await waiting).held == acknowledged(2)

    played([replica], scenario)


def test_weights_that_are_new_enough_are_not_pulled_again():
    shelf = Shelf(version=3)
    replica = replica_of(shelf, scripted("a"))

    async def scenario() -> None:
        for version in (0, 1, 3):
            await replica.release(await held(replica, version))
        shelf.put(4)
        await asyncio.gather(*(held(replica, 4) for _ in range(5)))

    played([replica], scenario)
    assert shelf.pulls == [3, 4]


def test_groups_that_wait_for_a_change_go_on_in_one_turn_of_the_loop():
    shelf = Shelf()
    replica = replica_of(shelf, scripted("a"))
    order: list[str] = []

    async def waits() -> None:
        await replica.weights.ensure(1)
        order.append("goes on")
        asyncio.get_running_loop().call_soon(order.append, "next turn")

    async def scenario() -> None:
        changing = asyncio.create_task(replica.weights.ensure(1))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(waits()) for _ in range(5)]
        await asyncio.sleep(0)
        shelf.put(1)
        await asyncio.gather(changing, *waiting)
        await asyncio.sleep(0)

    played([replica], scenario)
    assert order == ["goes on"] * 5 + ["next turn"] * 5, "an engine admits together what comes in one turn"


@pytest.mark.parametrize("version", [0, 1])
def test_a_hold_asked_for_as_a_change_ends_is_granted(version: int):
    asked: list[asyncio.Task[Hold]] = []

    class Asked(ScriptedEngine):
        async def checksums(self) -> Mapping[TensorSpec, int]:
            asked.append(asyncio.create_task(held(replica, version)))  # runs before the callbacks of the change
            return await super().checksums()

    shelf = Shelf(version=1)
    replica = replica_of(shelf, Asked(own_tokens, shapes={"w": (2,)}, version=-1))

    async def scenario() -> None:
        await held(replica, 1)
        assert (await asked[0]).held == acknowledged(1)

    played([replica], scenario)


def test_a_change_between_groups_waits_for_every_hold():
    shelf = Shelf()
    replica = replica_of(shelf, scripted("a"))

    async def scenario() -> None:
        first, second = await held(replica), await held(replica)
        shelf.put(1)
        newer = asyncio.create_task(held(replica, 1))
        await until(lambda: 1 in shelf.pulls)
        await replica.release(first)
        chunk = await replica.finish(ask(second))
        await turns()
        assert (spans(chunk), newer.done(), replica.load().is_loading) == ([0], False, False)
        await replica.release(second)
        assert (await newer).held == acknowledged(1)

    played([replica], scenario)


def test_a_pending_change_grants_no_old_hold_and_aborts_what_has_none():
    shelf = Shelf()
    engine = scripted("a")
    replica = replica_of(shelf, engine)
    old = WeightsWanted(0, hash_of(0))

    async def scenario() -> None:
        hold = await held(replica)
        visitor = asyncio.create_task(replica.finish(ask(wanted=old, new=90)))
        await until(lambda: engine.stats().num_tokens >= 3)
        shelf.put(1)
        newer = asyncio.create_task(held(replica, 1))
        await until(lambda: 1 in shelf.pulls)
        assert await replica.hold(old) is None
        assert await replica.hold(WeightsWanted(1), waits=False) is None
        refused = await replica.finish(ask(wanted=old))
        assert (refused.more.output_ids, refused.more.finish, refused.reason) == ((), "abort", "weights")
        await replica.release(hold)
        aborted = await visitor
        assert (aborted.more.finish, aborted.reason, spans(aborted)) == ("abort", "weights", [0])
        assert (await newer).held == acknowledged(1)
        late = await replica.finish(ask(hold))
        assert (late.reason, late.held) == ("weights", acknowledged(1))

    played([replica], scenario)


def test_a_change_in_flight_happens_under_running_requests():
    shelf = Shelf()
    engine = scripted("a")
    replica = replica_of(shelf, engine, when="inflight")

    async def scenario() -> None:
        assert not (await held(replica)).id
        running = asyncio.create_task(replica.finish(ask(wanted=WeightsWanted(0))))
        await until(lambda: engine.stats().num_tokens == 4)
        shelf.put(1)
        newer = await replica.finish(ask(wanted=WeightsWanted(1)))
        assert spans(newer) == [1]
        older = await running
        assert (spans(older), len(older.more.output_ids)) == ([0, 1], NUM_TOKENS)
        assert older.weights == (acknowledged(0), acknowledged(1))

    played([replica], scenario)


def test_resident_versions_load_at_once_until_there_is_no_room():
    shelf = Shelf()
    engine = scripted("a", resident_versions=2)
    replica = replica_of(shelf, engine, when="beside")

    async def scenario() -> None:
        await held(replica)
        oldest = asyncio.create_task(replica.finish(ask()))
        await until(lambda: engine.stats().num_tokens == 2)
        shelf.put(1)
        await held(replica, 1)
        newer = asyncio.create_task(replica.finish(ask()))
        await until(lambda: engine.stats().num_running == 2)
        assert not oldest.done()
        shelf.put(2)
        await held(replica, 2)
        assert oldest.done()
        done = [await oldest, await newer, await replica.finish(ask())]
        assert [spans(chunk) for chunk in done] == [[0], [1], [2]]
        assert [chunk.weights for chunk in done] == [(acknowledged(version),) for version in range(3)]

    played([replica], scenario)


def test_older_groups_start_while_newer_ones_wait_for_room():
    shelf = Shelf()
    engine = scripted("a", resident_versions=2)
    replica = replica_of(shelf, engine, when="beside")

    async def scenario() -> None:
        await held(replica)
        oldest = asyncio.create_task(replica.finish(ask()))
        await until(lambda: engine.stats().num_running == 1)
        shelf.put(1)
        await held(replica, 1)
        older = asyncio.create_task(replica.finish(ask()))
        await until(lambda: engine.stats().num_running == 2)
        await engine.pause()
        shelf.put(2)
        newest = asyncio.create_task(held(replica, 2))
        await until(lambda: 2 in shelf.pulls)
        await turns()
        assert not newest.done()
        assert (await held(replica, 1)).held == acknowledged(1), "room is only for what needs it"
        await engine.resume()
        await asyncio.gather(oldest, older, newest)

    played([replica], scenario)


def test_a_drained_replica_loads_the_newest_staged_weights():
    shelf = Shelf()
    staged: list[float] = []

    class Noting(ScriptedEngine):
        async def stage(self, weights: Mapping[str, Tensor]) -> None:
            staged.append(weights["w"][0].item())
            await super().stage(weights)

    replica = replica_of(shelf, Noting(own_tokens, shapes={"w": (2,)}, version=-1))

    async def scenario() -> None:
        hold = await held(replica)
        shelf.put(1)
        waiting = asyncio.create_task(held(replica, 1))
        await until(lambda: 1 in shelf.pulls)
        shelf.put(2)
        await replica.release(hold)
        assert (await waiting).held == acknowledged(2)
        assert (shelf.pulls, staged) == ([0, 1, 2], [0, 1, 2])

    played([replica], scenario)


def test_holds_of_a_session_worker_that_died_end():
    shelf = Shelf()
    replica = replica_of(shelf, scripted("a"))

    async def scenario() -> None:
        for owner in ("session-0", "session-1", "session-0"):
            await replica.hold(WeightsWanted(0), owner=owner)
        shelf.put(1)
        newer = asyncio.create_task(held(replica, 1))
        replica.forget("session-0")
        assert replica.load().num_present == 1
        replica.forget("session-1")
        assert (await newer).held == acknowledged(1)

    played([replica], scenario)


def test_a_drain_aborts_requests_with_their_tokens_and_keeps_the_holds():
    engine = scripted("a")
    replica = replica_of(Shelf(), engine)

    async def scenario() -> None:
        hold = await held(replica)
        running = asyncio.create_task(replica.finish(request := ask(hold)))
        await until(lambda: engine.stats().num_tokens == 4)
        await replica.drain()
        chunk = await running
        assert (chunk.more.finish, chunk.reason, chunk.more.output_ids) == (
            "abort", "drained", tuple(own_tokens(request)[:4]),
        )  # fmt: skip
        assert replica.load().num_present == 1
        assert (await replica.finish(ask(hold))).more.finish == "length"

    played([replica], scenario)


def test_a_pull_is_reported_once_with_the_next_end():
    shelf = Shelf()
    replica = replica_of(shelf, scripted("a"))

    async def scenario() -> None:
        hold = await held(replica)
        first = await replica.finish(ask(hold))
        assert [pull.worker for pull in first.pulls] == ["rollout-0"]
        assert first.pulls[0].end_s <= first.told_s
        assert (await replica.finish(ask(hold))).pulls == ()
        shelf.put(1)
        newer = asyncio.create_task(held(replica, 1))
        await until(lambda: 1 in shelf.pulls)
        waits = await replica.finish(ask(hold))
        await replica.release(hold)
        (pull,) = (await replica.finish(ask(await newer))).pulls
        assert waits.told_s <= pull.start_s <= pull.end_s, "waiting for groups is no part of it"

    played([replica], scenario)


# -------------------------------------------------------------------------------------------------------- verification


@pytest.mark.parametrize("kind", [WorkerDied, DeadlineExceeded, WeightsMismatch])
def test_a_failed_relay_fails_only_the_replica_that_pulls(kind: type[WorkerError]):
    class Failing(Shelf):
        async def pull(self, at_least: int) -> tuple[Manifest, dict[str, Tensor]]:
            raise kind("relay-0a1b", "serving version 2 or newer", "the process is gone")

    replica = replica_of(Failing(), scripted("a"))
    losses: list[WorkerError] = []
    replica.on_loss = losses.append
    with pytest.raises(kind) as raised:
        played([replica], lambda: held(replica, 2))
    assert str(raised.value) == (
        "rollout-0 while pulling version 2 or newer: relay-0a1b while serving version 2 or newer: the process is gone"
    )
    assert losses == [raised.value]


@pytest.mark.parametrize(
    ("published", "own", "message"),
    [
        ("b1", "b2", "version 2 is an adapter of the base b1, and this replica loads an adapter of the base b2"),
        ("b1", None, "version 2 is an adapter of the base b1, and this replica loads whole weights"),
        (None, "b2", "version 2 is whole weights, and this replica loads an adapter of the base b2"),
    ],
)
def test_an_adapter_of_another_base_is_refused_by_name(published: str | None, own: str | None, message: str):
    engine = scripted("a")
    replica = replica_of(Shelf(version=2, base=published), engine, base=own)
    with pytest.raises(WeightsMismatch, match=message):
        played([replica], lambda: held(replica, 2))
    assert engine.version == -1


def test_an_adapter_of_its_own_base_is_loaded():
    replica = replica_of(Shelf(version=2, base="b1"), scripted("a"), base="b1")
    assert played([replica], lambda: held(replica, 2)).held == acknowledged(2)


@pytest.mark.parametrize("when", ["between", "inflight"])
def test_acknowledgements_are_kept_while_a_request_or_group_needs_them(when: Literal["between", "inflight"]):
    shelf = Shelf()
    engine = scripted("a", lambda request: [DIGIT] * 999)
    replica = replica_of(shelf, engine, when=when)
    num_versions = ACKNOWLEDGEMENTS_KEPT + 9

    async def scenario() -> None:
        await replica.release(await held(replica))
        running = asyncio.create_task(replica.finish(ask(new=999))) if when == "inflight" else None
        for version in range(1, num_versions):
            tokens = engine.stats().num_tokens
            await until(lambda tokens=tokens: running is None or engine.stats().num_tokens > tokens)
            shelf.put(version)
            await replica.release(await held(replica, version))
        if running is not None:
            chunk = await running
            assert [a.version for a in chunk.weights] == spans(chunk) == list(range(num_versions))
        shelf.put(num_versions)
        await replica.release(await held(replica, num_versions))
        assert len(replica.weights._acknowledged) == ACKNOWLEDGEMENTS_KEPT

    played([replica], scenario)


def test_a_corrupted_tensor_closes_the_gate_for_good():
    shelf = Shelf(version=1)
    replica = replica_of(shelf, scripted("a"))
    losses: list[WorkerError] = []
    replica.on_loss = losses.append

    async def scenario() -> None:
        await replica.release(await held(replica, 1))
        shelf.put(2)
        shelf.corrupted = True
        with pytest.raises(WeightsMismatch, match=r"verifying version 2: .* than those published of w \(1 tensors\)"):
            await held(replica, 2)
        shelf.corrupted = False
        for version in (1, 2):
            with pytest.raises(WeightsMismatch, match=r"earlier weight change failed, .* while verifying version 2: "):
                await held(replica, version)
        assert replica.weights.acknowledgement == acknowledged(1)

    played([replica], scenario)
    assert shelf.pulls == [1, 2]
    assert len(losses) == 3


@pytest.mark.parametrize("is_busy", [False, True])
def test_weights_that_are_damaged_later_are_noticed_by_an_idle_replica(is_busy: bool):
    engine = scripted("a")
    replica = replica_of(Shelf(version=1), engine, verify_s=0.01)
    losses: list[WorkerError] = []
    replica.on_loss = losses.append

    async def scenario() -> None:
        replica.start_verifying()
        await replica.release(await held(replica, 1))
        running = asyncio.create_task(replica.finish(ask(new=60))) if is_busy else None
        await until(lambda: running is None or engine.stats().num_tokens > 0)
        engine._weights["w"][1] += 1
        if running is not None:
            assert spans(await running) == [1], "no request that runs is cut"
        await until(lambda: bool(losses))
        with pytest.raises(WeightsMismatch, match=r"while verifying version 1: .* than those published of w"):
            await held(replica, 1)
        with pytest.raises(WeightsMismatch, match="verifying version 1"):
            await replica.finish(ask(new=1))

    played([replica], scenario)
    assert str(losses[0]).startswith("rollout-0 while verifying version 1: the engine computes with other values")


def test_sound_weights_are_verified_again_without_a_word():
    engine, replica = scripted("a"), None
    verified: list[int] = []
    honest = engine.checksums

    async def checksums() -> Mapping[TensorSpec, int]:
        verified.append(engine.version)
        return await honest()

    engine.checksums = checksums
    replica = replica_of(Shelf(version=1), engine, verify_s=0.01)

    async def scenario() -> None:
        replica.start_verifying()
        await replica.release(await held(replica, 1))
        await until(lambda: len(verified) > 3)
        assert spans(await replica.finish(ask())) == [1]

    played([replica], scenario)
    assert set(verified) == {1}


def test_a_replica_served_one_version_late_starts_nothing_on_it():
    replica = replica_of(Shelf(version=2, late=True), scripted("a"))
    with pytest.raises(WeightsMismatch, match="asked for version 2 or newer, and got 1"):
        played([replica], lambda: held(replica, 2))
    assert replica.weights.acknowledgement is None
    assert replica.weights.take_pulls() == (), "a failed pull is not reported"


def test_a_failed_probe_stops_the_replica_naming_both_versions():
    shelf = Shelf(version=1)
    replica = replica_of(shelf, scripted("a"))

    async def scenario() -> None:
        await replica.release(await held(replica, 1))
        shelf.put(2)
        shelf.probe = Probe((1, 2, 3), (-0.5, 0.0))  # the scripted engine says 0 of every token
        with pytest.raises(WeightsMismatch, match=r"version 2: .* by 0\.25 .* before the change it held version 1"):
            await held(replica, 2)
        assert replica.weights.acknowledgement == acknowledged(1)

    played([replica], scenario)


def test_requests_under_a_corrupted_change_end_with_its_failure():
    shelf = Shelf()
    engine = scripted("a")
    replica = replica_of(shelf, engine, when="inflight")
    losses: list[WorkerError] = []
    replica.on_loss = losses.append

    async def scenario() -> None:
        await held(replica)
        running = asyncio.create_task(replica.finish(ask(new=90)))
        await until(lambda: engine.stats().num_tokens == 4)
        shelf.put(1)
        shelf.corrupted = True
        with pytest.raises(WeightsMismatch):
            await held(replica, 1)
        with pytest.raises(WeightsMismatch, match="verifying version 1"):
            await running
        assert {type(loss) for loss in losses} == {WeightsMismatch}, "the cause is reported, not what it led to"

    played([replica], scenario)


class Verifying(ScriptedEngine):
    """Sums its weights only once `may_end` is set."""

    def __init__(self) -> None:
        super().__init__(own_tokens, shapes={"w": (2,)}, version=-1, name="verifying")
        self.is_verifying, self.may_end = asyncio.Event(), asyncio.Event()

    async def checksums(self) -> Mapping[TensorSpec, int]:
        self.is_verifying.set()
        await self.may_end.wait()
        return await super().checksums()


@pytest.mark.parametrize("corrupted", [False, True])
def test_tokens_of_weights_that_are_being_verified_are_withheld(corrupted: bool):
    shelf, engine = Shelf(), Verifying()
    replica = replica_of(shelf, engine, when="inflight")

    async def scenario() -> None:
        engine.may_end.set()
        await held(replica)
        requests = [ask(), ask(new=90)]
        short, long = (asyncio.create_task(replica.finish(request)) for request in requests)
        await until(lambda: engine.stats().num_tokens == 4)
        engine.may_end.clear()
        engine.is_verifying.clear()
        shelf.put(1)
        shelf.corrupted = corrupted
        newer = asyncio.create_task(held(replica, 1))
        await engine.is_verifying.wait()
        await until(lambda: engine.stats().num_running == 1)
        scored = asyncio.create_task(replica.score((1, 2)))
        await turns()
        assert not short.done()
        assert not scored.done()
        assert await replica.progress({requests[1].id: 0}) == {}
        engine.may_end.set()
        ends = await asyncio.gather(newer, short, scored, long, return_exceptions=True)
        if corrupted:
            assert {type(end) for end in ends} == {WeightsMismatch}
        else:
            done = await short
            assert [a.version for a in done.weights] == spans(done) == [0, 1]
            assert ((await scored).version, (await scored).weights) == (1, (acknowledged(1),))

    played([replica], scenario)


class Changing(ScriptedEngine):
    """Its weights change under the first scoring."""

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        logprobs = await super().score(token_ids)
        if self.version == 0:
            self.version = 1
            return tuple(-9.0 for _ in logprobs)
        return logprobs


def test_tokens_are_scored_again_if_the_weights_change_meanwhile():
    replica = replica_of(None, Changing(lambda request: "", version=0))
    scored = played([replica], lambda: replica.score((1, 2, 3)))
    assert (scored.version, scored.logprobs) == (1, (0.0, 0.0))
