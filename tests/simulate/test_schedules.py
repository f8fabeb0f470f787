"""Random schedules with faults; `python -m benchmarks.schedules --count 10000` plays more of them."""

from __future__ import annotations

import pytest

from tests.by_day import first_by_day
from tests.simulate.schedules import outcome_of, played, sessions_of


@pytest.mark.parametrize("block", first_by_day(range(10), 3))
def test_random_schedules_stay_bounded_and_train_every_task_once(block):
    for seed in range(12 * block, 12 * (block + 1)):
        outcome = played(seed)
        assert outcome.is_exactly_once, seed
        assert outcome.is_calibrated, seed
        assert outcome.staleness <= outcome.bound, seed
        assert outcome.num_stale == 0, seed
        assert outcome.num_healthy == 0, seed
        assert outcome.has_all_permits, seed


def test_schedules_cover_skipped_tasks_and_smaller_groups_and_replacements():
    outcomes = [played(seed) for seed in (1, 76, 124, 163)]
    assert all(outcome.num_replaced for outcome in outcomes)
    assert sum(outcome.num_passed_over for outcome in outcomes) > 10
    assert sum(outcome.num_smaller for outcome in outcomes) > 5


@pytest.mark.parametrize("seed", [6094, 8652])
def test_a_stopped_run_drops_nothing_after_its_last_checkpoint(seed):
    before = sessions_of(seed)[0][0][2]
    assert {group_id for group_id, _ in before.dropped} == {group_id for group_id, _ in before.lasting_drops()}
    assert played(seed).is_exactly_once


def test_groups_dropped_twice_or_lost_in_an_interrupted_run_are_found():
    sessions, limits = sessions_of(6094)
    before, after = (witness.dropped for _, _, witness in sessions)
    assert outcome_of(sessions, limits).is_exactly_once
    for dropped in (before, after):
        group_id, dropped_s = lasting = dropped[0]
        for second in (before, after):
            second.insert(0, (group_id, dropped_s))
            assert not outcome_of(sessions, limits).is_exactly_once
            del second[0]
        dropped.remove(lasting)
        assert not outcome_of(sessions, limits).is_exactly_once
        dropped.insert(0, lasting)
    assert outcome_of(sessions, limits).is_exactly_once
