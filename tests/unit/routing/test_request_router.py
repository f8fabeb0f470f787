"""Requests go to the replica where they cost least, and go on elsewhere after an abort or a death."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.errors import WorkerDied, WorkerError
from rlsys.routing.request_router import Claim, KnownReplica, RequestRouter, cheapest, request_weight
from rlsys.routing.requests import Chunk, Completion, Request, WeightsWanted
from rlsys.types import Acknowledged, EngineStats, ReplicaLoad, Sampling, VersionSpan
from tests.scripted_replica import ScriptedReplica, seeded_tokens

T = TypeVar("T")
NEW = 12


def run(scenario: Coroutine[object, object, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 20))


def ask(name: str = "r", seed: int = 1, prompt: tuple[int, ...] = (3, 4, 5), new: int = NEW) -> Request:
    return Request(name, prompt, Sampling(max_new_tokens=new), seed)


async def turns(num: int) -> None:
    """Let the event loop go round."""
    for _ in range(num):
        await asyncio.sleep(0)


def place(name: str, weight: int = 0, slots: int = 64, speed: float = 0.0, others: int = 0) -> KnownReplica:
    load = ReplicaLoad(name, 0, EngineStats(0, 0, 0.0, 0), num_slots=slots, tokens_per_s=speed)
    return KnownReplica(replica=ScriptedReplica(name), num_running=weight, weight=weight, others=others, reported=load)


# ---------------------------------------------------------------------------------------------------------- the choice


def test_a_request_goes_where_the_least_work_is():
    places = [place("a", 5), place("b", 2), place("c", 3)]
    assert cheapest(places, 1) is places[1]


def test_the_prefix_keeps_a_request_unless_it_saves_less_than_the_queue_costs():
    places = [place("a", 5), place("b", 2)]
    assert cheapest(places, 3, places[0], saved=2) is places[0]
    assert cheapest(places, 3, places[0], saved=1) is places[1]


def test_a_fast_replica_gets_more_work_than_a_slow_one():
    fast, slow = place("fast", 0, speed=300.0), place("slow", 0, speed=100.0)
    given_to = Counter[str]()
    for _ in range(40):
        chosen = cheapest([slow, fast], 1)
        assert chosen is not None
        chosen.weight += 1
        given_to[chosen.name] += 1
    assert given_to == {"fast": 30, "slow": 10}


def test_requests_of_other_session_workers_count():
    assert (chosen := cheapest([place("a", 1, others=9), place("b", 4)], 1)) is not None
    assert chosen.name == "b"


def test_no_replica_gets_more_requests_than_it_has_room_for():
    assert cheapest([place("a", 8, slots=4)], 1) is None
    assert cheapest([place("a", 7, slots=4)], 1) is not None


def test_a_replica_that_makes_no_progress_is_used_only_alone():
    stuck, busy = place("a"), place("b", 9)
    stuck.is_stuck = True
    assert cheapest([stuck, busy], 1) is busy
    assert cheapest([stuck], 1) is stuck


def test_the_weight_of_a_request_grows_with_its_prefix():
    assert [request_weight(n) for n in (0, 1023, 1024, 10_240)] == [1, 1, 2, 11]


# ------------------------------------------------------------------------------------------------------------- requests


def test_a_request_has_the_tokens_versions_and_acknowledgements_of_its_replica():
    async def scenario() -> tuple[Completion, Claim]:
        router = RequestRouter([ScriptedReplica("a", version=3)])
        claim = await router.claim(WeightsWanted(2), 0)
        return await router.generate(ask(), claim), claim

    done, claim = run(scenario())
    assert done.output_ids == tuple(seeded_tokens(ask()))
    assert done.finish == "length"
    assert done.versions == (VersionSpan(3, NEW),)
    assert list(claim.vouched) == [Acknowledged("a", 3, "hash-3")]
    assert claim.wanted == WeightsWanted(3, "hash-3")


@pytest.mark.parametrize("holds", [True, False])
def test_a_request_goes_on_elsewhere_from_its_last_token_when_its_replica_dies(holds: bool):
    async def scenario() -> tuple[Completion, list[ScriptedReplica]]:
        one, two = ScriptedReplica("a", holds=holds), ScriptedReplica("b", holds=holds)
        router = RequestRouter([one, two])
        claim = await router.claim(WeightsWanted(0), 0)
        two.go.clear()
        one.go.clear()
        work = asyncio.create_task(router.generate(ask(), claim))
        await turns(5)
        sampler, other = (one, two) if one.requests else (two, one)
        sampler.go.set()
        await turns(4)
        sampler.die()
        other.go.set()
        return await work, [sampler, other]

    done, (dead, other) = run(scenario())
    assert done.output_ids == tuple(seeded_tokens(ask()))
    assert 0 < dead.num_sampled < NEW
    assert dead.num_sampled + other.num_sampled == NEW, "no token is sampled twice"
    assert other.requests[-1].num_begun == dead.num_sampled


def test_a_request_waits_for_the_successor_of_an_only_replica():
    async def scenario() -> Completion:
        one = ScriptedReplica("a")
        router = RequestRouter([one])
        claim = await router.claim(WeightsWanted(0), 0)
        one.go.clear()
        work = asyncio.create_task(router.generate(ask(), claim))
        await turns(5)
        one.die()
        await turns(5)
        assert not work.done()
        router.meet([ScriptedReplica("a.1")])
        return await work

    assert run(scenario()).output_ids == tuple(seeded_tokens(ask()))


def test_a_group_whose_version_no_replica_has_any_more_is_given_up():
    async def scenario() -> None:
        one, two = ScriptedReplica("a", version=1), ScriptedReplica("b", version=2)
        router = RequestRouter([one])
        claim = await router.claim(WeightsWanted(1), 0)
        one.go.clear()
        work = asyncio.create_task(router.generate(ask(), claim))
        await turns(5)
        one.die()
        router.meet([two])
        await work

    with pytest.raises(WorkerDied, match="no other replica has version 1") as raised:
        run(scenario())
    assert raised.value.worker == "a", "no healthy replica is blamed"


def test_a_request_that_loses_replica_after_replica_is_given_up():
    async def scenario() -> None:
        replicas = [ScriptedReplica(f"a.{i}", holds=False) for i in range(9)]
        router = RequestRouter(replicas, max_losses=3)
        claim = await router.claim(WeightsWanted(0), 0)
        for replica in replicas:
            replica.die()
        await router.generate(ask(), claim)

    with pytest.raises(WorkerError, match="the process is gone"):
        run(scenario())


def test_an_abort_for_other_weights_sends_the_request_to_a_holder():
    async def scenario() -> tuple[Completion, ScriptedReplica]:
        one, two = ScriptedReplica("a", num_slots=1), ScriptedReplica("b")
        router = RequestRouter([one, two])
        first = await router.claim(WeightsWanted(0), 0)
        second = await router.claim(WeightsWanted(0), 1)
        assert {first.hold.replica, second.hold.replica} == {"a", "b"}  # type: ignore[union-attr]
        two.version = 5
        return await router.generate(ask(), first), two

    done, _ = run(scenario())
    assert done.versions == (VersionSpan(0, NEW),)


def test_a_drained_replica_is_left():
    async def scenario() -> tuple[Completion, ScriptedReplica, ScriptedReplica]:
        one, two = ScriptedReplica("a", holds=False), ScriptedReplica("b", holds=False)
        router = RequestRouter([one, two])
        claim = await router.claim(WeightsWanted(0), 0)
        one.go.clear()
        work = asyncio.create_task(router.generate(ask(), claim))
        await turns(4)
        one.drain()
        return await work, one, two

    done, one, two = run(scenario())
    assert done.output_ids == tuple(seeded_tokens(ask()))
    assert (len(one.requests), len(two.requests)) == (1, 1)


def test_groups_move_to_a_replica_with_the_same_weights():
    async def scenario() -> tuple[int, int, Claim, ScriptedReplica]:
        one, two, newer = ScriptedReplica("a"), ScriptedReplica("b"), ScriptedReplica("c", version=4)
        router = RequestRouter([one])
        claim = await router.claim(WeightsWanted(0), 0)
        router.meet([one, two, newer])
        refused = await router.move("a", "c")
        moved = await router.move("a", "b")
        await turns(3)
        return refused, moved, claim, one

    refused, moved, claim, one = run(scenario())
    assert (refused, moved) == (0, 1)
    assert claim.hold is not None
    assert claim.hold.replica == "b"
    assert not one.held


def test_a_released_claim_lets_the_weights_change():
    async def scenario() -> Claim:
        one = ScriptedReplica("a")
        router = RequestRouter([one])
        claim = await router.claim(WeightsWanted(0), 0)
        one.publish(1)
        newer = asyncio.create_task(router.claim(WeightsWanted(1), 1))
        await turns(5)
        assert not newer.done()
        router.release(claim)
        return await newer

    assert run(scenario()).wanted == WeightsWanted(1, "hash-1")


def test_without_holds_weights_that_are_known_take_no_call():
    async def scenario() -> int:
        one = ScriptedReplica("a", holds=False)
        router = RequestRouter([one])
        for number in range(5):
            claim = await router.claim(WeightsWanted(0), number)
            await router.generate(ask(f"r{number}"), claim)
            router.release(claim)
        return one.num_holds_asked

    assert run(scenario()) == 1


def test_requests_wait_for_room_in_the_order_of_their_groups():
    async def scenario() -> list[str]:
        one = ScriptedReplica("a", holds=False, num_slots=1)
        router = RequestRouter([one])
        claims = [await router.claim(WeightsWanted(0), order) for order in (9, 3, 7)]
        first = await router.generate(ask("first"), claims[0])  # after it, the router knows the slots
        assert first.finish
        one.go.clear()
        running = [asyncio.create_task(router.generate(ask(f"running-{i}"), claims[0])) for i in range(2)]
        await turns(5)
        waiting = [asyncio.create_task(router.generate(ask(f"group-{c.order}"), c)) for c in claims]
        await turns(5)
        one.go.set()
        await asyncio.gather(*running, *waiting)
        return [request.id for request in one.requests]

    assert run(scenario())[3:] == ["group-3", "group-7", "group-9"]


def test_a_cancelled_request_leaves_its_room_to_the_next():
    async def scenario() -> Completion:
        one = ScriptedReplica("a", holds=False, num_slots=1)
        router = RequestRouter([one])
        claim = await router.claim(WeightsWanted(0), 0)
        await router.generate(ask("first"), claim)
        one.go.clear()
        works = [asyncio.create_task(router.generate(ask(f"r{i}"), claim)) for i in range(4)]
        await turns(5)
        for work in works[:3]:
            work.cancel()
        await turns(5)
        one.go.set()
        return await works[3]

    assert run(scenario()).finish == "length"


@given(data=st.data())
def test_no_token_is_lost_or_sampled_twice_whatever_replicas_do(data: st.DataObject):
    """Replicas die, drain and join at random; every request ends with the tokens that one replica would have given."""
    num_requests = data.draw(st.integers(1, 6))
    events = data.draw(st.lists(st.sampled_from(["die", "drain", "join", "none"]), max_size=12))

    async def scenario() -> tuple[list[Completion], int]:
        every = [ScriptedReplica(f"r-{i}", holds=False, per_chunk=1) for i in range(3)]
        live = list(every)
        router = RequestRouter(live, max_losses=99)
        claim = await router.claim(WeightsWanted(0), 0)
        works = [asyncio.create_task(router.generate(ask(f"q{i}", seed=i), claim)) for i in range(num_requests)]
        for number, event in enumerate(events):
            await turns(3)
            if event == "die" and len(live) > 1:
                live.pop(0).die()
            elif event == "drain" and len(live) > 1:
                live[number % len(live)].drain()
            elif event == "join":
                every.append(ScriptedReplica(f"n-{number}", holds=False, per_chunk=1))
                live.append(every[-1])
                router.meet(live)
            claim.left.clear()
        return list(await asyncio.gather(*works)), sum(replica.num_sampled for replica in every)

    dones, num_sampled = run(scenario())
    assert [done.output_ids for done in dones] == [tuple(seeded_tokens(ask(seed=i))) for i in range(num_requests)]
    assert num_sampled == num_requests * NEW


def test_the_end_of_a_reply_that_a_dead_replica_could_not_tell_is_not_lost():
    async def scenario() -> Completion:
        one = ScriptedReplica("a", holds=False, per_chunk=NEW)
        two = ScriptedReplica("b", holds=False)
        router = RequestRouter([one, two])
        claim = await router.claim(WeightsWanted(0), 0)
        whole = tuple(seeded_tokens(ask()))
        begun = Completion(whole, (-0.5,) * NEW, (VersionSpan(0, NEW),), None)
        one.die()
        return await router.generate(replace(ask(), begun=begun), claim)

    assert run(scenario()).finish == "length"


def test_groups_hold_the_weights_of_the_near_replica_where_the_driver_has_put_them():
    near, far = ScriptedReplica("near"), ScriptedReplica("far")
    near.is_near = True

    async def scenario() -> set[str]:
        router = RequestRouter([far, near])
        claims = [await router.claim(WeightsWanted(0), order) for order in range(6)]
        holders = {claim.hold.replica for claim in claims if claim.hold is not None}
        for claim in claims:
            router.release(claim)
        await turns(3)
        return holders

    assert run(scenario()) == {"near"}


def test_a_replica_of_this_process_has_what_it_can_start_at_once():
    async def scenario() -> tuple[ScriptedReplica, ScriptedReplica]:
        near, far = ScriptedReplica("near", holds=False, num_slots=3), ScriptedReplica("far", holds=False, num_slots=3)
        near.is_near = True
        router = RequestRouter([near, far])
        claim = await router.claim(WeightsWanted(0), 0)
        await router.generate(ask("first"), claim)
        near.go.clear()
        works = [asyncio.create_task(router.generate(ask(f"r{i}"), claim)) for i in range(5)]
        await turns(5)
        counts = len(near.requests) - 1, len(far.requests)
        near.go.set()
        await asyncio.gather(*works)
        assert counts == (3, 2)
        return near, far

    run(scenario())


def test_a_near_replica_that_refuses_its_own_version_is_not_asked_again():
    """It has the version that the group wants, and is about to change it: only its holders may go on there."""

    class Changing(ScriptedReplica):
        is_near = True

        async def generate(self, request: Request) -> AsyncIterator[Chunk]:
            self.requests.append(request)
            yield self._last(Completion((), (), (), "abort"), "weights")

    async def scenario() -> tuple[Completion, int]:
        far, near = ScriptedReplica("far"), Changing("near")
        router = RequestRouter([far])
        claim = await router.claim(WeightsWanted(0), 0)
        router.meet([near, far])
        other = await router.claim(WeightsWanted(0), 1)
        assert other.hold is not None
        assert other.hold.replica == "near", "the router knows its version"
        return await router.generate(ask(), claim), len(near.requests)

    done, num_asked = run(scenario())
    assert (done.finish, num_asked) == ("length", 1)
