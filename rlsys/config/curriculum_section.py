"""The `curation` section: selection of tasks and their number of episodes, by the results of earlier episodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, field_validator

from rlsys.algorithm import Algorithm
from rlsys.config.config_problems import Location
from rlsys.config.section import Section

Rate = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of curation; none is active by default. The section `curation` of a configuration explains each."""

    success_reward: float = 1.0
    """An episode with this reward or more is a success."""
    fewer_above: float | None = None
    """Success rate above which a task gets half the episodes."""
    within: tuple[float, float] = (0.0, 1.0)
    """Least and greatest success rate of a task that is issued."""
    min_episodes: int = 8
    """Scored episodes before a task's success rate counts."""
    look_again: int = 4
    """Times a task is passed over before it is issued again with its history cleared; 0: never."""
    stored_successes: int = 0
    """Most successes to store, one per task; 0: none."""

    @property
    def is_selective(self) -> bool:
        """True if a task may be passed over."""
        return self.within != (0.0, 1.0)

    @property
    def needs_history(self) -> bool:
        """True if a rule depends on success rates."""
        return self.is_selective or self.fewer_above is not None


class CurationSection(Section):
    """Selection of tasks and their number of episodes, by the results of earlier episodes; off by default."""

    success_reward: float = 1.0
    """An episode with this reward or more is a success. An episode without a score counts in no success rate."""
    fewer_above: Rate | None = None
    """Success rate above which a task gets half of `algorithm.group_size` episodes, rounded up."""
    success_within: tuple[Rate, Rate] = (0.0, 1.0)
    """Least and greatest success rate of a task that is rolled out; others are passed over. If no task is left and
    `look_again` is 0, the run ends."""
    min_episodes: PositiveInt = 8
    """Scored episodes of a task before its success rate counts. Only episodes trained or dropped before the newest step
    was published count."""
    look_again: NonNegativeInt = 4
    """Times a task is passed over before it is rolled out again with its history cleared; 0: never."""
    stored_successes: NonNegativeInt = 0
    """Most successes to store for groups in which all episodes fail, the newest of each task. A stored success within
    the staleness bound replaces one episode. The least recently stored or used task is evicted first. 0: none."""

    @field_validator("success_within")
    @classmethod
    def _is_a_range(cls, within: tuple[float, float]) -> tuple[float, float]:
        low, high = within
        if low > high:
            raise ValueError(f"the least, {low:g}, is above the greatest, {high:g}")
        return within

    def rules(self) -> Rules:
        """The same rules in the form that `Curriculum` takes."""
        return Rules(
            success_reward=self.success_reward,
            fewer_above=self.fewer_above,
            within=self.success_within,
            min_episodes=self.min_episodes,
            look_again=self.look_again,
            stored_successes=self.stored_successes,
        )

    def problems(self, algorithm: Algorithm, max_staleness: int | None) -> list[tuple[Location, str]]:
        """Conflicts with the rest of the configuration; `max_staleness` None: unknown."""
        found: list[tuple[Location, str]] = []
        size = algorithm.group_size
        if self.fewer_above is not None and not _can_have(algorithm, fewer(size)):
            text = f"groups of {fewer(size)} are too small for the algorithm: raise algorithm.group_size ({size})"
            found.append((("fewer_above",), text))
        if self.stored_successes and size == 1:
            found.append((("stored_successes",), "a group needs other episodes beside it: raise algorithm.group_size"))
        if self.stored_successes and max_staleness == 0:
            text = "what is stored is older than the step that trains it: set asynchrony.max_staleness to 1 or more"
            found.append((("stored_successes",), text))
        return found


def _can_have(algorithm: Algorithm, group_size: int) -> bool:
    """True if the algorithm allows groups of this size, and they are smaller than its `group_size`."""
    try:
        replace(algorithm, group_size=group_size)
    except ValidationError:
        return False
    return group_size < algorithm.group_size


def fewer(group_size: int) -> int:
    """Episodes of a smaller group: half, rounded up."""
    return (group_size + 1) // 2
