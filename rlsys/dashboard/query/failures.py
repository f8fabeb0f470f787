"""Reasons for which episodes of training failed: a fold over events."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from rlsys.dashboard.responses import FailureRow, FailuresAnswer
from rlsys.monitoring.events import Event, GroupScored

MOST_REASONS = 500
"""Most distinct reasons in memory; those seen longest ago are forgotten first, and counted."""


@dataclass
class Failures:
    """Failed episodes of a run by reason, such as the exception of a reward function."""

    num_episodes: int = 0
    """Episodes scored or failed so far."""
    num_failed: int = 0
    _rows: dict[str, FailureRow] = field(default_factory=dict)
    """By reason, the one seen last at the end."""

    HEARS = (GroupScored,)

    def observe(self, event: Event, time_s: float) -> None:
        """Process one of the events in `HEARS`."""
        if not isinstance(event, GroupScored):
            return
        self.num_episodes += len(event.rewards)
        for reason, number in event.failures.items():
            if not isfinite(number):  # of a damaged file
                continue
            num, before = int(number), self._rows.pop(reason, None)
            self.num_failed += num
            self._rows[reason] = FailureRow(
                reason=reason,
                num_episodes=num + (before.num_episodes if before else 0),
                first_s=before.first_s if before else time_s,
                last_s=time_s,
                last_group_id=event.group_id,
                last_task_id=event.task_id,
            )
            if len(self._rows) > MOST_REASONS:
                del self._rows[next(iter(self._rows))]

    def answer(self) -> FailuresAnswer:
        """List the reasons, the most frequent first."""
        rows = sorted(self._rows.values(), key=lambda row: -row.num_episodes)
        return FailuresAnswer(rows, self.num_failed, self.num_episodes)
