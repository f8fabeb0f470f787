"""Chunks of all requests of a session worker at a replica share messages, and no token is sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rlsys.errors import DeadlineExceeded, RlsysError, WorkerDied, WorkerError
from rlsys.routing.requests import Chunk, Completion, Hold, Request, Scored, WeightsWanted
from rlsys.testing.virtual_clock import run_virtual
from rlsys.types import Sampling, VersionSpan
from tests.replicas import own_tokens, remote_of, replica_of
from tests.scripted_engine import ScriptedEngine
from workers.rollout.chunk_stream import MAX_GATHER_S, PERIOD_S, YOUNG_S, ChunkStream, Message
from workers.rollout.remote_replica import RemoteReplica
from workers.rollout.replica_worker import ReplicaWorker

TICK_S = 0.1
LONG = 40
"""Tokens of a request that lasts four seconds."""


def engine_of() -> ScriptedEngine:
    return ScriptedEngine(own_tokens, tick_s=TICK_S)


def ask(name: str, num_tokens: int, *, num_begun: int = 0, is_read: bool = False) -> Request:
    request = Request(name, (3, 4), Sampling(max_new_tokens=num_tokens), seed=len(name), is_read=is_read)
    ids = tuple(own_tokens(request)[:num_begun])
    begun = Completion(ids, (0.0,) * num_begun, (VersionSpan(0, num_begun),), None) if ids else None
    return Request(request.id, request.prompt_ids, request.sampling, request.seed, begun, is_read=is_read)


class Reader:
    """Reads a stream, and notes the time of each message."""

    def __init__(self, engine: ScriptedEngine, num_streams: int = 1) -> None:
        self.stream = ChunkStream(replica_of(None, engine), lambda: num_streams)
        self.messages: list[tuple[float, Message]] = []

    async def read(self, *requests: Request) -> None:
        """Submit these, and read until each has ended."""
        self.stream.submit(requests)
        left = {request.id for request in requests}
        async for message in self.stream.messages():
            self.messages.append((asyncio.get_running_loop().time(), message))
            left -= {name for name, part in message if not isinstance(part, Chunk) or part.more.finish is not None}
            if not left:
                self.stream.close()

    def chunks(self, name: str) -> list[Chunk]:
        parts = [part for _, message in self.messages for of, part in message if of == name]
        return [part for part in parts if isinstance(part, Chunk)]

    def tokens(self, name: str) -> tuple[int, ...]:
        return Completion.join([chunk.more for chunk in self.chunks(name)]).output_ids


def read(requests: Sequence[Request], num_streams: int = 1) -> Reader:
    reader = Reader(engine_of(), num_streams)
    run_virtual(reader.read(*requests))
    return reader


def test_ends_at_one_time_share_a_message():
    reader = read([ask("a", 5), ask("bb", 5), ask("ccc", 5)])
    ((_, message),) = reader.messages
    assert [name for name, _ in message] == ["a", "bb", "ccc"]
    assert all(len(reader.tokens(name)) == 5 for name in ("a", "bb", "ccc"))


def test_a_request_that_ends_young_sends_only_its_end():
    reader = read([ask("a", 8), ask("bb", LONG)])
    assert [chunk.more.finish for chunk in reader.chunks("a")] == ["length"]


def test_tokens_of_an_old_request_are_sent_before_its_end():
    reader = read([ask("a", LONG)])
    first_s, _ = reader.messages[0]
    assert YOUNG_S <= first_s <= YOUNG_S + TICK_S + PERIOD_S
    assert LONG - YOUNG_S / TICK_S <= len(reader.chunks("a")) <= LONG
    assert reader.tokens("a") == tuple(own_tokens(ask("a", LONG))[:LONG])


def test_old_requests_share_their_messages():
    reader = read([ask("a", LONG), ask("bb", LONG)])
    assert all([name for name, _ in message] == ["a", "bb"] for _, message in reader.messages)


def test_tokens_that_somebody_reads_come_at_once():
    reader = read([ask("a", 5, is_read=True)])
    assert reader.messages[0][0] <= TICK_S + PERIOD_S
    assert [len(chunk.more.output_ids) for chunk in reader.chunks("a")] == [1] * 5


def test_many_streams_of_a_replica_send_more_rarely():
    often, rarely = read([ask("a", LONG)]), read([ask("a", LONG)], num_streams=40)
    assert len(rarely.messages) < len(often.messages) / 3
    assert rarely.tokens("a") == often.tokens("a")


@pytest.mark.parametrize("num_begun", [0, 1, 7, LONG - 1])
@pytest.mark.parametrize("is_read", [False, True])
def test_no_token_is_sent_twice_nor_those_sampled_elsewhere(num_begun: int, is_read: bool):
    request = ask("a", LONG, num_begun=num_begun, is_read=is_read)
    reader = read([request, ask("bb", 9)])
    assert reader.tokens("a") == tuple(own_tokens(request)[num_begun:LONG])
    done = Completion.join([chunk.more for chunk in reader.chunks("a")])
    assert (done.versions, done.finish) == ((VersionSpan(0, LONG - num_begun),), "length")


def test_an_end_does_not_wait_long_for_others():
    reader = read([ask("a", 3), ask("bb", LONG)])
    assert reader.messages[0][0] <= 3 * TICK_S + MAX_GATHER_S


def test_a_cancelled_request_is_sampled_and_sent_no_further():
    engine = engine_of()
    reader = Reader(engine)

    async def scenario() -> None:
        reading = asyncio.create_task(reader.read(ask("a", LONG, is_read=True), ask("bb", 9)))
        await asyncio.sleep(0.5)
        reader.stream.cancel(["a", "unknown"])
        num_sent = len(reader.chunks("a"))
        await asyncio.sleep(TICK_S)
        assert engine.stats().num_running == 1
        await asyncio.sleep(1.0)
        assert (len(reader.chunks("a")), len(reader.chunks("bb"))) == (num_sent, 1)
        reader.stream.close()
        await reading

    run_virtual(scenario())


def test_a_request_that_is_sent_again_is_sampled_once():
    reader = Reader(engine := engine_of())

    async def scenario() -> None:
        reader.stream.submit([ask("a", 9)])
        await asyncio.sleep(0.3)
        await reader.read(ask("a", 9))
        assert engine.stats().num_running == 0

    run_virtual(scenario())
    assert reader.tokens("a") == tuple(own_tokens(ask("a", 9))[:9])


def test_closing_ends_the_messages_and_the_requests():
    engine = engine_of()
    reader = Reader(engine)

    async def scenario() -> None:
        reading = asyncio.create_task(reader.read(ask("a", LONG)))
        await asyncio.sleep(0.5)
        reader.stream.close()
        await reading
        assert (reader.messages, engine.stats().num_running) == ([], 0)

    run_virtual(scenario())


def test_an_error_ends_its_request():
    class Broken(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            if request.id == "bb":
                raise KeyError("layer")
            return await super().generate(request)

    engine = Broken(own_tokens, tick_s=TICK_S)
    reader = Reader(engine)

    async def scenario() -> None:
        reading = asyncio.create_task(reader.read(ask("a", LONG), ask("bb", 5)))
        await asyncio.sleep(0.5)
        await engine.close()
        await reading

    run_virtual(scenario())
    errors: dict[str, RlsysError | Chunk] = dict(part for _, message in reader.messages for part in message)
    assert isinstance(errors["a"], WorkerDied)
    assert isinstance(errors["bb"], WorkerError) and "KeyError: 'layer'" in str(errors["bb"])


# ----------------------------------------------------------------------------------------------- the side of a session


class Pair:
    """A replica, and a session worker's side of it."""

    def __init__(self, kind: type[ReplicaWorker] = ReplicaWorker) -> None:
        self.engine = engine_of()
        self.worker = kind("rollout-0", {"policy": replica_of(None, self.engine)})
        self.remote = remote_of("rollout-0", self.worker)
        self.replica = RemoteReplica(self.remote, "policy", "session-0")

    async def sampled(self, request: Request) -> tuple[int, ...]:
        return Completion.join([chunk.more async for chunk in self.replica.generate(request)]).output_ids


