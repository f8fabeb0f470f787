"""Tasks that episodes of the run propose, as one of its sources of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson

from rlsys.data.row_adapters import RowProblem, sniff, task_of
from rlsys.data.task_source import Cursor, TasksState
from rlsys.errors import DataError
from rlsys.types import Json, Task

FINGERPRINT = "proposed"
MOST = 100_000
"""Tasks that a source keeps; further ones are ignored."""


class ProposedTasks:
    """Stream of the tasks that were added so far: each once in the order of its arrival, then from the first again.

    Has the methods of `TaskSource`. Nothing is drawn while it is empty. All rows are in the checkpoint, so that a
    resumed run continues with the same tasks. A row that was added before is ignored.
    """

    def __init__(self, name: str, system: str | None = None, template_kwargs: Mapping[str, Json] | None = None) -> None:
        """`system` and `template_kwargs` are those of all conversations about its tasks, see `Task`."""
        self._name, self._system, self._template_kwargs = name, system, template_kwargs or {}
        self._rows: list[dict[str, Json]] = []
        self._tasks: list[Task] = []
        self._known: set[bytes] = set()
        self._next = 0
        """Index of the next task."""
        self.num_drawn = 0
        """Tasks drawn so far."""

    def __copy__(self) -> ProposedTasks:
        other = ProposedTasks(self._name, self._system, self._template_kwargs)
        other.restore(TasksState(FINGERPRINT, self.cursor, rows=self.rows))
        return other

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    @property
    def rows(self) -> list[dict[str, Json]]:
        """The rows of all tasks, in order."""
        return list(self._rows)

    @property
    def cursor(self) -> Cursor:
        """Position of the next task; its `epoch` is the number of tasks drawn."""
        return Cursor(self.num_drawn, self._next)

    @property
    def fingerprint(self) -> str:
        return FINGERPRINT

    def add(self, row: Mapping[str, Json]) -> bool:
        """Add a task in the form of a row of data. Returns False if it is known, or there is no room."""
        own = dict(row)
        mark = orjson.dumps(own, option=orjson.OPT_SORT_KEYS)
        if mark in self._known or len(self._rows) >= MOST:
            return False
        task = proposed_task(own)
        kwargs = {**self._template_kwargs, **task.template_kwargs}
        task = replace(task, id=f"{self._name}/{task.id}", source=self._name, template_kwargs=kwargs)
        self._tasks.append(replace(task, system=self._system))
        self._rows.append(own)
        self._known.add(mark)
        return True

    def next(self) -> Task:
        task = self.at(self.cursor)
        self._next = (self._next + 1) % len(self)
        self.num_drawn += 1
        return task

    def at(self, cursor: Cursor) -> Task:
        if not 0 <= cursor.position < len(self):
            raise DataError(f"{cursor} lies outside {len(self)} proposed tasks: it belongs to other data")
        return self._tasks[cursor.position]

    def restore(self, state: TasksState) -> list[str]:
        if state.fingerprint != FINGERPRINT:
            raise DataError("the checkpoint has a source of another kind under this name: rename this one")
        self._rows, self._tasks, self._known = [], [], set()
        for row in state.rows:
            self.add(row)
        self.num_drawn, self._next = state.cursor.epoch, state.cursor.position
        return []


def proposed_task(row: Mapping[str, Json]) -> Task:
    """Convert a proposed row to a task. Raises `DataError` for a row that is none, or that a checkpoint cannot keep."""
    own = dict(row)
    try:
        orjson.dumps(own)
    except orjson.JSONEncodeError as error:
        raise DataError(f"a proposed task cannot be written as JSON: {error}; propose plain values") from None
    try:
        return task_of(own, sniff([own]))
    except RowProblem as problem:
        raise DataError(f"a proposed task cannot be used: {problem}; propose rows such as {{'prompt': ...}}") from None
