"""The table behind the streaming queue: a group is a row, and what is known of it are columns.

Columns come in any order. A consumer declares which of them it needs, and takes every row once when these are there,
oldest first; what one consumer took, another still gets (TransferQueue, arXiv:2507.01663). A row is one attempt at a
group: when the group is issued again, another row takes its place, and what is still handed in for the first is refused
and counted. Rows hold metadata and references, never payloads. An operation costs O(log n) for n rows in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from rlsys.types import Group

EPISODES = "episodes"
"""The rolled-out `Group`."""
REWARD = "reward"
"""The same `Group` with its scores written in."""


@dataclass(slots=True, eq=False)
class Row:
    """What is known of one attempt at one group."""

    serial: int
    values: dict[str, object] = field(default_factory=dict)
    """By column: `EPISODES`, `REWARD`, or the name of a signal, whose value is a reference to the column."""
    taken_by: set[str] = field(default_factory=set)
    """Consumers that took it."""

    def has(self, *columns: str) -> bool:
        """Are these columns there?"""
        return all(column in self.values for column in columns)

    @property
    def num_tokens(self) -> int:
        """`Group.num_tokens` of the group. Needs `EPISODES`."""
        return cast("Group", self.values[EPISODES]).num_tokens

    @property
    def group(self) -> Group:
        """The group with the scores and signals that are there. Needs `EPISODES`."""
        group = cast("Group", self.values.get(REWARD, self.values[EPISODES]))
        signals = {name: value for name, value in self.values.items() if name not in (EPISODES, REWARD)}
        return replace(group, columns={**group.columns, **signals}) if signals else group


class Table:
    """All rows in flight, and who took which."""

    def __init__(self, consumers: Mapping[str, frozenset[str]]) -> None:
        """`consumers`: the columns each of them needs, by its name."""
        self._needs = consumers
        self._columns = frozenset().union(*consumers.values())
        self._rows: dict[int, Row] = {}
        self._ready: dict[str, list[int]] = {consumer: [] for consumer in consumers}
        """Per consumer a heap of serials. One that is ready for it is in there; others may be, and are skipped."""
        self._num_ready = dict.fromkeys(consumers, 0)
        self.num_refused = 0
        """Columns handed in twice, or for an attempt that is over."""

    def __contains__(self, serial: int) -> bool:
        return serial in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def get(self, serial: int) -> Row | None:
        """The row of a group that is in flight."""
        return self._rows.get(serial)

    def holds(self, row: Row) -> bool:
        """Is this still the attempt that counts?"""
        return self._rows.get(row.serial) is row

    def open(self, serial: int) -> Row:
        """An empty row for a new attempt at a group; it takes the place of the row there was."""
        if before := self._rows.get(serial):
            self.close(before)
        row = self._rows[serial] = Row(serial)
        return row

    def put(self, row: Row, column: str, value: object) -> bool:
        """Add a column. False, and counted, if the row has it already, or is no longer the attempt that counts."""
        if column not in self._columns:
            raise ValueError(f"group {row.serial}: nobody needs a column {column!r}")
        if not self.holds(row) or column in row.values:
            self.num_refused += 1
            return False
        row.values[column] = value
        for consumer, needs in self._needs.items():
            if column in needs and row.has(*needs):
                self._push(consumer, row)
        return True

    def num_ready(self, consumer: str) -> int:
        """Rows it could take."""
        return self._num_ready[consumer]

    def next(self, consumer: str) -> Row | None:
        """The oldest row it could take."""
        heap = self._ready[consumer]
        while heap:
            row = self._rows.get(heap[0])
            if row is not None and self._is_ready(consumer, row):
                return row
            heapq.heappop(heap)
        return None

    def take(self, consumer: str, row: Row) -> None:
        """It has this row, which `next` gave it."""
        row.taken_by.add(consumer)
        self._num_ready[consumer] -= 1

    def put_back(self, consumer: str, row: Row) -> None:
        """Let it take this row again; nothing to do if the attempt is over."""
        if self.holds(row) and consumer in row.taken_by:
            row.taken_by.remove(consumer)
            self._push(consumer, row)

    def close(self, row: Row) -> None:
        """The row leaves the table, which must hold it."""
        assert self.holds(row)
        for consumer in self._needs:
            if self._is_ready(consumer, row):
                self._num_ready[consumer] -= 1
        del self._rows[row.serial]

    def _is_ready(self, consumer: str, row: Row) -> bool:
        return consumer not in row.taken_by and row.has(*self._needs[consumer])

    def _push(self, consumer: str, row: Row) -> None:
        heapq.heappush(self._ready[consumer], row.serial)
        self._num_ready[consumer] += 1
