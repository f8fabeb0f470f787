"""Exactly-once record of every group: issued, finished, consumed.

The ledger hands out assignments. What it handed out and did not see consumed or dropped, it hands out again after a
resume,
under the same serial and so with the same sampling seeds. An interrupted run therefore consumes the same multiset of
tasks as an uninterrupted one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rlsys.data.source import Cursor, TaskSource
from rlsys.seeds import group_seed
from rlsys.types import Assignment, PolicyVersion, Task


@dataclass(frozen=True, slots=True)
class Entry:
    """One group that was issued and is neither consumed nor dropped."""

    serial: int
    task_id: str
    cursor: Cursor
    """Where the task was drawn, so that a resume draws it again."""
    issued_s: float
    """Event-loop time of issue, in seconds."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a checkpoint keeps of the ledger."""

    fingerprint: str
    """Of the task source: a cursor means nothing in other data."""
    cursor: Cursor
    next_serial: int
    num_consumed: int
    pending: list[Entry]
    """Issued, and neither consumed nor dropped, oldest first."""


@dataclass
class Ledger:
    """Who was handed which task, and what became of it."""

    source: TaskSource
    group_size: int
    seed: int
    next_serial: int = 0
    num_consumed: int = 0
    open: dict[int, Entry] = field(default_factory=dict)
    _again: deque[Entry] = field(default_factory=deque)

    def issue(self, version: PolicyVersion) -> Assignment:
        """The next assignment: what an interrupted session left open first, oldest first, then new tasks."""
        if self._again:
            entry = self._again.popleft()
            serial, cursor = entry.serial, entry.cursor
            task = self.source.at(cursor)
        else:
            serial, cursor = self.next_serial, self.source.cursor
            self.next_serial += 1
            task = self.source.next()
        self.open[serial] = Entry(serial, task.id, cursor, asyncio.get_running_loop().time())
        return Assignment(serial, task, self.group_size, version, group_seed(self.seed, serial))

    def consume(self, serials: Iterable[int]) -> list[Task]:
        """These groups were trained; returns their tasks. Raises KeyError for one that is not open."""
        entries = [self.open.pop(serial) for serial in serials]
        self.num_consumed += len(entries)
        return [self.source.at(entry.cursor) for entry in entries]

    def drop(self, serial: int) -> None:
        """This group was given up, with its reason counted elsewhere."""
        del self.open[serial]

    def table(self) -> str:
        """What is pending, for how long: one line per open group, oldest first."""
        now = asyncio.get_running_loop().time()
        rows = [
            f"  group {e.serial}: task {e.task_id}, issued {now - e.issued_s:.0f} s ago" for e in self.open.values()
        ]
        return "\n".join(rows) or "  nothing is pending"

    def state(self) -> LedgerState:
        """For the checkpoint, at one moment."""
        pending = sorted([*self.open.values(), *self._again], key=lambda e: e.serial)
        return LedgerState(self.source.fingerprint, self.source.cursor, self.next_serial, self.num_consumed, pending)

    def restore(self, state: LedgerState, finished: Collection[int]) -> None:
        """Go on from `state`: the groups `finished` are in the queue again, all other open ones will be issued again.

        Raises `DataError` if the tasks are not those the state was taken with.
        """
        self.source.check(state.fingerprint)
        self.source.seek(state.cursor)
        self.next_serial, self.num_consumed = state.next_serial, state.num_consumed
        self.open = {e.serial: e for e in state.pending if e.serial in finished}
        self._again = deque(e for e in state.pending if e.serial not in finished)
