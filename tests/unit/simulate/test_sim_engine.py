"""Simulated engine: processor sharing, counted by hand."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.simulate.sim_engine import SimEngine, SimRequest
from rlsys.testing.virtual_clock import run_virtual
from rlsys.types import PolicyVersion
from tests.simulate.profiles import small

PLAIN: dict[str, Any] = {
    "decode": {"overhead_s": 0.0, "weights_s": 1.0, "sequence_s": 0.5, "token_s": 0.0},
    "prefill_tokens_per_s": 1e12,
    "slots": 4,
    "cache_tokens": 10_000,
}
"""A step takes 1 s with up to two requests, then half a second for each."""


@dataclass(eq=False)
class Asked:
    """Requests of one engine, and when each was answered."""

    engine: SimEngine
    ended_s: dict[int, float] = field(default_factory=dict)
    sampled: Counter[PolicyVersion] = field(default_factory=Counter)

    def request(self, number: int, num_tokens: int, num_context: int = 1) -> SimRequest:
        owner = cast("Any", self)
        return SimRequest(num_context, num_tokens, lambda: self._end(number), owner, self.sampled)

    def _end(self, number: int) -> None:
        self.ended_s[number] = round(asyncio.get_running_loop().time(), 6)


def asked(**changes: Any) -> Asked:
    engine = SimEngine(small(**{**PLAIN, **changes, "response": {"mean": 4, "cap": 8}}))
    engine.change(0)
    return Asked(engine)


def test_steps_are_shared_and_take_longer_with_more_requests():
    async def work() -> dict[int, float]:
        it = asked()
        it.engine.submit([it.request(0, 10)])
        await asyncio.sleep(4.0)
        it.engine.submit([it.request(i, 4) for i in (1, 2, 3)])  # four requests: 2 s a step
        await asyncio.sleep(100)
        return it.ended_s

    assert run_virtual(work()) == {0: 14.0, 1: 12.0, 2: 12.0, 3: 12.0}


def test_what_finds_no_slot_waits_in_order():
    async def work() -> dict[int, float]:
        it = asked(slots=2)
        it.engine.submit([it.request(0, 3), it.request(1, 5), it.request(2, 4), it.request(3, 1)])
        await asyncio.sleep(100)
        return it.ended_s

    assert run_virtual(work()) == {0: 3.0, 1: 5.0, 2: 7.0, 3: 6.0}


def test_a_longer_context_takes_longer_to_attend_to():
    async def work() -> dict[int, float]:
        it = asked(decode={**PLAIN["decode"], "token_s": 0.01})
        it.engine.submit([it.request(0, 10, num_context=100)])
        await asyncio.sleep(100)
        return it.ended_s

    assert run_virtual(work()) == {0: pytest.approx(10 * 1.0 + 0.01 * (100 * 10 + 10 * 10 / 2))}


def test_prompts_hold_up_decoding_unless_they_are_cached():
    async def work() -> dict[int, float]:
        it = asked(prefill_tokens_per_s=10.0)
        fresh, cached = it.request(0, 2, num_context=20), it.request(1, 2, num_context=20)
        cached.num_cached = 20
        it.engine.submit([fresh, cached])
        await asyncio.sleep(100)
        return it.ended_s

    assert run_virtual(work()) == {0: 4.0, 1: 4.0}


def test_an_inflight_change_splits_tokens_by_version_and_delays_them():
    async def work() -> tuple[Counter[PolicyVersion], dict[int, float]]:
        it = asked()
        it.engine.submit([it.request(0, 10)])
        await asyncio.sleep(4.5)
        assert it.engine.change(1, load_s=3.0) == 3.0
        await asyncio.sleep(100)
        return it.sampled, it.ended_s

    assert run_virtual(work()) == ({0: 4, 1: 6}, {0: 13.0})


def test_what_is_aborted_goes_on_elsewhere_from_its_tokens():
    async def work() -> tuple[Counter[PolicyVersion], dict[int, float], int]:
        it, other = asked(), asked()
        it.engine.submit([it.request(0, 10)])
        await asyncio.sleep(4.5)
        moved = it.engine.abort([cast("Any", it)])
        other.engine.submit(moved)
        await asyncio.sleep(100)
        return it.sampled, it.ended_s, other.engine.used.num_prefilled

    assert run_virtual(work()) == ({0: 10}, {0: 10.5}, 5)


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(1, 90)), min_size=1, max_size=30),
    cache_tokens=st.integers(150, 2000),
    changes=st.lists(st.floats(0, 60), max_size=4),
)
def test_whatever_comes_when_every_token_is_sampled_once(
    arrivals: list[tuple[float, int, int]], cache_tokens: int, changes: list[float]
):
    async def work() -> Asked:
        it, loop = asked(cache_tokens=cache_tokens), asyncio.get_running_loop()
        for number, (at_s, num_tokens, num_context) in enumerate(arrivals):
            loop.call_later(at_s, it.engine.submit, [it.request(number, num_tokens, num_context)])
        for version, at_s in enumerate(sorted(changes), 1):
            loop.call_later(at_s, it.engine.change, version, 0.5)
        await asyncio.sleep(1e6)
        return it

    it = run_virtual(work())
    assert len(it.ended_s) == len(arrivals)
    assert it.sampled.total() == sum(num_tokens for _, num_tokens, _ in arrivals)
    assert 0 < it.engine.used.cache_s <= it.engine.used.busy_s
