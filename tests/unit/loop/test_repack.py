"""Best-fit consolidation of long tails: laws of the plan, and a plan by hand."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.loop.repack import KV_MAX, Move, StepTimes, plan_repack
from rlsys.types import EngineStats, ReplicaLoad

MAX_REQUESTS, NEWEST = 16, 5


def load(
    replica: str, kv_used: float, num_running: int = 2, *, version: int = 3, waiting: int = 0, loading: bool = False
) -> ReplicaLoad:
    return ReplicaLoad(replica, version, EngineStats(num_running, waiting, kv_used, 0), loading)


@st.composite
def looks(draw: st.DrawFn) -> tuple[list[ReplicaLoad], dict[str, float]]:
    """What replicas do now, and how full some of them were before."""
    shares = st.integers(0, 20).map(lambda n: n / 20)
    count = draw(st.integers(0, 12))
    loads = [
        load(
            f"r{i}",
            draw(shares),
            draw(st.integers(0, 20)),
            version=draw(st.integers(3, 5)),
            waiting=draw(st.sampled_from([0, 0, 0, 1])),
            loading=draw(st.sampled_from([False, False, False, True])),
        )
        for i in range(count)
    ]
    before = {f"r{i}": draw(shares) for i in range(count) if draw(st.integers(0, 5))}
    return loads, before


def plan(loads: list[ReplicaLoad], before: dict[str, float]) -> tuple[Move, ...]:
    return plan_repack(loads, before, NEWEST, MAX_REQUESTS)


@given(looks())
def test_no_replica_gives_and_takes_and_none_gives_twice(look):
    moves = plan(*look)
    sources, destinations = [m.source for m in moves], {m.to for m in moves}
    assert not destinations & set(sources)
    assert len(set(sources)) == len(sources)


@given(looks())
def test_no_replica_gets_fuller_than_allowed(look):
    loads, _ = look
    stats = {each.replica: each.stats for each in loads}
    taken = defaultdict(list)
    for move in plan(*look):
        taken[move.to].append(stats[move.source])
    for to, guests in taken.items():
        assert stats[to].kv_used + sum(s.kv_used for s in guests) <= KV_MAX + 1e-9
        assert stats[to].num_running + sum(s.num_running for s in guests) <= MAX_REQUESTS


@given(looks())
def test_only_emptying_replicas_of_one_old_version_take_part(look):
    loads, before = look
    found = {each.replica: each for each in loads}
    for move in plan(*look):
        for each in (found[move.source], found[move.to]):
            assert each.version == move.version < NEWEST
            assert each.stats.kv_used < min(KV_MAX, before[each.replica])
            assert 0 < each.stats.num_running < MAX_REQUESTS
            assert not each.stats.num_waiting
            assert not each.is_loading


@given(looks())
def test_every_move_empties_one_busy_replica(look):
    loads, _ = look
    moves = plan(*look)
    after = Counter({each.replica: each.stats.num_running for each in loads})
    for move in moves:
        after[move.to] += after[move.source]
        after[move.source] = 0
    busy_before = sum(each.stats.num_running > 0 for each in loads)
    assert sum(n > 0 for n in after.values()) == busy_before - len(moves)


@given(looks(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_replica_order(look, order: random.Random):
    loads, before = look
    assert plan(order.sample(loads, len(loads)), before) == plan(loads, before)


@given(looks())
def test_what_the_plan_leaves_apart_does_not_fit_together(look):
    loads, before = look
    moves = plan(loads, before)
    moved = {m.source for m in moves} | {m.to for m in moves}
    left = [
        each
        for each in loads
        if each.replica not in moved
        and not each.is_loading
        and each.version < NEWEST
        and not each.stats.num_waiting
        and 0 < each.stats.num_running < MAX_REQUESTS
        and each.stats.kv_used < min(KV_MAX, before.get(each.replica, 0.0))
    ]
    for one in left:
        for other in left:
            if one is not other and one.version == other.version:
                kv_used = one.stats.kv_used + other.stats.kv_used
                num_requests = one.stats.num_running + other.stats.num_running
                assert kv_used > KV_MAX or num_requests > MAX_REQUESTS


def test_the_emptiest_goes_into_the_fullest_that_has_room():
    loads = [load("a", 0.1), load("b", 0.3), load("c", 0.5), load("d", 0.85), load("e", 0.2, version=4)]
    before: dict[str, float] = dict.fromkeys(list("abcde"), 1.0)
    assert plan(loads, before) == (Move("a", "c", 3), Move("b", "c", 3))


@pytest.mark.parametrize(
    "other",
    [
        load("b", 0.1, version=4),  # another version
        load("b", 0.1, 0),  # nothing to do
        load("b", 0.1, 15),  # too many requests together
        load("b", 0.85),  # too full together
        load("b", 0.1, waiting=1),
        load("b", 0.1, loading=True),
    ],
)
def test_nothing_moves_where(other):
    before = {"a": 0.9, "b": 0.9}
    assert plan([load("a", 0.2), load("b", 0.1)], before) != ()
    assert plan([load("a", 0.2), other], before) == ()


def test_nothing_moves_while_the_cache_fills_or_lacks_history():
    loads = [load("a", 0.2), load("b", 0.1)]
    assert plan(loads, {"a": 0.2, "b": 0.9}) == ()
    assert plan(loads, {"b": 0.9}) == ()


def test_replicas_on_the_newest_version_are_left_alone():
    loads = [load("a", 0.2, version=NEWEST), load("b", 0.1, version=NEWEST)]
    assert plan(loads, {"a": 0.9, "b": 0.9}) == ()


@given(st.integers(1, 60), st.integers(0, 3))
def test_replicas_have_no_more_requests_than_measured_steps_allow(roofline: int, shift: int):
    times, tokens, before = StepTimes(), 0, 64
    for at_s, running in enumerate([64, 64, 48, 48, 32, 32, 20, 20, 12, 12, 7, 7, 4, 4, 2, 2, 1, 1]):
        mean, before = (running + before) / 2, running
        tokens += round(mean / (0.01 * max(1.0, mean / roofline)))
        times.observe([ReplicaLoad("a", 0, EngineStats(running, 0, 0.5, tokens))], at_s + shift)
    allowed = times.most_requests(64)
    assert allowed <= 64
    assert allowed == 64 if roofline > 52 else 0.6 * roofline <= allowed <= 2 * roofline


def test_until_sizes_are_measured_all_slots_may_be_used():
    times = StepTimes()
    assert times.most_requests(64) == 64
    for at_s in range(3):
        times.observe([load("a", 0.5, 30, version=at_s)], float(at_s))  # another version each time
    assert times.most_requests(64) == 64
