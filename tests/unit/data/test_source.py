"""A task source continues from its cursor after any interruption, without a difference."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.data.task_source import Cursor, TaskSource, permute_index
from rlsys.errors import DataError
from rlsys.types import Task


def tasks(num: int, answer: str = "") -> list[Task]:
    return [Task(id=str(i), prompt=f"prompt {i}", answer=answer) for i in range(num)]


def drawn(source: TaskSource, num: int) -> list[str]:
    return [source.next().id for _ in range(num)]


@given(st.integers(1, 40), st.integers(0, 2**32), st.booleans(), st.integers(0, 120), st.integers(1, 60))
def test_a_source_resumed_from_its_cursor_equals_an_uninterrupted_one(
    size: int, seed: int, shuffle: bool, before: int, after: int
) -> None:
    interrupted = TaskSource(tasks(size), seed, shuffle=shuffle)
    first = drawn(interrupted, before)
    resumed = TaskSource(tasks(size), seed, shuffle=shuffle)
    resumed.seek(interrupted.cursor)
    assert first + drawn(resumed, after) == drawn(TaskSource(tasks(size), seed, shuffle=shuffle), before + after)


@given(st.integers(1, 70), st.integers(0, 2**32))
def test_every_epoch_offers_every_task_once(size: int, seed: int) -> None:
    source = TaskSource(tasks(size), seed)
    for _ in range(3):
        assert Counter(drawn(source, size)) == Counter(t.id for t in tasks(size))


@given(st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_what_is_left_out_is_never_drawn_and_all_else_in_the_same_order(
    size: int, seed: int, data: st.DataObject
) -> None:
    left_out = data.draw(st.sets(st.integers(0, size - 1).map(str), max_size=size - 1))
    whole, part = TaskSource(tasks(size), seed), TaskSource(tasks(size), seed, left_out=left_out)
    expected = [task_id for task_id in drawn(whole, 3 * size) if task_id not in left_out]
    before = data.draw(st.integers(0, len(expected)))
    assert drawn(part, before) == expected[:before]
    assert part.num_drawn == before
    assert part.at(part.cursor).id not in left_out
    resumed = TaskSource(tasks(size), seed, left_out=left_out)
    resumed.seek(part.cursor)
    assert resumed.num_drawn == before
    assert drawn(resumed, len(expected) - before) == expected[before:]


def test_a_source_of_which_everything_is_left_out_has_no_task() -> None:
    with pytest.raises(DataError, match="there is no task to train on"):
        TaskSource(tasks(2), seed=0, left_out={"0", "1"})


def test_any_place_can_be_read_without_moving() -> None:
    source = TaskSource(tasks(10), seed=3)
    places = [(source.cursor, source.next().id) for _ in range(25)]
    at_rest = source.cursor
    assert [source.at(cursor).id for cursor, _ in reversed(places)] == [task_id for _, task_id in reversed(places)]
    assert source.cursor == at_rest == Cursor(2, 5)


def test_without_shuffling_tasks_come_in_file_order() -> None:
    assert drawn(TaskSource(tasks(3), seed=9, shuffle=False), 7) == ["0", "1", "2", "0", "1", "2", "0"]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = TaskSource(tasks(50), seed=0)
    orders = [drawn(source, 50), drawn(source, 50), drawn(TaskSource(tasks(50), seed=1), 50)]
    assert len(set(map(tuple, orders))) == 3


def test_the_order_never_changes_between_versions() -> None:
    assert drawn(TaskSource(tasks(10), seed=0), 10) == ["5", "9", "3", "2", "0", "6", "4", "7", "1", "8"]


def test_every_order_of_a_small_set_is_about_equally_likely() -> None:
    orders = Counter(tuple(permute_index(i, 3, seed) for i in range(3)) for seed in range(6000))
    assert len(orders) == 6
    assert all(850 < count < 1150 for count in orders.values())


def test_other_tasks_than_those_of_the_checkpoint_are_said_and_begin_at_the_same_place() -> None:
    before = TaskSource(tasks(10), seed=0)
    drawn(before, 17)
    for other in (
        TaskSource(tasks(11), seed=0),
        TaskSource(tasks(10, answer="changed"), seed=0),
        TaskSource(tasks(10), seed=1),
        TaskSource(tasks(10), seed=0, shuffle=False),
    ):
        (note,) = other.restore(before.state())
        assert before.fingerprint in note and other.fingerprint in note and "task 8 of epoch 2" in note
        assert other.cursor == Cursor(1, 7)
    assert TaskSource(tasks(10), seed=0).restore(before.state()) == []


def test_where_the_place_is_gone_the_next_epoch_begins() -> None:
    before = TaskSource(tasks(10), seed=0)
    drawn(before, 17)
    shorter = TaskSource(tasks(6), seed=0)
    (note,) = shorter.restore(before.state())
    assert "task 1 of epoch 3" in note
    assert len(set(drawn(shorter, 6))) == 6


def test_a_cursor_outside_the_data_is_refused() -> None:
    with pytest.raises(DataError, match="outside 10 tasks"):
        TaskSource(tasks(10), seed=0).seek(Cursor(0, 10))


def test_a_source_without_tasks_is_refused() -> None:
    with pytest.raises(DataError, match="no task"):
        TaskSource([], seed=0)
