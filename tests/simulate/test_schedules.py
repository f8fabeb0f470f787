"""Random schedules with faults; `python -m benchmarks.schedules --count 10000` plays more of them."""

from __future__ import annotations

import pytest

from tests.simulate.schedules import played


@pytest.mark.parametrize("block", range(10))
def test_random_schedules_stay_bounded_and_train_every_task_once(block):
    for seed in range(30 * block, 30 * (block + 1)):
        outcome = played(seed)
        assert outcome.is_exactly_once, seed
        assert outcome.is_calibrated, seed
        assert outcome.staleness <= outcome.bound, seed
        assert outcome.num_stale == 0, seed
        assert outcome.num_healthy == 0, seed
        assert outcome.has_all_permits, seed


def test_schedules_cover_skipped_tasks_and_smaller_groups_and_grafts():
    outcomes = [played(seed) for seed in (1, 76, 124, 163)]
    assert all(outcome.num_grafted for outcome in outcomes)
    assert sum(outcome.num_passed_over for outcome in outcomes) > 10
    assert sum(outcome.num_smaller for outcome in outcomes) > 5
