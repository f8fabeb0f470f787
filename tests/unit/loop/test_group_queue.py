"""Queue of groups: pacing by permits, order of group ids, version bounds, streamed columns, no loss and no
duplicate."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithm import Column
from rlsys.config.run_sections import LimitsSection
from rlsys.errors import PayloadLost
from rlsys.loop.failure_policy import DroppedGroups, FailurePolicy
from rlsys.loop.group_queue import LEARNER, GroupQueue, InFlightGroup, Permit, State
from rlsys.loop.task_ledger import LedgerState
from rlsys.monitoring.events import Events, GroupDropped, GroupIssued, GroupReissued, GroupRolledOut, GroupScored
from rlsys.testing import run_virtual
from rlsys.types import Group, Score
from rlsys.util import deadlines
from tests.groups import episode, group, hand_in, queue_of, rolled_out
from tests.growth import growth
from tests.simulate.world import EventRecorder

COLUMN = Column.REFERENCE_LOGPROBS
COLUMNS = frozenset({COLUMN})


@dataclass
class Producers:
    """One task per permit that was ever waited for; each holds its permit until told what to do with it."""

    queue: GroupQueue
    admitted: list[int] = field(default_factory=list)
    """Versions of the permits handed out, in order."""
    _told: dict[int, asyncio.Future[Group | None]] = field(default_factory=dict)
    """By group_id."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, count: int) -> None:
        self._tasks += [asyncio.create_task(self._produce()) for _ in range(count)]

    async def _produce(self) -> None:
        async with self.queue.permit() as permit:
            self.admitted.append(permit.group.assignment.version)
            told = self._told[permit.group.group_id] = asyncio.get_running_loop().create_future()
            done = await told
            if done is None:
                self.queue.drop(permit.group, "failed", "")
            else:
                hand_in(self.queue, permit, done)

    async def finish(self, *group_ids: int, versions: tuple[int, ...] = (0,)) -> None:
        for group_id in group_ids:
            self._told[group_id].set_result(group(group_id, versions=versions))
        await settled()

    async def drop(self, group_id: int) -> None:
        self._told[group_id].set_result(None)
        await settled()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the virtual clock."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


async def settled() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def played(queue: GroupQueue, scenario: Callable[[Producers], Awaitable[None]], num_producers: int = 6) -> None:
    """Run `scenario` beside producers."""

    async def main() -> None:
        producers = Producers(queue)
        producers.start(num_producers)
        await settled()
        await scenario(producers)
        producers.cancel()

    run_virtual(main())


async def taken(queue: GroupQueue, version: int = 0) -> list[int]:
    """Serials of a step, none of whose candidates is stale."""
    groups = await queue.take(version)
    assert not queue.dropped["stale"]
    return [each.group_id for each in groups]


async def produced(queue: GroupQueue, count: int, order: Callable[[list[Permit]], list[Permit]] = list) -> None:
    """So many groups that are rolled out and scored, each on a permit of its own, handed in in this order."""
    async with AsyncExitStack() as permits:
        held = [await permits.enter_async_context(queue.permit()) for _ in range(count)]
        for permit in order(held):
            assignment = permit.group.assignment
            hand_in(queue, permit, group(assignment.group_id, versions=(assignment.version,)))


def put(queue: GroupQueue, one: InFlightGroup, column: str) -> bool:
    """Hand in a column of any kind; that of an annotator is the number of the attempt."""
    if column == "episodes":
        return queue.finish_rollout(one, rolled_out(group(one.group_id)))
    if column == "reward":
        if is_new := queue.score(one, group(one.group_id)):
            queue.offer(one)
        return is_new
    return queue.put(one, Column(column), one.attempt)


def pending(*group_ids: int) -> LedgerState:
    """Of a session that issued groups up to the last of these, of which these are open."""
    ledger = queue_of().ledger
    for group_id in range(group_ids[-1] + 1):
        ledger.issue(0)
        if group_id not in group_ids:
            ledger.drop(group_id)
    return ledger.state()


# ----------------------------------------------------------------------------------------------------- life of a group


@virtual
async def test_a_group_goes_through_every_state_and_tells_its_transitions():
    recorder, seen = EventRecorder(), []

    queue = queue_of(1, columns=COLUMNS, events=Events([recorder]))
    async with queue.permit() as permit:
        one = permit.group
        seen.append(one.state)
        queue.start_rollout(permit)
        seen.append(one.state)
        await asyncio.sleep(5.0)
        queue.finish_rollout(one, rolled_out(group(0)))
        seen.append(one.state)
        queue.score(one, group(0))
        seen.append(one.state)
        queue.offer(one)
        assert one.state is State.SCORED, "its column is not there"
    assert await queue.take_for(COLUMN, 100) == [one]
    queue.put(one, COLUMN, "column")
    seen.append(one.state)
    assert await queue.take(0) == [one]
    seen.append(one.state)
    queue.put_back(LEARNER, [one])
    assert one.state is State.READY
    assert await queue.take(0) == [one]
    assert queue.release([one], 1) == [one.assignment.task]
    seen.append(one.state)
    assert one.is_over
    assert one.began_s is not None and deadlines.now() - one.began_s == 5.0
    assert (queue.groups, queue.ledger.open, queue.ledger.num_consumed) == ({}, {}, 1)
    assert seen == PATH
    assert [type(event) for event in recorder.events] == [GroupIssued, GroupRolledOut, GroupScored]


