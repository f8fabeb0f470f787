"""What becomes of groups that are not trained as they are: given up, dropped as too stale, or issued again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rlsys.errors import NoSignal, PayloadLost, RlsysError, RunAborted
from rlsys.events import Events, GroupDropped, GroupReissued, SignalMissing
from rlsys.failures import Abort, Decision, Drop, FailurePolicy
from rlsys.ledger import Ledger
from rlsys.persistence import GivenUp
from rlsys.queue import Permit, StreamingQueue
from rlsys.table import Row
from rlsys.types import Assignment, Group


@dataclass
class Losses:
    """Carries out what the failure policy decides about groups: in the queue, in the ledger, and as an event."""

    queue: StreamingQueue
    ledger: Ledger
    failures: FailurePolicy
    events: Events
    num_failed: int = 0
    """Groups given up since one was judged."""
    num_no_signal: int = 0
    """Groups without a signal since one was judged that has some."""
    num_settled_away: int = 0
    """Groups of steps in which settling left nothing to train, since a step was trained."""

    def decide(self, error: RlsysError, attempt: int) -> Decision:
        """What to do about the failure of the `attempt`-th attempt, counted from 1."""
        in_a_row = self.num_no_signal if isinstance(error, NoSignal) else self.num_failed
        return self.failures.decide(error, attempt=attempt, dropped_in_a_row=in_a_row)

    def judged(self) -> None:
        """A group was judged, and there is something to learn in it."""
        self.num_failed = self.num_no_signal = 0

    def trained(self) -> None:
        """A step was trained."""
        self.num_settled_away = 0

    def give_up(self, permit: Permit, assignment: Assignment, given_up: GivenUp) -> None:
        """Drop the group of a permit; nothing to do if it was lost meanwhile, and is issued again."""
        if permit.is_over:
            return
        if isinstance(given_up.error, NoSignal):
            self.num_failed, self.num_no_signal = 0, self.num_no_signal + 1
            self._warn(self.num_no_signal, 1, given_up.error)
        else:
            self.num_failed += 1
        permit.reason = given_up.decision.reason
        self._drop(assignment.serial, assignment.task.id, permit.reason, str(given_up.error))

    def drop_stale(self, group: Group) -> None:
        """The queue dropped this group as too stale."""
        detail = f"tokens of version {group.oldest_version} are older than the staleness bound allows"
        self._drop(group.serial, group.task_id, "stale", detail)

    def drop_step(self, rows: Sequence[Row], error: NoSignal) -> None:
        """There is nothing to learn in a whole step: its groups go, and others come in their place.

        Raises `RunAborted` where the failure policy gives up.
        """
        self.num_settled_away += len(rows)
        decision = self.failures.decide(error, attempt=1, dropped_in_a_row=self.num_settled_away - 1)
        if isinstance(decision, Abort):
            raise RunAborted(decision.message)
        assert isinstance(decision, Drop)
        self._warn(self.num_settled_away, len(rows), error)
        self.queue.drop(rows, decision.reason)
        for row in rows:
            self._drop(row.serial, row.group.task_id, decision.reason, str(error))

    def _warn(self, in_a_row: int, num_more: int, error: NoSignal) -> None:
        """Tell once that there is a tenth of the groups without a signal that end the run; `num_more` are the last."""
        limit = self.failures.max_no_signal_groups
        if in_a_row - num_more < ceil(limit / 10) <= in_a_row:
            self.events.emit(SignalMissing(in_a_row, limit, str(error)))

    def _drop(self, serial: int, task_id: str, reason: str, detail: str) -> None:
        self.ledger.drop(serial)
        self.events.emit(GroupDropped(serial, task_id, reason, detail))

    def issue_again(self, error: PayloadLost, rows: Sequence[Row]) -> list[Row]:
        """Issue the groups among `rows` again whose payload is gone; returns the others.

        The next free permits are for them. An attempt that was over before is nobody's loss. Raises the error if it is
        not about any of these rows, and `RunAborted` where the failure policy gives up.
        """
        kept = [row for row in rows if row.serial not in error.serials]
        if len(kept) == len(rows):
            raise error
        for row in rows:
            if row not in kept and self.queue.lose(row):
                self._again(row.serial, error)
        return kept

    def _again(self, serial: int, error: PayloadLost) -> None:
        task_id = self.ledger.again(serial)
        decision = self.decide(error, self.ledger.num_losses(serial))
        if isinstance(decision, Abort):
            raise RunAborted(decision.message) from error
        self.events.emit(GroupReissued(serial, task_id, str(error)))
