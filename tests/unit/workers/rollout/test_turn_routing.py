"""Single turns at other replicas: those that would wait at home, with the same tokens, on one version."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import WorkerDied
from rlsys.types import Acknowledged, Episode, VersionSpan
from tests.replicas import Shelf, assignment, hash_of, played, replica_of, scripted, until
from workers.engines.engine import Completion, Request
from workers.rollout.generator import Generator
from workers.rollout.group_route import Ticket
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.turn_router import TurnLoad, place_of_turn

NUM_TOKENS = 20
GROUP = 6


class Talk(Workflow):
    """Three turns of one dialogue."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for said in (session.task.prompt, "34>", "56>"):
            await agent.chat(said)


class Pair:
    """A replica with two slots, and one with many, on one shelf."""

    def __init__(self, when: Literal["between", "inflight", "beside"] = "between") -> None:
        self.shelf = Shelf()
        self.engines = [scripted("a", num_slots=2), scripted("b", num_slots=64)]
        self.workers = [
            replica_of(
                self.shelf, engine, name=name, when=when, workflow=Talk(), num_tokens=NUM_TOKENS, num_slots=slots
            )
            for engine, name, slots in zip(self.engines, "ab", (2, 64), strict=True)
        ]
        self.a, self.b = self.workers

    async def meet(self, peer: Generator | None = None) -> None:
        """Both hold the shelf's weights, and the first knows the second, or `peer`."""
        for worker in self.workers:
            await worker.run(assignment(self.shelf.version, group_id=999, size=0))
        assert self.a.generator.turns
        self.a.generator.turns.peers = (peer or self.b.generator,)

    @property
    def num_away(self) -> int:
        assert self.a.generator.turns
        return self.a.generator.turns.num_away


def at_home() -> tuple[Episode, ...]:
    pair = Pair()
    return played(pair.workers, lambda: pair.a.run(assignment(size=GROUP)))[1]


@pytest.mark.parametrize("when", ["between", "inflight", "beside"])
def test_turns_that_would_wait_are_sampled_by_a_peer_with_the_same_tokens(when):
    pair = Pair(when)

    async def scenario() -> None:
        await pair.meet()
        done, payload = await pair.a.run(assignment(size=GROUP))
        assert payload == at_home_payload
        assert pair.num_away >= 3 * (GROUP - 2), "all turns of the episodes that found no slot"
        assert pair.engines[1].stats().num_tokens == pair.num_away * NUM_TOKENS
        assert done[0].versions == (VersionSpan(0, 3 * GROUP * NUM_TOKENS),)
        assert set(done[0].weights) == {Acknowledged(name, 0, hash_of(0)) for name in "ab"}
        assert not pair.b.generator._stays, "nothing of the group stays there"
        assert [(await worker.generator.turn_load()).weight for worker in pair.workers] == [0, 0]

    at_home_payload = at_home()
    played(pair.workers, scenario)


def test_turns_stay_where_there_is_room():
    pair = Pair()

    async def scenario() -> None:
        await pair.meet()
        await pair.a.run(assignment(size=2))
        assert pair.num_away == 0

    played(pair.workers, scenario)


def test_a_session_returns_to_the_peer_that_has_its_prefix():
    pair = Pair()

    async def scenario() -> None:
        await pair.meet()
        await pair.engines[0].pause()  # its two turns hold the slots for a while
        group = asyncio.create_task(pair.a.run(assignment(size=3)))
        await until(lambda: pair.engines[1].stats().num_tokens >= 3 * NUM_TOKENS)
        await pair.engines[0].resume()
        await group
        assert pair.num_away == 3, "the third episode, also once there is room at home"

    played(pair.workers, scenario)


@pytest.mark.parametrize("why", ["other bytes", "another version", "a change waits", "an owner that is gone"])
def test_a_peer_that_may_not_take_turns_gets_none(why: str):
    pair = Pair()

    async def scenario() -> None:
        await pair.meet()
        b = pair.b.generator
        others: list[asyncio.Task] = []
        if why == "other bytes":
            b._acknowledged[0] = Acknowledged("b", 0, "others")
        if why == "another version":
            pair.shelf.put(1)
            await pair.b.run(assignment(1, group_id=4, size=0))
        if why == "an owner that is gone":
            await b.forget("a")
        if why == "a change waits":
            others.append(asyncio.create_task(pair.b.run(assignment(0, group_id=5, size=1))))
            await until(lambda: pair.engines[1].stats().num_tokens > 0)
            pair.shelf.put(1)
            others.append(asyncio.create_task(pair.b.run(assignment(1, group_id=4, size=0))))
            await until(b._changing.locked)
        done, payload = await pair.a.run(assignment(size=GROUP))
        assert pair.num_away == 0
        assert payload == at_home_payload
        assert {w.replica for w in done[0].weights} == {"a"}
        await asyncio.gather(*others)

    at_home_payload = at_home()
    played(pair.workers, scenario)


