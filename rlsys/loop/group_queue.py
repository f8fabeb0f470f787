"""Queue of groups between producers, annotators and the learner: states, permits, window and staleness bound.

    ISSUED -> ROLLING_OUT -> ROLLED_OUT -> SCORED -> READY -> TAKEN -> TRAINED

From each of the first six states an attempt at a group may become DROPPED, under a counted reason, or REISSUED. A
REISSUED attempt is replaced by another, at once or when a permit is free. A group taken for a step that failed is READY
again. Any other transition raises. Only the queue changes states, and it emits the event of each change.

Columns arrive one by one: an annotator takes rolled-out groups while others are still running. The learner takes groups
that have all their columns, oldest first (TransferQueue, arXiv:2507.01663). Columns for an attempt that is over are
refused and counted. An operation costs O(log n) for n groups in flight, `oldest_in_time` O(n).

The number of permits bounds the staleness, see `StalenessBound`. `take` checks it again on the versions of tokens. Its
`stale` drop counter should read 0.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf

from rlsys.algorithm import Column
from rlsys.loop.admission import Admission, StalenessBound
from rlsys.loop.task_ledger import Ledger, LedgerState
from rlsys.monitoring.events import Events, GroupDropped, GroupIssued, GroupReissued, group_rolled_out, group_scored
from rlsys.types import Assignment, Busy, Group, GroupKey, PolicyVersion, Ref, Task
from rlsys.util import deadlines
from rlsys.util.deadlines import Progress

LEARNER = "learner"
"""Consumer that takes groups to train. Every other consumer is an annotator, named after its column."""
State = Enum("State", "ISSUED ROLLING_OUT ROLLED_OUT SCORED READY TAKEN TRAINED DROPPED REISSUED")
"""State of an attempt at a group."""
_ENDS = (State.TRAINED, State.DROPPED, State.REISSUED)
_NEXT = {state: {State(state.value + 1), State.DROPPED, State.REISSUED} for state in State if state not in _ENDS}
_NEXT[State.TAKEN].add(State.READY)


@dataclass(slots=True, eq=False)
class InFlightGroup:
    """Metadata and references of one attempt at a group, never payloads."""

    assignment: Assignment
    num_losses: int = 0
    """Losses of the group's payload in this session."""
    state: State = State.ISSUED
    replica: str = ""
    """Replica of the last observed placement."""
    began_s: float | None = None
    """Start of its rollout, in seconds of `rlsys.util.deadlines.now`."""
    episodes: Group | None = None
    """The rolled-out group, with its scores once it is SCORED."""
    scoring: Busy | None = None
    """Time at which a reward worker scored it; None: it is not scored."""
    columns: dict[str, Ref] = field(default_factory=dict)
    """By column: a reference to the annotator's data."""
    annotators: set[str] = field(default_factory=set)
    """Columns whose annotators took the group."""
    is_offered: bool = False
    """True once the group is SCORED and worth training; its producer is then done with it."""

    @property
    def group_id(self) -> int:
        """Number of the group in the run."""
        return self.assignment.group_id

    @property
    def attempt(self) -> int:
        """Number of this attempt, see `GroupKey.attempt`."""
        return self.assignment.key.attempt

    @property
    def is_over(self) -> bool:
        """True if the attempt has ended."""
        return self.state in _ENDS

    @property
    def group(self) -> Group:
        """The rolled-out group with its available scores and columns."""
        assert self.episodes is not None, f"group {self.group_id} is {self.state.name}"
        columns = {**self.episodes.columns, **self.columns}
        return replace(self.episodes, columns=columns) if self.columns else self.episodes

    def lacking(self, columns: Iterable[Column]) -> list[str]:
        """Return what the learner still waits for, of episodes, reward and these columns."""
        is_there = {"episodes": self.episodes is not None, "reward": self.is_offered}
        is_there |= {column: column in self.columns for column in columns}
        return sorted(column for column, there in is_there.items() if not there)

    def next_attempt(self, assignment: Assignment) -> InFlightGroup:
        """Return the attempt that replaces this one."""
        key = GroupKey(self.group_id, self.attempt + 1)
        return InFlightGroup(replace(assignment, key=key), self.num_losses)

    def enter(self, state: State) -> None:
        """Change the state. Raises `RuntimeError` for an invalid transition."""
        if state not in _NEXT.get(self.state, ()):
            raise RuntimeError(f"group {self.group_id} is {self.state.name} and cannot become {state.name}")
        self.state = state

    def check(self, state: State) -> None:
        """Raise `RuntimeError` unless the attempt is in this state."""
        if self.state is not state:
            raise RuntimeError(f"group {self.group_id} is {self.state.name} and not {state.name}")


