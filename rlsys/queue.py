"""The streaming queue between producers, annotators and the learner: permits, window, and the staleness bound.

With P groups a step, S = max_staleness and window W there are B = (S + 1) * P permits, and

    staleness  <=  (B + W - 2) // P          (exactly S for W = 1)

provided a group starts on weights no older than its permit. Proof for W = 1: groups are taken in serial order, so
when the step of version v takes a group, at most B - 1 older groups held permits when that group was admitted; those
are at most S full steps plus the P - 1 groups beside it in its own step. A group that is lost gives its permit back and
keeps its place: it is issued again before any new one is, so the older groups still hold a permit each. Permits alone
bound nothing if finished groups may overtake slow ones without limit: each place of overtaking costs one more, hence
W - 1.

Until the version `synchronous_until` is published only P of the permits exist. A step then takes every group there is,
and all of them were admitted at its version: staleness is 0 whatever the window. The rest of the permits are released
with that version, as if the run began there; so the bound holds from there as it does from the start.

`take` checks the bound again on version stamps. Its `stale` drop counter should read 0.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rlsys.algorithm import Signal
from rlsys.table import EPISODES, REWARD, Row, Table
from rlsys.types import Group, PolicyVersion

LEARNER = "learner"
"""The consumer that takes groups to train. Every other is the annotator of a signal, and has its name."""
PRODUCED = (EPISODES, REWARD)
"""Columns that the holder of a permit puts. Once both are there, the group can do without it."""


@dataclass(slots=True)
class Permit:
    """The right to have one group in the pipe, from admission until its step is published."""

    version: PolicyVersion
    """Version it was released at: its group must start on weights no older."""
    _queue: StreamingQueue
    row: Row | None = None
    """Of the attempt under way."""
    reason: str = "failed"
    """Why the group is dropped if it is never judged."""

    def open(self, serial: int) -> Row:
        """Begin an attempt at a group, in its place in the order; what comes from an earlier one is refused."""
        self.row = self._queue._attempt(serial)
        return self.row

    def put(self, column: str, value: object) -> bool:
        """Hand in a column of the group. False if the group was lost meanwhile, and is issued again."""
        assert self.row is not None, "open it first"
        if isinstance(value, Group) and value.serial != self.row.serial:
            raise ValueError(f"permit of group {self.row.serial} was handed group {value.serial}")
        return self._queue.put(self.row, column, value)

    def renew(self, group: Group) -> None:
        """Hand in `group`, with another payload, in place of what was rolled out: columns made of that are refused.

        Nothing to do if the group was lost meanwhile.
        """
        if self.row is not None and not self.is_over:
            self.row = self._queue._open(self.row.serial)
            self.put(EPISODES, group)

    @property
    def is_over(self) -> bool:
        """Was the group lost meanwhile? Another permit has it then, or will."""
        return self.row is not None and not self._queue.holds(self.row)


@dataclass
class StreamingQueue:
    """Groups in flight, in serial order. Lives in the driver's event loop; not thread-safe, by design."""

    groups_per_step: int
    max_staleness: int
    window: int
    version: PolicyVersion
    """Version of the newest published weights; `release` moves it on."""
    num_groups: int
    """Groups the rest of the run will consume: no more are admitted, so the last step leaves nothing unused."""
    signals: frozenset[Signal] = frozenset()
    """Columns the learner needs besides episodes and rewards, each added by an annotator."""
    synchronous_until: PolicyVersion = 0
    """Up to this version there is no more in the pipe than one step."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Drops by reason: `stale`, `failed`, `too_long`, `no_signal`."""
    num_reissued: int = 0
    """Attempts at groups beyond the first of each."""

    def __post_init__(self) -> None:
        needs = {LEARNER: frozenset((*PRODUCED, *self.signals))}
        self._consumers = {**needs, **{signal: frozenset((EPISODES,)) for signal in self.signals}}
        self._arrivals = {consumer: asyncio.Event() for consumer in self._consumers}
        self._start_over(self.version, self.num_groups)

    @property
    def capacity(self) -> int:
        """Permits in existence, at most: (max_staleness + 1) * groups_per_step."""
        return (self.max_staleness + 1) * self.groups_per_step

    def permits_at(self, version: PolicyVersion) -> int:
        """Permits in existence while `version` is the newest."""
        return self.groups_per_step if version < self.synchronous_until else self.capacity

    @property
    def staleness_bound(self) -> int:
        """Versions that no trained token can be behind."""
        return (self.capacity + self.window - 2) // self.groups_per_step

    def bound_at(self, version: PolicyVersion) -> int:
        """Versions that no token trained by the step of `version` can be behind."""
        return 0 if version < self.synchronous_until else self.staleness_bound

    def is_in_time(self, group: Group, place: int, version: PolicyVersion) -> bool:
        """Will a finished group be within the bound if, from `version` on, `place` older ones come before it, and as
        many younger ones as the window lets overtake it?"""
        return group.oldest_version >= self._oldest_in_time(place, version)

    def oldest_in_time(self, serial: int) -> PolicyVersion:
        """Version of the oldest token that this group, which is in flight, may hold: whenever it is taken, that is
        within the bound."""
        place = sum(row.serial < serial for row in self._table)
        return self._oldest_in_time(place, self.version)

    def _oldest_in_time(self, place: int, version: PolicyVersion) -> PolicyVersion:
        num_before = place if version < self.synchronous_until else place + self.window - 1
        return version + num_before // self.groups_per_step - self.bound_at(version)

    @property
    def num_finished(self) -> int:
        """Groups that wait to be taken by the learner."""
        return self._table.num_ready(LEARNER)

    @property
    def num_refused(self) -> int:
        """Columns that were handed in twice, or for an attempt that was over."""
        return self._table.num_refused

    @property
    def num_permits(self) -> int:
        """Permits that are free, held, or back a judged group: `permits_at` of them, and less only near the end."""
        return self._free.qsize() + self._num_held + sum(row.has(*PRODUCED) for row in self._table)

    @property
    def finished(self) -> list[Row]:
        """Judged groups that were not taken yet, oldest first: what a checkpoint keeps. Signals are added again."""
        rows = [row for row in self._table if row.has(*PRODUCED) and LEARNER not in row.taken_by]
        return sorted(rows, key=lambda row: row.serial)

    def lacking(self) -> dict[int, list[str]]:
        """By serial, what the learner still waits for: columns of the groups in flight."""
        return {row.serial: sorted(self._consumers[LEARNER] - row.values.keys()) for row in self._table}

    # --------------------------------------------------------------------------------------------------------- permits

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[Permit]:
        """Hold a permit; leaving the block before the group is judged drops the group and gives the permit back.

        Waits for a free permit (and for the run to need another group). Unblocked by `release`, by drops and losses.
        """
        permit = Permit(await self._free.get(), self)
        self._num_held += 1
        try:
            yield permit
        finally:
            self._num_held -= 1
            if permit.row is None or not permit.row.has(*PRODUCED):
                self._leave(permit)

    def _leave(self, permit: Permit) -> None:
        if not permit.is_over:
            if permit.row is not None:
                self._table.close(permit.row)
            self.dropped[permit.reason] += 1
        self._give_back()

    def release(self, rows: Sequence[Row], version: PolicyVersion) -> None:
        """Free the permits of a step whose weights are published as `version`: the next groups are born on them."""
        for row in rows:
            self._table.close(row)
        num_more = self.permits_at(version) - self.permits_at(self.version)
        self.version = version
        self._admit(len(rows) + num_more)

    def drop(self, rows: Iterable[Row], reason: str) -> None:
        """Give groups up that the learner took: their permits are free for others, of the version there is."""
        for row in rows:
            self._table.close(row)
            self.dropped[reason] += 1
            self._give_back()

    def restore(
        self, version: PolicyVersion, num_groups: int, finished: Sequence[Group], pending: Iterable[int]
    ) -> None:
        """Start over at `version` with `num_groups` left to consume, the `finished` of an earlier session among them.

        `pending` are serials that session had issued and not finished: they keep their place in the order, so that
        nothing younger is taken before they are issued again.
        """
        self._start_over(version, num_groups, len(finished))
        for serial in {*pending} - {group.serial for group in finished}:
            self._open(serial)
        for group in finished:
            row = self._open(group.serial)
            self.put(row, EPISODES, group)
            self.put(row, REWARD, group)

    def _start_over(self, version: PolicyVersion, num_groups: int, num_finished: int = 0) -> None:
        self.version, self.num_groups = version, num_groups
        self._table = Table(self._consumers)
        self._places: list[int] = []
        """Heap of serials. One that is in flight and that the learner did not take is in there; others may be."""
        self._free: asyncio.Queue[PolicyVersion] = asyncio.Queue()
        self._num_held = 0
        """Permits whose block is not left."""
        self._num_admitted = num_finished
        """Permits handed out for groups that the run will consume; one that is given back is handed out again."""
        self._admit(self.permits_at(version) - num_finished)

    def _admit(self, count: int) -> None:
        for _ in range(min(count, self.num_groups - self._num_admitted)):
            self._num_admitted += 1
            self._free.put_nowait(self.version)

    def _give_back(self) -> None:
        self._free.put_nowait(self.version)
        self._wake()

    # ---------------------------------------------------------------------------------------------------------- columns

    def put(self, row: Row, column: str, value: object) -> bool:
        """Hand in a column. False, and counted, if it is there already or the attempt of `row` is over."""
        is_new = self._table.put(row, column, value)
        self._wake()
        return is_new

    def holds(self, row: Row) -> bool:
        """Is this the attempt at its group that counts?"""
        return self._table.holds(row)

    def lose(self, row: Row) -> bool:
        """The payload of this attempt is gone: forget it. The group keeps its place until it is issued again.

        False if the attempt is over, with nothing done: another one at the group is not to blame, and a group that was
        trained or dropped is not issued again.
        """
        if not self.holds(row):
            return False
        self._open(row.serial)
        if row.has(*PRODUCED):
            self._give_back()  # whoever produced it has left
        return True

    async def take_rows(self, signal: Signal, max_tokens: int) -> list[Row]:
        """For the annotator of `signal`: groups without it, oldest first, of `max_tokens` in all, or one.

        Waits for a rolled-out group; unblocked by producers.
        """
        rows: list[Row] = []
        while (row := self._table.next(signal)) is None:
            await self._arrival(signal)
        while row is not None and (not rows or row.num_tokens <= max_tokens):
            max_tokens -= row.num_tokens
            self._table.take(signal, row)
            rows.append(row)
            row = self._table.next(signal)
        return rows

    async def take(self, *, version: PolicyVersion, on_stale: Callable[[Group], None]) -> list[Row]:
        """For the learner: the next step's groups, oldest first.

        Waits for a group with all its columns, less than `window` serials past the oldest one in flight. Unblocked by
        producers and annotators handing in columns, and by drops. A group with a token more than `staleness_bound`
        versions behind `version` (or any, before `synchronous_until`) is dropped as `stale`, and handed to `on_stale`.
        """
        bound = self.bound_at(version)
        taken: list[Row] = []
        while len(taken) < self.groups_per_step:
            row = self._table.next(LEARNER)
            if row is None or row.serial >= self._oldest() + self.window:
                await self._arrival(LEARNER)
                continue
            self._table.take(LEARNER, row)
            if version - row.group.oldest_version > bound:
                self.drop([row], "stale")
                on_stale(row.group)
            else:
                taken.append(row)
        return taken

    def put_back(self, consumer: str, rows: Iterable[Row]) -> None:
        """Let a consumer take these rows again; of an attempt that is over, it gets the next one."""
        for row in rows:
            self._table.put_back(consumer, row)
            heapq.heappush(self._places, row.serial)
        self._wake()

    def _attempt(self, serial: int) -> Row:
        self.num_reissued += serial in self._table
        return self._open(serial)

    def _open(self, serial: int) -> Row:
        heapq.heappush(self._places, serial)
        return self._table.open(serial)

    def _oldest(self) -> int:
        """Serial of the oldest group in flight that the learner did not take."""
        while (row := self._table.get(self._places[0])) is None or LEARNER in row.taken_by:
            heapq.heappop(self._places)
        return self._places[0]

    async def _arrival(self, consumer: str) -> None:
        self._arrivals[consumer].clear()
        await self._arrivals[consumer].wait()

    def _wake(self) -> None:
        for arrival in self._arrivals.values():
            arrival.set()
