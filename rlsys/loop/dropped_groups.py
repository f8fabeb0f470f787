"""Dropping and reissuing of groups: the failure policy decides, and the queue executes."""

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
    """Counters of consecutive failures, and the calls that drop or reissue groups by them."""

    queue: GroupQueue
    failures: FailurePolicy
    num_failed: int = 0
    """Groups given up since the last useful scored group."""
    num_no_signal: int = 0
    """Groups without a signal since the last group with one."""
    num_settled_away: int = 0
    """Groups in steps that had nothing to train after `finalize_advantages`, since the last trained step."""

    def decide(self, error: RlsysError, attempt: int) -> Decision:
        """Return the decision on the failure of attempt number `attempt`, counted from 1."""
        in_a_row = self.num_no_signal if isinstance(error, NoSignal) else self.num_failed
        return self.failures.decide(error, attempt=attempt, dropped_in_a_row=in_a_row)

    def scored(self) -> None:
        """Reset the counters after a scored group that can be trained."""
        self.num_failed = self.num_no_signal = 0

    def trained(self) -> None:
        self.num_settled_away = 0

    def give_up(self, group: InFlightGroup, given_up: GivenUp) -> None:
        """Drop a group; does nothing if it was lost meanwhile, and is reissued."""
        if group.is_over:
            return
        if isinstance(given_up.error, NoSignal):
            self.num_failed, self.num_no_signal = 0, self.num_no_signal + 1
            self._warn(self.num_no_signal, 1, given_up.error)
        else:
            self.num_failed += 1
        self.queue.drop(group, given_up.decision.reason, str(given_up.error))

    def drop_step(self, groups: Sequence[InFlightGroup], error: NoSignal) -> None:
        """Drop all groups of a step that has nothing to train.

        Raises `RunAborted` if the failure policy ends the run.
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
        """Warn once, at a tenth of the limit on groups without a signal; `num_more` of them are new."""
        limit = self.failures.max_no_signal_groups
        if in_a_row - num_more < ceil(limit / 10) <= in_a_row:
            self.queue.events.emit(SignalMissing(in_a_row, limit, str(error)))

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
            if isinstance(decision := self.decide(error, group.num_losses + 1), Abort):
                raise RunAborted(decision.message) from error
            self.queue.reissue(group, str(error))
        return [group for group in groups if group not in lost]
