"""The `eval` section: what a policy is measured on, in training and by `rlsys eval`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from rlsys.config.config_problems import Location, nested
from rlsys.config.section import Section
from rlsys.errors import ConfigError


def dataset_name(path: str) -> str:
    """What a data set is called that was given no name: `data/held_out.jsonl` is `held_out`, `org/sums#hard` is
    `sums-hard`."""
    return re.sub(r"[:#]", "-", re.sub(r"\.(jsonl?|parquet)$", "", path.rstrip("/").rpartition("/")[2]))


def datasets_of(options: Sequence[str]) -> dict[str, str]:
    """Data sets by name, from words like `hard=b.parquet`, or `a.jsonl`, which is named after the file.

    What stands before a `=` and is no name, such as `/data/run` of `/data/run=3/a.jsonl`, belongs to the path. Raises
    `ConfigError` if two have the same name.
    """
    sets: dict[str, str] = {}
    for option in options:
        name, equals, path = option.partition("=")
        if not (equals and _is_name(name)):
            name, path = dataset_name(option), option
        if name in sets:
            raise ConfigError(f"two data sets are called {name}: {sets[name]} and {path}; name them: NAME=PATH")
        sets[name] = path
    return sets


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*", text, re.ASCII) is not None


def _named(data: object) -> object:
    return {dataset_name(data): data} if isinstance(data, str) else {} if data is None else data


def _well_named(data: dict[str, str]) -> dict[str, str]:
    text = "the name of a data set is letters, digits, `_`, `-` and `.`; give another, as in {NAME: PATH}"
    if problems := [((name,), text) for name in data if not _is_name(name)]:
        raise nested(problems)
    return data


DataSets = Annotated[
    dict[str, Annotated[str, Field(min_length=1)]],
    BeforeValidator(_named, json_schema_input_type=dict[str, str] | str | None),
    AfterValidator(_well_named),
]


class EvalSection(Section):
    """What the policy is measured on, and how."""

    data: DataSets = Field(default={})
    """Data sets by name, `{held_out: a.jsonl, hard: b.parquet}`, each as `data.path`; of a single path, the name is
    that of the file."""
    every: NonNegativeInt = 0
    """Steps between two evaluations in training, the first before it; the last step is evaluated too. 0: none."""
    samples: PositiveInt = 1
    """Samples per task."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature, 0.01 or more; 0 is greedy."""
    limit: PositiveInt | None = None
    """Tasks of each data set, from the first; None: all."""
    pass_reward: float = 1.0
    """A sample passes, for pass@k, with this reward or more."""
    replicas: PositiveInt = 1
    """Copies of the policy that generate for evaluation alone, each with the resources of `rollout`; in training they
    start where `every` is more than 0."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        problems: list[tuple[Location, str]] = []
        if self.every and not self.data:
            problems.append((("every",), "there is nothing to evaluate on; set eval.data, or set this to 0"))
        if self.samples > 1 and self.temperature == 0:
            text = "greedy samples of a task are all the same; set eval.temperature, or set this to 1"
            problems.append((("samples",), text))
        if 0 < self.temperature < 0.01:
            problems.append((("temperature",), "engines cannot tell it from 0.01; set 0 for greedy, or 0.01 or more"))
        if problems:
            raise nested(problems)
        return self
