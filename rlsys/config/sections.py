"""Base of the sections of a configuration, and the sections `curation`, `eval`, `dashboard` and `alerts`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from rlsys.algorithm import Algorithm
from rlsys.config.config_problems import Problem, nearest, problems_of_value, refuse
from rlsys.errors import ConfigError
from rlsys.monitoring.alert_rules import RULES

Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys, documented by the string below each key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _means_something(cls, given: object, read: ValidatorFunctionWrapHandler) -> object:
        value = read(given)
        refuse(problems_of_value(given, value))
        return value


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


def dataset_name(path: str) -> str:
    """Default name of a data set: `held_out` for `data/held_out.jsonl`, `sums-hard` for `org/sums#hard`."""
    return re.sub(r"[:#]", "-", re.sub(r"\.(jsonl?|csv|parquet)$", "", path.rstrip("/").rpartition("/")[2]))


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
    return {dataset_name(data): data} if isinstance(data, str) else {} if data is None else data


def _well_named(data: dict[str, str]) -> dict[str, str]:
    text = "the name of a data set is letters, digits, `_`, `-` and `.`; give another, as in {NAME: PATH}"
    refuse(((name,), text) for name in data if not _is_name(name))
    return data


DataSets = Annotated[
    dict[str, Annotated[str, Field(min_length=1)]],
    BeforeValidator(_datasets_by_name, json_schema_input_type=dict[str, str] | str | None),
    AfterValidator(_well_named),
]


def ks_up_to(samples: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... and `samples`; 6 gives `[1, 2, 4, 6]`."""
    return sorted({*(1 << i for i in range(samples.bit_length())), samples})


class EvalSection(Section):
    """Data and settings of the evaluation of a policy."""

    data: DataSets = Field(default={})
    """Data sets by name, `{held_out: a.jsonl, hard: b.parquet}`, each in the form of `data.path`. A single path is
    named after its file."""
    every: NonNegativeInt = 0
    """Steps between two evaluations. The first is before training; the last step is evaluated too. 0: none."""
    samples: PositiveInt = 1
    """Samples per task."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature, 0.01 or more; 0 is greedy."""
    limit: PositiveInt | None = None
    """Most tasks of each data set, from the first; None: all."""
    replicas: PositiveInt = 1
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


def dashboard_address(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`. Raises `ValueError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(
            f"should be HOST:PORT, such as 127.0.0.1:8321, with port 0 for any that is free (got {address!r})"
        )
    return host, int(port)


def _with_port(address: str | None) -> str | None:
    return address and ":".join(map(str, dashboard_address(address)))


Dashboard = Annotated[str | None, AfterValidator(_with_port)]


def _check_rules(thresholds: dict[str, float | None]) -> dict[str, float | None]:
    there = f"there are: {', '.join(RULES)}"
    refuse(((name,), f"no such alert; {nearest(name, RULES, there)}") for name in thresholds if name not in RULES)
    return thresholds


Thresholds = Annotated[dict[str, float | None], AfterValidator(_check_rules)]
