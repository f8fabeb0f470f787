"""Attempting one piece of work until it succeeds or the failure policy says otherwise."""

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
    """Carries the decision to drop a group up to where it is carried out."""

    def __init__(self, decision: Drop, error: RlsysError) -> None:
        super().__init__(decision.reason)
        self.decision, self.error = decision, error


@dataclass
class Retries:
    """Attempts pieces of work until they succeed, and has dead workers replaced."""

    events: Events
    """Told once of every worker that failed, however many pieces of work hit it."""
    decide: Callable[[RlsysError, int], Decision]
    """What to do about a failure of the n-th attempt at one piece of work, counted from 1."""
    _failed: set[str] = field(default_factory=set)
    """Names of workers. A replacement has a name of its own."""

    async def persist(self, pool: Rollouts | Rewards, attempt_once: Callable[[], Awaitable[T]]) -> T:
        """Attempt until it works.

        A worker of `pool` that is to be replaced is replaced in the background; the next attempt waits for that only
        if no other worker is alive. Raises `RunAborted`, or `GivenUp` where the decision is to drop. An error that no
        worker can be blamed for, of data or configuration, and `PayloadLost` pass as they are.
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