@virtual
async def test_reissues_and_drops_are_counted_and_reported():
    recorder = EventRecorder()

    queue = queue_of(1, events=Events([recorder]))
    await produced(queue, 1)
    (lost,) = await queue.take(0)
    queue.reissue(lost, "its payload is gone")
    assert (lost.state, list(queue.ledger.open)) == (State.REISSUED, [])
    async with queue.permit() as permit:
        again = permit.group
        assert (again.group_id, again.attempt, again.num_losses, again.state) == (0, 2, 1, State.ISSUED)
        queue.start_rollout(permit)
        assert queue.start_rollout(permit).attempt == 3, "a replica died"
        assert again.state is State.REISSUED
        queue.drop(permit.group, "too_long", "9 tokens too many")
    assert (permit.group.state, queue.groups) == (State.DROPPED, {})
    assert (queue.num_reissued, queue.dropped) == (2, {"too_long": 1})
    told = [event for event in recorder.events if not isinstance(event, GroupRolledOut | GroupScored)]
    task = recorder.of(GroupIssued)[0].task_id
    issued = GroupIssued(0, task, 0, 2)
    assert told == [
        issued,
        GroupReissued(0, task, "its payload is gone"),
        issued,
        GroupDropped(0, task, "too_long", "9 tokens too many"),
    ]


PATH = list(State)[:7]
LEGAL = {state: {later, State.DROPPED, State.REISSUED} for state, later in pairwise(PATH)}
LEGAL[State.TAKEN].add(State.READY)


@given(choices=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 99)), max_size=80), has_column=st.booleans())
@virtual
async def test_whatever_is_asked_for_no_group_makes_an_illegal_transition(choices, has_column):
    queue = queue_of(2, max_staleness=1, window=9, columns=COLUMNS if has_column else frozenset())
    held: list[tuple[AsyncExitStack, Permit]] = []
    attempts: list[InFlightGroup] = []

    def ask(operation: int, choice: int) -> None:
        permit, one = held[choice % len(held)][1], attempts[choice % len(attempts)]
        operations: list[Callable[[], object]] = [
            lambda: queue.start_rollout(permit),
            lambda: queue.finish_rollout(one, rolled_out(group(one.group_id))),
            lambda: queue.score(one, group(one.group_id)),
            lambda: queue.offer(one),
            lambda: has_column and queue.put(one, COLUMN, "column"),
            lambda: queue.put_back(LEARNER, [one]),
            lambda: queue.release([one], queue.version),
            lambda: queue.drop(one, "failed", ""),
            lambda: queue.reissue(one, ""),
        ]
        operations[operation]()

    def counts() -> tuple[int, ...]:
        return queue.num_refused, queue.num_reissued, queue.dropped.total(), queue.num_finished, queue.num_permits

    for operation, choice in choices:
        states, before = {one: one.state for one in attempts}, counts()
        if held and operation < 9:
            try:
                ask(operation, choice)
            except RuntimeError:
                assert ({one: one.state for one in attempts}, counts()) == (states, before)
        elif held and operation == 9:
            await held.pop(choice % len(held))[0].aclose()
        elif operation == 10 and queue.num_finished > 1:
            await queue.take(queue.version)
        elif queue._free.qsize():
            stack = AsyncExitStack()
            held.append((stack, await stack.enter_async_context(queue.permit())))
        assert all(one.state is state or one.state in LEGAL.get(state, ()) for one, state in states.items())
        latest = [*queue.groups.values(), *(permit.group for _, permit in held)]
        attempts += [one for one in dict.fromkeys(latest) if one not in attempts]
        issued = [n for n, one in queue.groups.items() if one.state is not State.REISSUED]
        assert sorted(queue.ledger.open) == issued
        assert list(queue.ledger.state().pending) == list(queue.groups)
        assert queue.num_finished == sum(one.state is State.READY for one in queue.groups.values())
        num_twice = sum(permit.group.is_offered for _, permit in held)
        assert queue.num_permits - num_twice == queue.bound.capacity
    for stack, _ in held:
        await stack.aclose()


@pytest.mark.parametrize("state", list(State))
@virtual
async def test_a_transition_that_is_none_raises_and_changes_nothing(state):
    async with queue_of().permit() as permit:
        for other in State:
            one = replace(permit.group, state=state)
            if other in LEGAL.get(state, ()):
                one.enter(other)
                assert one.state is other
                continue
            with pytest.raises(RuntimeError, match=f"group 0 is {state.name} and cannot become {other.name}"):
                one.enter(other)
            assert one.state is state


