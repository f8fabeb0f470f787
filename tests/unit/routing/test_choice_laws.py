"""Laws of the choice of a replica, and the benefit of sending a session back to the replica that has its prefix."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.routing.request_router import OVERLOAD, PREFIX_TOKENS, TOLERANCE, ReplicaWork, cheapest, request_weight
from rlsys.types import EngineStats, ReplicaLoad


def slots(num: int) -> ReplicaLoad:
    return ReplicaLoad("a", 0, EngineStats(0, 0, 0.0, 0), num_slots=num)


weights = st.lists(st.integers(1, 20), min_size=1, max_size=40)
works = st.lists(
    st.builds(
        ReplicaWork,
        num_running=st.integers(0, 9),
        weight=st.integers(0, 50),
        others=st.integers(0, 50),
        reported=st.sampled_from([None, slots(2), slots(64)]),
        is_stuck=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def routed(replicas: list[ReplicaWork], weight: int, home: ReplicaWork | None = None, saved: int = 0) -> ReplicaWork:
    chosen = cheapest(replicas, weight, home, saved)
    assert chosen is not None
    chosen.add(weight)
    return chosen


@given(works, st.integers(1, 20), st.none() | st.integers(0, 5), st.integers(0, 20))
def test_a_replica_without_room_is_never_chosen_and_a_stuck_one_last(
    replicas: list[ReplicaWork], weight: int, home: int | None, saved: int
):
    chosen = cheapest(replicas, weight, replicas[home] if home is not None and home < len(replicas) else None, saved)
    fit = [replica for replica in replicas if replica.has_room]
    if chosen is None:
        assert not fit
    else:
        assert chosen in fit
        assert not chosen.is_stuck or all(replica.is_stuck for replica in fit)


@given(weights, st.integers(1, 6))
def test_without_prefixes_loads_differ_by_the_largest_weight_at_most(sent: list[int], num_replicas: int):
    replicas = [ReplicaWork() for _ in range(num_replicas)]
    for weight in sent:
        routed(replicas, weight)
    outstanding = [replica.weight for replica in replicas]
    assert sum(outstanding) == sum(sent)
    assert max(outstanding) - min(outstanding) <= max(sent)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=40), st.integers(1, 6))
def test_prefixes_overload_no_replica_beyond_what_they_save(sent: list[tuple[int, int]], num_replicas: int):
    replicas = [ReplicaWork() for _ in range(num_replicas)]
    homes: dict[int, ReplicaWork] = {}
    for weight, session in sent:
        homes[session] = routed(replicas, weight, homes.get(session), saved=weight if session in homes else 0)
    outstanding, most = [replica.weight for replica in replicas], max(weight for weight, _ in sent)
    allowed = max(OVERLOAD * (min(outstanding) + most), min(outstanding) + 2 * most + TOLERANCE)
    assert max(outstanding) <= allowed


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 20))
def test_while_loads_are_balanced_every_session_goes_back(num_replicas: int, rounds: int, weight: int):
    """One session per replica; each asks again only when it was answered."""
    replicas = [ReplicaWork() for _ in range(num_replicas)]
    homes: dict[int, list[ReplicaWork]] = {session: [] for session in range(num_replicas)}
    for _ in range(rounds):
        for been in homes.values():
            been.append(routed(replicas, weight, been[-1] if been else None, saved=weight if been else 0))
        for been in homes.values():
            been[-1].remove(weight)
    assert all(len(set(map(id, been))) == 1 for been in homes.values())


# ----------------------------------------------------------------------------------------------------------- simulated


@dataclass(frozen=True)
class Simulated:
    """What a workload met with."""

    hit_share: float
    """Prefix tokens that were cached where the request went, of all prefix tokens."""
    max_weight: int
    """Largest outstanding weight of any replica at any time."""
    mean_max_weight: float
    """The weight of the heaviest replica, on average over requests."""


def simulated(*, is_sticky: bool, seed: int, num_replicas: int = 4, num_sessions: int = 64) -> Simulated:
    """Sessions of twelve turns whose prefix grows by 200 to 3000 tokens a turn; between turns a tool runs.

    A turn lasts as long as its new tokens; every replica keeps the prefix of the last turn of a session it answered.
    """
    rng, number = random.Random(seed), count()
    replicas = [ReplicaWork() for _ in range(num_replicas)]
    prefix, turns = Counter[int](), Counter[int]()
    cached = {id(replica): Counter[int]() for replica in replicas}
    homes: dict[int, ReplicaWork] = {}
    hits = total = 0
    heaviest: list[int] = []
    moments: list[tuple[float, int, int, tuple[ReplicaWork, int] | None]] = []
    """Time, number, session, and (replica, weight) of a request that is answered, None where one is made."""
    for session in range(num_sessions):
        heappush(moments, (rng.uniform(0, 50), next(number), session, None))
    while moments:
        now, _, session, answered = heappop(moments)
        if answered:
            replica, weight = answered
            replica.remove(weight)
            cached[id(replica)][session] = prefix[session]
            homes[session] = replica
            turns[session] += 1
            if turns[session] < 12:
                heappush(moments, (now + rng.expovariate(1 / 20), next(number), session, None))
            continue
        weight = request_weight(prefix[session])
        home = homes.get(session) if is_sticky else None
        replica = routed(replicas, weight, home, prefix[session] // PREFIX_TOKENS if home else 0)
        hits += cached[id(replica)][session]
        total += prefix[session]
        heaviest.append(max(replica.weight for replica in replicas))
        num_new = rng.randint(200, 3000)
        prefix[session] += num_new
        heappush(moments, (now + num_new / 100, next(number), session, (replica, weight)))
    return Simulated(hits / total, max(heaviest), sum(heaviest) / len(heaviest))


@pytest.mark.parametrize("seed", range(3))
def test_going_back_raises_prefix_hits_without_raising_the_load_much(seed: int):
    least, sticky = simulated(is_sticky=False, seed=seed), simulated(is_sticky=True, seed=seed)
    assert least.hit_share < 0.7
    assert sticky.hit_share > 0.85
    assert sticky.max_weight <= 1.25 * least.max_weight
    assert sticky.mean_max_weight <= 1.15 * least.mean_max_weight