def test_requests_of_one_turn_travel_together():
    async def scenario() -> list[str]:
        pair = Pair()
        done = await asyncio.gather(*(pair.sampled(ask(name, 5)) for name in ("a", "bb", "ccc")))
        assert done == [tuple(own_tokens(ask(name, 5))[:5]) for name in ("a", "bb", "ccc")]
        return pair.remote.actor.calls

    assert sorted(run_virtual(scenario())) == ["chunks", "submit"]


@pytest.mark.parametrize("why", ["it dies", "it leaves the pool", "it forgets the session worker"])
def test_requests_of_a_replica_that_is_lost_end(why: str):
    async def scenario() -> None:
        pair = Pair()
        running = [asyncio.create_task(pair.sampled(ask(name, LONG))) for name in ("a", "bb")]
        await asyncio.sleep(0.5)
        if why == "it dies":
            pair.remote.actor.die()
        elif why == "it leaves the pool":
            pair.replica.close()
        else:
            await pair.worker.forget("session-0")
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert [type(end) for end in ends] == [WorkerDied] * 2

    run_virtual(scenario())


def test_all_that_waits_for_a_replica_behind_a_cut_goes_on_elsewhere():
    class Silent(ReplicaWorker):
        async def hold(self, policy: str, owner: str, wanted: WeightsWanted, *, waits: bool = True) -> Hold | None:
            await asyncio.Event().wait()
            return None

        async def score(self, policy: str, token_ids: Sequence[int]) -> Scored:
            await asyncio.Event().wait()
            raise AssertionError("never answered")

    async def scenario() -> None:
        pair = Pair(Silent)
        waiting = [
            asyncio.create_task(pair.sampled(ask("a", LONG))),
            asyncio.create_task(pair.replica.hold(WeightsWanted(0))),
            asyncio.create_task(pair.replica.score((1, 2))),
        ]
        await asyncio.sleep(0.5)
        pair.replica.give_up()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [DeadlineExceeded] * 3

    run_virtual(scenario())


