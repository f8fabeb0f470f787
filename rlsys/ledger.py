"""Exactly-once record of every group: issued, leased, finished, consumed.

The ledger hands out assignments. What it handed out and did not see consumed or dropped, it hands out again after a
resume or when its payload is lost, under the same serial and so with the same sampling seeds. An interrupted run
therefore consumes the same multiset of tasks as an uninterrupted one, whatever died.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlsys import deadlines
from rlsys.curation import Curation, CurationState
from rlsys.data.source import Cursor, TaskSource
from rlsys.errors import RunAborted
from rlsys.seeds import group_seed
from rlsys.types import Assignment, PolicyVersion, Task


@dataclass(frozen=True, slots=True)
class Entry:
    """One group that was issued and is neither consumed nor dropped."""

    serial: int
    task_id: str
    cursor: Cursor
    """Where the task was drawn, so that it can be drawn again."""
    size: int | None = None
    """Episodes, where curation gave it fewer than the group size; it keeps them when it is issued again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt at rolling out a group. Its owner is whoever `Rollouts.whereabouts` says."""

    attempt: int
    """Counted from 1, over all leases of the group in this session."""
    began_s: float
    """In seconds of `rlsys.deadlines.now`."""


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
    curation: CurationState = field(default_factory=CurationState)
    """Empty in checkpoints that are older than this key."""


@dataclass
class Ledger:
    """Who was handed which task, and what became of it."""

    source: TaskSource
    group_size: int
    seed: int
    lease_s: float
    """Deadline of one attempt at rolling out a group, in seconds; the rollout pool ends it then."""
    curation: Curation = field(default_factory=Curation)
    """What decides which tasks are issued, and how large their groups are."""
    next_serial: int = 0
    num_consumed: int = 0
    open: dict[int, Entry] = field(default_factory=dict)
    _leases: dict[int, Lease] = field(default_factory=dict)
    """The latest of every open group, kept while the group waits to be issued again."""
    _num_losses: Counter[int] = field(default_factory=Counter)
    _again: list[tuple[int, Entry]] = field(default_factory=list)
    """Heap of what waits to be issued again, by serial."""

    def issue(self, version: PolicyVersion) -> Assignment:
        """The next assignment: what was lost or an interrupted session left open first, oldest first, then new
        tasks.

        Raises `RunAborted` if curation leaves no task to issue.
        """
        if self._again:
            serial, entry = heapq.heappop(self._again)
            task = self.source.at(entry.cursor)
        else:
            cursor, task = self._draw()
            serial = self.next_serial
            self.next_serial += 1
            entry = Entry(serial, task.id, cursor, self.curation.size_of(task.id, self.group_size))
        self.open[serial] = entry
        return Assignment(serial, task, entry.size or self.group_size, version, group_seed(self.seed, serial))

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

    def will_issue(self, serial: int) -> bool:
        """Is this group still to be handed out, for the first time or again?"""
        return serial >= self.next_serial or any(serial == waiting for waiting, _ in self._again)

    def lease(self, serial: int) -> Lease:
        """A new attempt at rolling out an open group begins."""
        attempt = self._leases[serial].attempt + 1 if serial in self._leases else 1
        lease = self._leases[serial] = Lease(attempt, deadlines.now())
        return lease

    def num_losses(self, serial: int) -> int:
        """Times that what was rolled out of a group was gone, in this session and until it is settled."""
        return self._num_losses[serial]

    def again(self, serial: int) -> str:
        """What was rolled out of this group is gone: issue it again; returns its task's id. Raises KeyError if it is
        not open."""
        entry = self.open.pop(serial)
        self._num_losses[serial] += 1
        self.curation.lose(serial, entry.task_id)
        heapq.heappush(self._again, (serial, entry))
        return entry.task_id

    def consume(self, serials: Iterable[int]) -> list[Task]:
        """These groups were trained, and what came of it is published; returns their tasks. Raises KeyError for one
        that is not open."""
        entries = [self._settle(serial) for serial in serials]
        self.num_consumed += len(entries)
        self.curation.publish()
        return [self.source.at(entry.cursor) for entry in entries]

    def drop(self, serial: int) -> None:
        """This group was given up, with its reason counted elsewhere. Raises KeyError if it is not open."""
        self._settle(serial)

    def _settle(self, serial: int) -> Entry:
        self._leases.pop(serial, None)
        self._num_losses.pop(serial, None)
        self.curation.settle(serial)
        return self.open.pop(serial)

    def table(self, owners: Mapping[int, str], lacking: Mapping[int, Sequence[str]]) -> str:
        """What is pending, and where: one line per group, oldest first.

        `owners` says by serial which replica rolls a group out, `lacking` which columns the learner still waits for.
        """
        lines = {n: self._line(entry, owners.get(n), lacking.get(n)) for n, entry in self.open.items()}
        lines |= {serial: f"task {entry.task_id}, waits to be issued again" for serial, entry in self._again}
        return "\n".join(f"  group {n}: {lines[n]}" for n in sorted(lines)) or "  nothing is pending"

    def _line(self, entry: Entry, owner: str | None, lacking: Sequence[str] | None) -> str:
        said = [f"task {entry.task_id}"]
        lease = self._leases.get(entry.serial)
        lasts_s = 0.0 if lease is None else deadlines.now() - lease.began_s
        if lease is not None:
            said.append(f"attempt {lease.attempt}" + ("" if owner else f" begun {lasts_s:.0f} s ago"))
        if owner is not None:
            said += [f"{owner} since {lasts_s:.0f} s", f"lease ends in {self.lease_s - lasts_s:.0f} s"]
        else:
            said.append(f"waits for {' and '.join(lacking)}" if lacking else "waits to be trained")
        return ", ".join(said)

    def state(self) -> LedgerState:
        """For the checkpoint, at one moment."""
        entries = [*self.open.values(), *(entry for _, entry in self._again)]
        pending = sorted(entries, key=lambda e: e.serial)
        return LedgerState(
            self.source.fingerprint,
            self.source.cursor,
            self.next_serial,
            self.num_consumed,
            pending,
            self.curation.state(),
        )

    def restore(self, state: LedgerState, finished: Collection[int]) -> None:
        """Go on from `state`: the groups `finished` are in the queue again, all other open ones will be issued again.

        Raises `DataError` if the tasks are not those the state was taken with.
        """
        self.source.check(state.fingerprint)
        self.source.seek(state.cursor)
        self.next_serial, self.num_consumed = state.next_serial, state.num_consumed
        self.open = {e.serial: e for e in state.pending if e.serial in finished}
        self.curation.restore(state.curation, finished)
        self._leases = {}
        self._num_losses.clear()
        self._again = [(e.serial, e) for e in state.pending if e.serial not in finished]  # sorted, so a heap
