"""What to do about a failure: one pure question. The driver executes the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rlsys.errors import (
    DeadlineExceeded,
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
    """Times that rolling out a group or judging it fails, or that its payload is lost, before the run ends. Each is
    counted apart: a group is not blamed for outliving different failures."""
    max_failed_groups: int
    """Groups dropped one after the other before the run ends: then it is not the task's fault."""

    def decide(self, error: RlsysError, *, attempt: int, dropped_in_a_row: int) -> Decision:
        """`attempt` counts from 1 for the piece of work at hand, or the losses of the group; `dropped_in_a_row` over
        all groups since one succeeded."""
        if isinstance(error, WorkerDied | DeadlineExceeded | WeightsMismatch | PayloadLost):
            if attempt >= self.max_attempts:
                return Abort(f"gave up after {attempt} attempts at one group; the last failure: {error}")
            return Reissue() if isinstance(error, PayloadLost) else Retry(restart=error.worker)
        if isinstance(error, TaskTooLong | NothingToTrain):
            if dropped_in_a_row + 1 < self.max_failed_groups:
                return Drop("too_long" if isinstance(error, TaskTooLong) else "failed")
            return Abort(f"{self.max_failed_groups} groups were dropped one after the other; the last failure: {error}")
        return Abort(str(error))