@virtual
async def test_the_table_says_what_is_pending_and_for_how_long():
    queue = queue_of(5, columns=COLUMNS)
    assert queue.table({}) == "  nothing is pending"
    async with AsyncExitStack() as permits:
        held = [await permits.enter_async_context(queue.permit()) for _ in range(4)]
        a, b, c, d = (permit.group.assignment.task.id for permit in held)
        zero, _, two, _ = (queue.start_rollout(permit) for permit in held)
        queue.start_rollout(held[1])
        queue.finish_rollout(zero, rolled_out(group(0)))
        queue.reissue(two, "")
        queue.finish_rollout(held[3].group, rolled_out(group(3)))
        queue.score(held[3].group, group(3))
        queue.offer(held[3].group)
        queue.put(held[3].group, COLUMN, "column")
        await asyncio.sleep(40)
        assert queue.table({0: "rollout-0", 1: "rollout-1", 9: "rollout-0"}).splitlines() == [
            f"  group 0: task {a}, attempt 1 begun 40 s ago, waits for reference_logprobs and reward",
            f"  group 1: task {b}, attempt 2, rollout-1 since 40 s",
            f"  group 2: task {c}, waits to be issued again",
            f"  group 3: task {d}, attempt 1 begun 40 s ago, waits to be trained",
        ]


@virtual
async def test_a_restored_group_has_no_attempt_in_this_session():
    queue = queue_of(2)
    queue.restore(pending(4, 5), 7, 9, [group(5, versions=(7,))])
    four, five = (each.assignment.task.id for each in queue.groups.values())
    assert queue.table({}).splitlines() == [
        f"  group 4: task {four}, waits to be issued again",
        f"  group 5: task {five}, waits to be trained",
    ]


# -------------------------------------------------------------------------------------------------- permits and window


def test_groups_in_the_pipe_never_exceed_the_permits():
    queue = queue_of(2, max_staleness=1)

    async def scenario(producers: Producers) -> None:
        assert len(producers.admitted) == queue.bound.capacity == 4
        await producers.finish(0, 1)
        await taken(queue)
        await settled()
        assert len(producers.admitted) == 4

    played(queue, scenario)


def test_released_permits_carry_the_version_that_was_published():
    queue = queue_of(2)

    async def scenario(producers: Producers) -> None:
        await producers.finish(0, 1)
        queue.release(await queue.take(0), 1)
        await settled()
        assert producers.admitted == [0, 0, 1, 1]

    played(queue, scenario)


def test_a_window_of_one_is_strictly_first_in_first_out():
    queue = queue_of(2, max_staleness=1)

    async def scenario(producers: Producers) -> None:
        await producers.finish(1, 2, 3)
        take = asyncio.create_task(taken(queue))
        await settled()
        assert not take.done()
        await producers.finish(0)
        assert await take == [0, 1]

    played(queue, scenario)


def test_a_window_counts_group_ids_past_the_oldest_open_group():
    queue = queue_of(1, max_staleness=3, window=3)

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


def test_a_drop_is_counted_and_its_permit_admits_another():
    queue = queue_of(2, num_groups=2)

    async def scenario(producers: Producers) -> None:
        assert len(producers.admitted) == 2
        await producers.drop(0)
        assert queue.dropped == {"failed": 1}
        assert len(producers.admitted) == 3
        await producers.finish(1, 2)
        assert await taken(queue) == [1, 2]

    played(queue, scenario)


def test_no_more_groups_are_admitted_than_the_run_will_consume():
    queue = queue_of(2, max_staleness=3, num_groups=4)

    async def scenario(producers: Producers) -> None:
        assert len(producers.admitted) == 4
        await producers.finish(0, 1)
        queue.release(await queue.take(0), 1)
        await settled()
        assert len(producers.admitted) == 4

    played(queue, scenario)


@pytest.mark.parametrize("is_dropped", [True, False])
@virtual
async def test_a_producer_that_raises_gives_its_permit_back(is_dropped):
    queue = queue_of(1)

    async def fail() -> int:
        async with queue.permit() as permit:
            if is_dropped:
                queue.drop(permit.group, "too_long", "")
            raise ZeroDivisionError(permit.group.group_id)

    for group_id in (0, 1) if is_dropped else (0, 0):
        with pytest.raises(ZeroDivisionError, match=str(group_id)):
            await fail()
    assert queue.dropped == ({"too_long": 2} if is_dropped else {})
    assert queue.num_permits == 1


@virtual
async def test_a_group_takes_no_episodes_but_its_own():
    queue = queue_of()
    async with queue.permit() as permit:
        one = queue.start_rollout(permit)
        with pytest.raises(ValueError, match="group 0 was handed group 4"):
            queue.finish_rollout(one, rolled_out(group(4)))
        queue.finish_rollout(one, rolled_out(group(0)))
        with pytest.raises(ValueError, match="group 0 was handed group 4"):
            queue.score(one, group(4))


