"""Tasks that the run proposes are a source of its data: drawn in order, saved with the run, owed nothing before."""

from __future__ import annotations

from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.data.proposed_tasks import ProposedTasks, proposed_task
from rlsys.data.task_mixture import TaskMixture
from rlsys.data.task_source import TaskSource
from rlsys.errors import DataError
from rlsys.types import Task


def mixture(**weights: float) -> TaskMixture:
    sources = {"file": TaskSource([Task(id=f"f{i}", prompt=f"{i}") for i in range(5)], seed=1)}
    return TaskMixture(
        {**sources, "made": ProposedTasks("made", system="Be brief.")}, {0: {"file": 1.0, "made": 1.0, **weights}}
    )


def row(number: int) -> dict:
    return {"prompt": f"p{number}", "answer": f"{number}"}


def test_nothing_is_drawn_until_there_is_a_task_and_nothing_is_owed_then():
    tasks = mixture()
    assert {tasks.next().source for _ in range(20)} == {""}
    assert tasks.propose(row(0))
    drawn = [tasks.next().id.startswith("made") for _ in range(10)]
    assert sum(drawn) == 5
    assert drawn in ([True, False] * 5, [False, True] * 5)


def test_each_task_comes_once_in_order_and_then_from_the_first_again():
    made = ProposedTasks("made", system="Be brief.")
    for number in range(3):
        made.add(row(number))
    assert [made.next().prompt for _ in range(5)] == ["p0", "p1", "p2", "p0", "p1"]
    made.add(row(3))
    assert [made.next().prompt for _ in range(3)] == ["p2", "p3", "p0"]
    task = made.tasks[0]
    assert (task.source, task.system, task.answer) == ("made", "Be brief.", "0")


def test_a_known_task_is_ignored():
    tasks = mixture()
    assert [tasks.propose(row(n)) for n in (0, 0, 1)] == [True, False, True]
    assert tasks.num_proposed == 2
    assert not TaskMixture({"file": TaskSource([Task(id="f", prompt="p")], 1)}, {0: {"file": 1.0}}).propose(row(0))


actions = st.lists(st.integers(0, 6) | st.none(), max_size=40)


@given(before=actions, after=actions)
def test_a_stream_resumed_from_its_state_equals_an_uninterrupted_one(before, after):
    def play(tasks: TaskMixture, script: list) -> list[str]:
        drawn = []
        for action in script:
            if action is None:
                cursor = tasks.cursor
                drawn.append(tasks.next().id)
                assert tasks.at(cursor).id == drawn[-1]
            else:
                tasks.propose(row(action))
        return drawn

    whole, cut = mixture(), mixture()
    expected = play(whole, before + after)
    first = play(cut, before)
    resumed = mixture()
    assert resumed.restore(cut.state()) == []
    assert first + play(resumed, after) == expected
    twin = copy(cut)
    assert first + play(twin, after) == expected


def test_a_row_that_is_no_task_is_refused():
    with pytest.raises(DataError, match=r"a proposed task cannot be used: .*prompt"):
        ProposedTasks("made").add({"answer": "4"})


@pytest.mark.parametrize("row", [{"id": "\ud800"}, {"tools": {1}}])
def test_a_row_that_no_checkpoint_can_keep_is_refused(row):
    with pytest.raises(DataError, match=r"a proposed task cannot be written as JSON: .*; propose plain values"):
        proposed_task({"prompt": "2 + 2?", **row})
