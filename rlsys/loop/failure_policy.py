"""Decisions on failures, as one pure function. The driver executes them."""

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
    """Attempt the same work again, after the worker `restart` is replaced."""

    restart: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop this group, counted under `reason`; the run goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reissue:
    """Reissue the lost groups."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the run with this message."""

    message: str


Decision: TypeAlias = Retry | Drop | Reissue | Abort


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Retries failures of machines, drops groups whose task failed, and aborts on everything else."""

    max_attempts: int
    """Failures after which the run ends: of rolling out one group, of scoring it, or losses of its payload, each
    counted separately."""
    max_failed_groups: int
    """Consecutive failed groups after which the run ends: then the tasks are not the cause."""
    max_no_signal_groups: int
    """Consecutive groups without a signal after which the run ends: then further groups do not help."""

    def decide(self, error: RlsysError, *, attempt: int, dropped_in_a_row: int) -> Decision:
        """Decide on `error`. `attempt` counts from 1, for this piece of work or the losses of its group.
        `dropped_in_a_row` counts consecutive groups dropped for the same kind of reason."""
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
