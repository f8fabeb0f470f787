"""Number of groups in flight: the bound on staleness, and within it the number that keeps the trainer just busy.

Groups beyond the number that keeps the trainer just busy only grow old: they wait finished for the trainer, or at the
replicas for a slot. MSPipe (arXiv:2402.15113) picks the least staleness that hides what the trainer would wait for.
Here that is found while the run goes on, whenever the trainer asks for its next step:

    groups are missing, and no request waits for a slot    as many more permits as groups are missing
    in all of 2 (S + 1) steps, groups were left over       fewer permits: the least number that was left over, except
                                                           for a quarter of a step

S + 1 steps train all groups that were in flight at the last change, so its effect is seen before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlsys.types import PolicyVersion


@dataclass(slots=True)
class StalenessBound:
    """The hard bound on the age of tokens, in versions, and the number of permits that it follows from.

    With P groups a step, S = max_staleness and window W there are B = (S + 1) * P permits, and

        staleness  <=  (B + W - 2) // P          (exactly S for W = 1)

    provided a group starts on weights no older than its permit. Proof for W = 1: groups are taken in order of group
    ids. When the step of version v takes a group, at most B - 1 older groups held permits when that group was admitted.
    Those are at most S full steps plus the other P - 1 groups of its step. A lost group gives its permit back and keeps
    its place. It is reissued before any new group is issued, so each older group still holds a permit. With a window,
    each place by which finished groups may overtake adds one group, hence W - 1; without a limit, permits give no
    bound.

    Until the version `synchronous_until` is published only P of the permits exist. Each step then takes all groups in
    flight, and all were admitted at its version: staleness is 0 for any window. That version releases the other
    permits, as if the run began there, so the same bound holds from there.
    """

    groups_per_step: int
    max_staleness: int
    window: int
    """Places by which a finished group may overtake, and one."""
    synchronous_until: PolicyVersion = 0
    """Before this version, at most one step of groups is in flight."""

    @property
    def capacity(self) -> int:
        """Maximum number of permits: (max_staleness + 1) * groups_per_step."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def versions(self) -> int:
        """Maximum staleness of any trained token."""
        return (self.capacity + self.window - 2) // self.groups_per_step

    def permits_at(self, version: PolicyVersion) -> int:
        """Return the maximum number of permits while `version` is the newest."""
        return self.groups_per_step if version < self.synchronous_until else self.capacity

    def at(self, version: PolicyVersion) -> int:
        """Return the maximum staleness of tokens trained by the step of `version`."""
        return 0 if version < self.synchronous_until else self.versions

    def oldest_at(self, place: int, version: PolicyVersion) -> PolicyVersion:
        """Return the oldest version allowed for tokens of a group with `place` older groups before it from `version`
        on. As many younger groups as the window allows may overtake it."""
        num_before = place if version < self.synchronous_until else place + self.window - 1
        return version + num_before // self.groups_per_step - self.at(version)


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
