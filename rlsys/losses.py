"""What becomes of groups that are not trained as they are: given up, dropped as too stale, or issued again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.errors import PayloadLost, RlsysError, RunAborted
from rlsys.events import Events, GroupDropped, GroupReissued
from rlsys.failures import Abort, Decision, FailurePolicy
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
    num_in_a_row: int = 0
    """Groups given up since one was judged."""

    def decide(self, error: RlsysError, attempt: int) -> Decision:
        """What to do about the failure of the `attempt`-th attempt, counted from 1."""
        return self.failures.decide(error, attempt=attempt, dropped_in_a_row=self.num_in_a_row)

    def give_up(self, permit: Permit, assignment: Assignment, given_up: GivenUp) -> None:
        """Drop the group of a permit; nothing to do if it was lost meanwhile, and is issued again."""
        if permit.is_over:
            return
        self.num_in_a_row += 1
        permit.reason = given_up.decision.reason
        self._drop(assignment.serial, assignment.task.id, permit.reason, str(given_up.error))

    def drop_stale(self, group: Group) -> None:
        """The queue dropped this group as too stale."""
        detail = f"tokens of version {group.oldest_version} are older than the staleness bound allows"
        self._drop(group.serial, group.task_id, "stale", detail)

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
