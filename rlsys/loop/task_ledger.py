"""Tasks of groups: an exactly-once record of them.

`Ledger` knows the task of each group, and the groups that are neither consumed nor dropped. Those are reissued after a
resume, or when their payload is lost, under the same group id and so with the same sampling seeds. An interrupted run
therefore consumes the same multiset of tasks as an uninterrupted one. `rlsys.loop.curation` selects tasks.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, PlainSerializer

from rlsys.data.task_mixture import TaskMixture
from rlsys.data.task_source import Cursor, SourceState, Tasks, TasksState
from rlsys.errors import DataError, RunAborted
from rlsys.loop.curation import Curation, CurationState
from rlsys.types import Assignment, EpisodeMeta, GroupKey, PolicyVersion
from rlsys.util.seeds import group_seed


@dataclass(frozen=True, slots=True)
class TaskDraw:
    """Draw of a task from the source, and the decisions of curation on its group."""

    task_id: str
    cursor: Cursor
    """Position of the task in the source, to draw it again."""
    size: int | None = None
    """Episodes, if curation gave it fewer than the group size; a reissued group keeps its size."""
    token_limit: int | None = None
    """Most tokens that an episode may sample, if curation limits it; a reissued group keeps its limit."""


def _from_rows(rows: Any) -> dict[Any, Any]:  # noqa: ANN401  (the parsed JSON of any file)
    """Return the rows of a checkpoint by their `group_id`."""
    try:
        draws = {row["group_id"]: row for row in rows}
    except (TypeError, LookupError) as error:
        raise ValueError(f"the pending groups are not rows with a group_id: {error!r}") from error
    if len(draws) < len(rows):
        raise ValueError("a pending group is listed twice")
    return draws


def _to_rows(draws: dict[int, TaskDraw]) -> list[dict[str, Any]]:
    return [{"group_id": group_id, **asdict(draw)} for group_id, draw in draws.items()]


TaskDraws: TypeAlias = Annotated[dict[int, TaskDraw], BeforeValidator(_from_rows), PlainSerializer(_to_rows)]
"""Draws by group id; in a checkpoint, rows that begin with their `group_id`."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Ledger state in a checkpoint."""

    fingerprint: str
    """Hash of the task source: a cursor is valid only for the same data."""
    cursor: Cursor
    next_group_id: int
    num_consumed: int
    pending: TaskDraws
    """Draws of issued groups that are neither consumed nor dropped, oldest first."""
    curation: CurationState = field(default_factory=CurationState)
    sources: dict[str, SourceState] = field(default_factory=dict)
    """By name, if there are several; `fingerprint` and `cursor` are then empty."""


