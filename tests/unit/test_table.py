"""The table of rows: every consumer gets every row once, when its columns are there, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.table import EPISODES, REWARD, Row, Table
from rlsys.testing import run_virtual
from rlsys.types import Score
from tests.groups import episode, group

NEEDS = {
    "learner": frozenset({"a", "b", "c"}),
    "annotator of b": frozenset({"a"}),
    "annotator of c": frozenset({"a"}),
    "judge of both": frozenset({"b", "c"}),
}


def taken(table: Table, consumer: str) -> list[int]:
    """Serials of everything that a consumer can take."""
    serials: list[int] = []
    while (row := table.next(consumer)) is not None:
        table.take(consumer, row)
        serials.append(row.serial)
    return serials


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9), num_rows=st.integers(1, 30), num_consumers=st.integers(1, 4))
def test_in_any_order_every_consumer_gets_every_row_once_when_its_columns_are_there(seed, num_rows, num_consumers):
    chance = random.Random(seed)
    consumers = dict(list(NEEDS.items())[:num_consumers])
    columns = sorted(frozenset().union(*consumers.values()))
    table = Table(consumers)
    rows = [table.open(serial) for serial in chance.sample(range(100), num_rows)]
    to_come = [(row, column) for row in rows for column in columns] * 2  # every column is handed in twice
    chance.shuffle(to_come)
    delivered: dict[str, list[int]] = defaultdict(list)
    there: dict[int, set[str]] = defaultdict(set)

    def take_one(consumer: str) -> None:
        ready = [r.serial for r in rows if consumers[consumer] <= there[r.serial]]
        left = sorted(set(ready) - set(delivered[consumer]))
        row = table.next(consumer)
        assert (row.serial if row else None) == (left[0] if left else None)
        assert table.num_ready(consumer) == len(left)
        if row:
            table.take(consumer, row)
            delivered[consumer].append(row.serial)

    for row, column in to_come:
        assert table.put(row, column, f"{row.serial}{column}") == (column not in there[row.serial])
        there[row.serial].add(column)
        take_one(chance.choice(list(consumers)))
    for consumer in consumers:
        while table.next(consumer):
            take_one(consumer)
        assert Counter(delivered[consumer]) == Counter(row.serial for row in rows)
    assert table.num_refused == len(to_come) // 2


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9))
def test_of_every_group_exactly_one_attempt_is_consumed_however_often_it_is_issued_again(seed):
    chance = random.Random(seed)
    table = Table(NEEDS)
    attempts: list[Row] = [table.open(serial) for serial in range(10)]
    consumed: list[Row] = []
    for _ in range(400):
        row = chance.choice(attempts)
        done = {r.serial for r in consumed}
        match chance.choice(["put", "put", "put", "put", "again", "take", "put back"]):
            case "put":
                is_refused = not table.put(row, column := chance.choice("abc"), column)
                assert is_refused or table.holds(row)
            case "again" if row.serial not in done:
                attempts.append(table.open(row.serial))
            case "take" if (ready := table.next("learner")) is not None:
                assert ready.has("a", "b", "c")
                assert ready.serial not in done
                assert table.holds(ready)
                table.take("learner", ready)
                consumed.append(ready)
            case "put back" if consumed:
                table.put_back("learner", consumed.pop())
            case _:
                pass
    for serial in range(10):
        row = table.get(serial)
        assert row is not None
        for column in "abc":
            if column not in row.values:
                assert table.put(row, column, column)
    rest = taken(table, "learner")
    assert sorted([*rest, *(row.serial for row in consumed)]) == list(range(10))


def test_a_column_is_refused_and_counted_where_nobody_waits_for_it():
    table = Table(NEEDS)
    first = table.open(1)
    assert table.put(first, "a", 1)
    assert not table.put(first, "a", 2), "a duplicate"
    second = table.open(1)
    assert not table.put(first, "b", 1), "its lease is over: the group was issued again"
    assert not table.put(Row(7), "a", 1), "nobody issued group 7"
    assert table.put(second, "a", 3)
    table.close(second)
    assert not table.put(second, "b", 1), "the group was dropped"
    assert table.num_refused == 4
    assert first.values == {"a": 1}


def test_a_column_that_nobody_needs_is_a_mistake():
    table = Table(NEEDS)
    with pytest.raises(ValueError, match="group 1: nobody needs a column 'z'"):
        table.put(table.open(1), "z", 1)


def test_a_row_that_is_put_back_is_next_again_and_one_issued_again_is_not():
    table = Table({"learner": frozenset("a")})
    rows = [table.open(serial) for serial in range(3)]
    for row in rows:
        table.put(row, "a", row.serial)
    assert taken(table, "learner") == [0, 1, 2]
    table.open(1)
    for row in rows:
        table.put_back("learner", row)
    assert table.num_ready("learner") == 2
    assert taken(table, "learner") == [0, 2]


def test_a_group_is_assembled_whole_from_its_columns_in_any_order():
    rolled_out = group(4, episodes=[episode(None), episode(None)])
    signal = object()
    table = Table({"learner": frozenset({EPISODES, REWARD, "signal"})})
    row = table.open(4)
    judged = rolled_out.with_scores((Score(1.0), Score(0.5)))
    for column, value in (("signal", signal), (REWARD, judged), (EPISODES, rolled_out)):
        assert table.next("learner") is None
        assert table.put(row, column, value)
    assert row.group.columns == {"signal": signal}
    assert [e.trajectories[0].reward for e in row.group.episodes] == [1.0, 0.5]


# ----------------------------------------------------------------------------------------------------------- streaming


def chain(stages: int) -> Mapping[str, frozenset[str]]:
    """Stage i reads column i and writes column i + 1."""
    return {str(i): frozenset({str(i)}) for i in range(stages)}


async def makespan_s(stage_s: list[float], num_rows: int, *, is_streaming: bool) -> float:
    """Seconds until the last stage has had every row: as they come, or one stage after the other."""
    table = Table({**chain(len(stage_s)), "end": frozenset({str(len(stage_s))})})
    progress = asyncio.Condition()

    async def work(stage: int) -> None:
        for _ in range(num_rows):
            async with progress:
                await progress.wait_for(lambda: table.next(str(stage)) is not None)
            row = table.next(str(stage))
            assert row is not None
            table.take(str(stage), row)
            await asyncio.sleep(stage_s[stage])
            async with progress:
                table.put(row, str(stage + 1), None)
                progress.notify_all()

    began = asyncio.get_running_loop().time()
    for row in [table.open(serial) for serial in range(num_rows)]:
        table.put(row, "0", None)
    if is_streaming:
        await asyncio.gather(*(work(stage) for stage in range(len(stage_s))))
    else:
        for stage in range(len(stage_s)):
            await work(stage)
    assert table.num_ready("end") == num_rows
    return asyncio.get_running_loop().time() - began


def test_five_stages_that_stream_take_as_long_as_the_slowest_and_not_as_long_as_all():
    stage_s, num_rows = [0.3, 1.0, 0.5, 0.8, 0.2], 40
    apart_s = run_virtual(makespan_s(stage_s, num_rows, is_streaming=False))
    streaming_s = run_virtual(makespan_s(stage_s, num_rows, is_streaming=True))
    assert apart_s == pytest.approx(num_rows * sum(stage_s))
    assert streaming_s == pytest.approx(num_rows * max(stage_s) + sum(stage_s) - max(stage_s))


def test_ten_thousand_rows_in_flight_cost_no_more_per_operation_than_a_few():
    num_rows = 10_000
    table = Table({"learner": frozenset({"a", "b"}), "annotator": frozenset({"a"})})
    began = time.process_time()
    rows = [table.open(serial) for serial in range(num_rows)]
    for row in reversed(rows):
        table.put(row, "a", None)
    for row in rows:
        annotated = table.next("annotator")
        assert annotated is row
        table.take("annotator", row)
        table.put(row, "b", None)
        assert table.num_ready("learner") == 1
        table.take("learner", row)
        table.close(row)
    assert time.process_time() - began < 2.0
