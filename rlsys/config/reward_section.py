"""The `reward` section: one or more weighted reward functions, and a reward model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlsys.config.config_problems import nearest, nested, refuse, shown, union_tag
from rlsys.config.sections import Section
from rlsys.rewards.given_functions import code_of
from rlsys.rewards.reward_function import MODEL, RewardSpec
from rlsys.rewards.reward_registry import BUILTIN, JUDGE, JUDGE_TIMEOUT_S, SERVER, SERVER_TIMEOUT_S


def _known(spec: str) -> str:
    """Reject an unknown bare name. A function in a module is looked up later, because the import may be slow."""
    module, colon, name = spec.rpartition(":")
    if spec.endswith(".py"):
        raise ValueError(f"{spec} is a file; say what in it is meant, as in `{spec}:name`")
    if not name.isidentifier() or (colon and not module):
        raise PydanticCustomError("spec", "should be the name of a built-in, or `module:name` of yours")
    if not colon and spec not in BUILTIN:
        hint = nearest(spec, BUILTIN, f"give {', '.join(BUILTIN)}, or `module:name` of yours")
        raise ValueError(f"no reward function is named {spec!r}; {hint}")
    return spec


FunctionSpec = Annotated[str, AfterValidator(_known)]


class RewardItem(Section):
    """One of several reward functions."""

    fn: FunctionSpec
    """Reward function: a built-in, `module:name`, or `path/to/file.py:name`."""
    weight: float = 1.0
    """Factor of its value in the sum."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in its metric `reward/by/NAME`; None: the name of the function."""
    given: str | None = None
    """Name of another function: this one applies only to episodes for which that one gave more than 0. So a bonus for
    brevity or parallel work goes to right answers alone. None: it applies to all."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra arguments of the function by name; for a class, arguments of its constructor."""

    @property
    def label(self) -> str:
        """`name`, or the default in its place."""
        return self.name or self.fn.rpartition(":")[2]