def test_a_peer_changes_its_weights_after_the_turns_that_it_took():
    pair = Pair()

    async def scenario() -> None:
        await pair.meet()
        await pair.engines[1].pause()
        group = asyncio.create_task(pair.a.run(assignment(size=3)))
        await until(lambda: bool(pair.b.generator._stays))
        pair.shelf.put(1)
        change = asyncio.create_task(pair.b.run(assignment(1, group_id=4, size=0)))
        await until(lambda: 1 in pair.shelf.pulls)
        for _ in range(20):
            await asyncio.sleep(0)
        assert pair.b.generator.load().version == 0
        await pair.engines[1].resume()
        await change
        done, _ = await group
        assert done[0].versions == (VersionSpan(0, 9 * NUM_TOKENS),), "the next turns stayed at home"

    played(pair.workers, scenario)


def test_turns_go_on_at_home_while_a_change_of_weights_waits_for_them():
    pair = Pair()

    async def scenario() -> None:
        await pair.meet()
        await pair.engines[1].pause()
        busy = asyncio.create_task(pair.b.run(assignment(group_id=5, size=64)))  # no room there
        group = asyncio.create_task(pair.a.run(assignment(size=GROUP)))
        await until(lambda: pair.engines[0].stats().num_tokens > 0)
        pair.shelf.put(1)
        change = asyncio.create_task(pair.a.run(assignment(1, group_id=4, size=0)))
        await until(pair.a.generator._changing.locked)
        done, _ = await group
        assert done[0].versions == (VersionSpan(0, 3 * GROUP * NUM_TOKENS),)
        await change
        await pair.engines[1].resume()
        await busy

    played(pair.workers, scenario)


class Lost(Generator):
    """A peer that dies while it samples."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.name, self.worker, self.num_asked = worker.name, worker, 0

    async def turn_load(self) -> TurnLoad:
        self.num_asked += 1
        return await self.worker.generator.turn_load()

    async def visit(
        self, ticket: Ticket, request: Request, held: Acknowledged | None
    ) -> tuple[Completion, tuple[Acknowledged, ...]]:
        raise WorkerDied(self.name, "sampling a turn", "the process is gone")

    async def evict(self, ticket: Ticket, *, keep_cache: bool = False) -> None:
        pass


def test_a_peer_that_dies_loses_only_its_turns():
    pair = Pair()
    lost = Lost(pair.b)

    async def scenario() -> None:
        await pair.meet(lost)
        _, payload = await pair.a.run(assignment(size=GROUP))
        assert payload == at_home_payload
        assert 0 < lost.num_asked <= GROUP, "it is left alone after a failure"

    at_home_payload = at_home()
    played(pair.workers, scenario)


def test_an_attempt_that_ends_takes_its_turns_from_the_peer():
    pair = Pair()

    async def scenario() -> None:
        await pair.meet()
        await pair.engines[1].pause()
        group = asyncio.create_task(pair.a.run(assignment(size=3)))
        await until(lambda: bool(pair.b.generator._stays))
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert not pair.b.generator._stays
        assert pair.engines[1].stats().num_waiting == 0

    played(pair.workers, scenario)


loads = st.builds(TurnLoad, st.integers(0, 9), st.booleans(), st.sampled_from([None, Acknowledged("x", 1, "same")]))


@given(loads, st.lists(loads, max_size=4), st.integers(0, 5))
def test_a_turn_goes_to_nobody_who_would_let_it_wait(home: TurnLoad, peers: list[TurnLoad], last: int):
    names = list(range(len(peers)))
    place = place_of_turn(home, list(zip(names, peers, strict=True)), last if last in names else None)
    if place is None:
        assert home.has_room or not any(peer.fits(home.held) for peer in peers)
    else:
        assert peers[place].fits(home.held)
        assert place == last or not home.has_room
