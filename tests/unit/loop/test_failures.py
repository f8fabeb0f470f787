"""Table of decisions: the consequence of each failure."""

from __future__ import annotations

import pytest

from rlsys.config.run_sections import LimitsSection
from rlsys.errors import (
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
from rlsys.loop.failure_policy import FailurePolicy

POLICY = FailurePolicy(LimitsSection(max_attempts=3, max_failed_groups=4, max_zero_advantage_groups=6))
MACHINE = [kind("rollout-1", "rolling out", "it broke") for kind in (WorkerDied, DeadlineExceeded, WeightsMismatch)]
TASK = [TaskTooLong("rollout-1", "encoding", "it is long"), NothingToTrain("it is void")]


def name(error: RlsysError) -> str:
    return type(error).__name__


def aborted(error: RlsysError, *, attempt: int, dropped_in_a_row: int) -> str:
    """The message with which the policy ends the run."""
    with pytest.raises(RunAborted) as raised:
        POLICY.decide(error, attempt=attempt, dropped_in_a_row=dropped_in_a_row)
    return str(raised.value)


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("error", MACHINE, ids=name)
def test_worker_faults_are_retried(error, attempt):
    assert POLICY.decide(error, attempt=attempt, dropped_in_a_row=99) is None


def test_lost_payloads_are_reissued_up_to_the_attempt_limit():
    error = PayloadLost((3, 5))
    assert POLICY.decide(error, attempt=2, dropped_in_a_row=99) is None
    message = "gave up after 3 attempts at one group; the last failure: the bytes of group 3, 5 are gone"
    assert aborted(error, attempt=3, dropped_in_a_row=0).startswith(message)


@pytest.mark.parametrize("error", MACHINE, ids=name)
def test_a_machine_that_breaks_every_time_ends_the_run(error):
    message = "gave up after 3 attempts at one group; the last failure: rollout-1 while rolling out: it broke"
    assert aborted(error, attempt=3, dropped_in_a_row=0) == message


@pytest.mark.parametrize(
    ("error", "reason"), list(zip(TASK, ["too_long", "failed"], strict=True)), ids=["long", "void"]
)
@pytest.mark.parametrize("dropped_in_a_row", [0, 2])
def test_what_a_task_broke_is_dropped_under_its_reason(error, reason, dropped_in_a_row):
    assert POLICY.decide(error, attempt=1, dropped_in_a_row=dropped_in_a_row) == reason


@pytest.mark.parametrize("error", TASK, ids=name)
def test_too_many_drops_in_a_row_end_the_run(error):
    message = f"4 groups were dropped one after the other; the last failure: {error}"
    assert aborted(error, attempt=1, dropped_in_a_row=3) == message


def test_groups_without_advantages_are_dropped_up_to_the_limit():
    error = ZeroAdvantage("group 7 (task a) has equal rewards: [1.0]")
    assert POLICY.decide(error, attempt=1, dropped_in_a_row=4) == "zero_advantage"
    for dropped_in_a_row in (5, 8):
        message = aborted(error, attempt=1, dropped_in_a_row=dropped_in_a_row)
        for part in (
            f"{dropped_in_a_row + 1} groups",
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
        (WorkflowError("rollout-1", "running W", "KeyError: 'x'"), "rollout-1 while running W: KeyError: 'x'"),
        (WorkerError("actor-0", "training", "out of memory"), "actor-0 while training: out of memory"),
        (TrainingError("the loss is nan"), "the loss is nan"),
        (ConfigError("train.lr"), "train.lr"),
    ],
    ids=["WorkflowError", "WorkerError", "TrainingError", "ConfigError"],
)
def test_errors_that_need_a_person_end_the_run_at_once(error, message):
    assert aborted(error, attempt=1, dropped_in_a_row=0) == message
