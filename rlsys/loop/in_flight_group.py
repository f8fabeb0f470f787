"""One attempt at a group, from its issue to its end.

    ISSUED -> ROLLING_OUT -> ROLLED_OUT -> SCORED -> READY -> TAKEN -> TRAINED

Each of the first six may instead become DROPPED, under a counted reason, or REISSUED: another attempt at the group
takes its place, now or once a permit is free. A group that was taken for a step which came to nothing is READY again.
The queue alone changes states (`rlsys.loop.group_queue`); any other transition raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from rlsys.types import Assignment, Group, Ref
from rlsys.util import deadlines

State = Enum("State", "ISSUED ROLLING_OUT ROLLED_OUT SCORED READY TAKEN TRAINED DROPPED REISSUED")
"""Where an attempt at a group is on its way to the learner."""
_ENDS = (State.TRAINED, State.DROPPED, State.REISSUED)
_NEXT = {state: {State(state.value + 1), State.DROPPED, State.REISSUED} for state in State if state not in _ENDS}
_NEXT[State.TAKEN].add(State.READY)


@dataclass(slots=True, eq=False)
class InFlightGroup:
    """What is known of one attempt at a group: metadata and references, never payloads."""

    assignment: Assignment
    attempt: int = 1
    """Counted from 1 over all attempts at the group in this session; 0: an earlier session made it."""
    num_losses: int = 0
    """Times that the payload of the group was gone, in this session."""
    state: State = State.ISSUED
    reason: str = ""
    """Of a drop: `stale`, `failed`, `too_long` or `no_signal`."""
    replica: str = ""
    """Where it was last seen to be rolled out."""
    entered_s: dict[State, float] = field(default_factory=dict)
    """When it came into each state after the first, in seconds of `rlsys.util.deadlines.now`."""
    episodes: Group | None = None
    """The rolled-out group, with its scores once it is SCORED."""
    columns: dict[str, Ref] = field(default_factory=dict)
    """By signal: a reference to the column that an annotator made."""
    annotators: set[str] = field(default_factory=set)
    """Signals whose annotators took it."""
    is_offered: bool = False
    """Is it SCORED and found to be worth training? It does without its producer then."""

    @property
    def group_id(self) -> int:
        """Number of the group in the run."""
        return self.assignment.group_id

    @property
    def is_over(self) -> bool:
        """Is there nothing more to come of this attempt?"""
        return self.state in _ENDS

    @property
    def group(self) -> Group:
        """The rolled-out group with the scores and signals that are there."""
        assert self.episodes is not None, f"group {self.group_id} is {self.state.name}"
        columns = {**self.episodes.columns, **self.columns}
        return replace(self.episodes, columns=columns) if self.columns else self.episodes

    def next_attempt(self, assignment: Assignment) -> InFlightGroup:
        """What takes its place."""
        return InFlightGroup(assignment, self.attempt + 1, self.num_losses)

    def enter(self, state: State) -> None:
        """Change the state. Raises `RuntimeError` where that is no step of a group's life."""
        if state not in _NEXT.get(self.state, ()):
            raise RuntimeError(f"group {self.group_id} is {self.state.name} and cannot become {state.name}")
        self.state = state
        self.entered_s[state] = deadlines.now()

    def check(self, state: State) -> None:
        """Raise `RuntimeError` unless it is in this state."""
        if self.state is not state:
            raise RuntimeError(f"group {self.group_id} is {self.state.name} and not {state.name}")
