"""Deadlines count only the time in which this process ran."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rlsys.errors import DeadlineExceeded
from rlsys.testing import run_virtual
from rlsys.testing.virtual_clock import VirtualLoop
from rlsys.util import deadlines
from rlsys.weight_sync.sync import with_deadline


def suspend(seconds: float) -> None:
    """What a process sees that was stopped: the clock is later, and nothing else happened."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.jump(seconds)


async def elapsed_s(work) -> float:
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await work
    return asyncio.get_running_loop().time() - began


async def overdue(seconds: float) -> None:
    async with deadlines.timeout(seconds):
        await asyncio.Event().wait()


@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.0, 7.3, 600.0])
def test_a_deadline_is_over_when_its_seconds_are(seconds):
    async def main() -> None:
        assert await elapsed_s(overdue(seconds)) == pytest.approx(seconds, abs=1e-3)

    run_virtual(main())


def test_results_in_time_return_and_late_ones_name_the_worker():
    async def main() -> None:
        assert await with_deadline(asyncio.sleep(3, "done"), 4, "rollout-0", "rolling out") == "done"
        with pytest.raises(DeadlineExceeded, match="rollout-0 while rolling out: no answer within 4 s"):
            await with_deadline(asyncio.sleep(5), 4, "rollout-0", "rolling out")

    run_virtual(main())


def test_deadlines_of_different_length_are_over_in_their_order():
    async def main() -> None:
        over: list[float] = []

        async def wait(seconds: float) -> None:
            await deadlines.sleep(seconds)
            over.append(seconds)

        await asyncio.gather(*(wait(s) for s in (9.0, 0.5, 30.0, 0.1, 2.5)))
        assert over == [0.1, 0.5, 2.5, 9.0, 30.0]

    run_virtual(main())


@pytest.mark.parametrize("lived_s", [0.5, 4.0, 9.9])
def test_a_deadline_is_not_over_because_the_process_was_suspended(lived_s):
    async def main() -> None:
        began = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(elapsed_s(overdue(10.0)))
        await asyncio.sleep(lived_s)
        suspend(3600.0)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await waiting
        lived = asyncio.get_running_loop().time() - began - 3600.0
        assert 10.0 <= lived + 1e-3 < 10.0 + 2 * deadlines.TICK_S

    run_virtual(main())


def test_an_answer_is_accepted_after_a_suspension():
    async def main() -> None:
        work = asyncio.create_task(with_deadline(asyncio.sleep(100, "answer"), 200, "rollout-0", "rolling out"))
        await asyncio.sleep(50)
        suspend(10_000.0)
        assert await work == "answer"

    run_virtual(main())


def test_a_deadline_after_a_suspension_has_its_full_length():
    async def main() -> None:
        await deadlines.sleep(2.0)
        await asyncio.sleep(50.0)
        assert deadlines.now() == pytest.approx(52.0)
        suspend(1000.0)
        assert await elapsed_s(overdue(3.0)) == pytest.approx(3.0)

    run_virtual(main())


@pytest.mark.slow
def test_thousands_of_deadlines_cost_one_timer():
    async def wait(num_deadlines: int) -> None:
        loop: Any = asyncio.get_running_loop()
        waiting = [asyncio.create_task(overdue(600.0)) for _ in range(num_deadlines)]
        await asyncio.sleep(0)
        assert len(loop._scheduled) == 1
        began = time.process_time()
        await asyncio.sleep(500.0)
        spent_s[num_deadlines] = time.process_time() - began
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(3.0)
        assert not loop._scheduled

    spent_s: dict[int, float] = {}
    for num_deadlines in (1000, 10_000):
        run_virtual(wait(num_deadlines))
    assert spent_s[10_000] < 5 * spent_s[1000]


def test_idleness_is_counted_from_the_last_progress():
    async def main() -> None:
        progress = deadlines.Progress()
        assert progress.idle_s() == 0.0
        await asyncio.sleep(3.0)
        assert progress.idle_s() == 3.0
        progress.mark_progress()
        await asyncio.sleep(1.0)
        assert progress.idle_s() == 1.0

    run_virtual(main())


@pytest.mark.parametrize("is_inside_first", [True, False])
def test_a_held_deadline_stands_still(is_inside_first: bool):
    async def main() -> None:
        ends: list[float] = []
        loop = asyncio.get_running_loop()
        deadline = deadlines.PausedDeadline(5.0, lambda: ends.append(loop.time()))
        if not is_inside_first:
            deadline.hold(is_held=True)
        with deadline:
            if is_inside_first:
                await asyncio.sleep(2)
                deadline.hold(is_held=True)
            await asyncio.sleep(100)
            deadline.hold(is_held=False)
            assert not deadline.is_over
            left_s = 3.0 if is_inside_first else 5.0
            began_s = loop.time()
            await asyncio.sleep(left_s + 1)
        assert ends == [pytest.approx(began_s + left_s)]

    run_virtual(main())
