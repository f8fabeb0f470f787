"""The file of `rlsys population`: runs that search together for values of some keys.

config: [examples/sort/run.yaml]
members: 4
search: pbt
every: 20
keys:
  train.lr: { low: 1.0e-5, high: 1.0e-3 }
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from rlsys.config.loader import of_tree
from rlsys.config.schema import Config
from rlsys.config.sections import Section

SEARCHED = re.compile(r"train\.lr|train\.clip_norm|critic\.lr|algorithm\.(?!type$|group_size$).+")
"""Keys that a run can change between two steps."""


class RangeSection(Section):
    """Range of a key: values are drawn uniformly in their logarithm."""

    low: PositiveFloat
    """Least value."""
    high: PositiveFloat
    """Greatest value."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low, {self.low:g}, is above high, {self.high:g}")
        return self


class PopulationFile(Section):
    """Several runs of one configuration that search for values of its keys."""

    config: Annotated[list[str], Field(min_length=1)]
    """Configuration files of every run; later ones win."""
    members: Annotated[int, Field(ge=2)] = 4
    """Runs at the same time."""
    search: Literal["pbt", "asha", "random"] = "pbt"
    """`pbt`: at every meeting the worst runs take weights, moments and place in the data of one of the best, and change
    the values a little. `asha`: a run ends early unless it is among the best at its step. `random`: none of it."""
    every: PositiveInt = 20
    """Steps between two meetings (`pbt`), or to the first one (`asha`), whose later ones are at `every / share`,
    `every / share`², and so on."""
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Share of the runs that is replaced at a meeting, and of those copied (`pbt`); that goes on from one (`asha`)."""
    score: str = "reward/mean"
    """Metric to compare by: its mean over the last `every` steps."""
    score_is: Literal["highest", "lowest"] = "highest"
    """Best value of `score`."""
    seed: NonNegativeInt = 0
    """Seed of drawn and changed values. `run.seed` of run i is that of the configuration plus i."""
    keys: Annotated[dict[str, RangeSection], Field(min_length=1)]
    """Searched keys of the configuration, each with its range."""

    @field_validator("keys")
    @classmethod
    def _can_be_searched(cls, keys: dict[str, RangeSection]) -> dict[str, RangeSection]:
        if strange := [key for key in keys if not SEARCHED.fullmatch(key)]:
            raise ValueError(
                f"{', '.join(strange)} cannot change in a run; search train.lr, train.clip_norm, critic.lr, or keys of "
                "the algorithm except type and group_size"
            )
        return keys


def with_values(config: Config, values: dict[str, float], name: str) -> Config:
    """Return the configuration with other values of some keys. Raises `ConfigError`; `name` is that of the run."""
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        section: dict[str, Any] = tree
        *sections, last = key.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return of_tree(Config, tree, f"the population, run {name}")