def test_tokens_beyond_the_bound_are_dropped_as_stale_and_replaced():
    recorder = EventRecorder()
    queue = queue_of(1, max_staleness=1, version=5, events=Events([recorder]))

    async def scenario(producers: Producers) -> None:
        await producers.finish(0, versions=(3, 5))
        await producers.finish(1, versions=(4, 5))
        groups = await queue.take(5)
        stale = [event.group_id for event in recorder.of(GroupDropped)]
        assert ([each.group_id for each in groups], stale, queue.dropped) == ([1], [0], {"stale": 1})
        await settled()
        assert len(producers.admitted) == 3

    played(queue, scenario)


@virtual
async def test_dropping_taken_groups_frees_their_permits():
    queue = queue_of(2, num_groups=2)
    await produced(queue, 2)
    for one in await queue.take(0):
        queue.drop(one, "zero_advantage", "")
    assert queue.dropped == {"zero_advantage": 2}
    assert queue.num_permits == 2
    await produced(queue, 2)
    assert await taken(queue) == [2, 3]


def test_the_synchronous_phase_has_one_step_in_the_pipe():
    queue = queue_of(2, max_staleness=2, synchronous_until=2)

    async def scenario(producers: Producers) -> None:
        for version, admitted in ((0, [0, 0]), (1, [0, 0, 1, 1])):
            assert producers.admitted == admitted
            await producers.finish(2 * version, 2 * version + 1, versions=(version,))
            queue.release(await queue.take(version), version + 1)
            await settled()
        assert not queue.dropped
        assert producers.admitted == [0, 0, 1, 1] + [2] * 6

    played(queue, scenario, num_producers=12)


# ------------------------------------------------------------------------------------------------------------- restore


@virtual
async def test_a_restored_queue_keeps_finished_groups_and_places_of_others():
    queue = queue_of(2, max_staleness=1)
    queue.restore(pending(4, 5, 6), 7, 6, [group(5, versions=(6,)), group(6, versions=(6,))])
    assert [each.group_id for each in queue.finished_groups] == [5, 6]
    take = asyncio.create_task(queue.take(7))
    await settled()
    assert not take.done(), "group 4 is older than those that are finished"
    producers = Producers(queue)
    producers.start(5)
    await settled()
    assert producers.admitted == [7, 7]
    await producers.finish(4, versions=(7,))
    first = await take
    assert [each.group_id for each in first] == [4, 5]
    ledger = queue_of().ledger
    order = [ledger.issue(0).task for _ in range(6)]
    assert queue.release(first, 8) == order[4:]
    await settled()
    assert producers.admitted == [7, 7, 8, 8]
    assert len(queue.finished_groups) == queue.num_finished == 1
    assert not queue.dropped
    producers.cancel()


@virtual
async def test_a_queue_restored_while_synchronous_drops_its_stale_groups():
    recorder = EventRecorder()
    queue = queue_of(2, max_staleness=2, synchronous_until=5, events=Events([recorder]))
    queue.restore(pending(6, 7), 3, 20, [group(6, versions=(2,))])
    producers = Producers(queue)
    producers.start(5)
    await settled()
    assert producers.admitted == [3], "of two permits, one backs the group that is finished"
    await producers.finish(7, versions=(3,))
    take = asyncio.create_task(queue.take(3))
    await settled()
    await producers.finish(8, versions=(3,))
    stale = [event.group_id for event in recorder.of(GroupDropped)]
    assert ([each.group_id for each in await take], stale) == ([7, 8], [6])
    producers.cancel()


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
def test_a_group_is_in_time_if_taken_within_the_bound(window, place, version, is_in_time):
    """Two groups a step; a bound of two versions at window 1, of three at 2 and 3; synchronous before version 5. The
    group is of version 5 from there on, and of version 3 before."""
    queue = queue_of(2, max_staleness=2, window=window, synchronous_until=5)
    one = group(9, versions=(5 if version >= 5 else 3,))
    assert (one.oldest_version >= queue.bound.oldest_at(place, version)) == is_in_time


# ------------------------------------------------------------------------------------------------------------- columns


@virtual
async def test_the_learner_waits_for_the_columns_that_annotators_add():
    queue = queue_of(2, max_staleness=1, columns=COLUMNS)
    await produced(queue, 3)
    assert (queue.num_finished, [each.group_id for each in queue.finished_groups]) == (0, [0, 1, 2])
    assert queue.groups[0].lacking(COLUMNS) == [COLUMN]
    groups = await queue.take_for(COLUMN, max_tokens=30)
    assert [each.group_id for each in groups] == [0, 1, 2]
    for one in reversed(groups):
        assert queue.put(one, COLUMN, f"column of {one.group_id}")
    trained = [each.group for each in await queue.take(0)]
    assert [(g.group_id, g.columns) for g in trained] == [(n, {COLUMN: f"column of {n}"}) for n in (0, 1)]