class RewardModelSection(Section):
    """Classifier with one label that scores together with the functions, or instead of them."""

    path: str = Field(min_length=1)
    """Folder of a Hugging Face sequence classifier with its tokenizer, or `org/name` on the hub."""
    weight: float = 1.0
    """Factor of its value in the sum."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    max_tokens: PositiveInt = 4096
    """Most tokens of prompt and completion together; of longer texts, the end is scored."""
    threads: PositiveInt = 1
    """CPU threads of the model in one worker."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for the model in one worker, besides `reward.num_cpus`."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for the model in one worker."""


def _given_known(items: tuple[RewardItem, ...]) -> tuple[RewardItem, ...]:
    """Reject a `given` that names no other function without a `given` of its own."""
    plain = [item.label for item in items if item.given is None]
    refuse(
        (
            (index, "given"),
            f"no function without `given` is named {item.given!r}; "
            + nearest(item.given, plain, f"give {' or '.join(plain)}" if plain else "leave one function without it"),
        )
        for index, item in enumerate(items)
        if item.given is not None and item.given not in plain
    )
    return items


_ONE, _SEVERAL = union_tag("one"), union_tag("several")

Functions = Annotated[
    Annotated[FunctionSpec, Tag(_ONE)] | Annotated[tuple[RewardItem, ...], AfterValidator(_given_known), Tag(_SEVERAL)],
    Discriminator(lambda value: _ONE if isinstance(value, str) else _SEVERAL),
]


def specs_of(functions: Functions, *, source: str | None = None) -> tuple[RewardSpec, ...]:
    """Reward functions, of the tasks of one source or of all others. Raises `ConfigError` for one that was given in
    another program."""
    items = (RewardItem(fn=functions),) if isinstance(functions, str) else functions
    return tuple(RewardSpec(i.fn, i.label, i.weight, i.args, code_of(i.fn), source, i.given) for i in items)


class RewardSection(Section):
    """Workers that score episodes."""

    model: RewardModelSection | None = None
    """Reward model, whose value is added to those of the functions; None: no model."""
    fn: Functions | None = None
    """Reward function: a built-in, `module:name`, or `path/to/file.py:name`. Or a list of them with weights, such as
    `[{fn: exact}, {fn: my.py:fmt, weight: 0.2}]`: the reward is the weighted sum of those that apply. None: `exact`,
    or `zero` if the algorithm uses no rewards, or only the model if there is one."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one call of the functions, seconds. A call that exceeds it is killed, and its episode fails. A group
    is first scored in one call within this time. If that takes longer, its episodes are scored one by one, and so are
    those of later groups until all episodes of a group are in time. At least the `timeout_s` of `llm_judge` and
    `http`."""
    workers: NonNegativeInt = 1
    """Ray actors that score in parallel. 0: each replica scores its own groups, in a killable process beside it, which
    saves a worker and a trip of every group where functions are fast."""
    processes: PositiveInt = 1
    """Killable processes of one worker."""
    memory_mb: PositiveInt = 8192
    """Writable private memory of each of these processes, and of each process that it starts. A function that needs
    more fails with a `MemoryError`, or crashes its process."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for one worker, without its model."""

    @property
    def functions(self) -> tuple[RewardSpec, ...]:
        """Every function, each with a unique name. Raises `ConfigError` for one that was given in another program."""
        return specs_of(self._items)

    @property
    def worker_cpus(self) -> float:
        """CPUs of one worker, including its model."""
        return self.num_cpus + (self.model.num_cpus if self.model else 0.0)

    @property
    def worker_gpus(self) -> float:
        """GPUs of one worker."""
        return self.model.num_gpus if self.model else 0.0

    def rooted(self) -> Self:
        """Copy with absolute paths, because workers run in another folder."""
        fn, model = rooted_functions(self.fn), self.model
        if model is not None and Path(model.path).is_dir():
            model = model.model_copy(update={"path": str(Path(model.path).absolute())})
        return self.model_copy(update={"fn": fn, "model": model})

    @property
    def _items(self) -> tuple[RewardItem, ...]:
        if self.fn is None:
            return () if self.model else (RewardItem(fn="exact"),)
        return (RewardItem(fn=self.fn),) if isinstance(self.fn, str) else self.fn

    @field_validator("fn", mode="before")
    @classmethod
    def _has_one_of_two_forms(cls, fn: object) -> object:
        if not isinstance(fn, str | list | tuple | None):
            raise ValueError(
                f"give one function, such as `exact`, or a list, such as [{{fn: exact}}] (got {shown(fn)})"
            )
        items = [] if fn is None or isinstance(fn, str) else fn
        refuse(((i,), f"write it as {{fn: {item}}}") for i, item in enumerate(items) if isinstance(item, str))
        return fn

    @field_validator("fn")
    @classmethod
    def _has_one_name_each(cls, fn: Functions | None, info: ValidationInfo) -> Functions | None:
        has_model = info.data.get("model") is not None
        if isinstance(fn, str) and has_model and RewardItem(fn=fn).label == MODEL:
            raise ValueError(
                f"{MODEL!r} is the name of the reward model too; write it as [{{fn: {fn}, name: another}}]"
            )
        if fn is None or isinstance(fn, str):
            return fn
        if not fn:
            raise ValueError("names no function; leave the key out for the default")
        taken = Counter(item.label for item in fn)
        if has_model:
            taken[MODEL] += 1
        refuse(
            ((index, "name"), f"{item.label!r} is the name of another function too; give each a different `name`")
            for index, item in enumerate(fn)
            if taken[item.label] > 1
        )
        return fn

    @model_validator(mode="after")
    def _gives_requests_their_time(self) -> Self:
        """Reject a timeout of a request above `timeout_s`, which would make slow requests fail as hangs."""
        defaults = {JUDGE: JUDGE_TIMEOUT_S, SERVER: SERVER_TIMEOUT_S}
        for spec in self._items:
            own_s = spec.args.get("timeout_s", defaults.get(spec.fn))
            if spec.fn in defaults and isinstance(own_s, int | float) and own_s > self.timeout_s:
                text = f"is {self.timeout_s:g}, and {spec.fn} waits {own_s:g} s for one request: raise it, or lower "
                raise nested([(("timeout_s",), text + f"`timeout_s` in the args of {spec.label!r}")])
        return self


def rooted_functions(fn: Functions | None) -> Functions | None:
    """Copy with absolute paths of files."""
    if fn is None or isinstance(fn, str):
        return fn and _absolute(fn)
    return tuple(item.model_copy(update={"fn": _absolute(item.fn)}) for item in fn)


def _absolute(spec: str) -> str:
    file, colon, name = spec.rpartition(":")
    return f"{Path(file).absolute()}{colon}{name}" if file.endswith(".py") else spec
