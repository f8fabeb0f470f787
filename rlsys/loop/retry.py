"""Retries of one piece of work until it succeeds or the failure policy decides otherwise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from rlsys.contracts import Rewards, Rollouts
from rlsys.errors import NoSignal, NothingToTrain, RlsysError, RunAborted, WorkerError
from rlsys.loop.failure_policy import Abort, Decision, Drop, Retry
from rlsys.monitoring.events import Events, WorkerFailed, WorkerRestarted

T = TypeVar("T")


class GivenUp(Exception):
    """Carries the decision to drop a group to the code that drops it."""

    def __init__(self, decision: Drop, error: RlsysError) -> None:
        super().__init__(decision.reason)
        self.decision, self.error = decision, error


@dataclass
class Retries:
    """Retries pieces of work until they succeed, and has dead workers replaced."""

    events: Events
    """Receives one event per failed worker, even if several pieces of work fail on it."""
    decide: Callable[[RlsysError, int], Decision]
    """Returns the decision on the failure of attempt n at one piece of work, counted from 1."""
    _failed: set[str] = field(default_factory=set)
    """Names of workers. A replacement has a new name."""

    async def persist(self, pool: Rollouts | Rewards, attempt_once: Callable[[], Awaitable[T]]) -> T:
        """Attempt until success.

        A failed worker of `pool` is replaced in the background; the next attempt waits for that only if no other worker
        is alive. Raises `RunAborted`, or `GivenUp` if the decision is to drop. Passes on `PayloadLost` and errors of
        data or configuration.
        """
        dead: tuple[str, RlsysError] | None = None
        for attempt in count(1):
            try:
                if dead:
                    await self._replace(pool, *dead)
                return await attempt_once()
            except (WorkerError, NothingToTrain, NoSignal) as error:
                match self.decide(error, attempt):
                    case Retry(restart=worker):
                        dead = (worker, error)
                    case Drop() as decision:
                        raise GivenUp(decision, error) from error
                    case Abort(message=message):
                        raise RunAborted(message) from error
        raise AssertionError("unreachable")

    async def _replace(self, pool: Rollouts | Rewards, worker: str, error: RlsysError) -> None:
        if worker not in self._failed:
            self._failed.add(worker)
            phase = error.phase if isinstance(error, WorkerError) else ""
            self.events.emit(WorkerFailed(worker, phase, str(error)))
        await pool.restart(worker, lambda replaced, seconds: self.events.emit(WorkerRestarted(replaced, seconds)))