@dataclass
class Ledger:
    """Draws the tasks of groups, and counts each of them once."""

    source: Tasks
    group_size: int
    seed: int
    curation: Curation = field(default_factory=Curation)
    """Decides which tasks are issued, and the sizes of their groups."""
    next_group_id: int = 0
    num_consumed: int = 0
    open: dict[int, TaskDraw] = field(default_factory=dict)
    """By id of an issued group that is neither settled nor to be reissued."""
    _again: list[tuple[int, TaskDraw]] = field(default_factory=list)
    """Heap of groups to reissue, by group id."""

    def issue(self, version: PolicyVersion) -> Assignment:
        """Return the next assignment: lost groups and open groups of an earlier session first, oldest first, then new
        tasks. Each is a first attempt; the queue counts the later ones.

        Raises `RunAborted` if curation leaves no task to issue.
        """
        if self._again:
            group_id, draw = heapq.heappop(self._again)
        else:
            group_id, draw = self.next_group_id, self._draw()
            self.next_group_id += 1
        self.open[group_id] = draw
        return self.assignment(GroupKey(group_id, 1), draw, version)

    def assignment(self, key: GroupKey, draw: TaskDraw, version: PolicyVersion) -> Assignment:
        """Return the assignment for a permit of `version`."""
        task, seed = self.source.at(draw.cursor), group_seed(self.seed, key.group_id)
        size, limit = draw.size or self.group_size, draw.token_limit
        return Assignment(key, task, size, version, seed, token_limit=limit)

    def _draw(self) -> TaskDraw:
        """Draw the next task that curation does not skip. Raises `RunAborted`.

        An epoch may begin anywhere in these draws, so every task comes up at least `look_again` + 1 times. Only
        with `look_again` 0 can all tasks be skipped every time.
        """
        for _ in range((self.curation.look_again + 2) * len(self.source)):
            cursor, task = self.source.cursor, self.source.next()
            if (issue := self.curation.on_issue(task.id, self.group_size)) is not None:
                return TaskDraw(task.id, cursor, issue.size, issue.token_limit)
        low, high = self.curation.rules.success_within
        raise RunAborted(
            f"the success rate of every task ({len(self.source)} of them) is below {low:g} or above {high:g}, so that "
            "curation.success_within leaves none to roll out: the policy has learned them all, or they are beyond it. "
            "Take tasks of another difficulty, or widen curation.success_within"
        )

    def again(self, group_id: int) -> None:
        """Queue a group whose payload is lost for reissue. Raises `KeyError` if it is not open."""
        draw = self.open.pop(group_id)
        self.curation.lose(group_id, draw.task_id)
        heapq.heappush(self._again, (group_id, draw))

    def consume(self, group_ids: Iterable[int]) -> None:
        """Record groups as trained and published. Raises `KeyError` for a group that is not open."""
        for group_id in group_ids:
            self.drop(group_id)
            self.num_consumed += 1
        self.curation.publish()
        self._weigh()

    def _weigh(self) -> None:
        """Let the weights of the sources follow what they teach, if the rules say so."""
        if self.curation.rules.follows_reward_std and isinstance(self.source, TaskMixture):
            self.source.multiply(self.curation.factors(self.source.shares))

    def propose(self, episodes: Iterable[EpisodeMeta]) -> None:
        """Add the tasks that trained episodes propose to the source of proposed tasks, if there is one."""
        if isinstance(self.source, TaskMixture):
            for episode in episodes:
                for row in episode.proposals:
                    self.source.propose(row)

    def metrics(self) -> dict[str, float]:
        """Return the figures of curation, by full metric name."""
        found = self.curation.metrics()
        if isinstance(self.source, TaskMixture) and (num := self.source.num_proposed) is not None:
            found["curation/proposed"] = num
        if self.curation.rules.follows_reward_std and isinstance(self.source, TaskMixture):
            found |= {f"curation/share/{name}": share for name, share in self.source.shares.items()}
        return found

    def drop(self, group_id: int) -> None:
        """Settle a group that was trained or dropped. Raises `KeyError` if it is not open."""
        del self.open[group_id]
        self.curation.settle(group_id)

    def state(self) -> LedgerState:
        """Return the state for a checkpoint."""
        pending, tasks = sorted([*self.open.items(), *self._again]), self.source.state()
        return LedgerState(
            tasks.fingerprint,
            tasks.cursor,
            self.next_group_id,
            self.num_consumed,
            dict(pending),
            self.curation.state(),
            dict(tasks.sources),
        )

    def restore(self, state: LedgerState, finished: Collection[int]) -> list[str]:
        """Restore `state`: the groups `finished` are in the queue again, all other open ones will be reissued.

        Returns what has changed in the tasks since. A group whose task is gone gets another one. Raises `DataError`
        for a state that these sources cannot have.
        """
        notes = self.source.restore(TasksState(state.fingerprint, state.cursor, state.sources))
        self.next_group_id, self.num_consumed = state.next_group_id, state.num_consumed
        self.curation.restore(state.curation, finished)
        self._weigh()
        pending = {group_id: self._draw_again(draw) if notes else draw for group_id, draw in state.pending.items()}
        self.open = {group_id: draw for group_id, draw in pending.items() if group_id in finished}
        self._again = [each for each in pending.items() if each[0] not in finished]  # sorted, so a heap
        return notes

    def _draw_again(self, draw: TaskDraw) -> TaskDraw:
        """Return a draw of the same place in tasks that have changed since, or the next draw if there is none."""
        try:
            return replace(draw, task_id=self.source.at(draw.cursor).id)
        except DataError:
            return self._draw()
