"""The streaming queue: permits pace, serials order, versions bound, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithm import Signal
from rlsys.queue import LEARNER, Permit, StreamingQueue
from rlsys.table import EPISODES, REWARD
from rlsys.testing import run_virtual
from rlsys.types import Group
from tests.groups import group

SIGNAL = Signal.REFERENCE_LOGPROBS
SIGNALS = frozenset({SIGNAL})


def queue_of(
    *,
    groups_per_step: int = 2,
    max_staleness: int = 0,
    window: int = 1,
    version: int = 0,
    num_groups: int = 100,
    signals: frozenset[Signal] = frozenset(),
    synchronous_until: int = 0,
) -> StreamingQueue:
    return StreamingQueue(groups_per_step, max_staleness, window, version, num_groups, signals, synchronous_until)


def submit(permit: Permit, done: Group) -> None:
    """Hand in all that a producer has to."""
    permit.put(EPISODES, done)
    permit.put(REWARD, done)


def no_stale(group: Group) -> None:
    raise AssertionError(f"group {group.serial} is stale")


@dataclass
class Producers:
    """One task per permit that was ever waited for; each holds its permit until told what to do with it."""

    queue: StreamingQueue
    admitted: list[int] = field(default_factory=list)
    """Versions of the permits handed out, in order."""
    _told: dict[int, asyncio.Future[Group | None]] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, serials: Sequence[int]) -> None:
        for serial in serials:
            self._told[serial] = asyncio.get_running_loop().create_future()
            self._tasks.append(asyncio.create_task(self._produce(serial)))

    async def _produce(self, serial: int) -> None:
        async with self.queue.permit() as permit:
            self.admitted.append(permit.version)
            permit.open(serial)
            done = await self._told[serial]
            if done is not None:
                submit(permit, done)

    async def finish(self, *serials: int, versions: Sequence[int] = (0,)) -> None:
        for serial in serials:
            self._told[serial].set_result(group(serial, versions=versions))
        await settled()

    async def drop(self, serial: int) -> None:
        self._told[serial].set_result(None)
        await settled()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def settled() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def played(queue: StreamingQueue, scenario: Callable[[Producers], Awaitable[None]], num_producers: int = 6) -> None:
    """Run `scenario` beside producers of serials 0, 1, ..."""

    async def main() -> None:
        producers = Producers(queue)
        producers.start(range(num_producers))
        await settled()
        await scenario(producers)
        producers.cancel()

    run_virtual(main())


async def taken(queue: StreamingQueue, version: int = 0) -> list[int]:
    return [row.serial for row in await queue.take(version=version, on_stale=no_stale)]


def test_no_more_groups_are_in_the_pipe_than_there_are_permits():
    queue = queue_of(groups_per_step=2, max_staleness=1)

    async def scenario(producers: Producers) -> None:
        assert len(producers.admitted) == queue.capacity == 4
        await producers.finish(0, 1)
        await queue.take(version=0, on_stale=no_stale)
        await settled()
        assert len(producers.admitted) == 4

    played(queue, scenario)


def test_released_permits_carry_the_version_that_was_published():
    queue = queue_of(groups_per_step=2)

    async def scenario(producers: Producers) -> None:
        await producers.finish(0, 1)
        queue.release(await queue.take(version=0, on_stale=no_stale), 1)
        await settled()
        assert producers.admitted == [0, 0, 1, 1]

    played(queue, scenario)


def test_a_window_of_one_is_strictly_first_in_first_out():
    queue = queue_of(groups_per_step=2, max_staleness=1)

    async def scenario(producers: Producers) -> None:
        await producers.finish(1, 2, 3)
        take = asyncio.create_task(taken(queue))
        await settled()
        assert not take.done()
        await producers.finish(0)
        assert await take == [0, 1]

    played(queue, scenario)


def test_a_window_counts_serials_past_the_oldest_open_group():
    queue = queue_of(groups_per_step=1, max_staleness=3, window=3)

    async def scenario(producers: Producers) -> None:
        await producers.finish(3)
        take = asyncio.create_task(taken(queue))
        await settled()
        assert not take.done()
        await producers.finish(2)
        assert await take == [2]
        await producers.finish(0)
        assert [await taken(queue), await taken(queue)] == [[0], [3]]

    played(queue, scenario)


def test_a_drop_is_counted_gives_its_permit_back_and_admits_another_group():
    queue = queue_of(groups_per_step=2, num_groups=2)

    async def scenario(producers: Producers) -> None:
        assert len(producers.admitted) == 2
        await producers.drop(0)
        assert queue.dropped == {"failed": 1}
        assert len(producers.admitted) == 3
        await producers.finish(1, 2)
        assert await taken(queue) == [1, 2]

    played(queue, scenario)


def test_no_more_groups_are_admitted_than_the_run_will_consume():
    queue = queue_of(groups_per_step=2, max_staleness=3, num_groups=4)

    async def scenario(producers: Producers) -> None:
        assert len(producers.admitted) == 4
        await producers.finish(0, 1)
        queue.release(await queue.take(version=0, on_stale=no_stale), 1)
        await settled()
        assert len(producers.admitted) == 4

    played(queue, scenario)


def test_a_producer_that_raises_gives_its_permit_back():
    async def main() -> None:
        queue = queue_of(groups_per_step=1)

        async def fail() -> None:
            async with queue.permit() as permit:
                permit.open(7)
                permit.reason = "too_long"
                raise ZeroDivisionError

        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await fail()
        assert queue.dropped == {"too_long": 2}

    run_virtual(main())


def test_a_permit_takes_no_other_group_than_its_own():
    async def main() -> None:
        async with queue_of().permit() as permit:
            permit.open(3)
            with pytest.raises(ValueError, match="permit of group 3 was handed group 4"):
                permit.put(EPISODES, group(4))

    run_virtual(main())


def test_tokens_beyond_the_bound_are_dropped_as_stale_and_replaced():
    queue = queue_of(groups_per_step=1, max_staleness=1, version=5)
    stale: list[int] = []

    async def scenario(producers: Producers) -> None:
        await producers.finish(0, versions=(3, 5))
        await producers.finish(1, versions=(4, 5))
        rows = await queue.take(version=5, on_stale=lambda group: stale.append(group.serial))
        assert ([row.serial for row in rows], stale, queue.dropped) == ([1], [0], {"stale": 1})
        await settled()
        assert len(producers.admitted) == 3

    played(queue, scenario)


async def produced(queue: StreamingQueue, *serials: int) -> None:
    """Groups that are rolled out and judged, each on a permit of its own."""
    for serial in serials:
        async with queue.permit() as permit:
            permit.open(serial)
            submit(permit, group(serial, versions=(permit.version,)))


def test_the_learner_waits_for_the_columns_that_annotators_add():
    async def main() -> None:
        queue = queue_of(groups_per_step=2, max_staleness=1, signals=SIGNALS)
        await produced(queue, 0, 1, 2)
        assert (queue.num_finished, [row.serial for row in queue.finished]) == (0, [0, 1, 2])
        assert queue.lacking()[0] == [SIGNAL]
        rows = await queue.take_rows(SIGNAL, max_tokens=30)
        assert [row.serial for row in rows] == [0, 1, 2]
        for row in reversed(rows):
            assert queue.put(row, SIGNAL, f"column of {row.serial}")
        groups = [row.group for row in await queue.take(version=0, on_stale=no_stale)]
        assert [(g.serial, g.columns) for g in groups] == [(n, {SIGNAL: f"column of {n}"}) for n in (0, 1)]

    run_virtual(main())


@pytest.mark.parametrize(("max_tokens", "serials"), [(1, [0]), (10, [0]), (20, [0, 1]), (29, [0, 1]), (30, [0, 1, 2])])
def test_an_annotator_takes_whole_groups_up_to_its_budget_or_one(max_tokens, serials):
    async def main() -> None:
        queue = queue_of(groups_per_step=2, max_staleness=1, signals=SIGNALS)
        await produced(queue, 2, 0, 1)
        assert {row.num_tokens for row in await queue.take_rows(SIGNAL, max_tokens)} == {10}
        again = queue_of(groups_per_step=2, max_staleness=1, signals=SIGNALS)
        await produced(again, 2, 0, 1)
        assert [row.serial for row in await again.take_rows(SIGNAL, max_tokens)] == serials

    run_virtual(main())


def test_what_comes_for_an_attempt_that_is_over_is_refused_counted_and_never_trained():
    async def main() -> None:
        queue = queue_of(groups_per_step=1, signals=SIGNALS)
        async with queue.permit() as permit:
            permit.open(0)
            first = permit.row
            assert first is not None
            permit.put(EPISODES, group(0))
            assert not permit.put(EPISODES, group(0)), "a duplicate"
            permit.open(0)  # its lease is over, and another attempt begins
            submit(permit, group(0))
            assert not queue.put(first, REWARD, None)
        (row,) = await queue.take_rows(SIGNAL, 100)
        assert not queue.put(first, SIGNAL, "late")
        assert queue.put(row, SIGNAL, "in time")
        (trained,) = await queue.take(version=0, on_stale=no_stale)
        assert trained.group.columns == {SIGNAL: "in time"}
        queue.release([trained], 1)
        assert not queue.put(row, SIGNAL, "after it was trained")
        assert (queue.num_refused, queue.num_reissued) == (4, 1)

    run_virtual(main())


def test_a_group_that_is_lost_keeps_its_place_and_gives_its_permit_to_the_next_attempt():
    async def main() -> None:
        queue = queue_of(groups_per_step=2)
        await produced(queue, 0, 1)
        zero, one = await queue.take(version=0, on_stale=no_stale)
        assert queue.lose(zero)
        queue.put_back(LEARNER, [one])
        take = asyncio.create_task(queue.take(version=0, on_stale=no_stale))
        await settled()
        assert not take.done(), "group 0 is older"
        await produced(queue, 0)
        again = await take
        assert [row.serial for row in again] == [0, 1]
        assert again[0] is not zero
        assert again[1] is one
        queue.release(again, 1)
        await produced(queue, 2, 3)
        assert (queue.dropped, queue.num_reissued) == ({}, 1)

    run_virtual(main())


def test_the_loss_of_an_attempt_that_is_over_changes_nothing():
    async def main() -> None:
        queue = queue_of(groups_per_step=1, max_staleness=1)
        await produced(queue, 0)
        (first,) = queue.finished
        assert queue.lose(first)
        assert not queue.lose(first), "it waits to be issued again"
        await produced(queue, 0)
        assert not queue.lose(first), "the next attempt is there"
        taken = await queue.take(version=0, on_stale=no_stale)
        assert not queue.lose(first), "the next attempt is being trained"
        queue.release(taken, 1)
        assert not any(map(queue.lose, (first, *taken))), "the group is trained"
        assert (queue.num_permits, queue.dropped) == (queue.capacity, {})

    run_virtual(main())


def test_a_group_that_is_lost_while_it_is_judged_leaves_its_permit_when_its_producer_does():
    async def main() -> None:
        queue = queue_of(groups_per_step=1, signals=SIGNALS)
        async with queue.permit() as permit:
            permit.open(0)
            permit.put(EPISODES, group(0))
            await queue.take_rows(SIGNAL, 100)
            assert permit.row is not None
            assert queue.lose(permit.row)
            assert permit.is_over
            assert not permit.put(REWARD, group(0))
            again = asyncio.create_task(produced(queue, 0))
            await settled()
            assert not again.done(), "there is one permit"
        await again
        assert [row.serial for row in await queue.take_rows(SIGNAL, 100)] == [0]
        assert not queue.dropped

    run_virtual(main())


def test_ten_thousand_groups_in_flight_cost_no_more_each_than_a_few():
    async def main() -> None:
        queue = queue_of(groups_per_step=100, max_staleness=99, num_groups=10_000, signals=SIGNALS)
        await produced(queue, *range(10_000))
        for version in range(100):
            for row in await queue.take_rows(SIGNAL, 1000):
                queue.put(row, SIGNAL, None)
            assert queue.num_finished == 100
            queue.release(await queue.take(version=version, on_stale=no_stale), version + 1)

    began = time.process_time()
    run_virtual(main())
    assert time.process_time() - began < 3.0


def test_a_restored_queue_keeps_finished_groups_and_the_places_of_unfinished_ones():
    queue = queue_of(groups_per_step=2, max_staleness=1)
    queue.restore(7, 6, finished=[group(5, versions=(6,)), group(6, versions=(6,))], pending=[4, 5, 6])
    assert [row.serial for row in queue.finished] == [5, 6]

    async def main() -> None:
        take = asyncio.create_task(queue.take(version=7, on_stale=no_stale))
        await settled()
        assert not take.done(), "group 4 is older than those that are finished"
        producers = Producers(queue)
        producers.start([4, 7, 8, 9, 10])
        await settled()
        assert producers.admitted == [7, 7]
        await producers.finish(4, versions=(7,))
        first = await take
        assert [row.serial for row in first] == [4, 5]
        queue.release(first, 8)
        await settled()
        assert producers.admitted == [7, 7, 8, 8]
        assert len(queue.finished) == queue.num_finished == 1
        producers.cancel()

    run_virtual(main())


@dataclass
class Played:
    """Producers that drop or finish groups, and a learner, on one queue after the other."""

    chance: random.Random
    drop_share: float
    consumed: list[int] = field(default_factory=list)
    in_pipe: set[int] = field(default_factory=set)
    """Serials that were issued, and neither dropped nor released."""
    again: list[int] = field(default_factory=list)
    """Serials to issue again, oldest first."""
    serials: Iterator[int] = field(default_factory=count)
    num_before: int = 0
    """Groups consumed on the queues before."""

    @property
    def unsettled(self) -> list[int]:
        return sorted(self.in_pipe - {*self.consumed})

    async def produce(self, queue: StreamingQueue) -> None:
        while True:
            async with queue.permit() as permit:
                serial = self.again.pop(0) if self.again else next(self.serials)
                self.in_pipe.add(serial)
                assert len(self.in_pipe) <= queue.permits_at(queue.version)
                permit.open(serial)
                await asyncio.sleep(self.chance.paretovariate(1.2))
                if self.chance.random() < self.drop_share:
                    self.in_pipe.remove(serial)
                else:
                    submit(permit, group(serial, versions=(permit.version,)))

    async def learn(self, queue: StreamingQueue, until: int) -> None:
        for version in range(queue.version, until):
            bound = 0 if version < queue.synchronous_until else queue.staleness_bound
            rows = await queue.take(version=version, on_stale=no_stale)
            for row in rows:
                assert row.serial < self.unsettled[0] + queue.window
                assert version - row.group.oldest_version <= bound
                self.consumed.append(row.serial)
            await asyncio.sleep(self.chance.random() * 3)
            self.in_pipe -= {row.serial for row in rows}
            queue.release(rows, version + 1)
            assert queue.num_permits == min(queue.permits_at(version + 1), queue.num_groups - len(self.consumed))

    async def run(self, queue: StreamingQueue, until: int) -> None:
        """Until version `until` is published; then whatever is being produced is cut off."""
        producers = [asyncio.create_task(self.produce(queue)) for _ in range(queue.capacity)]
        await self.learn(queue, until)
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)

    def restored(self, before: StreamingQueue, queue: StreamingQueue) -> None:
        """Let `queue` go on where `before` was cut."""
        finished = [row.group for row in before.finished]
        self.again = [serial for serial in self.unsettled if serial not in {g.serial for g in finished}]
        self.consumed, self.num_before = [], self.num_before + len(self.consumed)
        queue.restore(before.version, queue.num_groups - self.num_before, finished, self.unsettled)


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    window=st.sampled_from([1, 1, 2, 4]),
    drop_share=st.sampled_from([0.0, 0.3]),
    synchronous_until=st.sampled_from([0, 0, 1, 3, 5, 99]),
    cut=st.sampled_from([0, 0, 1, 2, 4, 6]),
)
def test_whatever_the_interleaving_groups_are_ordered_bounded_and_none_is_lost(
    seed, groups_per_step, max_staleness, window, drop_share, synchronous_until, cut
):
    steps = 8

    def fresh() -> StreamingQueue:
        return queue_of(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            window=window,
            num_groups=steps * groups_per_step,
            synchronous_until=synchronous_until,
        )

    played = Played(random.Random(seed), drop_share)
    order: list[int] = []

    async def main() -> None:
        queue = fresh()
        if cut:
            await played.run(queue, cut)
            order.extend(played.consumed)
            before, queue = queue, fresh()
            played.restored(before, queue)
        await played.run(queue, steps)
        order.extend(played.consumed)

    run_virtual(main())
    assert len(set(order)) == len(order) == steps * groups_per_step
    assert not played.unsettled
    if window == 1:
        assert order == sorted(order)


def test_up_to_a_version_there_is_no_more_in_the_pipe_than_one_step():
    queue = queue_of(groups_per_step=2, max_staleness=2, synchronous_until=2)

    async def scenario(producers: Producers) -> None:
        for version, admitted in ((0, [0, 0]), (1, [0, 0, 1, 1])):
            assert producers.admitted == admitted
            await producers.finish(2 * version, 2 * version + 1, versions=(version,))
            queue.release(await queue.take(version=version, on_stale=no_stale), version + 1)
            await settled()
        assert producers.admitted == [0, 0, 1, 1] + [2] * 6

    played(queue, scenario, num_producers=12)


def test_a_queue_restored_before_that_version_holds_one_step_and_drops_what_is_stale():
    stale: list[int] = []
    queue = queue_of(groups_per_step=2, max_staleness=2, synchronous_until=5)
    queue.restore(3, 20, finished=[group(6, versions=(2,))], pending=[6, 7])

    async def scenario(producers: Producers) -> None:
        assert producers.admitted == [3], "of two permits, one backs the group that is finished"
        await producers.finish(7, versions=(3,))
        take = asyncio.create_task(queue.take(version=3, on_stale=lambda group: stale.append(group.serial)))
        await settled()
        await producers.finish(8, versions=(3,))
        assert ([row.serial for row in await take], stale) == ([7, 8], [6])

    async def main() -> None:
        producers = Producers(queue)
        producers.start(range(7, 12))
        await settled()
        await scenario(producers)
        producers.cancel()

    run_virtual(main())


@pytest.mark.parametrize(
    ("window", "place", "version", "is_in_time"),
    [
        (1, 0, 7, True),
        (1, 0, 8, False),
        (1, 1, 7, True),
        (1, 2, 7, False),
        (1, 2, 6, True),
        (2, 1, 7, True),
        (3, 1, 7, True),
        (3, 3, 7, False),
        (1, 0, 5, True),
        (1, 0, 4, False),
        (3, 1, 4, False),
        (3, 1, 3, True),
    ],
)
def test_a_finished_group_is_in_time_if_it_is_taken_within_the_bound_whatever_overtakes_it(
    window, place, version, is_in_time
):
    """Two groups a step; a bound of two versions at window 1, of three at 2 and 3; synchronous before version 5. The
    group is of version 5 from there on, and of version 3 before."""
    queue = queue_of(groups_per_step=2, max_staleness=2, window=window, synchronous_until=5)
    one = group(9, versions=(5 if version >= 5 else 3,))
    assert queue.is_in_time(one, place, version) == is_in_time


def test_groups_that_were_taken_and_given_up_make_room_for_others():
    async def main() -> None:
        queue = queue_of(groups_per_step=2, num_groups=2)
        await produced(queue, 0, 1)
        queue.drop(await queue.take(version=0, on_stale=no_stale), "no_signal")
        assert queue.dropped == {"no_signal": 2}
        assert queue.num_permits == 2
        await produced(queue, 2, 3)
        assert await taken(queue) == [2, 3]

    run_virtual(main())