@pytest.mark.parametrize(
    ("max_tokens", "group_ids"), [(1, [0]), (10, [0]), (20, [0, 1]), (29, [0, 1]), (30, [0, 1, 2])]
)
@virtual
async def test_an_annotator_takes_whole_groups_up_to_its_token_budget(max_tokens, group_ids):
    queue = queue_of(2, max_staleness=1, columns=COLUMNS)
    await produced(queue, 3, order=lambda held: [held[2], held[0], held[1]])
    groups = await queue.take_for(COLUMN, max_tokens)
    assert {each.group.num_tokens for each in groups} == {10}
    assert [each.group_id for each in groups] == group_ids


@virtual
async def test_results_for_an_ended_attempt_are_refused_and_counted():
    queue = queue_of(1, columns=COLUMNS)
    async with queue.permit() as permit:
        first = queue.start_rollout(permit)
        assert queue.finish_rollout(first, rolled_out(group(0)))
        assert not queue.finish_rollout(first, rolled_out(group(0))), "a duplicate"
        queue.reissue(first, "its payload is gone")
    await produced(queue, 1)
    assert not queue.score(first, group(0))
    (second,) = await queue.take_for(COLUMN, 100)
    assert not queue.put(first, COLUMN, "late")
    assert queue.put(second, COLUMN, "in time")
    (trained,) = await queue.take(0)
    assert trained.group.columns == {COLUMN: "in time"}
    queue.release([trained], 1)
    assert not queue.put(second, COLUMN, "after it was trained")
    assert (queue.num_refused, queue.num_reissued) == (4, 1)


@virtual
async def test_duplicate_and_outdated_columns_are_refused_and_counted():
    queue = queue_of(2, columns=COLUMNS)
    async with queue.permit() as permit, queue.permit() as other:
        first = queue.start_rollout(permit)
        assert queue.finish_rollout(first, rolled_out(group(0)))
        assert queue.put(first, COLUMN, 1)
        assert not queue.put(first, COLUMN, 2), "a duplicate"
        with pytest.raises(RuntimeError, match="group 1 is ISSUED and cannot be annotated"):
            queue.put(other.group, COLUMN, 5)
        queue.drop(permit.group, "failed", "")
        assert not queue.score(permit.group, group(0)), "the group was dropped"
        assert (queue.num_refused, queue.num_reissued) == (2, 0)
        assert first.columns == {COLUMN: 1}


@virtual
async def test_a_group_whose_episodes_may_change_is_annotated_once_it_is_scored():
    queue = queue_of(1, columns=COLUMNS, annotated_from=State.SCORED)
    async with queue.permit() as permit:
        first = queue.start_rollout(permit)
        queue.finish_rollout(first, rolled_out(group(0)))
        taking = asyncio.create_task(queue.take_for(COLUMN, 100))
        await asyncio.sleep(1.0)
        assert not taking.done()
        queue.score(first, replace(group(0), payload="replaced"))
        assert await taking == [first]
        assert first.group.payload == "replaced"


@virtual
async def test_a_column_that_nobody_needs_is_a_mistake():
    queue = queue_of(columns=COLUMNS)
    async with queue.permit() as permit:
        with pytest.raises(ValueError, match=r"group 0: no worker needs a column .*values"):
            queue.put(permit.group, Column.VALUES, 1)


@virtual
async def test_a_group_put_back_comes_next_unless_reissued():
    queue = queue_of(3, window=3)
    await produced(queue, 3)
    groups = await queue.take(0)
    assert [each.group_id for each in groups] == [0, 1, 2]
    queue.reissue(groups[1], "")
    queue.put_back(LEARNER, groups)
    assert queue.num_finished == 2
    queue.bound.groups_per_step = 2
    assert await taken(queue) == [0, 2]


@virtual
async def test_an_annotator_takes_again_what_is_put_back():
    queue = queue_of(3, columns=COLUMNS)
    await produced(queue, 3)
    groups = await queue.take_for(COLUMN, 100)
    queue.reissue(groups[1], "")
    queue.put_back(COLUMN, groups)
    assert await queue.take_for(COLUMN, 100) == [groups[0], groups[2]]


@pytest.mark.parametrize("order", list(permutations(["reward", COLUMN, Column.VALUES])))
@virtual
async def test_a_group_is_complete_with_its_columns_in_any_order(order):
    played_out = group(0, episodes=[episode(None), episode(None)])
    queue = queue_of(1, columns=frozenset({COLUMN, Column.VALUES}))
    async with queue.permit() as permit:
        one = queue.start_rollout(permit)
        queue.finish_rollout(one, rolled_out(played_out))
        for column in order:
            assert queue.num_finished == 0
            if column == "reward":
                assert queue.score(one, played_out.with_scores((Score(1.0), Score(0.5))))
                queue.offer(one)
            else:
                assert queue.put(one, column, f"column of {column}")
    (whole,) = await queue.take(0)
    assert whole.group.columns == {kind: f"column of {kind}" for kind in queue.columns}
    assert [e.trajectories[0].reward for e in whole.group.episodes] == [1.0, 0.5]


