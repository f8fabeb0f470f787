"""Number of groups in flight that keeps the trainer just busy, within the bound on staleness.

Groups beyond that number only grow old: they wait finished for the trainer, or at the replicas for a slot. MSPipe
(arXiv:2402.15113) picks the least staleness that hides what the trainer would wait for. Here that is found while the
run goes on, whenever the trainer asks for its next step:

    groups are missing, and no request waits for a slot    as many more permits as groups are missing
    in all of 2 (S + 1) steps, groups were left over       fewer permits: the least number that was left over, except
                                                           for a quarter of a step

S + 1 steps train all groups that were in flight at the last change, so its effect is seen before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Admission:
    """Number of permits, between one step of groups and `capacity`; it begins at `capacity`."""

    groups_per_step: int
    capacity: int
    """(S + 1) steps of groups."""
    _left_over: list[int] = field(default_factory=list, init=False)
    """Groups left over in each step since the last change."""

    def __post_init__(self) -> None:
        self.permits = self.capacity

    def observe(self, num_ready: int, num_queued: int) -> None:
        """Adjust the number: the trainer asks for a step, `num_ready` groups are finished in its order, and at the
        replicas `num_queued` groups wait for a slot."""
        missing = self.groups_per_step - num_ready
        if missing > 0 and not num_queued:
            self.permits = min(self.capacity, self.permits + missing)
            self._left_over.clear()
            return
        self._left_over.append(max(0, -missing) + num_queued)
        if len(self._left_over) * self.groups_per_step < 2 * self.capacity:
            return
        spare = min(self._left_over) - self.groups_per_step // 4
        self.permits = max(self.groups_per_step, self.permits - max(0, spare))
        self._left_over.clear()
