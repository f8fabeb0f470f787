"""Decisions on failures, as one pure function, and their execution: retries of work, and drops of groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import TypeAlias, TypeVar

from rlsys.config.run_sections import LimitsSection
from rlsys.contracts import Composer, Reference, Rewards, Rollouts
from rlsys.errors import (
    AllTruncated,
    CollectiveFailed,
    DeadlineExceeded,
    EndpointDown,
    GroupExpired,
    NothingToTrain,
    PayloadLost,
    RlsysError,
    RunAborted,
    TaskTooLong,
    WeightsMismatch,
    WorkerDied,
    WorkerError,
    WorkflowError,
    ZeroAdvantage,
)
from rlsys.loop.endpoints import Endpoints
from rlsys.loop.group_queue import GroupQueue, InFlightGroup
from rlsys.monitoring.events import Events, WorkerFailed, WorkerRestarted, ZeroAdvantageWarning

T = TypeVar("T")
Replaceable: TypeAlias = Rollouts | Rewards | Composer | Reference
"""Pools whose dead workers are replaced."""
_ZERO_ADVANTAGE = (
    "{count} groups one after the other had nothing to learn from, such as equal rewards in every group: the tasks are "
    "solved, or hopeless for this model, or the reward is constant. Look at rewards and answers, take tasks of another "
    "difficulty or a finer reward, or raise limits.max_zero_advantage_groups. The last: {error}"
)


TRUNCATED_STEPS = 10
"""Steps of groups in a row that may be left out because every reply was cut by length."""
RECENT = 100
"""Number of last groups of which `limits.failed_share` may fail."""
NEVER_A_SUCCESS = 16
"""Groups after which a run ends in which every group has failed."""
MOST_TOO_LONG = 1000
"""Groups after which a run ends if each was given up for the length of its task: where a run can measure prompts, it
leaves such tasks out."""


@dataclass
class RecentGroups:
    """Outcomes of the groups that were scored or given up last."""

    has_succeeded: bool = False
    num_too_long: int = 0
    """Groups that were given up for the length of their task, since one that was not."""
    _failed: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT - 1))
    """All but the one that is decided on."""

    @property
    def num_failed(self) -> int:
        return sum(self._failed)

    def add(self, *, is_failed: bool) -> None:
        self.num_too_long = 0
        self._failed.append(is_failed)
        self.has_succeeded = self.has_succeeded or not is_failed


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Retries failures of machines, drops groups whose task failed, and aborts on everything else.

    It also aborts after too many drops: of failed groups, because then the tasks are not the cause, or of groups with
    zero advantage in a row, because then further groups do not help.
    """

    limits: LimitsSection

    def decide(
        self, error: RlsysError, attempt: int, recent: RecentGroups | None = None, num_zero_advantage: int = 0
    ) -> str | None:
        """Return None to attempt the same work again, or the reason under which to drop its group.

        Raises `RunAborted` to end the run. `attempt` counts from 1, for this piece of work or the losses of its group.
        `recent` are the groups before this one, None where any number may fail; `num_zero_advantage` of them in a row
        were dropped for that reason.
        """
        if isinstance(error, WorkerDied | DeadlineExceeded | WeightsMismatch | PayloadLost):
            if attempt >= self.limits.max_attempts:
                raise RunAborted(f"gave up after {attempt} attempts at one group; the last failure: {error}")
            return None
        if isinstance(error, GroupExpired | WorkflowError) and attempt < self.limits.max_attempts:
            return None
        if isinstance(error, TaskTooLong):
            if recent is not None and recent.num_too_long + 1 >= MOST_TOO_LONG:
                raise RunAborted(f"{MOST_TOO_LONG} groups one after the other were too long; the last: {error}")
            return "too_long"
        if isinstance(error, NothingToTrain | GroupExpired | WorkflowError | EndpointDown):
            if recent is not None:
                self._check_share(recent, error)
            return "failed"
        if isinstance(error, ZeroAdvantage):
            if num_zero_advantage + 1 < self.limits.max_zero_advantage_groups:
                return "zero_advantage"
            raise RunAborted(_ZERO_ADVANTAGE.format(count=num_zero_advantage + 1, error=error))
        raise RunAborted(str(error))

    def _check_share(self, recent: RecentGroups, error: RlsysError) -> None:
        """Raise `RunAborted` if too many of the recent groups and one more have failed."""
        num_failed, share = recent.num_failed + 1, self.limits.failed_share
        if not recent.has_succeeded and num_failed >= NEVER_A_SUCCESS:
            raise RunAborted(f"each of the first {num_failed} groups failed; the last: {error}")
        if num_failed > share * RECENT:
            raise RunAborted(
                f"{num_failed} of the last {RECENT} groups failed, more than limits.failed_share {share:g}; "
                f"the last: {error}"
            )

    def check_replaceable(self, failures: Sequence[WorkerError]) -> None:
        """Return if all ranks of actor and critic are to be replaced after these failures since the last finished step.

        Raises `RunAborted` after too many: a collective that fails again without a dead rank has a cause that new
        processes do not remove.
        """
        num_collective = sum(isinstance(failure, CollectiveFailed) for failure in failures)
        if len(failures) >= self.limits.max_attempts or num_collective > 1:
            raise RunAborted(str(failures[-1])) from failures[-1]


class GivenUp(Exception):
    """Carries the decision to drop a group to the code that drops it."""

    def __init__(self, reason: str, error: RlsysError) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


