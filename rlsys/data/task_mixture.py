"""Stream of tasks from several sources, each drawn by its weight and with an exact cursor of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeAlias

from rlsys.data.proposed_tasks import ProposedTasks
from rlsys.data.task_source import Cursor, SourceState, TaskSource, TasksState
from rlsys.errors import DataError
from rlsys.types import Json, Task

Source: TypeAlias = TaskSource | ProposedTasks


class TaskMixture:
    """Endless stream of tasks from named sources. Has the methods of `TaskSource`, and its law.

    The next task comes from the source that is furthest behind its weight, counted since the sources or their weights
    last changed; of equals, the first. So of n tasks under the same weights, each source has its share, give or take
    one (two sources) or less than the number of sources, and no chance is involved.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[int, Mapping[str, float]]) -> None:
        """`weights` are those of the sources, in any unit, by the number of tasks drawn from which they hold, which
        begin at 0. Weight 0: no task is drawn. Raises `DataError` if all are 0."""
        if not all(sum(by_name.values()) > 0 for by_name in weights.values()):
            raise DataError("data: no source has a weight above 0, so there is no task to train on")
        self._sources = sources
        self._stages = {
            begin: {name: by_name[name] / sum(by_name.values()) for name in sources}
            for begin, by_name in sorted(weights.items())
        }
        self._drawn = dict.fromkeys(sources, 0)
        self._owed = dict.fromkeys(sources, 0.0)
        """Tasks by which a source was behind when the factors last changed."""
        self._factors: Mapping[str, float] = dict.fromkeys(sources, 1.0)

    def __copy__(self) -> TaskMixture:
        """Share the tasks, but not the place in them."""
        other = TaskMixture({name: copy(source) for name, source in self._sources.items()}, self._stages)
        other._drawn, other._owed, other._factors = dict(self._drawn), dict(self._owed), self._factors
        return other

    def multiply(self, factors: Mapping[str, float]) -> None:
        """Multiply the weights of all sources by factors above 0, from the next task on. A source that is behind stays
        so, however often factors change."""
        if factors != self._factors:
            self._owed = {name: self._behind(name, sum(self._drawn.values())) for name in self._sources}
            self._drawn = dict.fromkeys(self._sources, 0)
            self._factors = dict(factors)

    def propose(self, row: Mapping[str, Json]) -> bool:
        """Add a row to the source of proposed tasks, if there is one. Returns True if it is new there.

        That source has its share from its first task on; it owes nothing for the time before.
        """
        proposed = next((source for source in self._sources.values() if isinstance(source, ProposedTasks)), None)
        if proposed is None:
            return False
        was_empty = not len(proposed)
        is_new = proposed.add(row)
        if was_empty and is_new:
            self._drawn = dict.fromkeys(self._sources, 0)
            self._owed = dict.fromkeys(self._sources, 0.0)
        return is_new

    @property
    def num_proposed(self) -> int | None:
        """Proposed tasks so far; None without a source of them."""
        found = [len(source) for source in self._sources.values() if isinstance(source, ProposedTasks)]
        return found[0] if found else None

    @property
    def shares(self) -> Mapping[str, float]:
        """Shares of the sources for the next task, by name; 0 for one without tasks."""
        stage, factors = self._weights, self._factors
        weights = {name: stage[name] * factors[name] * bool(len(source)) for name, source in self._sources.items()}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def __len__(self) -> int:
        """Number of tasks of all sources together."""
        return sum(map(len, self._sources.values()))

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks of all sources."""
        return [task for source in self._sources.values() for task in source.tasks]

    @property
    def cursor(self) -> Cursor:
        """Position of the next task."""
        name = self._next_source()
        return replace(self._sources[name].cursor, source=name)

    def next(self) -> Task:
        """Return the next task, and advance the cursor of its source."""
        name = self._next_source()
        self._drawn[name] += 1
        task = self._sources[name].next()
        if self._num_drawn in self._stages:
            self._drawn = dict.fromkeys(self._sources, 0)
            self._owed = dict.fromkeys(self._sources, 0.0)
        return task

    def at(self, cursor: Cursor) -> Task:
        """Return the task at any position of the stream; no cursor moves."""
        if cursor.source not in self._sources:
            raise DataError(f"{cursor}: there is no source of this name; there are: {', '.join(self._sources)}")
        return self._sources[cursor.source].at(replace(cursor, source=""))

    def state(self) -> TasksState:
        """Return the state for a checkpoint."""
        saved = {
            name: SourceState(
                fingerprint=source.fingerprint,
                cursor=source.cursor,
                num_drawn=self._drawn[name],
                weight=self._weights[name],
                owed=self._owed[name],
                factor=self._factors[name],
                rows=source.rows,
            )
            for name, source in self._sources.items()
        }
        return TasksState(sources=saved)

    def restore(self, state: TasksState) -> list[str]:
        """Move to a state. Returns what has changed since: sources that begin, tasks, and weights.

        Raises `DataError` if a source of the state is gone.
        """
        if not state.sources:
            raise DataError(
                "the checkpoint is of a run with one source of data, and now there are several: begin a new run "
                "with the weights of this one: model.path=RUN"
            )
        if gone := [name for name in state.sources if name not in self._sources]:
            raise DataError(
                f"data: the source {gone[0]} of the checkpoint is gone, and groups under way need its tasks: keep it, "
                "with weight 0 if no more of its tasks should be drawn"
            )
        notes: list[str] = []
        for name, source in self._sources.items():
            if (saved := state.sources.get(name)) is None:
                notes.append(f"the source {name} is new, and starts at its beginning ({len(source)} tasks)")
                continue
            try:
                changed = source.restore(TasksState(saved.fingerprint, saved.cursor, rows=saved.rows))
                notes += [f"source {name}: {note}" for note in changed]
            except DataError as error:
                raise DataError(f"data: source {name}: {error}") from error
        weights = self._weights
        for name, saved in state.sources.items():
            if abs(saved.weight - weights[name]) > 1e-9:
                notes.append(f"the source {name} has weight {weights[name]:.3g}, before {saved.weight:.3g}")
        is_same = not notes
        self._drawn = {name: state.sources[name].num_drawn if is_same else 0 for name in self._sources}
        self._owed = {name: state.sources[name].owed if is_same else 0.0 for name in self._sources}
        self._factors = {name: state.sources[name].factor if is_same else 1.0 for name in self._sources}
        return notes

    @property
    def _num_drawn(self) -> int:
        """Tasks drawn since the beginning, from all sources."""
        return sum(source.num_drawn for source in self._sources.values())

    @property
    def _weights(self) -> Mapping[str, float]:
        """Configured shares of the sources for the next task."""
        return self._stages[max(begin for begin in self._stages if begin <= self._num_drawn)]

    def _next_source(self) -> str:
        shares, num = self.shares, sum(self._drawn.values()) + 1
        return max((name for name in self._sources if shares[name] > 0), key=lambda name: self._behind(name, num))

    def _behind(self, name: str, num: int) -> float:
        """Tasks that a source lacks of its share of the first `num` since the factors last changed."""
        return self._owed[name] + self.shares[name] * num - self._drawn[name]