@dataclass(slots=True)
class Permit:
    """Right to have one group in flight, from admission until its step is published."""

    group: InFlightGroup
    """The latest attempt made with this permit."""


@dataclass
class GroupQueue:
    """Groups in flight, in order of group ids. Used only in the driver's event loop; not thread-safe."""

    bound: StalenessBound
    version: PolicyVersion
    """Version of the newest published weights; `release` advances it."""
    num_groups: int
    """Groups that the rest of the run consumes. No more are admitted, so the last step leaves none unused."""
    ledger: Ledger
    """Assigns tasks to permits, and counts every task exactly once."""
    columns: frozenset[Column] = frozenset()
    """Columns the learner needs besides episodes and rewards, each added by an annotator."""
    annotated_from: State = State.ROLLED_OUT
    """State in which annotators can take a group: SCORED if its episodes may change until then."""
    admission: Admission | None = None
    """Adapts the number of permits, below that of `bound`; None: always all of them."""
    events: Events = field(default_factory=Events)
    progress: Progress = field(default_factory=Progress)
    """Advances with every transition that results from work done."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Drops by reason: `stale`, `failed`, `too_long`, `zero_advantage`."""
    num_reissued: int = 0
    """Attempts beyond the first of each group."""
    num_refused: int = 0
    """Results that were handed in twice, or for an attempt that is over."""

    def __post_init__(self) -> None:
        self._arrivals = {consumer: asyncio.Event() for consumer in (LEARNER, *self.columns)}
        self._start_over(self.version, self.num_groups)

    def permits_at(self, version: PolicyVersion) -> int:
        """Return the number of permits while `version` is the newest, as of now."""
        most = self.bound.permits_at(version)
        return min(most, self.admission.permits) if self.admission else most

    def oldest_in_time(self, group_id: int) -> PolicyVersion:
        """Return the oldest version allowed for tokens of this group in flight, whenever the learner takes it."""
        return self.bound.oldest_at(sum(other < group_id for other in self.groups), self.version)

    # ------------------------------------------------------------------------------------------------ what is in flight

    @property
    def num_permits(self) -> int:
        """Permits that are free, held, or of a finished group: `permits_at`. After it fell more, fewer near the end."""
        return self._free.qsize() + self._num_held + sum(g.is_offered and not g.is_over for g in self.groups.values())

    @property
    def num_finished(self) -> int:
        """Groups in state READY, waiting for the learner."""
        return sum(group.state is State.READY for group in self.groups.values())

    @property
    def finished_groups(self) -> list[InFlightGroup]:
        """Finished groups that the learner did not take yet, oldest first. A checkpoint saves them without columns."""
        return [g for g in self.groups.values() if g.is_offered and g.state in (State.SCORED, State.READY)]

    def table(self, placements: Mapping[int, str]) -> str:
        """Format all pending groups, one per line, oldest first. `placements`: see `Rollouts.placements`."""
        lines = (f"  group {n}: {self._line(group, placements.get(n))}" for n, group in self.groups.items())
        return "\n".join(lines) or "  nothing is pending"

    def _line(self, group: InFlightGroup, replica: str | None) -> str:
        text = f"task {group.assignment.task.id}"
        if group.state is State.REISSUED:
            return f"{text}, waits to be issued again"
        lasts_s = 0.0 if group.began_s is None else deadlines.now() - group.began_s
        if replica is not None and group.state is State.ROLLING_OUT:
            return f"{text}, attempt {group.attempt}, {replica} since {lasts_s:.0f} s"
        if group.attempt:
            text += f", attempt {group.attempt} begun {lasts_s:.0f} s ago"
        lacking = group.lacking(self.columns)
        return f"{text}, waits for {' and '.join(lacking)}" if lacking else f"{text}, waits to be trained"

    # --------------------------------------------------------------------------------------------------------- permits

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[Permit]:
        """Hold a permit, and issue a group on it: one to be reissued, or a new one.

        Leaving the block gives the permit back, unless the group was offered to the learner. A group that is not over
        by then waits to be reissued. Waits for a free permit, and for the run to need another group; unblocked by
        `release`, drops and losses. Raises `RunAborted` if curation leaves no task to issue.
        """
        version = await self._free.get()
        self._num_held += 1
        permit = Permit(self._issue(version))
        try:
            yield permit
        finally:
            self._num_held -= 1
            if not permit.group.is_offered:
                if not permit.group.is_over:
                    self._void(permit.group)
                self._free.put_nowait(self.version)

    def _issue(self, version: PolicyVersion) -> InFlightGroup:
        assignment = self.ledger.issue(version)
        before = self.groups.get(assignment.group_id)
        group = self._open(InFlightGroup(assignment) if before is None else before.next_attempt(assignment))
        self.events.emit(GroupIssued(group.group_id, assignment.task.id, version, assignment.size))
        return group

    def _open(self, group: InFlightGroup) -> InFlightGroup:
        """Register an attempt at a group, at its place in the order."""
        if group.group_id in self.groups:
            self.num_reissued += 1
        else:
            heapq.heappush(self._places, group.group_id)
        self.groups[group.group_id] = group
        return group

    def release(self, groups: Sequence[InFlightGroup], version: PolicyVersion) -> list[Task]:
        """Free the permits of a step whose weights are published as `version`, for the next groups.

        Returns the tasks of the step.
        """
        for group in groups:
            self._enter(group, State.TRAINED)
        self.ledger.propose(episode for group in groups for episode in group.group.episodes)
        self.ledger.consume(group.group_id for group in groups)
        self.version = version
        self._admit(self.permits_at(version) - self.num_permits)
        return [group.assignment.task for group in groups]

    def restore(
        self, state: LedgerState, version: PolicyVersion, num_groups: int, finished: Iterable[Group]
    ) -> list[str]:
        """Restart at `version` with `num_groups` left to consume, including the `finished_groups` groups of an earlier
        session.

        Its other groups keep their place in the order: no younger group is taken before they are reissued. Returns
        what has changed in the tasks. Raises `DataError` if they are not those of that session.
        """
        episodes = {group.group_id: group for group in finished}
        notes = self.ledger.restore(state, episodes)
        self._start_over(version, num_groups, len(episodes))
        for group_id, draw in state.pending.items():
            group = self._open(InFlightGroup(self.ledger.assignment(GroupKey(group_id, 0), draw, version)))
            if group_id not in episodes:
                group.enter(State.REISSUED)
                continue
            self._enter(group, State.ROLLING_OUT)
            self._fill(group, episodes[group_id])
            self._enter(group, State.SCORED)
            self.offer(group)
        return notes

    def _start_over(self, version: PolicyVersion, num_groups: int, num_finished: int = 0) -> None:
        self.version, self.num_groups = version, num_groups
        self.groups: dict[int, InFlightGroup] = {}
        """By group id, oldest first: the latest attempt at every group that is issued or waits to be reissued."""
        self._ready: dict[str, list[int]] = {consumer: [] for consumer in self._arrivals}
        """Per consumer a heap of group ids. It contains all groups the consumer can take; other ids are skipped."""
        self._places: list[int] = []
        """Heap of group ids. It contains all groups in flight that the learner did not take; other ids are skipped."""
        self._free: asyncio.Queue[PolicyVersion] = asyncio.Queue()
        self._num_held = 0
        """Permits in use by a `permit` block."""
        self._queued: dict[str, int] = {}
        """By replica that answered since the last step was asked for: groups that waited there for a slot."""
        self._num_admitted = num_finished
        """Permits handed out for groups that the run will consume; a returned permit is handed out again."""
        self._admit(self.permits_at(version) - num_finished)

    def _admit(self, count: int) -> None:
        for _ in range(min(count, self.num_groups - self._num_admitted)):
            self._num_admitted += 1
            self._free.put_nowait(self.version)

    # ----------------------------------------------------------------------------------------------------- transitions

    def start_rollout(self, permit: Permit) -> InFlightGroup:
        """Begin a rollout attempt with a permit; a previous attempt is over then."""
        if (before := permit.group).state is not State.ISSUED:
            before.check(State.ROLLING_OUT)
            self._enter(before, State.REISSUED)
            permit.group = self._open(before.next_attempt(before.assignment))
        self._enter(permit.group, State.ROLLING_OUT)
        return permit.group

    def finish_rollout(self, group: InFlightGroup, rolled_out: Group) -> bool:
        """Hand in rolled-out episodes. Returns False, and counts it, if they exist already or the attempt is over."""
        if is_new := self._accepts(group, rolled_out.group_id, is_new=group.episodes is None):
            self._fill(group, rolled_out)
            if rolled_out.report is not None and (stats := rolled_out.report.stats) is not None:
                self._queued[rolled_out.replica] = stats.num_waiting // group.assignment.size
            self.events.emit(group_rolled_out(rolled_out))
        return is_new

    def _fill(self, group: InFlightGroup, episodes: Group) -> None:
        self._enter(group, State.ROLLED_OUT)
        group.episodes = episodes

    def score(self, group: InFlightGroup, scored: Group) -> bool:
        """Hand in scored episodes. Returns False, and counts it, if they exist already or the attempt is over."""
        is_scored = group.state in (State.SCORED, State.READY, State.TAKEN)
        if is_new := self._accepts(group, scored.group_id, is_new=not is_scored):
            self._enter(group, State.SCORED)
            group.episodes = scored
            self.events.emit(group_scored(scored, group.scoring))
        return is_new

    def offer(self, group: InFlightGroup) -> None:
        """Offer a scored group to the learner, which takes it once its columns exist."""
        group.check(State.SCORED)
        group.is_offered = True
        self._complete(group)

    def put(self, group: InFlightGroup, kind: Column, column: Ref) -> bool:
        """Hand in a column. Returns False, and counts it, if it exists already or the attempt is over."""
        if kind not in self.columns:
            raise ValueError(f"group {group.group_id}: no worker needs a column {kind!r}")
        if group.episodes is None and not group.is_over:
            raise RuntimeError(f"group {group.group_id} is {group.state.name} and cannot be annotated")
        if is_new := self._accepts(group, group.group_id, is_new=kind not in group.columns):
            group.columns[kind] = column
            self.progress.mark_progress()
            self._complete(group)
        return is_new

    def _accepts(self, group: InFlightGroup, group_id: int, *, is_new: bool) -> bool:
        if group_id != group.group_id:
            raise ValueError(f"group {group.group_id} was handed group {group_id}")
        is_accepted = is_new and not group.is_over
        self.num_refused += not is_accepted
        return is_accepted

    def _complete(self, group: InFlightGroup) -> None:
        if group.is_offered and self.columns <= group.columns.keys():
            self._enter(group, State.READY)

    def reissue(self, group: InFlightGroup, reason: str) -> None:
        """Reissue a group whose payload is lost. It keeps its place, and is issued before new groups."""
        self._void(group)
        group.num_losses += 1
        self.events.emit(GroupReissued(group.group_id, group.assignment.task.id, reason))

    def _void(self, group: InFlightGroup) -> None:
        self._enter(group, State.REISSUED)
        self.ledger.again(group.group_id)

    def drop(self, group: InFlightGroup, reason: str, detail: str) -> None:
        """Drop a group, counted under `reason`. Its permit is free for another group, at the newest version."""
        self._enter(group, State.DROPPED)
        self.dropped[reason] += 1
        self.ledger.drop(group.group_id)
        self.events.emit(GroupDropped(group.group_id, group.assignment.task.id, reason, detail))

    def _enter(self, group: InFlightGroup, state: State) -> None:
        before = group.state
        group.enter(state)
        if state is State.ROLLING_OUT:
            group.began_s = deadlines.now()
        if state is self.annotated_from:
            for column in self.columns:
                heapq.heappush(self._ready[column], group.group_id)
        if state is State.READY:
            heapq.heappush(self._ready[LEARNER], group.group_id)
        if before is State.TAKEN:
            heapq.heappush(self._places, group.group_id)
        if state in (State.TRAINED, State.DROPPED):
            del self.groups[group.group_id]
        if state in (State.REISSUED, State.DROPPED) and group.is_offered:
            self._free.put_nowait(self.version)  # its producer has left the `permit` block
        if state not in (State.ROLLING_OUT, State.REISSUED):
            self.progress.mark_progress()
        self._wake()

    def _wake(self) -> None:
        for arrival in self._arrivals.values():
            arrival.set()

    # ------------------------------------------------------------------------------------------------------- consumers

    async def take_for(self, column: Column, max_tokens: int) -> list[InFlightGroup]:
        """Take groups that lack `column`, oldest first: at most `max_tokens` in all, or one group.

        Waits for a rolled-out group; unblocked by producers.
        """
        taken: list[InFlightGroup] = []
        while (group := self._next(column)) is None:
            await self._arrival(column)
        while group is not None and (not taken or group.group.num_tokens <= max_tokens):
            max_tokens -= group.group.num_tokens
            group.annotators.add(column)
            taken.append(group)
            group = self._next(column)
        return taken

    async def take(self, version: PolicyVersion) -> list[InFlightGroup]:
        """Take the groups of the learner's next step, oldest first.

        Waits for a group with all its columns, less than `window` group ids past the oldest in flight. Unblocked by
        producers and annotators handing in columns, and by drops. A group with a token more versions behind
        `version` than `bound` allows is dropped as `stale`. Puts back what it took if it is cancelled.
        """
        if self.admission and version >= self.bound.synchronous_until:
            self.admission.observe(self._num_takeable(), sum(self._queued.values()))
            self._admit(self.permits_at(version) - self.num_permits)
        self._queued.clear()
        taken: list[InFlightGroup] = []
        try:
            while len(taken) < self.bound.groups_per_step:
                group = self._next(LEARNER)
                if group is None or group.group_id >= self._oldest() + self.bound.window:
                    await self._arrival(LEARNER)
                    continue
                self._enter(group, State.TAKEN)
                oldest = group.group.oldest_version
                if version - oldest > self.bound.at(version):
                    self.drop(group, "stale", f"tokens of version {oldest} are older than the staleness bound allows")
                else:
                    taken.append(group)
        except asyncio.CancelledError:
            self.put_back(LEARNER, taken)
            raise
        return taken

    def _num_takeable(self) -> int:
        """Return the number of groups that the learner can take without waiting."""
        is_lacking = (n for n, g in self.groups.items() if g.state not in (State.READY, State.TAKEN))
        first_lacking = min(is_lacking, default=inf)
        ready = (n for n, group in self.groups.items() if group.state is State.READY)
        return sum(n < first_lacking + self.bound.window for n in ready)

    def put_back(self, consumer: str, groups: Iterable[InFlightGroup]) -> None:
        """Return groups to a consumer, which can take them again. Attempts that are over are skipped."""
        for group in groups:
            if group.is_over:
                continue
            if consumer == LEARNER:
                self._enter(group, State.READY)
            else:
                group.annotators.remove(consumer)
                heapq.heappush(self._ready[consumer], group.group_id)
        self._wake()

    def _next(self, consumer: str) -> InFlightGroup | None:
        """Return the oldest group that this consumer can take."""
        heap = self._ready[consumer]
        while heap:
            if (group := self.groups.get(heap[0])) and self._is_ready(consumer, group):
                return group
            heapq.heappop(heap)
        return None

    def _oldest(self) -> int:
        """Return the id of the oldest group in flight that the learner did not take."""
        while (group := self.groups.get(self._places[0])) is None or group.state is State.TAKEN:
            heapq.heappop(self._places)
        return self._places[0]

    async def _arrival(self, consumer: str) -> None:
        self._arrivals[consumer].clear()
        await self._arrivals[consumer].wait()

    def _is_ready(self, consumer: str, group: InFlightGroup) -> bool:
        if consumer == LEARNER:
            return group.state is State.READY
        is_there = self.annotated_from.value <= group.state.value < State.TRAINED.value
        return is_there and consumer not in group.annotators
