"""What `benchmarks.chaos` calls broken: each law, on events in which it is."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos import broken_laws


def event(kind: str, time_s: float = 0.0, **fields: object) -> dict[str, Any]:
    return {"kind": kind, "time_s": time_s, **fields}


def step(number: int, *group_ids: int, time_s: float = 1.0) -> dict[str, Any]:
    return event("step_done", time_s, step=number, group_ids=group_ids)


def published(version: int, hash_: str) -> dict[str, Any]:
    return event("weights_published", version=version, hash=hash_)


STARTED = event("run_started", first_step=0)
ISSUED = [event("group_issued", group_id=i, task_id=f"task-{i}") for i in range(4)]
WHOLE = [STARTED, *ISSUED, published(0, "a"), step(1, 0, 1), published(1, "b"), event("group_dropped", group_id=2)]
BACK = event("rolled_back", version=2, restored=0)


def test_a_whole_run_breaks_no_law():
    assert broken_laws(WHOLE, {3}, 4) == []


def test_steps_that_were_rolled_back_count_no_more():
    again = [*WHOLE, BACK, published(2, "a"), step(3, 0, 1), published(3, "b")]
    assert broken_laws(again, {3}, 4) == []


def test_steps_after_the_resumed_checkpoint_count_no_more():
    resumed = [*WHOLE, STARTED, published(0, "a"), step(1, 1, 0), published(1, "c")]
    assert broken_laws(resumed, {3}, 4) == []


def test_a_version_that_is_made_again_has_a_hash_of_its_own_though_its_line_is_lost():
    again = [*WHOLE, step(2, 3), published(2, "c"), STARTED, published(0, "a"), step(1, 0, 1)]
    resumed = [*again, event("run_started", first_step=1), published(1, "lost"), step(2, 3)]
    assert broken_laws(resumed, set(), 4) == []


@pytest.mark.parametrize(
    ("more", "pending", "told"),
    [
        ([step(2, 1)], {3}, "group 1 was trained 2 times"),
        ([BACK, published(2, "a")], {3}, "group 0 is lost"),
        ([BACK, published(2, "b"), step(3, 0, 1)], {3}, "version 2 was restored with another hash"),
        ([STARTED, published(0, "b"), step(1, 0, 1)], {3}, "version 0 was restored with another hash"),
        ([published(1, "b")], {3}, "version 1 was published twice"),
        ([event("group_issued", group_id=1, task_id="task-9")], {3}, "group 1 has two tasks"),
        ([], set(), "group 3 is lost"),
        ([step(2, 3)], {3}, "group 3 is trained and pending"),
        ([step(2, time_s=50.0)], {3}, "49.0 s before step 2, for no named cause"),
    ],
)
def test_a_broken_law_is_named(more, pending, told):
    assert told in broken_laws([*WHOLE, *more], pending, 4)


def test_a_named_cause_excuses_a_pause():
    failed = event("worker_failed", 2.0, worker="actor-0")
    assert broken_laws([*WHOLE, failed, step(2, time_s=50.0)], {3}, 4) == []
