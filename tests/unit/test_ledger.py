"""The ledger: every group is issued, and then consumed or dropped, exactly once; an interruption changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.data.source import TaskSource
from rlsys.errors import DataError
from rlsys.ledger import Ledger
from rlsys.seeds import group_seed
from rlsys.testing import run_virtual, tasks
from rlsys.types import Assignment

T = TypeVar("T")


def ledger_of(num_tasks: int = 5, seed: int = 3) -> Ledger:
    return Ledger(TaskSource(tasks(num_tasks), seed), group_size=4, seed=seed, lease_s=600.0)


def played(scenario: Coroutine[object, object, T]) -> T:
    return run_virtual(scenario)


def test_assignments_are_numbered_and_seeded_by_their_number():
    async def scenario() -> None:
        ledger = ledger_of()
        first, second = ledger.issue(0), ledger.issue(2)
        assert (first.serial, first.version, first.size) == (0, 0, 4)
        assert (second.serial, second.version) == (1, 2)
        assert (first.seed, second.seed) == (group_seed(3, 0), group_seed(3, 1))
        assert first.task == ledger_of().source.next()

    played(scenario())


def test_consuming_returns_the_tasks_in_order_and_closes_them():
    async def scenario() -> None:
        ledger = ledger_of()
        issued = [ledger.issue(0) for _ in range(7)]
        assert ledger.consume([4, 0, 6]) == [issued[i].task for i in (4, 0, 6)]
        assert (sorted(ledger.open), ledger.num_consumed) == ([1, 2, 3, 5], 3)

    played(scenario())


@pytest.mark.parametrize("settle", ["consume", "drop"])
def test_a_group_cannot_be_settled_twice_or_before_it_is_issued(settle):
    async def scenario() -> None:
        ledger = ledger_of()
        ledger.issue(0)
        settled = {"consume": lambda serial: ledger.consume([serial]), "drop": ledger.drop}[settle]
        settled(0)
        for serial in (0, 1):
            with pytest.raises(KeyError):
                settled(serial)

    played(scenario())


def test_the_table_says_what_is_pending_and_for_how_long():
    async def scenario() -> None:
        ledger = ledger_of()
        assert ledger.table({}, {}) == "  nothing is pending"
        a, b, c, d = (ledger.issue(0).task.id for _ in range(4))
        for serial in (0, 1, 1, 2, 3):
            ledger.lease(serial)
        ledger.again(2)
        await asyncio.sleep(40)
        owners, lacking = {1: "rollout-1"}, {0: ["reference_logprobs", "reward"], 1: ["episodes"], 3: []}
        assert ledger.table(owners, lacking).splitlines() == [
            f"  group 0: task {a}, attempt 1 begun 40 s ago, waits for reference_logprobs and reward",
            f"  group 1: task {b}, attempt 2, rollout-1 since 40 s, lease ends in 560 s",
            f"  group 2: task {c}, waits to be issued again",
            f"  group 3: task {d}, attempt 1 begun 40 s ago, waits to be trained",
        ]

    played(scenario())


def test_a_resume_issues_what_was_open_first_under_the_same_numbers_and_seeds():
    async def scenario() -> None:
        before = ledger_of()
        issued = [before.issue(0) for _ in range(6)]
        before.consume([0, 2])
        before.drop(1)
        after = ledger_of()
        after.restore(before.state(), finished={4})
        again = [after.issue(9) for _ in range(3)]
        assert [(a.serial, a.seed, a.task) for a in again[:2]] == [(s, issued[s].seed, issued[s].task) for s in (3, 5)]
        assert again[2].serial == 6
        assert {a.version for a in again} == {9}
        assert after.consume([4]) == [issued[4].task]
        assert after.num_consumed == 3

    played(scenario())


def test_a_lost_group_is_issued_again_before_new_ones_and_its_attempts_and_losses_are_counted():
    async def scenario() -> None:
        ledger = ledger_of()
        issued = [ledger.issue(0) for _ in range(4)]
        assert [ledger.lease(1).attempt, ledger.lease(1).attempt] == [1, 2]
        assert [ledger.again(3), ledger.again(1)] == [issued[3].task.id, issued[1].task.id]
        assert [e.serial for e in ledger.state().pending] == [0, 1, 2, 3]
        again = [ledger.issue(7) for _ in range(3)]
        assert [a.serial for a in again] == [1, 3, 4]
        assert [(a.task, a.seed, a.version) for a in again[:2]] == [(issued[s].task, issued[s].seed, 7) for s in (1, 3)]
        assert ledger.lease(1).attempt == 3
        assert [ledger.num_losses(serial) for serial in (0, 1, 3)] == [0, 1, 1]
        ledger.consume([1])
        assert ledger.num_losses(1) == 0
        with pytest.raises(KeyError):
            ledger.again(1)

    played(scenario())


def test_other_tasks_than_those_of_the_checkpoint_are_refused():
    async def scenario() -> None:
        state = ledger_of().state()
        with pytest.raises(DataError, match="the tasks are not those of the checkpoint"):
            ledger_of(num_tasks=6).restore(state, finished=())

    played(scenario())


def test_what_waits_to_be_issued_again_survives_a_second_interruption():
    async def scenario() -> None:
        before = ledger_of()
        for _ in range(3):
            before.issue(0)
        between = ledger_of()
        between.restore(before.state(), finished=())
        between.issue(0)
        assert [e.serial for e in between.state().pending] == [0, 1, 2]

    played(scenario())


@settings(deadline=None, max_examples=100)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["issue", "issue", "consume", "drop", "crash", "again"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_whenever_it_crashes_every_group_is_settled_exactly_once(actions):
    async def scenario() -> None:
        ledger = ledger_of()
        meant: dict[int, Assignment] = {}
        settled: list[int] = []

        def issue() -> None:
            assignment = ledger.issue(0)
            known = meant.setdefault(assignment.serial, assignment)
            assert (known.task, known.seed) == (assignment.task, assignment.seed)

        def settle(choice: int, how: str) -> None:
            if ledger.open:
                serial = sorted(ledger.open)[choice % len(ledger.open)]
                ledger.drop(serial) if how == "drop" else ledger.consume([serial])
                settled.append(serial)

        for action, choice in actions:
            if action == "issue":
                issue()
            elif action == "again" and ledger.open:
                ledger.again(sorted(ledger.open)[choice % len(ledger.open)])
            elif action == "crash":
                state, ledger = ledger.state(), ledger_of()
                ledger.restore(state, finished={e.serial for e in state.pending if e.serial % 10 < choice})
            elif action in ("consume", "drop"):
                settle(choice, action)
        while ledger.open:
            settle(0, "consume")
        while len(settled) < len(meant):
            issue()
            settle(0, "consume")
        assert len(set(settled)) == len(settled)
        assert sorted(meant) == list(range(len(meant)))

    played(scenario())