@given(seed=st.integers(0, 10**9), num_groups=st.integers(1, 30), num_kinds=st.integers(0, 3))
@virtual
async def test_every_consumer_gets_each_complete_group_once(seed, num_groups, num_kinds):
    chance = random.Random(seed)
    kinds = list(Column)[:num_kinds]
    needs = {LEARNER: {"episodes", "reward", *kinds}, **{kind: {"episodes"} for kind in kinds}}

    queue = queue_of(1, max_staleness=num_groups - 1, window=num_groups, columns=frozenset(kinds))
    delivered: dict[str, list[int]] = defaultdict(list)
    there: dict[int, set[str]] = defaultdict(set)

    async def take_one(consumer: str) -> None:
        ready = [one.group_id for one in groups if needs[consumer] <= there[one.group_id]]
        left = sorted(set(ready) - set(delivered[consumer]))
        assert consumer != LEARNER or queue.num_finished == len(left)
        found = queue._next(consumer)
        assert (found.group_id if found else None) == (left[0] if left else None)
        if found:
            took = queue.take(0) if consumer == LEARNER else queue.take_for(Column(consumer), 1)
            assert await took == [found]
            delivered[consumer].append(found.group_id)

    async with AsyncExitStack() as permits:
        held = [await permits.enter_async_context(queue.permit()) for _ in range(num_groups)]
        groups = [queue.start_rollout(permit) for permit in held]
        columns = ["episodes", "reward", *kinds]
        to_come = [(one, column) for one in groups for column in columns] * 2  # every column is handed in twice
        num_columns = len(to_come)
        chance.shuffle(to_come)
        while to_come:
            one, column = to_come.pop(0)
            if column != "episodes" and not there[one.group_id]:
                with pytest.raises(RuntimeError):
                    put(queue, one, column)
                to_come.append((one, column))
                continue
            assert put(queue, one, column) == (column not in there[one.group_id])
            there[one.group_id].add(column)
            await take_one(chance.choice(list(needs)))
        for consumer in needs:
            while queue._next(consumer):
                await take_one(consumer)
            assert Counter(delivered[consumer]) == Counter(one.group_id for one in groups)
        assert queue.num_refused == num_columns // 2


@given(seed=st.integers(0, 10**9))
@virtual
async def test_exactly_one_attempt_per_group_is_consumed(seed):
    chance = random.Random(seed)

    queue = queue_of(1, max_staleness=500, window=10, num_groups=1000, columns=COLUMNS)
    consumed: list[InFlightGroup] = []

    async with AsyncExitStack() as permits:

        async def attempt() -> InFlightGroup:
            return queue.start_rollout(await permits.enter_async_context(queue.permit()))

        attempts = [await attempt() for _ in range(10)]
        for _ in range(400):
            one = chance.choice(attempts)
            match chance.choice(["put", "put", "put", "put", "again", "take", "put back"]):
                case "put":
                    column = chance.choice(["episodes", "reward", COLUMN])
                    if one.episodes is None and not one.is_over and column != "episodes":
                        with pytest.raises(RuntimeError):
                            put(queue, one, column)
                    else:
                        is_refused = not put(queue, one, column)
                        assert is_refused or queue.groups[one.group_id] is one
                case "again" if not one.is_over and one not in consumed:
                    queue.reissue(one, "")
                    attempts.append(again := await attempt())
                    assert again.group_id == one.group_id
                case "take" if queue.num_finished:
                    (found,) = await queue.take(0)
                    assert queue.groups[found.group_id] is found
                    assert found.group.columns == {COLUMN: found.attempt}
                    assert found.group_id not in {c.group_id for c in consumed}
                    consumed.append(found)
                case "put back" if consumed:
                    queue.put_back(LEARNER, [consumed.pop()])
                case _:
                    pass
        for one in queue.groups.values():
            for column in ("episodes", "reward", COLUMN):
                is_there = column not in one.lacking(queue.columns)
                assert put(queue, one, column) == (not is_there)
        rest = [group_id for _ in range(10 - len(consumed)) for group_id in await taken(queue)]
        assert sorted([*rest, *(one.group_id for one in consumed)]) == list(range(10))


# --------------------------------------------------------------------------------------------------------------- losses


@virtual
async def test_a_lost_group_keeps_its_place_and_reuses_its_permit():
    queue = queue_of(2)
    await produced(queue, 2)
    zero, one = await queue.take(0)
    queue.reissue(zero, "")
    queue.put_back(LEARNER, [one])
    take = asyncio.create_task(queue.take(0))
    await settled()
    assert not take.done(), "group 0 is older"
    await produced(queue, 1)
    again = await take
    assert [each.group_id for each in again] == [0, 1]
    assert again[0] is not zero
    assert again[1] is one
    queue.release(again, 1)
    await produced(queue, 2)
    assert (queue.dropped, queue.num_reissued) == ({}, 1)


