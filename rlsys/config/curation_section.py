"""Section `curation`: which tasks are rolled out, and how many episodes they get."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
)

from rlsys.algorithm import Algorithm
from rlsys.config.config_problems import Problem
from rlsys.config.section import Section
from rlsys.util.number_ranges import Fraction


class CurationSection(Section):
    """Selection of tasks and their number of episodes, by the results of earlier episodes; off by default."""

    fewer_above: Fraction | None = None
    """Success rate above which a task gets half of `algorithm.group_size` episodes, rounded up."""
    success_within: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Least and greatest success rate of a task that is rolled out, over its last 8 scored episodes or more; others are
    passed over 4 times, and then rolled out again with their history cleared."""
    stored_successes: NonNegativeInt = 0
    """Most successes to store for groups in which all episodes fail, the newest of each task. A stored success within
    the staleness bound replaces one episode. The least recently stored or used task is evicted first. 0: none."""
    stored_staleness: NonNegativeInt = 0
    """Versions by which a stored success may be older than `asynchrony.max_staleness` allows. Its tokens then need an
    algorithm that corrects for any staleness, such as `dart`, or `grpo` with `correction: tis`."""
    length_cap: Annotated[float, Field(ge=1)] | None = None
    """Most tokens that an episode samples, over the longest success of its task so far; a task without a success has no
    such limit. A longer episode is truncated. None: no limit by task."""
    source_weights: Literal["fixed", "reward_std"] = "fixed"
    """`reward_std`: each source of data is drawn by its weight times the standard deviation of the rewards of a
    group, over about the last 30 groups: most where half of the episodes succeed, least where all or none do."""

    @field_validator("success_within")
    @classmethod
    def _is_a_range(cls, within: tuple[float, float]) -> tuple[float, float]:
        low, high = within
        if low > high:
            raise ValueError(f"the least, {low:g}, is above the greatest, {high:g}")
        return within

    @property
    def is_selective(self) -> bool:
        """True if a task may be passed over."""
        return self.success_within != (0.0, 1.0)

    @property
    def needs_history(self) -> bool:
        """True if a rule depends on earlier scores."""
        return (
            self.is_selective or self.fewer_above is not None or self.follows_reward_std or self.length_cap is not None
        )

    @property
    def follows_reward_std(self) -> bool:
        """True if the weights of sources follow what they teach."""
        return self.source_weights == "reward_std"

    def problems(self, algorithm: Algorithm, max_staleness: int | None) -> list[Problem]:
        """Conflicts with the rest of the configuration; `max_staleness` None: unknown."""
        found: list[Problem] = []
        size = algorithm.group_size
        if self.fewer_above is not None and not _can_have(algorithm, fewer(size)):
            text = f"groups of {fewer(size)} are too small for the algorithm: raise algorithm.group_size ({size})"
            found.append((("fewer_above",), text))
        if self.stored_successes and size == 1:
            found.append((("stored_successes",), "a group needs other episodes beside it: raise algorithm.group_size"))
        if self.stored_successes and max_staleness == 0 and not self.stored_staleness:
            text = (
                "what is stored is older than the step that trains it: set asynchrony.max_staleness to 1 or more, or "
                "curation.stored_staleness"
            )
            found.append((("stored_successes",), text))
        if self.stored_staleness and not self.stored_successes:
            found.append((("stored_staleness",), "nothing is stored: set curation.stored_successes"))
        elif self.stored_staleness and algorithm.max_safe_staleness is not None:
            text = f"the loss of {type(algorithm).__name__} does not correct for tokens of any age: set it to 0"
            found.append((("stored_staleness",), text))
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
