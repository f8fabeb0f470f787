"""State of every group: a fold over events. It keeps a few hundred bytes per group, only what lists show."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rlsys.monitoring.events import (
    Event,
    GroupDropped,
    GroupIssued,
    GroupPlaced,
    GroupReissued,
    GroupRolledOut,
    GroupScored,
    RolledBack,
    RunStarted,
    StepDone,
)

Pending: TypeAlias = Literal[
    "waits for a replica", "is rolled out", "waits for its reward", "waits to be trained", "is lost"
]
State: TypeAlias = Pending | Literal["trained", "dropped"]

PENDING: Mapping[State, Pending] = {state: state for state in get_args(Pending)}
"""States of groups that are neither trained nor dropped."""


@dataclass(frozen=True, slots=True)
class RewardRange:
    """Summary of the rewards of a group's episodes."""

    num_episodes: int
    num_failed: int
    """Episodes without a reward."""
    mean: float | None
    min: float | None
    max: float | None

    @classmethod
    def of(cls, rewards: Sequence[float | None]) -> RewardRange:
        """Summarise rewards; None: the episode failed, or has no reward."""
        given = [r for r in rewards if r is not None]
        failed = len(rewards) - len(given)
        if not given:
            return cls(len(rewards), failed, None, None, None)
        return cls(len(rewards), failed, sum(given) / len(given), min(given), max(given))

    @property
    def is_zero_std(self) -> bool:
        """True if there are several rewards and all are equal."""
        return self.num_episodes - self.num_failed > 1 and self.min == self.max


@dataclass(slots=True)
class GroupFacts:
    """State of one group."""

    group_id: int
    task_id: str
    issued_s: float
    """Time of the first issue."""
    since_s: float
    """Time at which the current state began."""
    state: State = "waits for a replica"
    where: str = ""
    """Worker that is processing the group, or the replica that rolled it out."""
    size: int = 0
    num_attempts: int = 1
    reason: str = ""
    """Reason of the last reissue, or of the drop."""
    rewards: RewardRange | None = None
    length_mean: float | None = None
    num_truncated: int | None = None
    oldest: int | None = None
    """Oldest version of its tokens."""
    step: int | None = None
    """Step that trained it."""

    def enter(self, state: State, time_s: float) -> None:
        self.state, self.since_s = state, time_s


@dataclass
class Groups:
    """Every group of a run by group id, and the groups of every step."""

    by_group_id: dict[int, GroupFacts] = field(default_factory=dict)
    by_task: dict[str, list[int]] = field(default_factory=dict)
    """Group ids of each task, in order of issue."""
    by_step: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Group ids of each step, in the order of the batch."""
    forgotten: set[int] = field(default_factory=set)
    """Groups that a resumed run may not know: their results are not in the checkpoint, or are reported again."""
    num_reissued: int = 0
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=500))
    """Seconds from issue to score of the last groups."""

    @property
    def pending(self) -> list[GroupFacts]:
        """Groups that are neither trained nor dropped, nor forgotten."""
        known = (facts for group_id, facts in self.by_group_id.items() if group_id not in self.forgotten)
        return [facts for facts in known if facts.state in PENDING]

    HEARS = (
        RunStarted,
        GroupIssued,
        GroupPlaced,
        GroupRolledOut,
        GroupScored,
        GroupDropped,
        GroupReissued,
        StepDone,
        RolledBack,
    )

    def observe(self, event: Event, time_s: float) -> None:
        """Process one of the events in `HEARS`."""
        match event:
            case GroupIssued():
                self._on_issued(event, time_s)
            case GroupPlaced(group_id=group_id, worker=worker):
                if facts := self.by_group_id.get(group_id):
                    facts.enter("is rolled out", time_s if facts.where != worker else facts.since_s)
                    facts.where = worker
            case GroupRolledOut():
                self._on_rolled_out(event, time_s)
            case GroupScored(group_id=group_id, task_id=task_id, rewards=rewards):
                facts = self._of(group_id, task_id, time_s)
                facts.rewards = RewardRange.of(rewards)
                facts.enter("waits to be trained", time_s)
                self.took_s.append(time_s - facts.issued_s)
            case GroupDropped(group_id=group_id, task_id=task_id, reason=reason):
                facts = self._of(group_id, task_id, time_s)
                facts.enter("dropped", time_s)
                facts.reason = reason
            case GroupReissued(group_id=group_id, task_id=task_id, reason=reason):
                facts = self._of(group_id, task_id, time_s)
                facts.enter("is lost", time_s)
                facts.where, facts.reason, self.num_reissued = "", reason, self.num_reissued + 1
            case StepDone():
                self._on_trained(event, time_s)
            case RunStarted(first_step=first) | RolledBack(restored=first):
                self._back_to(first)
            case _:
                pass

    def _on_issued(self, event: GroupIssued, time_s: float) -> None:
        facts = self.by_group_id.get(event.group_id)
        if facts is None or event.group_id in self.forgotten or facts.state not in PENDING:
            self.forgotten.discard(event.group_id)
            facts = self._new(event.group_id, event.task_id, time_s)
        else:
            facts.num_attempts += 1
            facts.where = ""
            facts.enter("waits for a replica", time_s)
        facts.size = event.size

    def _on_rolled_out(self, event: GroupRolledOut, time_s: float) -> None:
        facts = self._of(event.group_id, event.task_id, time_s)
        facts.where, facts.oldest, facts.num_truncated = event.worker, event.oldest, event.num_truncated
        facts.length_mean = sum(event.lengths) / len(event.lengths) if event.lengths else None
        facts.size = facts.size or len(event.lengths)
        facts.enter("waits for its reward", time_s)

    def _on_trained(self, event: StepDone, time_s: float) -> None:
        if not event.group_ids:
            return
        self.by_step[event.step] = event.group_ids
        for group_id in event.group_ids:
            self.forgotten.discard(group_id)
            if facts := self.by_group_id.get(group_id):
                facts.step = event.step
                facts.enter("trained", time_s)

    def _of(self, group_id: int, task_id: str, time_s: float) -> GroupFacts:
        """State of a group. A group without an issue event begins now."""
        self.forgotten.discard(group_id)
        return self.by_group_id.get(group_id) or self._new(group_id, task_id, time_s)

    def _new(self, group_id: int, task_id: str, time_s: float) -> GroupFacts:
        facts = self.by_group_id.get(group_id)
        if facts is None:
            self.by_task.setdefault(task_id, []).append(group_id)
        elif facts.task_id != task_id:
            self.by_task[facts.task_id].remove(group_id)
            self.by_task.setdefault(task_id, []).append(group_id)
        facts = self.by_group_id[group_id] = GroupFacts(group_id, task_id, time_s, time_s)
        return facts

    def _back_to(self, step: int) -> None:
        """Reset at the start of a session, or when steps are lost.

        Groups not trained up to `step` are reported again, or lost.
        """
        for at in [at for at in self.by_step if at > step]:
            del self.by_step[at]
        for group_id, facts in self.by_group_id.items():
            if facts.state in PENDING or (facts.step is not None and facts.step > step):
                self.forgotten.add(group_id)
                facts.step = None
