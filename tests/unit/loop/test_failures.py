"""Table of decisions: the consequence of each failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlsys.config.run_sections import LimitsSection
from rlsys.errors import (
    CollectiveFailed,
    ConfigError,
    DeadlineExceeded,
    NothingToTrain,
    PayloadLost,
    RlsysError,
    RunAborted,
    TaskTooLong,
    TrainingError,
    WeightsMismatch,
    WorkerDied,
    WorkerError,
    WorkflowError,
    ZeroAdvantage,
)
from rlsys.loop.endpoints import Endpoints
from rlsys.loop.failure_policy import MOST_TOO_LONG, FailurePolicy, RecentGroups, Retries
from rlsys.monitoring.events import Events, WorkerFailed
from rlsys.testing import EventRecorder, FakeWorld, run_virtual
from rlsys.testing.fake_pools import FakeRollouts

POLICY = FailurePolicy(LimitsSection(max_attempts=3, failed_share=0.2, max_zero_advantage_groups=6))
MACHINE = [kind("rollout-1", "rolling out", "it broke") for kind in (WorkerDied, DeadlineExceeded, WeightsMismatch)]
TASK = [TaskTooLong("rollout-1", "encoding", "it is long"), NothingToTrain("it is void")]
WORKFLOW = WorkflowError("rollout-1", "running W", "ConnectionError: refused")


def name(error: RlsysError) -> str:
    return type(error).__name__


def recent(num_failed: int, num_scored: int) -> RecentGroups:
    groups = RecentGroups()
    for is_failed in [True] * num_failed + [False] * num_scored:
        groups.add(is_failed=is_failed)
    return groups


def aborted(error: RlsysError, attempt: int, after: RecentGroups | None = None, num_zero_advantage: int = 0) -> str:
    """The message with which the policy ends the run."""
    with pytest.raises(RunAborted) as raised:
        POLICY.decide(error, attempt, after, num_zero_advantage)
    return str(raised.value)


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("error", MACHINE, ids=name)
def test_worker_faults_are_retried(error, attempt):
    assert POLICY.decide(error, attempt, recent(99, 1)) is None


def test_lost_payloads_are_reissued_up_to_the_attempt_limit():
    error = PayloadLost((3, 5))
    assert POLICY.decide(error, 2, recent(99, 1)) is None
    message = "gave up after 3 attempts at one group; the last failure: the bytes of group 3, 5 are gone"
    assert aborted(error, 3).startswith(message)


@pytest.mark.parametrize("error", MACHINE, ids=name)
def test_a_machine_that_breaks_every_time_ends_the_run(error):
    message = "gave up after 3 attempts at one group; the last failure: rollout-1 while rolling out: it broke"
    assert aborted(error, 3) == message


@pytest.mark.parametrize(
    ("error", "reason"), list(zip(TASK, ["too_long", "failed"], strict=True)), ids=["long", "void"]
)
@pytest.mark.parametrize("after", [recent(0, 0), recent(14, 0), recent(19, 1), None])
def test_what_a_task_broke_is_dropped_under_its_reason(error, reason, after):
    assert POLICY.decide(error, 1, after) == reason


def test_a_workflow_that_raises_is_attempted_again_and_then_dropped():
    assert [POLICY.decide(WORKFLOW, attempt, recent(0, 5)) for attempt in (1, 2, 3)] == [None, None, "failed"]


@pytest.mark.parametrize("error", [TASK[1], WORKFLOW], ids=name)
def test_too_large_a_share_of_failed_groups_ends_the_run(error):
    message = f"21 of the last 100 groups failed, more than limits.failed_share 0.2; the last: {error}"
    assert aborted(error, 3, recent(20, 60)) == message
    assert POLICY.decide(error, 3, recent(20, 99)), "the oldest failures are over"


@pytest.mark.parametrize("error", [TASK[1], WORKFLOW], ids=name)
def test_a_run_in_which_no_group_ever_succeeds_ends_soon(error):
    assert aborted(error, 3, recent(15, 0)) == f"each of the first 16 groups failed; the last: {error}"
    assert POLICY.decide(error, 3, recent(15, 1))


def test_tasks_that_are_too_long_end_a_run_only_if_nothing_else_comes():
    groups = recent(0, 0)
    groups.num_too_long = MOST_TOO_LONG - 2
    assert POLICY.decide(TASK[0], 1, groups) == "too_long"
    groups.num_too_long += 1
    assert aborted(TASK[0], 1, groups) == f"1000 groups one after the other were too long; the last: {TASK[0]}"
    groups.add(is_failed=False)
    assert POLICY.decide(TASK[0], 1, groups) == "too_long"


def test_groups_without_advantages_are_dropped_up_to_the_limit():
    error = ZeroAdvantage("group 7 (task a) has equal rewards: [1.0]")
    assert POLICY.decide(error, 1, num_zero_advantage=4) == "zero_advantage"
    for num_before in (5, 8):
        message = aborted(error, 1, num_zero_advantage=num_before)
        for part in (
            f"{num_before + 1} groups",
            "solved",
            "hopeless",
            "constant",
            "limits.max_zero_advantage_groups",
            "task a",
        ):
            assert part in message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerError("actor-0", "training", "out of memory"), "actor-0 while training: out of memory"),
        (TrainingError("the loss is nan"), "the loss is nan"),
        (ConfigError("train.lr"), "train.lr"),
    ],
    ids=["WorkerError", "TrainingError", "ConfigError"],
)
def test_errors_that_need_a_person_end_the_run_at_once(error, message):
    assert aborted(error, 1) == message


def test_a_share_of_one_is_never_exceeded():
    tolerant = FailurePolicy(LimitsSection(failed_share=1.0))
    groups = recent(0, 1)
    for _ in range(300):
        assert tolerant.decide(TASK[1], 3, groups) == "failed"
        groups.add(is_failed=True)


def test_deaths_of_ranks_end_the_run_after_as_many_as_allowed_and_collectives_after_two():
    death, collective = (kind("actor-1", "training a step", "x") for kind in (WorkerDied, CollectiveFailed))
    for failures in ([death], [death, death], [collective], [death, collective], [collective, death]):
        POLICY.check_replaceable(failures)
    for failures in ([death] * 3, [collective] * 2, [collective, death, collective]):
        with pytest.raises(RunAborted, match="actor-1 while training a step: x"):
            POLICY.check_replaceable(failures)


def test_a_failure_that_has_an_event_gets_no_second_one():
    recorder, told = EventRecorder(), DeadlineExceeded("rollout-1", "answering a heartbeat", "its node is cut off")
    told.is_reported = True
    events = Events([recorder])
    retries = Retries(events, lambda error, attempt: None, Endpoints(events, 3))
    world = FakeWorld()

    async def scenario() -> None:
        for failure in (told, WorkerDied("rollout-1", "rolling out", "the process is gone")):
            outcomes = iter([failure, None])

            async def attempt(outcomes: Iterator[WorkerError | None] = outcomes) -> None:
                if (error := next(outcomes)) is not None:
                    raise error

            await retries.persist(FakeRollouts(world), attempt)

    run_virtual(scenario())
    assert [event.detail for event in recorder.of(WorkerFailed)] == ["rollout-1 while rolling out: the process is gone"]
