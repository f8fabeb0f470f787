"""The `data` section: where the training tasks come from, and in which shares."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Tag,
    model_validator,
)

from rlsys.config.config_problems import MISSING, Problem, refuse, union_tag
from rlsys.config.rows_section import RowsSection, dataset_name
from rlsys.config.section import PathText, Section
from rlsys.data.row_adapters import Columns
from rlsys.errors import ConfigError

PROPOSED = "proposed"
"""Value of `SourceSection.path` for tasks that a run makes itself."""


def _from_the_start(weights: dict[int, float]) -> dict[int, float]:
    if 0 not in weights:
        refuse([((), "give the weight of the first steps too, as in {0: 0.8, 100: 0.5}")])
    return weights


_NUMBER, _BY_STEP = union_tag("number"), union_tag("by_step")
Weights = Annotated[
    Annotated[NonNegativeFloat, Tag(_NUMBER)]
    | Annotated[dict[NonNegativeInt, NonNegativeFloat], AfterValidator(_from_the_start), Tag(_BY_STEP)],
    Discriminator(lambda value: _BY_STEP if isinstance(value, dict) else _NUMBER),
]


class SourceSection(RowsSection):
    """One of several sources of training tasks."""

    path: PathText
    """As a `data.path` of one file. `proposed`: tasks that episodes of this run propose (`Session.propose`); nothing is
    drawn until there is one."""
    name: str = Field("", pattern=r"^[\w.-]*$")
    """Name in metrics, messages and checkpoints; empty: that of the file."""
    weight: Weights = 1.0
    """Share of the tasks that are drawn, over the sum of all weights; 0: none. For a curriculum, weights by the step
    from which each holds: `{0: 0.8, 100: 0.5}`; tasks count by `train.groups_per_step` as they are drawn."""
    shuffle: bool | None = None
    """Order of this source, as `data.shuffle`; `false` keeps a file that goes from easy to hard. None:
    `data.shuffle`."""

    @property
    def is_proposed(self) -> bool:
        """True if the tasks are those that episodes propose."""
        return self.path == PROPOSED

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        return self if self.name else self.model_copy(update={"name": dataset_name(self.path)})

    def weight_at(self, step: int) -> float:
        """Weight that holds from a step on."""
        if not isinstance(self.weight, dict):
            return self.weight
        return self.weight[max(first for first in self.weight if first <= step)]

    @property
    def steps(self) -> set[int]:
        """Steps from which a weight holds."""
        return {*self.weight} if isinstance(self.weight, dict) else {0}


_ONE, _SEVERAL = union_tag("one"), union_tag("several")
Paths = Annotated[
    Annotated[PathText, Tag(_ONE)] | Annotated[tuple[SourceSection, ...], Field(min_length=1), Tag(_SEVERAL)],
    Discriminator(lambda value: _SEVERAL if isinstance(value, list | tuple) else _ONE),
]


NO_ROWS = "none"
"""Value of `data.path` in a configuration whose rows a program passes."""


class DataSection(Section):
    """The training tasks. A list is short for `{path: LIST}`."""

    path: Paths = NO_ROWS
    """JSONL, JSON, CSV or parquet file, folder or hub data set, of plain, TRL prompt-only, verl or SkyRL rows. `#split`
    at the end selects one of several splits, and `org/name:config` a configuration of a hub data set. Or several
    sources: `[{path: a.jsonl, weight: 0.8}, {path: b.jsonl, weight: 0.2}]`. Any number of tasks has those shares, and
    each source its own order and place, which a resume keeps. A source that is added begins at its beginning. Only a
    program that passes rows (`data` of `rlsys.train`) can leave this key out."""
    columns: Columns = Field(default={})
    """Column names that differ from those of the supported forms, in evaluation data too: `{prompt: question}`, of
    `prompt` (None: `prompt`, `messages` or `question`), `answer` (None: the first with a value of
    `reward_model.ground_truth`, `reward_spec.ground_truth`, `answer`, `ground_truth`, `solution` and `label`), and `id`
    (not given: `id`, or a hash of the row; null: always a hash). `a.b` addresses a key inside an object."""
    max_prompt_tokens: PositiveInt = 1024
    """Tasks with a longer prompt are left out; the first lines of a run say how many. Where a run cannot measure them
    before it starts (the workflow builds the prompts, or the cluster is elsewhere), they are dropped as `too_long`.
    Later turns are bounded by `rollout.max_context_tokens`."""
    shuffle: bool = True
    """Draw a new order every epoch (from `run.seed`), or keep the order of the file."""
    balance_by: str | None = None
    """Column of the rows, such as a topic or a level: tasks with each of its values are drawn equally often, within
    their source. None: as often as there are."""

    @model_validator(mode="before")
    @classmethod
    def _of_list(cls, given: object) -> object:
        return {"path": given} if isinstance(given, list) else given

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        names = [source.name for source in self.sources]
        problems: list[Problem] = []
        for step, weights in self.weights_by_step.items():
            if not any(weights[source.name] for source in self.sources if not source.is_proposed):
                since = f" from step {step} on" if step else ""
                which = "of sources of files " if any(source.is_proposed for source in self.sources) else ""
                problems.append((("path",), f"all weights {which}are 0{since}, so there is no task to train on"))
        for index, name in enumerate(names):
            if self.sources[index].is_proposed and any(other.is_proposed for other in self.sources[:index]):
                problems.append((("path", index, "path"), "only one source can have proposed tasks"))
            if name in names[:index]:
                problems.append((("path", index, "name"), f"{name!r} is the name of another source too"))
        refuse(problems)
        return self

    def check_has_rows(self) -> None:
        """Raise `ConfigError` if no rows are named."""
        if self.path == NO_ROWS:
            raise ConfigError(f"data: {MISSING}: set data.path, e.g. to rows.jsonl; in Python, pass rows as `data`")

    @property
    def sources(self) -> tuple[SourceSection, ...]:
        """The sources of data, if there are several."""
        return () if isinstance(self.path, str) else self.path

    @property
    def weights_by_step(self) -> dict[int, dict[str, float]]:
        """Weights of the sources by name, by the step from which they hold."""
        steps = set[int]().union(*(source.steps for source in self.sources))
        return {step: {source.name: source.weight_at(step) for source in self.sources} for step in sorted(steps)}