def test_the_replica_samples_no_further_for_a_cancelled_session():
    async def scenario() -> None:
        pair = Pair()
        running = asyncio.create_task(pair.sampled(ask("a", LONG)))
        await asyncio.sleep(0.5)
        assert pair.engine.stats().num_running == 1
        running.cancel()
        await asyncio.sleep(0.0)
        await asyncio.sleep(TICK_S)
        assert pair.engine.stats().num_running == 0
        assert "cancel" in pair.remote.actor.calls

    run_virtual(scenario())


def test_the_failure_of_an_engine_is_reported_to_the_driver():
    async def scenario() -> None:
        pair = Pair()
        watched = asyncio.create_task(pair.worker.watch())
        running = asyncio.create_task(pair.sampled(ask("a", LONG)))
        await asyncio.sleep(0.5)
        await pair.engine.close()
        ends = await asyncio.gather(watched, running, pair.worker.watch(), return_exceptions=True)
        assert [type(end) for end in ends] == [WorkerDied] * 3

    run_virtual(scenario())


def test_holds_and_scores_go_through_the_same_replica():
    async def scenario() -> None:
        pair = Pair()
        hold = await pair.replica.hold(WeightsWanted(0))
        assert hold is not None and hold.replica == "rollout-0"
        assert (await pair.replica.score((1, 2, 3))).logprobs == (0.0, 0.0)
        await pair.replica.release(hold)

    run_virtual(scenario())


def test_releasing_at_a_dead_replica_does_nothing():
    async def scenario() -> None:
        pair = Pair()
        hold = await pair.replica.hold(WeightsWanted(0))
        assert hold is not None
        pair.remote.actor.die()
        await pair.replica.release(hold)
        with pytest.raises(WorkerDied):
            await pair.replica.hold(WeightsWanted(0))

    run_virtual(scenario())
