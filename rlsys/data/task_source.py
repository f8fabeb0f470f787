"""Endless stream of tasks whose whole state is a cursor.

Each epoch is a permutation of all tasks that depends only on the seed and the epoch's number. The permutation is not
stored: the task at any position is computed in constant time, so a stream can start at any cursor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import orjson
from xxhash import xxh3_64_intdigest, xxh3_128

from rlsys.errors import DataError
from rlsys.types import Task
from rlsys.util.seeds import epoch_seed

_ROUNDS = 6


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Position in the stream: `position` tasks into epoch number `epoch`, both from 0."""

    epoch: int = 0
    position: int = 0
    source: str = ""
    """Name of the source, if there are several."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """One of several sources in a checkpoint."""

    fingerprint: str
    cursor: Cursor
    num_drawn: int
    """Tasks drawn since sources or weights last changed."""
    weight: float
    """Configured share of the tasks."""
    owed: float = 0.0
    """Tasks by which it was behind its share then."""
    factor: float = 1.0
    """See `TaskMixture.multiply`."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Tasks that were proposed in the run, as rows."""


@dataclass(frozen=True, slots=True)
class TasksState:
    """Position in the tasks: `fingerprint` and `cursor` of a single source, or the state of each source."""

    fingerprint: str = ""
    cursor: Cursor = Cursor()
    sources: Mapping[str, SourceState] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    """Tasks that were proposed in the run."""


class Tasks(Protocol):
    """Endless stream of tasks; see `TaskSource`."""

    def __len__(self) -> int: ...

    @property
    def tasks(self) -> Sequence[Task]: ...

    @property
    def cursor(self) -> Cursor: ...

    def next(self) -> Task: ...

    def at(self, cursor: Cursor) -> Task: ...

    def state(self) -> TasksState: ...

    def restore(self, state: TasksState) -> list[str]: ...


class TaskSource:
    """Endless source of tasks. Law: a source moved to a cursor continues exactly as the one that stopped there."""

    def __init__(
        self, tasks: Sequence[Task], seed: int, *, shuffle: bool = True, left_out: Collection[str] = ()
    ) -> None:
        """`shuffle=False` keeps the file's order in every epoch. Tasks whose ids are `left_out` keep their positions,
        but are never drawn. Raises `DataError` without other tasks."""
        num_left = sum(task.id not in left_out for task in tasks)
        if not num_left:
            raise DataError("there is no task to train on")
        self._tasks, self._seed, self._shuffle, self._left_out = tasks, seed, shuffle, left_out
        self._num_left = num_left
        self.seek(Cursor())

    def __len__(self) -> int:
        """Number of positions in one epoch."""
        return len(self._tasks)

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks of one epoch, in the order of the file."""
        return self._tasks

    @property
    def cursor(self) -> Cursor:
        """Position of the next task."""
        return self._cursor

    def next(self) -> Task:
        """Return the task at the cursor, and advance the cursor to the next task that is not left out."""
        task = self.at(self._cursor)
        self._num_drawn += 1
        self._advance()
        return task

    def _advance(self) -> None:
        """Move the cursor by one, and past what is left out."""
        while True:
            epoch, position = self._cursor.epoch, self._cursor.position
            is_last = position + 1 == len(self)
            self._cursor = Cursor(epoch + 1, 0) if is_last else Cursor(epoch, position + 1)
            if not self._is_left_out(self._cursor):
                return

    def _is_left_out(self, cursor: Cursor) -> bool:
        return bool(self._left_out) and self.at(cursor).id in self._left_out

    def at(self, cursor: Cursor) -> Task:
        """Return the task at any position of the stream; the cursor does not move."""
        self._check_inside(cursor)
        if not self._shuffle:
            return self._tasks[cursor.position]
        return self._tasks[permute_index(cursor.position, len(self), epoch_seed(self._seed, cursor.epoch))]

    @property
    def num_drawn(self) -> int:
        """Tasks drawn since the beginning."""
        return self._num_drawn

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Tasks that were proposed in the run: none."""
        return []

    def seek(self, cursor: Cursor) -> None:
        """Move to `cursor`, or to the next task that is not left out. Raises `DataError` if it is outside the data."""
        self._check_inside(cursor)
        passed = range(cursor.position)
        num_out = sum(self._is_left_out(Cursor(cursor.epoch, each)) for each in passed) if self._left_out else 0
        self._num_drawn = cursor.epoch * self._num_left + len(passed) - num_out
        self._cursor = cursor
        if self._is_left_out(cursor):
            self._advance()

    def state(self) -> TasksState:
        """Return the state for a checkpoint."""
        return TasksState(self.fingerprint, self.cursor)

    def restore(self, state: TasksState) -> list[str]:
        """Move to a state. Returns what has changed since: other tasks, of which it goes on at the same place.

        Raises `DataError` for the state of several sources.
        """
        if state.sources:
            raise DataError(
                f"the checkpoint is of a run with the sources {', '.join(state.sources)}, and now there is one: give "
                "all of them, or begin a new run with the weights of this one: model.path=RUN"
            )
        if state.fingerprint == self.fingerprint:
            self.seek(state.cursor)
            return []
        epoch, position = state.cursor.epoch, state.cursor.position
        self.seek(state.cursor if position < len(self) else Cursor(epoch + 1))
        place = f"task {self.cursor.position + 1} of epoch {self.cursor.epoch + 1}"
        note = (
            f"the tasks are others than those of the checkpoint ({state.fingerprint}), now {self.fingerprint}: it goes "
            f"on at {place}, and some tasks may come twice in this epoch, or not at all"
        )
        return [note]

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the stream as text: `8192 tasks, seed 0, shuffled, content 5f0c...`. Saved in checkpoints."""
        order = "shuffled" if self._shuffle else "in file order"
        return f"{len(self)} tasks, seed {self._seed}, {order}, content {content_hash(self._tasks)}"

    def _check_inside(self, cursor: Cursor) -> None:
        if cursor.epoch < 0 or not 0 <= cursor.position < len(self):
            raise DataError(f"{cursor} lies outside {len(self)} tasks: it belongs to other data")


def content_hash(tasks: Sequence[Task]) -> str:
    """Hash ids, prompts and answers in order (xxh3, 128 bits). An id that no row gave is a hash of all columns."""
    content = xxh3_128()
    for task in tasks:
        content.update(orjson.dumps([task.id, task.prompt, task.answer]))
    return content.hexdigest()


def permute_index(index: int, size: int, seed: int) -> int:
    """Map `index` by a pseudo-random permutation of `range(size)`, without building the permutation.

    A Feistel network over the smallest even number of bits that fits `size` permutes that power of two, for any round
    function. Walking its cycles until the value falls below `size` restricts it to `range(size)` (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). The power is at most 4 * `size`: about four walks or fewer.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_number in range(_ROUNDS):
            word = (round_number << 64 | right).to_bytes(16, "little")
            left, right = right, left ^ (xxh3_64_intdigest(word, seed) & mask)
        index = left << half | right
        if index < size:
            return index
