"""One attempt at a group, from its issue to its end.

    ISSUED -> ROLLING_OUT -> ROLLED_OUT -> SCORED -> READY -> TAKEN -> TRAINED

From each of the first six states a group may become DROPPED, under a counted reason, or REISSUED. A REISSUED attempt is
replaced by another, at once or when a permit is free. A group taken for a step that failed is READY again. Only the
queue changes states (`rlsys.loop.group_queue`); any other transition raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from rlsys.types import Assignment, Group, Ref
from rlsys.util import deadlines

State = Enum("State", "ISSUED ROLLING_OUT ROLLED_OUT SCORED READY TAKEN TRAINED DROPPED REISSUED")
"""State of an attempt at a group."""
_ENDS = (State.TRAINED, State.DROPPED, State.REISSUED)
_NEXT = {state: {State(state.value + 1), State.DROPPED, State.REISSUED} for state in State if state not in _ENDS}
_NEXT[State.TAKEN].add(State.READY)


@dataclass(slots=True, eq=False)
class InFlightGroup:
    """Metadata and references of one attempt at a group, never payloads."""

    assignment: Assignment
    attempt: int = 1
    """Counted from 1 over all attempts in this session; 0 for a group finished in an earlier session."""
    num_losses: int = 0
    """Losses of the group's payload in this session."""
    state: State = State.ISSUED
    reason: str = ""
    """Reason of a drop: `stale`, `failed`, `too_long` or `no_signal`."""
    replica: str = ""
    """Replica of the last observed placement."""
    entered_s: dict[State, float] = field(default_factory=dict)
    """Time of each transition, by new state, in seconds of `rlsys.util.deadlines.now`."""
    episodes: Group | None = None
    """The rolled-out group, with its scores once it is SCORED."""
    columns: dict[str, Ref] = field(default_factory=dict)
    """By signal: a reference to the annotator's column."""
    annotators: set[str] = field(default_factory=set)
    """Signals whose annotators took the group."""
    is_offered: bool = False
    """True once the group is SCORED and worth training; its producer is then done with it."""

    @property
    def group_id(self) -> int:
        """Number of the group in the run."""
        return self.assignment.group_id

    @property
    def is_over(self) -> bool:
        """True if the attempt has ended."""
        return self.state in _ENDS

    @property
    def group(self) -> Group:
        """The rolled-out group with its available scores and signals."""
        assert self.episodes is not None, f"group {self.group_id} is {self.state.name}"
        columns = {**self.episodes.columns, **self.columns}
        return replace(self.episodes, columns=columns) if self.columns else self.episodes

    def next_attempt(self, assignment: Assignment) -> InFlightGroup:
        """Return the attempt that replaces this one."""
        return InFlightGroup(assignment, self.attempt + 1, self.num_losses)

    def enter(self, state: State) -> None:
        """Change the state. Raises `RuntimeError` for an invalid transition."""
        if state not in _NEXT.get(self.state, ()):
            raise RuntimeError(f"group {self.group_id} is {self.state.name} and cannot become {state.name}")
        self.state = state
        self.entered_s[state] = deadlines.now()

    def check(self, state: State) -> None:
        """Raise `RuntimeError` unless the attempt is in this state."""
        if self.state is not state:
            raise RuntimeError(f"group {self.group_id} is {self.state.name} and not {state.name}")
