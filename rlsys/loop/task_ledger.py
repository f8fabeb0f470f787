"""Exactly-once record of the tasks: the task of each group, and the groups that are neither consumed nor dropped.

Those groups are reissued after a resume, or when their payload is lost, under the same group id and so with the same
sampling seeds. An interrupted run therefore consumes the same multiset of tasks as an uninterrupted one.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rlsys.data.task_source import Cursor, TaskSource
from rlsys.errors import RunAborted
from rlsys.loop.curriculum import Curriculum, CurriculumState
from rlsys.types import Assignment, PolicyVersion, Task
from rlsys.util.seeds import group_seed


@dataclass(frozen=True, slots=True)
class IssuedTask:
    """Task of one group that is neither consumed nor dropped."""

    group_id: int
    task_id: str
    cursor: Cursor
    """Position of the task in the source, to draw it again."""
    size: int | None = None
    """Episodes, if curation gave it fewer than the group size; a reissued group keeps its size."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Ledger state in a checkpoint."""

    fingerprint: str
    """Hash of the task source: a cursor is valid only for the same data."""
    cursor: Cursor
    next_group_id: int
    num_consumed: int
    pending: list[IssuedTask]
    """Issued groups that are neither consumed nor dropped, oldest first."""
    curation: CurriculumState = field(default_factory=CurriculumState)
    """Empty in checkpoints older than this key."""


@dataclass
class Ledger:
    """Draws the tasks of groups, and counts each of them once."""

    source: TaskSource
    group_size: int
    seed: int
    curation: Curriculum = field(default_factory=Curriculum)
    """Decides which tasks are issued, and the sizes of their groups."""
    next_group_id: int = 0
    num_consumed: int = 0
    open: dict[int, IssuedTask] = field(default_factory=dict)
    _again: list[tuple[int, IssuedTask]] = field(default_factory=list)
    """Heap of groups to reissue, by group id."""

    def issue(self, version: PolicyVersion) -> Assignment:
        """Return the next assignment: lost groups and open groups of an earlier session first, oldest first, then new
        tasks.

        Raises `RunAborted` if curation leaves no task to issue.
        """
        if self._again:
            _, issued = heapq.heappop(self._again)
        else:
            cursor, task = self._draw()
            size = self.curation.size_of(task.id, self.group_size)
            issued = IssuedTask(self.next_group_id, task.id, cursor, size)
            self.next_group_id += 1
        self.open[issued.group_id] = issued
        return self.assignment(issued, version)

    def assignment(self, issued: IssuedTask, version: PolicyVersion) -> Assignment:
        """Return the assignment for a permit of `version`."""
        task, seed = self.source.at(issued.cursor), group_seed(self.seed, issued.group_id)
        return Assignment(issued.group_id, task, issued.size or self.group_size, version, seed)

    def _draw(self) -> tuple[Cursor, Task]:
        """Draw the next task that curation does not skip; return its position and the task. Raises `RunAborted`.

        An epoch may begin anywhere in these draws, so every task comes up at least `look_again` + 1 times. Only with
        `look_again` 0 can all tasks be skipped every time.
        """
        for _ in range((self.curation.rules.look_again + 2) * len(self.source)):
            cursor = self.source.cursor
            task = self.source.next()
            if not self.curation.passes_over(task.id):
                return cursor, task
        low, high = self.curation.rules.within
        raise RunAborted(
            f"the success rate of every task ({len(self.source)} of them) is below {low:g} or above {high:g}, so that "
            "curation.success_within leaves none to roll out: the policy has learned them all, or they are beyond it. "
            "Take tasks of another difficulty, widen curation.success_within, or set curation.look_again above 0"
        )

    def again(self, group_id: int) -> None:
        """Queue a group whose payload is lost for reissue. Raises `KeyError` if it is not open."""
        issued = self.open.pop(group_id)
        self.curation.lose(group_id, issued.task_id)
        heapq.heappush(self._again, (group_id, issued))

    def consume(self, group_ids: Iterable[int]) -> None:
        """Record groups as trained and published. Raises `KeyError` for a group that is not open."""
        for group_id in group_ids:
            self.drop(group_id)
            self.num_consumed += 1
        self.curation.publish()

    def drop(self, group_id: int) -> None:
        """Settle a group that was trained or dropped. Raises `KeyError` if it is not open."""
        del self.open[group_id]
        self.curation.settle(group_id)

    def state(self) -> LedgerState:
        """Return the state for a checkpoint."""
        pending = sorted([*self.open.items(), *self._again])
        return LedgerState(
            self.source.fingerprint,
            self.source.cursor,
            self.next_group_id,
            self.num_consumed,
            [issued for _, issued in pending],
            self.curation.state(),
        )

    def restore(self, state: LedgerState, finished: Collection[int]) -> None:
        """Restore `state`: the groups `finished` are in the queue again, all other open ones will be reissued.

        Raises `DataError` if the tasks differ from those of the state.
        """
        self.source.check(state.fingerprint)
        self.source.seek(state.cursor)
        self.next_group_id, self.num_consumed = state.next_group_id, state.num_consumed
        self.open = {e.group_id: e for e in state.pending if e.group_id in finished}
        self.curation.restore(state.curation, finished)
        self._again = [(e.group_id, e) for e in state.pending if e.group_id not in finished]  # sorted, so a heap
