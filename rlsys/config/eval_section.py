"""Section `eval`: data sets and settings of evaluations."""

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

from rlsys.config.config_problems import Problem, refuse
from rlsys.config.rows_section import RowsSection, dataset_name
from rlsys.config.section import PathText, Section
from rlsys.errors import ConfigError
from rlsys.util.number_ranges import Count, ManyFrom1


def datasets_of(options: Sequence[str]) -> dict[str, str]:
    """Data sets by name, from arguments such as `hard=b.parquet`, or `a.jsonl`, which is named after the file.

    Text before a `=` that is not a valid name, such as `/data/run` of `/data/run=3/a.jsonl`, belongs to the path.
    Raises `ConfigError` if two data sets have the same name.
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


def _datasets_by_name(data: object) -> object:
    sets = {dataset_name(data): data} if isinstance(data, str) else {} if data is None else data
    if not isinstance(sets, dict):
        return sets
    return {name: {"path": given} if isinstance(given, str) else given for name, given in sets.items()}


def _well_named(data: dict[str, RowsSection]) -> dict[str, RowsSection]:
    text = "the name of a data set is letters, digits, `_`, `-` and `.`; give another, as in {NAME: PATH}"
    refuse(((name,), text) for name in data if not _is_name(name))
    return data


DataSets = Annotated[
    dict[str, RowsSection],
    BeforeValidator(_datasets_by_name, json_schema_input_type=dict[str, RowsSection | PathText] | PathText | None),
    AfterValidator(_well_named),
]


def ks_up_to(samples: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... and `samples`; 6 gives `[1, 2, 4, 6]`."""
    return sorted({*(1 << i for i in range(samples.bit_length())), samples})


class EvalSection(Section):
    """Data and settings of the evaluation of a policy."""

    data: DataSets = Field(default={})
    """Data sets by name, `{held_out: a.jsonl, hard: b.parquet}`, each in the form of `data.path`, or with columns and a
    system message of its own: `{hard: {path: b.parquet, columns: {prompt: problem}}}`. A single path is named after its
    file. Reward functions whose `source` is the name of a set score that set, and no others do."""
    every: NonNegativeInt = 0
    """Steps between two evaluations. The first is before training; the last step is evaluated too. 0: none."""
    samples: ManyFrom1 = 1
    """Samples per task."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature, 0.01 or more; 0 is greedy."""
    limit: PositiveInt | None = None
    """Most tasks of each data set, from the first; None: all."""
    replicas: Count = 1
    """Replicas that generate for evaluation only, each with the resources of `rollout`. In training they start if
    `every` is more than 0."""

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics by which checkpoints can be compared, e.g. `eval/held_out/pass@4`."""
        names = ["mean", *(f"pass@{k}" for k in ks_up_to(self.samples)), "truncated_frac", "failed_frac", "length_mean"]
        return [f"eval/{dataset}/{name}" for dataset in self.data for name in names]

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        problems: list[Problem] = []
        if self.every and not self.data:
            problems.append((("every",), "there is nothing to evaluate on; set eval.data, or set this to 0"))
        if self.samples > 1 and self.temperature == 0:
            text = "greedy samples of a task are all the same; set eval.temperature, or set this to 1"
            problems.append((("samples",), text))
        if 0 < self.temperature < 0.01:
            problems.append((("temperature",), "engines cannot tell it from 0.01; set 0 for greedy, or 0.01 or more"))
        refuse(problems)
        return self
