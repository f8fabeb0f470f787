"""The `reward` section: one or more weighted reward functions, one of which may be a reward model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    JsonValue,
    PositiveInt,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlsys.config.config_problems import (
    UNKNOWN,
    Problem,
    nearest,
    nest_problems,
    problems_in,
    refuse,
    short_repr,
    union_tag,
)
from rlsys.config.section import PathText, Section
from rlsys.rewards.given_functions import code_of
from rlsys.rewards.reward_function import MODEL, RewardSpec
from rlsys.rewards.reward_registry import BUILTIN, JUDGE, JUDGE_TIMEOUT_S, SERVER, SERVER_TIMEOUT_S
from rlsys.util.number_ranges import CountFrom0, ManyFrom1, Seconds


def _check_name(spec: str) -> str:
    """Reject an unknown bare name. A function in a module is looked up later, because the import may be slow."""
    module, colon, name = spec.rpartition(":")
    if spec.endswith(".py"):
        raise ValueError(f"{spec} is a file; say what in it is meant, as in `{spec}:name`")
    if not name.isidentifier() or (colon and not module):
        raise PydanticCustomError("spec", "should be the name of a built-in, or `module:name` of yours")
    if not colon and spec not in (known := (*BUILTIN, MODEL)):
        hint = nearest(spec, known, f"give {', '.join(known)}, or `module:name` of yours")
        raise ValueError(f"no reward function is named {spec!r}; {hint}")
    return spec


FunctionSpec = Annotated[PathText, AfterValidator(_check_name)]


class RewardModelSection(Section):
    """Arguments of `model`, a classifier with one label that scores every episode in the reward workers."""

    path: PathText
    """Folder of a Hugging Face sequence classifier with its tokenizer, or `org/name` on the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    max_tokens: PositiveInt = 4096
    """Most tokens of prompt and completion together; of longer texts, the end is scored."""


class RewardItem(Section):
    """One of several reward functions."""

    fn: FunctionSpec
    """Reward function: a built-in, `module:name`, or `path/to/file.py:name`. `model`: a Hugging Face sequence
    classifier with one label, in the reward workers; its args are `path`, `dtype` (float32) and `max_tokens` (4096)."""
    weight: float = 1.0
    """Factor of its value in the sum."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in its metric `reward/by/NAME`; None: the name of the function."""
    source: str | None = None
    """Name of a source of data or of an evaluation: this function is of its tasks, for which only such functions count.
    None: of the tasks of all sources and evaluations without functions of their own."""
    given: str | None = None
    """Name of another function: this one applies only to episodes for which that one gave more than 0. So a bonus for
    brevity or parallel work goes to right answers alone. None: it applies to all."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra arguments of the function by name; for a class, arguments of its constructor."""

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, given: object) -> object:
        return {"fn": given} if isinstance(given, str) else given

    @property
    def label(self) -> str:
        """`name`, or the default in its place."""
        return self.name or self.fn.rpartition(":")[2]

    @model_validator(mode="after")
    def _is_a_whole_model(self) -> Self:
        if self.fn == MODEL:
            text = "the reward model scores every episode under its own name: leave this out"
            refuse(((key,), text) for key in ("name", "source", "given") if getattr(self, key) is not None)
            try:
                path = RewardModelSection.model_validate(self.args).path
            except ValidationError as error:
                has = f"unknown key; it has: {', '.join(RewardModelSection.model_fields)}"
                problems = ((at, has if text == UNKNOWN else text) for at, text in problems_in(error))
                raise nest_problems([(("args", *at), text) for at, text in problems]) from None
            return self.model_copy(update={"args": {**self.args, "path": path}})
        return self


def _belong_together(items: tuple[RewardItem, ...]) -> tuple[RewardItem, ...]:
    """Reject functions of the same tasks with one name, and a `given` that names no other function of these tasks
    without a `given` of its own."""
    problems: list[Problem] = []
    taken = Counter((item.source, item.label) for item in items)
    for index, item in enumerate(items):
        if taken[item.source, item.label] > 1:
            text = f"{item.label!r} is the name of another function too; give each a different `name`"
            problems.append(((index, "name"), text))
        plain = [each.label for each in items if each.given is None and each.source == item.source]
        if item.given is not None and item.given not in plain:
            remedy = f"give {' or '.join(plain)}" if plain else "leave one function without it"
            text = f"no function without `given` is named {item.given!r}; {nearest(item.given, plain, remedy)}"
            problems.append(((index, "given"), text))
    refuse(problems)
    return items


_ONE, _SEVERAL = union_tag("one"), union_tag("several")

Functions = Annotated[
    Annotated[FunctionSpec, Tag(_ONE)]
    | Annotated[tuple[RewardItem, ...], AfterValidator(_belong_together), Tag(_SEVERAL)],
    Discriminator(lambda value: _ONE if isinstance(value, str) else _SEVERAL),
]