@virtual
async def test_the_loss_of_an_attempt_that_is_over_changes_nothing():
    queue = queue_of(1, max_staleness=1)
    losses = DroppedGroups(queue, FailurePolicy(LimitsSection()))

    def lose(one: InFlightGroup) -> bool:
        num_losses = one.num_losses
        assert losses.reissue_lost(PayloadLost((0,)), [one]) == []
        return one.num_losses > num_losses

    await produced(queue, 1)
    (first,) = queue.finished_groups
    assert lose(first)
    assert not lose(first), "it waits to be issued again"
    await produced(queue, 1)
    assert not lose(first), "the next attempt is there"
    groups = await queue.take(0)
    assert not lose(first), "the next attempt is being trained"
    queue.release(groups, 1)
    assert not any(map(lose, (first, *groups))), "the group is trained"
    assert (queue.num_permits, queue.dropped) == (queue.bound.capacity, {})


@virtual
async def test_a_group_lost_while_scored_returns_its_permit_afterwards():
    queue = queue_of(1, columns=COLUMNS)
    async with queue.permit() as permit:
        one = queue.start_rollout(permit)
        queue.finish_rollout(one, rolled_out(group(0)))
        await queue.take_for(COLUMN, 100)
        queue.reissue(one, "")
        assert one.is_over
        assert not queue.score(one, group(0))
        again = asyncio.create_task(produced(queue, 1))
        await settled()
        assert not again.done(), "there is one permit"
    await again
    assert [each.group_id for each in await queue.take_for(COLUMN, 100)] == [0]
    assert not queue.dropped


@virtual
async def test_attempts_and_losses_of_a_group_are_counted_apart():
    queue = queue_of(4)
    async with AsyncExitStack() as permits:
        held = [await permits.enter_async_context(queue.permit()) for _ in range(4)]
        one, three = queue.start_rollout(held[1]), queue.start_rollout(held[3])
        assert [one.attempt, queue.start_rollout(held[1]).attempt] == [1, 2]
        queue.reissue(three, "")
        queue.reissue(held[1].group, "")
    async with queue.permit() as again, queue.permit() as later:
        queue.start_rollout(later)
        assert [again.group.group_id, later.group.group_id] == [0, 1], "producers 0 and 2 were cut off"
        assert (later.group.attempt, later.group.num_losses) == (3, 1)
        assert (again.group.attempt, again.group.num_losses) == (2, 0)


# ----------------------------------------------------------------------------------------------------------- streaming

STAGE_S = {"roll out": 0.3, "score": 1.0, COLUMN: 0.5, Column.VALUES: 0.8, "train": 0.2}
"""Annotators work beside the judge."""


async def makespan_s(num_groups: int, *, is_streaming: bool) -> float:
    """Seconds until every group is trained, if each stage works on one at a time: as they come, or one stage after the
    other."""
    columns = (COLUMN, Column.VALUES)
    queue = queue_of(1, max_staleness=num_groups - 1, num_groups=num_groups, columns=frozenset(columns))
    to_score: asyncio.Queue[tuple[Permit, Group]] = asyncio.Queue()

    async def roll_out() -> None:
        for permit in held:
            await asyncio.sleep(STAGE_S["roll out"])
            done = group(permit.group.group_id)
            queue.finish_rollout(queue.start_rollout(permit), rolled_out(done))
            to_score.put_nowait((permit, done))

    async def score() -> None:
        for _ in range(num_groups):
            permit, done = await to_score.get()
            await asyncio.sleep(STAGE_S["score"])
            queue.score(permit.group, done)
            queue.offer(permit.group)

    async def annotate(column: Column) -> None:
        for _ in range(num_groups):
            (one,) = await queue.take_for(column, 1)
            await asyncio.sleep(STAGE_S[column])
            queue.put(one, column, "column")

    async def train() -> None:
        for version in range(num_groups):
            groups = await queue.take(version)
            await asyncio.sleep(STAGE_S["train"])
            queue.release(groups, version + 1)

    async with AsyncExitStack() as permits:
        held = [await permits.enter_async_context(queue.permit()) for _ in range(num_groups)]
        began = asyncio.get_running_loop().time()
        stages = [roll_out(), score(), *map(annotate, columns), train()]
        if is_streaming:
            await asyncio.gather(*stages)
        else:
            for stage in stages:
                await stage
        assert queue.ledger.num_consumed == num_groups
        return asyncio.get_running_loop().time() - began


