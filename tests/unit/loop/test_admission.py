"""The number of groups in flight follows what the trainer needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.loop.admission import Admission

STEPS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=60)


@given(st.integers(1, 12), st.integers(0, 5), STEPS)
def test_there_is_always_one_step_of_permits_and_never_more_than_the_bound_allows(
    groups_per_step: int, max_staleness: int, steps: list[tuple[int, int]]
):
    admission = Admission(groups_per_step, groups_per_step * (max_staleness + 1))
    for num_ready, num_queued in steps:
        admission.observe(num_ready, num_queued)
        assert groups_per_step <= admission.permits <= admission.capacity


def observed(admission: Admission, *steps: tuple[int, int]) -> int:
    for step in steps:
        admission.observe(*step)
    return admission.permits


def test_groups_that_were_left_over_in_every_step_are_saved_except_for_a_quarter_of_a_step():
    admission = Admission(8, 40)
    assert observed(admission, *[(30, 0)] * 8, (20, 0)) == 40, "too early: their effect is not seen yet"
    assert observed(admission, (30, 0)) == 40 - (20 - 8 - 2)


def test_a_queue_at_the_replicas_is_left_over_too():
    assert observed(Admission(8, 40), *[(0, 12)] * 10) == 40 - (12 - 2)


def test_missing_groups_are_added_at_once():
    admission = Admission(8, 40)
    admission.permits = 16
    assert observed(admission, (5, 0)) == 19
    assert observed(admission, *[(0, 0)] * 9) == 40


def test_what_is_missing_while_requests_wait_for_a_slot_needs_slots_and_no_permits():
    admission = Admission(8, 40)
    admission.permits = 16
    assert observed(admission, (0, 5)) == 16