class RewardSection(Section):
    """Workers that score episodes."""

    fn: Functions | None = None
    """Reward function: a built-in, `module:name`, or `path/to/file.py:name`. Or a list of them with weights, such as
    `[exact, {fn: my.py:fmt, weight: 0.2}]`: the reward is the weighted sum of those that apply. Tasks
    without any have `exact`, or `zero` if the algorithm uses no rewards."""
    success: float = 1.0
    """An episode with this reward or more is a success, for curation and for pass@k. An episode without a score counts
    in no success rate."""
    timeout_s: Seconds = 10.0
    """Deadline of one call of the functions, seconds. A call that exceeds it is killed, and its episode fails. A group
    is first scored in one call within this time. If that takes longer, its episodes are scored one by one, and so are
    those of later groups until all episodes of a group are in time. More than the `timeout_s` of `llm_judge` and
    `http`."""
    workers: CountFrom0 = 1
    """Ray actors that score in parallel. 0: each replica scores its own groups, in a killable process beside it, which
    saves a worker and a trip of every group where functions are fast."""
    concurrency: ManyFrom1 | None = None
    """Groups that one worker scores at once. Async functions, as `llm_judge` and `http` are, wait together in one
    process, and the deadline of a call is for all of them. Plain functions have a process for each. None: 64 if a
    function is async, else 1."""

    @property
    def items(self) -> tuple[RewardItem, ...]:
        """Every entry of `fn`, the reward model too."""
        return (RewardItem(fn=self.fn),) if isinstance(self.fn, str) else self.fn or ()

    @property
    def model(self) -> RewardItem | None:
        """The entry of the reward model."""
        return next((item for item in self.items if item.fn == MODEL), None)

    @property
    def functions(self) -> tuple[RewardSpec, ...]:
        """Every function, as in `functions_or` with `exact`."""
        return self.functions_or("exact")

    def functions_or(self, default: str) -> tuple[RewardSpec, ...]:
        """Every function, and the default for tasks that have neither functions nor a model.

        Raises `ConfigError` for one that was given in another program.
        """
        has_any = any(item.source is None for item in self.items)
        items = self.items if has_any else (RewardItem(fn=default), *self.items)
        return tuple(
            RewardSpec(i.fn, i.label, i.weight, i.args, code_of(i.fn), i.source, i.given)
            for i in items
            if i.fn != MODEL
        )

    def with_absolute_paths(self) -> Self:
        """Copy with absolute paths, because workers run in another folder."""
        if self.fn is None or isinstance(self.fn, str):
            return self.model_copy(update={"fn": self.fn and _absolute(self.fn)})
        return self.model_copy(update={"fn": tuple(map(_with_absolute_path, self.fn))})

    @field_validator("fn", mode="before")
    @classmethod
    def _has_one_of_two_forms(cls, fn: object) -> object:
        if not isinstance(fn, str | list | tuple | None):
            raise ValueError(
                f"give one function, such as `exact`, or a list, such as [{{fn: exact}}] (got {short_repr(fn)})"
            )
        return fn

    @field_validator("fn")
    @classmethod
    def _names_one(cls, fn: Functions | None) -> Functions | None:
        if fn == MODEL:
            raise ValueError("the model needs its path; write it as [{fn: model, args: {path: ...}}]")
        if fn == ():
            raise ValueError("names no function; leave the key out for the default")
        return fn

    @field_validator("workers")
    @classmethod
    def _has_a_place_for_the_model(cls, workers: int, info: ValidationInfo) -> int:
        fn = info.data.get("fn")
        if not workers and not isinstance(fn, str) and any(item.fn == MODEL for item in fn or ()):
            raise ValueError("the reward model needs a worker: set it to 1 or more")
        return workers

    @model_validator(mode="after")
    def _gives_requests_their_time(self) -> Self:
        """Reject a timeout of a request that is not below `timeout_s`: a server that is away would fail as a hang."""
        defaults = {JUDGE: JUDGE_TIMEOUT_S, SERVER: SERVER_TIMEOUT_S}
        for spec in self.items:
            own_s = spec.args.get("timeout_s", defaults.get(spec.fn))
            if spec.fn in defaults and isinstance(own_s, int | float) and own_s >= self.timeout_s:
                text = f"is {self.timeout_s:g}, and {spec.fn} waits {own_s:g} s for one request: raise it, or lower "
                raise nest_problems([(("timeout_s",), text + f"`timeout_s` in the args of {spec.label!r}")])
        return self


def _with_absolute_path(item: RewardItem) -> RewardItem:
    path = item.args.get("path")
    if item.fn == MODEL and isinstance(path, str) and Path(path).is_dir():
        return item.model_copy(update={"args": {**item.args, "path": str(Path(path).absolute())}})
    return item.model_copy(update={"fn": _absolute(item.fn)})


def _absolute(spec: str) -> str:
    file, colon, name = spec.rpartition(":")
    return f"{Path(file).absolute()}{colon}{name}" if file.endswith(".py") else spec
