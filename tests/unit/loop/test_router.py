"""Routing of requests to replicas: laws of the choice, and the benefit of routing a session back to its replica."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import pytest
import ray
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlsys.errors import WorkerDied
from rlsys.loop.router import KV_FULL, OVERLOAD, Router, RouterLoad, choose, request_weight
from rlsys.types import Acknowledged, Assignment, Busy, EngineStats, GroupKey, RolloutReport, Task
from tests.groups import group, rolled_out
from workers.ray.call_stream import PayloadRef
from workers.ray.pool import PoolMember, PoolSpec
from workers.ray.remote_proxy import Remote
from workers.rollout.rollout_pool import ANSWER_S, RolloutPool
from workers.rollout.rollout_worker import RolloutWorker

FULL = EngineStats(num_running=8, num_waiting=2, kv_used=0.95, num_tokens=0)
weights = st.lists(st.integers(1, 20), min_size=1, max_size=40)
loads = st.lists(
    st.builds(RouterLoad, st.integers(0, 50), st.booleans(), st.sampled_from([None, FULL])), min_size=1, max_size=6
)


def test_a_request_weighs_more_the_longer_its_prefix() -> None:
    assert [request_weight(n) for n in (0, 1023, 1024, 10_240)] == [1, 1, 2, 11]


def test_the_choice_by_hand() -> None:
    assert choose([RouterLoad(3), RouterLoad(1), RouterLoad(1)], 1) == 1
    assert choose([RouterLoad(2), RouterLoad(1)], 1, home=0) == 0  # 3 is within 1.5 times 2
    assert choose([RouterLoad(3), RouterLoad(1)], 1, home=0) == 1
    assert choose([RouterLoad(0, is_live=False), RouterLoad(5)], 1, home=0) == 1
    assert choose([RouterLoad(1, stats=FULL), RouterLoad(5)], 1, home=0) == 1
    assert choose([RouterLoad(2, stats=FULL), RouterLoad(1, stats=FULL)], 1) == 1
    assert choose([RouterLoad(0), RouterLoad(9), RouterLoad(5)], 1, home=0, among={1, 2}) == 2
    assert choose([RouterLoad(0), RouterLoad(9, is_live=False)], 1, among={1}) == 0
    assert choose([RouterLoad(0)], 1, among=set()) == 0
    with pytest.raises(ValueError, match="no replica is live"):
        choose([RouterLoad(1, is_live=False), RouterLoad(0, is_live=False)], 1, among={1})


def test_transferred_load_counts_at_its_new_replica_until_released() -> None:
    router = Router(num_replicas=3)
    source = router.route(4, "session")
    router.transfer(source, 2, 4)
    assert [load.weight for load in router.loads] == [0, 0, 4]
    router.release(2, 4)
    assert [load.weight for load in router.loads] == [0, 0, 0]


@pytest.mark.parametrize(
    ("load", "is_full"),
    [
        (RouterLoad(1, stats=EngineStats(8, 1, KV_FULL, 0)), True),
        (RouterLoad(1, stats=EngineStats(8, 0, 1.0, 0)), False),
        (RouterLoad(1, stats=EngineStats(8, 9, 0.5, 0)), False),
        (RouterLoad(0, stats=FULL), False),
        (RouterLoad(9), False),
    ],
)
def test_a_replica_with_full_cache_and_waiting_requests_is_full(load: RouterLoad, is_full: bool) -> None:
    assert load.is_full == is_full


@settings(max_examples=200)
@given(loads, st.integers(1, 20), st.none() | st.integers(0, 5))
def test_dead_or_full_replicas_are_chosen_last(loads: list[RouterLoad], weight: int, home: int | None) -> None:
    assume(any(load.is_live for load in loads))
    chosen = loads[choose(loads, weight, home)]
    assert chosen.is_live
    if chosen.is_full:
        assert all(load.is_full for load in loads if load.is_live)


@settings(max_examples=100)
@given(weights, st.integers(1, 6))
def test_without_sessions_loads_differ_by_the_largest_weight_at_most(sent: list[int], num_replicas: int) -> None:
    router = Router(num_replicas)
    for session, weight in enumerate(sent):
        router.route(weight, session)
    outstanding = [load.weight for load in router.loads]
    assert sum(outstanding) == sum(sent)
    assert max(outstanding) - min(outstanding) <= max(sent)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=40), st.integers(1, 6))
def test_sessions_overload_no_replica_beyond_the_factor(sent: list[tuple[int, int]], num_replicas: int) -> None:
    router = Router(num_replicas)
    for weight, session in sent:
        router.route(weight, session)
    outstanding = [load.weight for load in router.loads]
    assert max(outstanding) <= OVERLOAD * (min(outstanding) + max(weight for weight, _ in sent))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), max_size=30), st.randoms(use_true_random=False))
def test_every_release_is_undone_exactly(sent: list[tuple[int, int]], rng: random.Random) -> None:
    router = Router(3)
    routed = [(router.route(weight, session), weight) for weight, session in sent]
    rng.shuffle(routed)
    for replica, weight in routed:
        router.release(replica, weight)
    assert [load.weight for load in router.loads] == [0, 0, 0]


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 20))
def test_while_loads_are_balanced_every_session_goes_back(num_replicas: int, rounds: int, weight: int) -> None:
    """One session per replica; each asks again only when it was answered."""
    router = Router(num_replicas)
    homes: dict[int, set[int]] = {session: set() for session in range(num_replicas)}
    for _ in range(rounds):
        routed = [(session, router.route(weight, session)) for session in homes]
        for session, replica in routed:
            homes[session].add(replica)
            router.release(replica, weight)
    assert [len(replicas) for replicas in homes.values()] == [1] * num_replicas


def test_a_session_that_moved_stays_where_it_moved() -> None:
    router = Router(2)
    assert router.route(1, "a") == 0
    assert router.route(20, "b") == 1
    assert router.route(40, "c") == 0
    assert router.route(1, "a") == 1  # at home it would be the 42nd of a replica, against the 21st
    router.release(0, 21)
    assert [load.weight for load in router.loads] == [20, 21]
    assert router.route(1, "a") == 1


def test_the_session_unused_for_longest_is_forgotten() -> None:
    router = Router(2, max_sessions=2)
    homes = [router.route(1, "a"), router.route(1, "b")]
    router.route(1, "a")
    router.release(homes[0], 1)
    router.route(3, "c")
    assert homes == [0, 1]
    assert list(router._homes) == ["a", "c"]


def test_a_replica_that_left_gets_no_routes_until_it_joins() -> None:
    router = Router(2)
    assert router.route(1, "a") == 0
    router.release(0, 1)
    router.report(0, FULL)
    router.leave(0)
    assert [router.route(1, session) for session in ("a", "b", "c")] == [1, 1, 1]
    router.join(0)
    assert router.loads[0] == RouterLoad(0)
    assert router.route(1, "d") == 0


# ---------------------------------------------------------------------------------------------------------- simulated


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
    rng, router, number = random.Random(seed), Router(num_replicas), count()
    prefix, turns = Counter[int](), Counter[int]()
    cached = [Counter[int]() for _ in range(num_replicas)]
    hits = total = 0
    heaviest: list[int] = []
    moments: list[tuple[float, int, int, tuple[int, int] | None]] = []
    """Time, number, session, and (replica, weight) of a request that is answered, None where one is made."""
    for session in range(num_sessions):
        heappush(moments, (rng.uniform(0, 50), next(number), session, None))
    while moments:
        now, _, session, answered = heappop(moments)
        if answered:
            replica, weight = answered
            router.release(replica, weight)
            cached[replica][session] = prefix[session]
            turns[session] += 1
            if turns[session] < 12:
                heappush(moments, (now + rng.expovariate(1 / 20), next(number), session, None))
            continue
        weight = request_weight(prefix[session])
        replica = router.route(weight, session if is_sticky else f"turn {next(number)}")
        hits += cached[replica][session]
        total += prefix[session]
        heaviest.append(max(load.weight for load in router.loads))
        num_new = rng.randint(200, 3000)
        prefix[session] += num_new
        heappush(moments, (now + num_new / 100, next(number), session, (replica, weight)))
    return Simulated(hits / total, max(heaviest), sum(heaviest) / len(heaviest))


@pytest.mark.parametrize("seed", range(3))
def test_going_back_raises_prefix_hits_without_raising_the_load_much(seed: int) -> None:
    least, sticky = simulated(is_sticky=False, seed=seed), simulated(is_sticky=True, seed=seed)
    assert least.hit_share < 0.7
    assert sticky.hit_share > 0.85
    assert sticky.max_weight <= 1.25 * least.max_weight
    assert sticky.mean_max_weight <= 1.15 * least.mean_max_weight


# ------------------------------------------------------------------------------------------------------------ the pool


class Actor:
    """Is set up at once, and holds no weights."""

    class call:  # noqa: N801  (a method of an actor handle)
        @staticmethod
        async def remote(*arguments: object) -> dict[str, Acknowledged]:
            return {}

    setup = dump_stacks = __ray_ready__ = call


class Told(RolloutPool):
    """A pool whose replicas answer at once, and tell who was asked; the ones in `dead` are gone."""

    def __init__(self, size: int) -> None:
        super().__init__(PoolSpec(size, self._start, lease_s=1.0, silence_s=6.0, max_attempts=1))
        self.asked: list[str] = []
        self.dead: set[str] = set()
        self.answer = asyncio.Event()
        self.answer.set()

    def _start(self, name: str) -> Remote[RolloutWorker]:
        return Remote(name, RolloutWorker, Actor(), ANSWER_S)

    async def _check(self, member: PoolMember) -> None: ...

    async def _sent(self, member: PoolMember, request: object, phase: str) -> tuple[object, PayloadRef]:
        assert isinstance(request, tuple)
        assignment, _ = request
        self.asked.append(member.name)
        await self.answer.wait()
        if member.name in self.dead:
            raise WorkerDied(member.name, phase, "the process is gone")
        stats = EngineStats(num_running=0, num_waiting=0, kv_used=0.0, num_tokens=7)
        return (rolled_out(group(assignment.group_id), RolloutReport(Busy(member.name, 0, 1), stats)),), PayloadRef(
            ray.ObjectRef.nil(), 0
        )


def assignment(group_id: int, num_characters: int = 10, *, size: int = 4, version: int = 0) -> Assignment:
    task = Task(id=str(group_id), prompt=f"{group_id:04}" + "x" * (num_characters - 4))
    return Assignment(GroupKey(group_id, 1), task, size, version, 0)


def test_a_pool_routes_by_prompt_length_to_the_least_loaded() -> None:
    async def scenario() -> None:
        pool = Told(2)
        await pool.ready()
        pool.answer.clear()
        long, *short = [assignment(0, num_characters=40_000), *(assignment(group_id) for group_id in range(1, 11))]
        async with asyncio.TaskGroup() as running:
            done = [running.create_task(pool.run(a)) for a in [long, *short]]
            await asyncio.sleep(0)
            pool.answer.set()
        assert pool.asked == ["rollout-0", *["rollout-1"] * 10]
        assert {load.weight for load in pool._router.loads} == {0}
        assert all(load.stats is not None and load.stats.num_tokens == 7 for load in pool._router.loads)
        assert [d.result()[0].group_id for d in done] == list(range(11))

    asyncio.run(scenario())


def test_a_pool_sends_nothing_to_a_replica_that_died() -> None:
    async def scenario() -> None:
        pool = Told(2)
        await pool.ready()
        pool.dead.add("rollout-0")
        with pytest.raises(WorkerDied, match="rollout-0"):
            await pool.run(assignment(0))
        for group_id in range(3):
            await pool.run(assignment(group_id))
        assert pool.asked == ["rollout-0", *["rollout-1"] * 3]
        assert {load.weight for load in pool._router.loads} == {0}

    asyncio.run(scenario())


def test_tasks_return_to_their_replica_while_weights_are_unchanged() -> None:
    async def scenario() -> None:
        pool = Told(2)
        await pool.ready()
        pool.answer.clear()
        chat = Task(id="t", prompt=({"role": "user", "content": "Sort 312"},))
        first = asyncio.create_task(pool.run(Assignment(GroupKey(0, 1), chat, 4, 0, 0)))
        second = asyncio.create_task(pool.run(assignment(1)))
        await asyncio.sleep(0)
        pool.answer.set()
        await asyncio.gather(first, second)
        for version in (0, 1, 1):
            await pool.run(assignment(1, version=version))
        assert pool.asked == ["rollout-0", "rollout-1", "rollout-1", "rollout-0", "rollout-0"]

    asyncio.run(scenario())
