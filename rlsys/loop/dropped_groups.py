"""What becomes of groups that are not trained as they are: the policy decides, and the queue carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rlsys.errors import NoSignal, PayloadLost, RlsysError, RunAborted
from rlsys.loop.failure_policy import Abort, Decision, Drop, FailurePolicy
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.in_flight_group import InFlightGroup
from rlsys.loop.retry import GivenUp
from rlsys.monitoring.events import SignalMissing


@dataclass
class DroppedGroups:
    """Counts what failed in a row, asks the failure policy, and has the queue drop groups or issue them again."""

    queue: GroupQueue
    failures: FailurePolicy
    num_failed: int = 0
    """Groups given up since one was scored."""
    num_no_signal: int = 0
    """Groups without a signal since one was scored that has some."""
    num_settled_away: int = 0
    """Groups of steps in which settling left nothing to train, since a step was trained."""

    def decide(self, error: RlsysError, attempt: int) -> Decision:
        """What to do about the failure of the `attempt`-th attempt, counted from 1."""
        in_a_row = self.num_no_signal if isinstance(error, NoSignal) else self.num_failed
        return self.failures.decide(error, attempt=attempt, dropped_in_a_row=in_a_row)

    def scored(self) -> None:
        """A group was scored, and there is something to learn in it."""
        self.num_failed = self.num_no_signal = 0

    def trained(self) -> None:
        """A step was trained."""
        self.num_settled_away = 0

    def give_up(self, group: InFlightGroup, given_up: GivenUp) -> None:
        """Drop a group; nothing to do if it was lost meanwhile, and is issued again."""
        if group.is_over:
            return
        if isinstance(given_up.error, NoSignal):
            self.num_failed, self.num_no_signal = 0, self.num_no_signal + 1
            self._warn(self.num_no_signal, 1, given_up.error)
        else:
            self.num_failed += 1
        self.queue.drop(group, given_up.decision.reason, str(given_up.error))

    def drop_step(self, groups: Sequence[InFlightGroup], error: NoSignal) -> None:
        """There is nothing to learn in a whole step: its groups go, and others come in their place.

        Raises `RunAborted` where the failure policy gives up.
        """
        self.num_settled_away += len(groups)
        decision = self.failures.decide(error, attempt=1, dropped_in_a_row=self.num_settled_away - 1)
        if isinstance(decision, Abort):
            raise RunAborted(decision.message)
        assert isinstance(decision, Drop)
        self._warn(self.num_settled_away, len(groups), error)
        for group in groups:
            self.queue.drop(group, decision.reason, str(error))

    def _warn(self, in_a_row: int, num_more: int, error: NoSignal) -> None:
        """Tell once that there is a tenth of the groups without a signal that end the run; `num_more` are the last."""
        limit = self.failures.max_no_signal_groups
        if in_a_row - num_more < ceil(limit / 10) <= in_a_row:
            self.queue.events.emit(SignalMissing(in_a_row, limit, str(error)))

    def issue_again(self, error: PayloadLost, groups: Sequence[InFlightGroup]) -> list[InFlightGroup]:
        """Issue the groups again whose payload is gone; returns the others.

        The next free permits are for them. An attempt that was over before is nobody's loss. Raises the error if it is
        not about any of these groups, and `RunAborted` where the failure policy gives up.
        """
        lost = [group for group in groups if group.group_id in error.group_ids]
        if not lost:
            raise error
        for group in lost:
            if group.is_over:
                continue
            if isinstance(decision := self.decide(error, group.num_losses + 1), Abort):
                raise RunAborted(decision.message) from error
            self.queue.reissue(group, str(error))
        return [group for group in groups if group not in lost]