@dataclass
class Retries:
    """Retries pieces of work until they succeed, and has dead workers replaced."""

    events: Events
    """Receives one event per failed worker, even if several pieces of work fail on it."""
    decide: Callable[[RlsysError, int], str | None]
    """Decides on the failure of attempt n at one piece of work, counted from 1; see `FailurePolicy.decide`."""
    endpoints: Endpoints
    _failed: set[str] = field(default_factory=set)
    """Names of workers. A replacement has a new name."""

    async def persist(self, pool: Replaceable, attempt_once: Callable[[], Awaitable[T]], source: str = "") -> T:
        """Attempt until success; `source` is that of the group's task, whose sources may need other servers.

        Waits for servers that do not answer, see `Endpoints`. A failed worker of `pool` is replaced in the background;
        the next attempt waits for that only if no other worker is alive. Raises `RunAborted`, or `GivenUp` if the
        decision is to drop. Passes on `PayloadLost` and errors of data or configuration.
        """
        try:
            return await self.endpoints.persist(lambda: self._attempt(pool, attempt_once), (type(pool), source))
        except EndpointDown as error:
            raise GivenUp(self.decide(error, 1) or "failed", error) from error

    async def _attempt(self, pool: Replaceable, attempt_once: Callable[[], Awaitable[T]]) -> T:
        death: WorkerError | None = None
        for attempt in count(1):
            try:
                if death is not None:
                    await self._replace(pool, death)
                return await attempt_once()
            except (WorkerError, NothingToTrain, ZeroAdvantage, GroupExpired) as error:
                if reason := self.decide(error, attempt):
                    raise GivenUp(reason, error) from error
                is_of_user = isinstance(error, WorkflowError)  # its worker is sound
                death = error if isinstance(error, WorkerError) and not is_of_user else None
        raise AssertionError("unreachable")

    async def _replace(self, pool: Replaceable, death: WorkerError) -> None:
        if not death.is_reported and death.worker not in self._failed:
            self._failed.add(death.worker)
            self.events.emit(WorkerFailed(death.worker, death.phase, str(death)))
        await pool.restart(death.worker, lambda worker, seconds: self.events.emit(WorkerRestarted(worker, seconds)))


@dataclass
class DroppedGroups:
    """Counts of failures, and the calls that drop or reissue groups by them."""

    queue: GroupQueue
    failures: FailurePolicy
    recent: RecentGroups = field(default_factory=RecentGroups)
    num_zero_advantage: int = 0
    """Groups with zero advantage since the last group that was trained."""
    num_truncated: int = 0
    """Of these, groups one after the other in which every reply was cut by length."""
    num_settled_away: int = 0
    """Groups in steps that had nothing to train after `finalize_advantages`, since the last trained step."""

    def decide(self, error: RlsysError, attempt: int) -> str | None:
        """Decide on the failure of attempt number `attempt`, see `FailurePolicy.decide`."""
        most = TRUNCATED_STEPS * self.queue.bound.groups_per_step
        if isinstance(error, AllTruncated) and self.num_truncated + 1 >= most:
            raise RunAborted(f"nothing was trained of {most} groups one after the other; the last: {error}")
        return self.failures.decide(error, attempt, self.recent, self.num_zero_advantage)

    def on_group_scored(self) -> None:
        """Count a scored group that can be trained."""
        self.recent.add(is_failed=False)
        self.num_zero_advantage = self.num_truncated = 0

    def on_step_trained(self) -> None:
        self.num_settled_away = 0

    def give_up(self, group: InFlightGroup, given_up: GivenUp) -> None:
        """Drop a group; does nothing if it was lost meanwhile, and is reissued."""
        if group.is_over:
            return
        if isinstance(given_up.error, ZeroAdvantage):
            self.num_zero_advantage += 1
            self.num_truncated = self.num_truncated + 1 if isinstance(given_up.error, AllTruncated) else 0
            self._warn(self.num_zero_advantage, 1, given_up.error)
        if isinstance(given_up.error, TaskTooLong):
            self.recent.num_too_long += 1
        else:
            self.recent.add(is_failed=not isinstance(given_up.error, ZeroAdvantage))
        self.queue.drop(group, given_up.reason, str(given_up.error))

    def drop_step(self, groups: Sequence[InFlightGroup], error: ZeroAdvantage) -> None:
        """Drop all groups of a step that has nothing to train.

        Raises `RunAborted` if the failure policy ends the run.
        """
        self.num_settled_away += len(groups)
        reason = self.failures.decide(error, 1, num_zero_advantage=self.num_settled_away - 1)
        assert reason is not None
        self._warn(self.num_settled_away, len(groups), error)
        for group in groups:
            self.queue.drop(group, reason, str(error))

    def _warn(self, in_a_row: int, num_more: int, error: ZeroAdvantage) -> None:
        """Warn once, at a tenth of the limit on groups with zero advantage; `num_more` of them are new."""
        limit = self.failures.limits.max_zero_advantage_groups
        if in_a_row - num_more < ceil(limit / 10) <= in_a_row:
            self.queue.events.emit(ZeroAdvantageWarning(in_a_row, limit, str(error)))

    def reissue_lost(self, error: PayloadLost, groups: Sequence[InFlightGroup]) -> list[InFlightGroup]:
        """Reissue the groups whose payload is lost; return the others.

        Reissued groups get the next free permits. A lost payload of a finished attempt is ignored. Raises `error` if it
        names none of these groups, and `RunAborted` if the failure policy ends the run.
        """
        lost = [group for group in groups if group.group_id in error.group_ids]
        if not lost:
            raise error
        for group in lost:
            if group.is_over:
                continue
            self.decide(error, group.num_losses + 1)
            self.queue.reissue(group, str(error))
        return [group for group in groups if group not in lost]
