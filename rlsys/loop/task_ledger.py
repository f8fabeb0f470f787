"""Exactly-once record of the tasks: which group is of which task, and which groups are neither consumed nor dropped.

What was issued and is neither is issued again after a resume or when its payload is lost, under the same group_id and
so with the same sampling seeds. An interrupted run therefore consumes the same multiset of tasks as an uninterrupted
one, whatever died.
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
    """The task of one group that is neither consumed nor dropped."""

    group_id: int
    task_id: str
    cursor: Cursor
    """Where the task was drawn, so that it can be drawn again."""
    size: int | None = None
    """Episodes, where curation gave it fewer than the group size; it keeps them when it is issued again."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a checkpoint keeps of the ledger."""

    fingerprint: str
    """Of the task source: a cursor means nothing in other data."""
    cursor: Cursor
    next_group_id: int
    num_consumed: int
    pending: list[IssuedTask]
    """Issued, and neither consumed nor dropped, oldest first."""
    curation: CurriculumState = field(default_factory=CurriculumState)
    """Empty in checkpoints that are older than this key."""


@dataclass
class Ledger:
    """Draws the tasks of groups, and counts each of them once."""

    source: TaskSource
    group_size: int
    seed: int
    curation: Curriculum = field(default_factory=Curriculum)
    """What decides which tasks are issued, and how large their groups are."""
    next_group_id: int = 0
    num_consumed: int = 0
    open: dict[int, IssuedTask] = field(default_factory=dict)
    _again: list[tuple[int, IssuedTask]] = field(default_factory=list)
    """Heap of what waits to be issued again, by group_id."""

    def issue(self, version: PolicyVersion) -> Assignment:
        """The next assignment: what was lost or an interrupted session left open first, oldest first, then new
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
        """What the holder of a permit of `version` rolls out."""
        task, seed = self.source.at(issued.cursor), group_seed(self.seed, issued.group_id)
        return Assignment(issued.group_id, task, issued.size or self.group_size, version, seed)

    def _draw(self) -> tuple[Cursor, Task]:
        """The next task that curation does not pass over, and where it was drawn. Raises `RunAborted`.

        An epoch may begin anywhere in these draws, so that every task comes up `look_again` + 1 times at least: only
        where it is 0 can all be passed over each time.
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
        """What was rolled out of this group is gone: issue it again. Raises KeyError if it is not open."""
        issued = self.open.pop(group_id)
        self.curation.lose(group_id, issued.task_id)
        heapq.heappush(self._again, (group_id, issued))

    def consume(self, group_ids: Iterable[int]) -> None:
        """These groups were trained, and what came of it is published. Raises KeyError for one that is not open."""
        for group_id in group_ids:
            self.drop(group_id)
            self.num_consumed += 1
        self.curation.publish()

    def drop(self, group_id: int) -> None:
        """This group is settled: it was given up, or trained. Raises KeyError if it is not open."""
        del self.open[group_id]
        self.curation.settle(group_id)

    def state(self) -> LedgerState:
        """For the checkpoint, at one moment."""
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
        """Go on from `state`: the groups `finished` are in the queue again, all other open ones will be issued again.

        Raises `DataError` if the tasks are not those the state was taken with.
        """
        self.source.check(state.fingerprint)
        self.source.seek(state.cursor)
        self.next_group_id, self.num_consumed = state.next_group_id, state.num_consumed
        self.open = {e.group_id: e for e in state.pending if e.group_id in finished}
        self.curation.restore(state.curation, finished)
        self._again = [(e.group_id, e) for e in state.pending if e.group_id not in finished]  # sorted, so a heap
