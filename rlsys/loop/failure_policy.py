"""What to do about a failure: one pure question. The driver executes the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rlsys.errors import (
    DeadlineExceeded,
    NoSignal,
    NothingToTrain,
    PayloadLost,
    RlsysError,
    TaskTooLong,
    WeightsMismatch,
    WorkerDied,
)


@dataclass(frozen=True, slots=True)
class Retry:
    """Attempt the same work again, once the worker `restart` is replaced."""

    restart: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give this group up, counted under `reason`; the run goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reissue:
    """Issue the groups again that were lost."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the run with this message."""

    message: str


Decision: TypeAlias = Retry | Drop | Reissue | Abort


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Retry what a machine broke, drop what a task broke, abort on what only a person can mend."""

    max_attempts: int
    """Times that rolling out a group or scoring it fails, or that its payload is lost, before the run ends. Each is
    counted apart: a group is not blamed for outliving different failures."""
    max_failed_groups: int
    """Groups dropped as failed one after the other before the run ends: then it is not the task's fault."""
    max_no_signal_groups: int
    """Groups without a signal one after the other before the run ends: then waiting for another does not help."""

    def decide(self, error: RlsysError, *, attempt: int, dropped_in_a_row: int) -> Decision:
        """`attempt` counts from 1 for the piece of work at hand, or the losses of the group; `dropped_in_a_row` over
        all groups dropped for a reason of this kind since one was not."""
        if isinstance(error, WorkerDied | DeadlineExceeded | WeightsMismatch | PayloadLost):
            if attempt >= self.max_attempts:
                return Abort(f"gave up after {attempt} attempts at one group; the last failure: {error}")
            return Reissue() if isinstance(error, PayloadLost) else Retry(restart=error.worker)
        if isinstance(error, TaskTooLong | NothingToTrain):
            if dropped_in_a_row + 1 < self.max_failed_groups:
                return Drop("too_long" if isinstance(error, TaskTooLong) else "failed")
            return Abort(f"{self.max_failed_groups} groups were dropped one after the other; the last failure: {error}")
        if isinstance(error, NoSignal):
            if dropped_in_a_row + 1 < self.max_no_signal_groups:
                return Drop("no_signal")
            return Abort(_NO_SIGNAL.format(count=dropped_in_a_row + 1, error=error))
        return Abort(str(error))


_NO_SIGNAL = (
    "{count} groups one after the other had nothing to learn from, such as equal rewards in every group: the tasks are "
    "solved, or hopeless for this model, or the reward is constant. Look at rewards and answers, take tasks of another "
    "difficulty or a finer reward, or raise limits.max_no_signal_groups. The last: {error}"
)