def test_five_streaming_stages_take_as_long_as_the_slowest():
    num_groups = 40
    apart_s = run_virtual(makespan_s(num_groups, is_streaming=False))
    streaming_s = run_virtual(makespan_s(num_groups, is_streaming=True))
    assert apart_s == pytest.approx(num_groups * sum(STAGE_S.values()))
    first_and_last_s = STAGE_S["roll out"] + STAGE_S["train"]
    assert streaming_s == pytest.approx(num_groups * max(STAGE_S.values()) + first_and_last_s)


@pytest.mark.slow
def test_a_group_costs_the_same_among_five_thousand_in_flight_as_among_five_hundred():
    async def consume(num_groups: int) -> None:
        num_steps = num_groups // 100
        queue = queue_of(100, max_staleness=num_steps - 1, num_groups=num_groups, columns=COLUMNS)
        await produced(queue, num_groups, order=lambda held: held[::-1])
        for version in range(num_steps):
            for one in await queue.take_for(COLUMN, 1000):
                queue.put(one, COLUMN, None)
            assert queue.num_finished == 100
            groups = await queue.take(version)
            assert [each.group_id for each in groups] == list(range(100 * version, 100 * version + 100))
            queue.release(groups, version + 1)
        assert not queue.dropped

    assert growth(lambda num_groups: run_virtual(consume(num_groups)), 500, 5000) < 40


# ----------------------------------------------------------------------------------------------------------- the bound


@dataclass
class Played:
    """Producers that drop or finish groups, and a learner, on one queue after the other."""

    chance: random.Random
    drop_share: float
    consumed: list[int] = field(default_factory=list)
    in_pipe: set[int] = field(default_factory=set)
    """Serials that were issued, and neither dropped nor released."""
    num_before: int = 0
    """Groups consumed on the queues before."""

    @property
    def unsettled(self) -> list[int]:
        return sorted(self.in_pipe - {*self.consumed})

    async def produce(self, queue: GroupQueue) -> None:
        while True:
            async with queue.permit() as permit:
                assignment = permit.group.assignment
                self.in_pipe.add(assignment.group_id)
                assert len(self.in_pipe) <= queue.permits_at(queue.version)
                await asyncio.sleep(self.chance.paretovariate(1.2))
                if self.chance.random() < self.drop_share:
                    self.in_pipe.remove(assignment.group_id)
                    queue.drop(permit.group, "failed", "")
                else:
                    hand_in(queue, permit, group(assignment.group_id, versions=(assignment.version,)))

    async def learn(self, queue: GroupQueue, until: int) -> None:
        for version in range(queue.version, until):
            bound = 0 if version < queue.bound.synchronous_until else queue.bound.versions
            groups = await queue.take(version)
            for one in groups:
                assert one.group_id < self.unsettled[0] + queue.bound.window
                assert version - one.group.oldest_version <= bound
                self.consumed.append(one.group_id)
            await asyncio.sleep(self.chance.random() * 3)
            self.in_pipe -= {one.group_id for one in groups}
            queue.release(groups, version + 1)
            assert queue.num_permits == min(queue.permits_at(version + 1), queue.num_groups - len(self.consumed))

    async def run(self, queue: GroupQueue, until: int) -> None:
        """Until version `until` is published; then whatever is being produced is cut off."""
        producers = [asyncio.create_task(self.produce(queue)) for _ in range(queue.bound.capacity)]
        await self.learn(queue, until)
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)
        assert not queue.dropped["stale"]

    def restored(self, before: GroupQueue, queue: GroupQueue) -> None:
        """Let `queue` go on where `before` was cut."""
        state = before.ledger.state()
        assert list(state.pending) == self.unsettled
        self.consumed, self.num_before = [], self.num_before + len(self.consumed)
        finished = [each.group for each in before.finished_groups]
        queue.restore(state, before.version, queue.num_groups - self.num_before, finished)


@given(
    seed=st.integers(0, 10**6),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    window=st.sampled_from([1, 1, 2, 4]),
    drop_share=st.sampled_from([0.0, 0.3]),
    synchronous_until=st.sampled_from([0, 0, 1, 3, 5, 99]),
    cut=st.sampled_from([0, 0, 1, 2, 4, 6]),
)
@virtual
async def test_groups_stay_ordered_bounded_and_complete_under_any_interleaving(
    seed, groups_per_step, max_staleness, window, drop_share, synchronous_until, cut
):
    steps = 8

    def fresh() -> GroupQueue:
        num_groups = steps * groups_per_step
        sizes = (groups_per_step, max_staleness, window)
        return queue_of(*sizes, num_groups=num_groups, synchronous_until=synchronous_until)

    played = Played(random.Random(seed), drop_share)
    order: list[int] = []

    queue = fresh()
    if cut:
        await played.run(queue, cut)
        order.extend(played.consumed)
        before, queue = queue, fresh()
        played.restored(before, queue)
    await played.run(queue, steps)
    order.extend(played.consumed)
    assert len(set(order)) == len(order) == steps * groups_per_step
    assert not played.unsettled
    if window == 1:
        assert order == sorted(order)
