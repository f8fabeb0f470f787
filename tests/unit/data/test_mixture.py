"""Several sources: each has its share of any number of tasks, and its own place, which a resume keeps."""

from __future__ import annotations

from collections import Counter
from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.data.task_mixture import TaskMixture
from rlsys.data.task_source import TaskSource
from rlsys.errors import DataError
from rlsys.types import Task


def tasks(name: str, num: int) -> list[Task]:
    return [Task(id=f"{name}/{i}", prompt=f"prompt {i}", source=name) for i in range(num)]


def mixture(sizes: dict[str, int], weights: dict[str, float], seed: int = 0) -> TaskMixture:
    return TaskMixture({name: TaskSource(tasks(name, size), seed) for name, size in sizes.items()}, {0: weights})


SIZES = {"a": 30, "b": 7, "c": 11}


def drawn(stream: TaskMixture, num: int) -> list[str]:
    return [stream.next().id for _ in range(num)]


def shares(ids: list[str]) -> Counter[str]:
    return Counter(each.partition("/")[0] for each in ids)


def test_two_sources_have_their_shares_within_one_percent_of_2000_tasks():
    found = shares(drawn(mixture({"a": 30, "b": 7}, {"a": 0.8, "b": 0.2}), 2000))
    assert found == {"a": 1600, "b": 400}


WEIGHTS = st.fixed_dictionaries({name: st.floats(0.01, 10) for name in SIZES})


@given(WEIGHTS, st.integers(1, 300))
def test_any_number_of_tasks_has_the_shares(weights: dict[str, float], num: int):
    found, total = shares(drawn(mixture(SIZES, weights), num)), sum(weights.values())
    assert all(abs(found[name] - num * weight / total) < len(SIZES) for name, weight in weights.items())


@given(WEIGHTS, st.integers(0, 200), st.integers(1, 60), st.integers(0, 2**32))
def test_a_mixture_resumed_from_its_state_equals_an_uninterrupted_one(
    weights: dict[str, float], before: int, after: int, seed: int
):
    interrupted, resumed = mixture(SIZES, weights, seed), mixture(SIZES, weights, seed)
    first = drawn(interrupted, before)
    assert resumed.restore(interrupted.state()) == []
    assert first + drawn(resumed, after) == drawn(mixture(SIZES, weights, seed), before + after)


@given(WEIGHTS, st.integers(60, 200))
def test_every_source_offers_each_of_its_tasks_once_per_epoch(weights: dict[str, float], num: int):
    ids = drawn(mixture(SIZES, weights), num)
    for name, size in SIZES.items():
        own = [each for each in ids if each.startswith(name)]
        epochs = [own[i : i + size] for i in range(0, len(own), size)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


def test_a_copy_has_a_place_of_its_own():
    stream = mixture(SIZES, {"a": 1, "b": 2, "c": 3})
    drawn(stream, 7)
    other = copy(stream)
    assert drawn(other, 20) == drawn(stream, 20)


def test_any_place_can_be_read_without_moving():
    stream = mixture(SIZES, {"a": 1, "b": 1, "c": 3})
    places = [(stream.cursor, stream.next().id) for _ in range(40)]
    assert [stream.at(cursor).id for cursor, _ in reversed(places)] == [each for _, each in reversed(places)]


@given(WEIGHTS, WEIGHTS, st.integers(1, 100), st.integers(0, 200), st.integers(1, 60))
def test_weights_that_change_hold_from_their_task_on_over_resumes(
    first: dict[str, float], later: dict[str, float], change: int, before: int, after: int
):
    def stream() -> TaskMixture:
        sources = {name: TaskSource(tasks(name, size), 0) for name, size in SIZES.items()}
        return TaskMixture(sources, {0: first, change: later})

    whole = drawn(stream(), change + 150)
    for weights, part in ((first, whole[:change]), (later, whole[change:])):
        found, total = shares(part), sum(weights.values())
        assert all(abs(found[name] - len(part) * weight / total) < len(SIZES) for name, weight in weights.items())
    cut, resumed = stream(), stream()
    begun = drawn(cut, before)
    assert resumed.restore(cut.state()) == []
    assert begun + drawn(resumed, after) == drawn(stream(), before + after)


def test_a_source_that_is_added_begins_and_the_others_go_on():
    before = mixture({"a": 30, "b": 7}, {"a": 0.8, "b": 0.2})
    first = drawn(before, 10)
    after = mixture(SIZES, {"a": 0.4, "b": 0.1, "c": 0.5})
    notes = after.restore(before.state())
    assert notes == [
        "the source c is new, and starts at its beginning (11 tasks)",
        "the source a has weight 0.4, before 0.8",
        "the source b has weight 0.1, before 0.2",
    ]
    more = drawn(after, 100)
    assert shares(more) == {"a": 40, "b": 10, "c": 50}, "it does not catch up with the others"
    own = [each for each in first + more if each.startswith("a")]
    assert own == drawn(mixture({"a": 30}, {"a": 1.0}), len(own))


def test_a_source_that_is_gone_or_changed_is_named():
    state = mixture(SIZES, {"a": 1, "b": 1, "c": 1}).state()
    with pytest.raises(DataError, match=r"the source b of the checkpoint is gone.*keep it, with weight 0"):
        mixture({"a": 30, "c": 11}, {"a": 1, "c": 1}).restore(state)
    (note,) = mixture({**SIZES, "c": 12}, {"a": 1, "b": 1, "c": 1}).restore(state)
    assert note.startswith("source c: the tasks are others than those of the checkpoint")
    assert shares(drawn(mixture(SIZES, {"a": 1, "b": 0, "c": 1}), 10)) == {"a": 5, "c": 5}


def test_one_source_and_several_are_not_mistaken_for_each_other():
    one, several = TaskSource(tasks("a", 30), 0), mixture(SIZES, {"a": 1, "b": 1, "c": 1})
    with pytest.raises(DataError, match="now there are several"):
        several.restore(one.state())
    with pytest.raises(DataError, match="a run with the sources a, b, c, and now there is one"):
        one.restore(several.state())


FACTORS = st.lists(
    st.tuples(st.integers(0, 40), st.fixed_dictionaries({name: st.floats(0.1, 1) for name in SIZES})),
    min_size=1,
    max_size=6,
)


@given(WEIGHTS, FACTORS)
def test_shares_that_change_often_are_kept_all_the_same(
    weights: dict[str, float], stages: list[tuple[int, dict[str, float]]]
):
    stream, found, due = mixture(SIZES, weights), Counter(), dict.fromkeys(SIZES, 0.0)
    for num, factors in stages:
        stream.multiply(factors)
        due = {name: due[name] + num * share for name, share in stream.shares.items()}
        found += shares(drawn(stream, num))
    assert all(abs(found[name] - due[name]) < len(SIZES) for name in SIZES)


@given(WEIGHTS, FACTORS, st.integers(1, 40))
def test_a_mixture_with_other_factors_goes_on_where_it_was(
    weights: dict[str, float], stages: list[tuple[int, dict[str, float]]], after: int
):
    whole, resumed = mixture(SIZES, weights), mixture(SIZES, weights)
    for num, factors in stages:
        whole.multiply(factors)
        drawn(whole, num)
    assert resumed.restore(whole.state()) == []
    assert drawn(resumed, after) == drawn(copy(whole), after) and resumed.shares == whole.shares
