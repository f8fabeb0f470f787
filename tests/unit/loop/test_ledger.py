"""Ledger: every group is issued, and then consumed or dropped, exactly once; an interruption changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.data.task_source import TaskSource
from rlsys.loop.task_ledger import Ledger
from rlsys.testing import tasks
from rlsys.types import Assignment
from rlsys.util.seeds import group_seed


def ledger_of(num_tasks: int = 5, seed: int = 3) -> Ledger:
    return Ledger(TaskSource(tasks(num_tasks), seed), group_size=4, seed=seed)


def test_assignments_are_numbered_and_seeded_by_their_number():
    ledger = ledger_of()
    first, second = ledger.issue(0), ledger.issue(2)
    assert (first.group_id, first.version, first.size) == (0, 0, 4)
    assert (second.group_id, second.version) == (1, 2)
    assert (first.seed, second.seed) == (group_seed(3, 0), group_seed(3, 1))
    assert first.task == ledger_of().source.next()


def test_consuming_groups_closes_them():
    ledger = ledger_of()
    for _ in range(7):
        ledger.issue(0)
    ledger.consume([4, 0, 6])
    assert (sorted(ledger.open), ledger.num_consumed) == ([1, 2, 3, 5], 3)


@pytest.mark.parametrize("settle", ["consume", "drop"])
def test_settling_twice_or_before_the_issue_raises(settle):
    ledger = ledger_of()
    ledger.issue(0)
    settled = {"consume": lambda group_id: ledger.consume([group_id]), "drop": ledger.drop}[settle]
    settled(0)
    for group_id in (0, 1):
        with pytest.raises(KeyError):
            settled(group_id)


def test_a_resume_first_reissues_open_groups_with_ids_and_seeds():
    before = ledger_of()
    issued = [before.issue(0) for _ in range(6)]
    before.consume([0, 2])
    before.drop(1)
    after = ledger_of()
    after.restore(before.state(), finished={4})
    again = [after.issue(9) for _ in range(3)]
    assert [(a.group_id, a.seed, a.task) for a in again[:2]] == [(s, issued[s].seed, issued[s].task) for s in (3, 5)]
    assert again[2].group_id == 6
    assert {a.version for a in again} == {9}
    after.consume([4])
    assert after.num_consumed == 3


def test_a_lost_group_is_issued_again_before_new_ones():
    ledger = ledger_of()
    issued = [ledger.issue(0) for _ in range(4)]
    for group_id in (3, 1):
        ledger.again(group_id)
    assert list(ledger.state().pending) == [0, 1, 2, 3]
    again = [ledger.issue(7) for _ in range(3)]
    assert [a.group_id for a in again] == [1, 3, 4]
    assert [(a.task, a.seed, a.version) for a in again[:2]] == [(issued[s].task, issued[s].seed, 7) for s in (1, 3)]
    ledger.consume([1])
    with pytest.raises(KeyError):
        ledger.again(1)


@pytest.mark.parametrize("num_tasks", [3, 5, 9])
def test_rows_that_were_removed_or_added_between_two_sessions_are_said_and_it_goes_on(num_tasks):
    before = ledger_of()
    issued = [before.issue(0) for _ in range(4)]
    before.consume([0])
    after = ledger_of(num_tasks=num_tasks)
    (note,) = after.restore(before.state(), finished=[2]) or [""]
    assert ("the tasks are others than those of the checkpoint" in note) == (num_tasks != 5)
    again = [after.issue(0) for _ in range(30)]
    assert [a.group_id for a in again] == [1, 3, *range(4, 32)]
    assert [a.seed for a in again[:2]] == [issued[1].seed, issued[3].seed]
    assert {a.task.id for a in again} == {task.id for task in tasks(num_tasks)}
    after.again(2)
    assert after.issue(0).task in tasks(num_tasks)


def test_rows_that_were_repaired_come_in_the_place_of_those_they_replace():
    before = ledger_of()
    issued = [before.issue(0) for _ in range(2)]
    repaired = [replace(task, answer=f"{task.answer}!") for task in tasks(5)]
    after = Ledger(TaskSource(repaired, seed=3), group_size=2, seed=3)
    (note,) = after.restore(before.state(), finished=())
    assert "at task 3 of epoch 1" in note
    again = [after.issue(0) for _ in range(3)]
    assert [a.task.answer for a in again[:2]] == [f"{a.task.answer}!" for a in issued]
    assert len({a.task.prompt for a in again}) == 3


def test_what_waits_to_be_issued_again_survives_a_second_interruption():
    before = ledger_of()
    for _ in range(3):
        before.issue(0)
    between = ledger_of()
    between.restore(before.state(), finished=())
    between.issue(0)
    assert list(between.state().pending) == [0, 1, 2]


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["issue", "issue", "consume", "drop", "crash", "again"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_whenever_it_crashes_every_group_is_settled_exactly_once(actions):
    ledger = ledger_of()
    meant: dict[int, Assignment] = {}
    settled: list[int] = []

    def issue() -> None:
        assignment = ledger.issue(0)
        known = meant.setdefault(assignment.group_id, assignment)
        assert (known.task, known.seed) == (assignment.task, assignment.seed)

    def settle(choice: int, how: str) -> None:
        if ledger.open:
            group_id = sorted(ledger.open)[choice % len(ledger.open)]
            ledger.drop(group_id) if how == "drop" else ledger.consume([group_id])
            settled.append(group_id)

    for action, choice in actions:
        if action == "issue":
            issue()
        elif action == "again" and ledger.open:
            ledger.again(sorted(ledger.open)[choice % len(ledger.open)])
        elif action == "crash":
            state, ledger = ledger.state(), ledger_of()
            ledger.restore(state, finished={group_id for group_id in state.pending if group_id % 10 < choice})
        elif action in ("consume", "drop"):
            settle(choice, action)
    while ledger.open:
        settle(0, "consume")
    while len(settled) < len(meant):
        issue()
        settle(0, "consume")
    assert len(set(settled)) == len(settled)
    assert sorted(meant) == list(range(len(meant)))
