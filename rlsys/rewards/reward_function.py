"""Reward functions of a run and their weighted sum. Arguments are picked by name, and determine the kind of function.

| argument | kind | returns |
| --- | --- | --- |
| `completion`, or none of the names below | a function of one completion | a number, or None |
| `solution_str` | the same, as verl's `compute_score` | a number, or a dict with `score` |
| `completions` or `prompts` | a function of a whole group, as TRL's reward functions | a list of those |

    def reward(completion: str, answer: str, level: str = "easy") -> float: ...
    def reward(prompts, completions, completion_ids=None, **columns) -> list[float | None]: ...
    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict: ...

Each may be `async`: the calls of one group then run concurrently in one event loop. A class is instantiated once with
`args`, and its `__call__` is the function.

None means that the function does not apply. An exception, or any other return value, is a failure with a reason, never
a reward of 0. After an `EndpointDown` the group waits for the server, and is scored again.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Self, SupportsFloat

import cloudpickle

from rlsys.data.row_adapters import json_text
from rlsys.errors import CannotScore, ConfigError, EndpointDown
from rlsys.rewards.reward_registry import describe_error, find
from rlsys.types import Episode, Json, PolicyVersion, Score, Task
from rlsys.util.printing import encodable

ALWAYS = (
    "completion",
    "completion_ids",
    "template_opening",
    "prompt",
    "answer",
    "ground_truth",
    "info",
    "task_id",
    "source",
    "episode",
)
"""Names that every function of one completion can request, for any columns. `answer` is text, or the list or object
that the row has as its answer. `ground_truth` is the answer if the row has no such column, and `completion_ids` are the
tokens that the policy sampled. `template_opening` is what the chat template began the reply with, `<think>` or nothing:
it is not in `completion`. `episode` is the whole `rlsys.types.Episode`, of all agents and turns."""
VERL = ("solution_str", "data_source", "extra_info")
"""More names for a function with the argument `solution_str`, the completion. The others are columns of the row, by
default "" and {}."""
TRL = ("completions", "prompts", "trainer_state", "log_extra", "log_metric")
"""More names for a function of a group, which cannot request `completion` and `prompt`. Every column is a list. Prompts
and completions are lists of messages if the task's prompt is. `trainer_state.global_step` is the number of optimizer
steps behind the weights that sampled. Logged numbers are parts of the scores, and so metrics `reward/by/...`; other
logged values are discarded."""
MODEL = "model"
"""Name of the reward model in metrics and failures; it is weighted and summed like a function."""
NOT_APPLICABLE = Score(None, "no reward function applies to it: each returned None, or has a `given` that was not met")
GREATEST = 1e30
"""Greatest reward, also below 0: sums and squares of more would overflow, in single precision too."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function of a run, e.g. `RewardSpec("my.py:fmt", "format", 0.2, {"pattern": ".+"})`."""

    fn: str
    name: str
    """Name in metrics and failures, unique in a run."""
    weight: float = 1.0
    args: Mapping[str, Json] = field(default_factory=dict)
    """Extra arguments, by name."""
    code: bytes | None = None
    """The function by value, see `rlsys.rewards.given_functions`; None: `fn` says where it is."""
    source: str | None = None
    """Source of data whose tasks it scores; None: it scores those of sources without functions of their own."""
    given: str | None = None
    """Name of a function of the same tasks: this one applies only where that one gave more than 0."""


class RewardSum:
    """Reward functions of a run: the reward is the weighted sum of their values."""

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        """Load every function. Raises `ConfigError`, see `RewardFunction.load`."""
        self._functions = [(spec, RewardFunction.load(spec.fn, spec.args, spec.code)) for spec in specs]
        self._own = {spec.source for spec in specs if spec.source is not None}
        self._runner = asyncio.Runner()
        """One event loop for all groups, so that functions can keep connections open; started on first use."""

    def check(self, columns: Iterable[str], source: str = "") -> None:
        """Raise `ConfigError` if a function of this source requires an argument that some of its rows lack."""
        names = list(columns)
        for _, function in self._functions_of(source):
            function.check(names)

    @property
    def wants_ids(self) -> bool:
        """True if a function requests the tokens of completions."""
        return any(function.wants_ids for _, function in self._functions)

    @property
    def wants_episodes(self) -> bool:
        """True if a function requests whole episodes."""
        return any("episode" in function.requested for _, function in self._functions)

    @property
    def is_async(self) -> bool:
        """True if a function is async: the calls of several groups can wait together."""
        return any(function.is_async for _, function in self._functions)

    def score(self, task: Task, completions: Sequence[RewardInput]) -> list[Score]:
        """Score completions of one task, in order. An exception of a function becomes a score without a value."""
        return self.score_groups([(task, completions)])[0]

    def score_groups(self, groups: Sequence[tuple[Task, Sequence[RewardInput]]]) -> list[list[Score]]:
        """Score completions of several tasks, as `score` does; async functions of all of them run concurrently."""
        begun = [
            [function.begin(task, completions) for _, function in self._functions_of(task.source)]
            if completions
            else []
            for task, completions in groups
        ]
        results = iter(results_of([result for calls in begun for own in calls for result in own], self._runner))
        return [
            self._sum_results(self._functions_of(task.source), calls, results, len(completions)) if calls else []
            for (task, completions), calls in zip(groups, begun, strict=True)
        ]

    @staticmethod
    def _sum_results(
        functions: Sequence[tuple[RewardSpec, RewardFunction]],
        begun: Sequence[Sequence[object]],
        results: Iterator[object],
        num_completions: int,
    ) -> list[Score]:
        """Sum the next results, those of the calls that were begun for one task, by completion."""
        contributions: list[list[Score]] = []
        for (spec, function), own in zip(functions, begun, strict=True):
            scores = function.scores(list(islice(results, len(own))), num_completions)
            contributions.append([weight_score(score, spec.name, spec.weight) for score in scores])
        by_name = {spec.name: scores for (spec, _), scores in zip(functions, contributions, strict=True)}
        contributions = [
            [_where(score, gate, spec.given) for score, gate in zip(own, by_name[spec.given], strict=True)]
            if spec.given
            else own
            for (spec, _), own in zip(functions, contributions, strict=True)
        ]
        return [total(scores) for scores in zip(*contributions, strict=True)]

    def _functions_of(self, source: str) -> list[tuple[RewardSpec, RewardFunction]]:
        wanted = source if source in self._own else None
        return [(spec, function) for spec, function in self._functions if spec.source == wanted]

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()


def weight_score(score: Score, name: str, weight: float) -> Score:
    """Weight the score of one function; its value and parts are listed under the function's name."""
    if score.value is None:
        return score if score == NOT_APPLICABLE else replace(score, failure=f"{name}: {score.failure}")
    parts = {f"{name}/{part}": value for part, value in score.parts.items()}
    return Score(weight * score.value, parts={name: score.value, **parts})


def _where(score: Score, gate: Score, name: str) -> Score:
    """Return the score of a function that applies where the one called `name` gave more than 0."""
    return score if gate.parts.get(name, 0.0) > 0 else NOT_APPLICABLE


def total(scores: Sequence[Score]) -> Score:
    """Sum the applicable scores. One failure fails the sum, since a missing part must not count as 0."""
    applicable = [score for score in scores if score != NOT_APPLICABLE]
    if not applicable:
        return NOT_APPLICABLE
    if failed := [score for score in applicable if score.value is None]:
        down = next((score.down for score in failed if score.down), None)
        return Score(None, "; ".join(score.failure for score in failed), down=down)
    value = score_of(math.fsum(score.value for score in applicable if score.value is not None))
    parts = {name: part for score in applicable for name, part in score.parts.items()}
    return Score(value.value, value.failure, parts)


@dataclass(frozen=True, slots=True)
class RewardInput:
    """Input of reward functions: the last turn of an agent, by default of the root."""

    text: str
    ids: Sequence[int] = ()
    """Tokens of the text; empty if no function requests them."""
    version: PolicyVersion = 0
    """Of the newest token."""
    opening: str = ""
    """Beginning of the reply that the chat template wrote."""
    episode: Episode | None = None
    """None if no function requests it."""

    @classmethod
    def of(cls, episode: Episode, trajectory: int = 0, *, with_ids: bool = True, with_episode: bool = True) -> Self:
        """Take the last turn of one trajectory of an episode; empty if there is none."""
        whole = episode if with_episode else None
        turns = episode.trajectories[trajectory].turns
        if not turns:
            return cls("", episode=whole)
        last = turns[-1]
        version = last.versions[-1].version if last.versions else 0
        return cls(last.text, last.output_ids if with_ids else (), version, last.template_opening, whole)


@dataclass(frozen=True)
class RewardFunction:
    """Function with the arguments that it requests."""

    spec: str
    """Name in the configuration, e.g. `exact` or `rewards.py:judge`."""
    function: Callable[..., object]
    args: Mapping[str, Json]
    """Arguments of every call."""
    required: tuple[str, ...]
    """Requested names without a default, except `args`."""
    requested: tuple[str, ...]
    """All requested names, except `args`."""
    takes_all: bool
    """True if the function has `**columns` and gets all arguments."""

    @classmethod
    def load(cls, spec: str, args: Mapping[str, Json] | None = None, code: bytes | None = None) -> RewardFunction:
        """Find `exact`, `module:name` or `path/file.py:name`; `code` is the function by value.

        Raises `ConfigError` if the function does not exist, cannot be called by name, or does not accept `args`.
        """
        args = args or {}
        function = find(spec) if code is None else cloudpickle.loads(code)
        if inspect.isclass(function):
            function, args = _instantiate(spec, function, args), {}
        parameters = _parameters(spec, function)
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        takes_all = len(named) < len(parameters)
        if given_anyway := [name for name in args if name in (*ALWAYS, *VERL, *TRL)]:
            raise ConfigError(f"reward {spec!r}: args cannot set {', '.join(given_anyway)}, which the task gives")
        if not takes_all:
            _check_known(spec, args, [p.name for p in named])
        if {"completion", "solution_str"} & {p.name for p in named} and "completions" in {p.name for p in named}:
            raise ConfigError(f"reward {spec!r} asks for one completion and for all of a group: it can have only one")
        requested = [p for p in named if p.name not in args]
        required = tuple(p.name for p in requested if p.default is p.empty)
        return cls(spec, function, args, required, tuple(p.name for p in requested), takes_all)

    def check(self, columns: Iterable[str]) -> None:
        """Raise `ConfigError` if an argument without a default is neither always available nor one of these columns."""
        available = [*self._names, *columns]
        missing = [name for name in self.required if name not in available]
        if missing:
            raise ConfigError(
                f"reward {self.spec!r} asks for {', '.join(missing)}, which not every row has; "
                f"available are {', '.join(dict.fromkeys(available))}"
            )

    @property
    def is_batched(self) -> bool:
        """True if one call scores a whole group."""
        return not {"completions", "prompts"}.isdisjoint(self.requested)

    @property
    def is_async(self) -> bool:
        """True for an async function, or an instance with an async `__call__`."""
        return any(map(inspect.iscoroutinefunction, (self.function, getattr(self.function, "__call__", None))))  # noqa: B004

    @property
    def wants_ids(self) -> bool:
        """True if the function requests the tokens of completions."""
        return self.takes_all or "completion_ids" in self.requested

    def begin(self, task: Task, completions: Sequence[RewardInput]) -> list[object]:
        """Call the function for these completions of one task: once per completion, or once for all.

        Returns what the calls return, awaitables of an async function; an exception becomes a `Score` without a value.
        Plain functions run here, outside the event loop, so that they may start a loop.
        """
        if self.is_batched:
            logged = _Logged([{} for _ in completions])
            result = self._call_function(task, _of_group(task, completions, logged))
            return [_await_with(result, logged) if inspect.isawaitable(result) else (result, logged)]
        return [self._call_function(task, {**task.info, **self._of_one(task, c)}) for c in completions]

    def scores(self, results: Sequence[object], num_completions: int) -> list[Score]:
        """Convert the results of the calls, see `results_of`, to one score per completion."""
        if not self.is_batched:
            return [score_of(result) for result in results]
        (outcome,) = results
        if isinstance(outcome, Score):
            return [outcome] * num_completions
        assert isinstance(outcome, tuple)
        result, logged = outcome
        if isinstance(result, Score):
            return [result] * num_completions
        return logged.add_to(scores_of_list(result, num_completions))

    @property
    def _names(self) -> tuple[str, ...]:
        if self.is_batched:
            return (*TRL, *(name for name in ALWAYS if name not in ("completion", "prompt")))
        return (*ALWAYS, *VERL) if "solution_str" in self.requested else ALWAYS

    def _of_one(self, task: Task, completion: RewardInput) -> dict[str, object]:
        given: dict[str, object] = {
            **_of_task(task),
            "completion": completion.text,
            "completion_ids": list(completion.ids),
            "template_opening": completion.opening,
            "prompt": task.prompt,
            "episode": completion.episode,
        }
        if "solution_str" in self.requested:
            given["solution_str"] = completion.text
            given["data_source"] = task.info.get("data_source", "")
            given["extra_info"] = task.info.get("extra_info", {})
        return given

    def _call_function(self, task: Task, given: Mapping[str, object]) -> object:
        if missing := [name for name in self.required if name not in given]:
            return Score(None, f"the row of task {task.id} has no {', '.join(missing)}")
        if not self.takes_all:
            given = {name: given[name] for name in self.requested if name in given}
        try:
            return self.function(**{**given, **self.args})
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the boundary to user code)
            return _failure(error)


# ---------------------------------------------------------------------------------------------------------- arguments


def _instantiate(spec: str, cls: Callable[..., object], args: Mapping[str, Json]) -> Callable[..., object]:
    """Instantiate a class; its constructor may reject `args` with `ValueError` or `ConfigError`."""
    parameters = _parameters(spec, cls)
    _check_known(spec, args, [p.name for p in parameters])
    if missing := [p.name for p in parameters if p.default is p.empty and p.name not in args]:
        raise ConfigError(f"reward {spec!r} needs args: {', '.join(missing)}")
    try:
        made = cls(**args)
    except (TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"reward {spec!r}: args: {error}") from error
    if not callable(made):
        raise ConfigError(f"reward {spec!r}: the class has no `__call__`, which would be the reward function")
    return made


def _parameters(spec: str, function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ConfigError(f"reward {spec!r}: it does not tell the names of its arguments") from error
    bound = function.keywords if isinstance(function, partial) else {}
    parameters = [p for p in parameters if p.name not in bound]
    unnamed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if unnamed:
        raise ConfigError(f"reward {spec!r}: arguments are passed by name, which {', '.join(unnamed)} cannot be")
    return parameters


def _check_known(spec: str, args: Mapping[str, Json], names: Sequence[str]) -> None:
    if unknown := [name for name in args if name not in names]:
        raise ConfigError(
            f"reward {spec!r}: args: it has no argument {', '.join(unknown)}; it has {', '.join(names) or 'none'}"
        )


def _of_task(task: Task) -> dict[str, object]:
    ground_truth = task.info.get("ground_truth", task.answer)
    is_answer = isinstance(ground_truth, list | dict) and task.answer == json_text(ground_truth)
    known: dict[str, object] = {
        "answer": ground_truth if is_answer else task.answer,
        "ground_truth": ground_truth,
        "info": task.info,
        "task_id": task.id,
    }
    return known if "source" in task.info else {**known, "source": task.source}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What TRL's reward functions read of the trainer's state."""

    global_step: int


@dataclass(frozen=True, slots=True)
class _Logged:
    """Numbers that a function of a group logs, as TRL's `log_metric(name, value)` and `log_extra(column, values)`."""

    parts: list[dict[str, float]]
    """By name, for each completion."""

    def metric(self, name: str, value: object) -> None:
        self.extra(name, [value] * len(self.parts))

    def extra(self, name: str, values: Sequence[object]) -> None:
        for own, value in zip(self.parts, values, strict=False):
            if isinstance(value, SupportsFloat) and math.isfinite(number := float(value)):
                own[encodable(str(name))] = number

    def add_to(self, scores: Sequence[Score]) -> list[Score]:
        return [
            replace(score, parts={**score.parts, **own}) if score.value is not None else score
            for score, own in zip(scores, self.parts, strict=True)
        ]


async def _await_with(result: Awaitable[object], logged: _Logged) -> tuple[object, _Logged]:
    return await result, logged


def _of_group(task: Task, completions: Sequence[RewardInput], logged: _Logged) -> dict[str, object]:
    """Collect the arguments for a function of a group; every list has one entry per completion."""
    columns = {**task.info, **_of_task(task)}
    if isinstance(task.prompt, str):
        prompts, replies = [task.prompt for _ in completions], [c.text for c in completions]
    else:
        prompts = [[dict(message) for message in task.prompt] for _ in completions]
        replies = [[{"role": "assistant", "content": c.text}] for c in completions]
    return {
        **{name: [value] * len(completions) for name, value in columns.items()},
        "prompts": prompts,
        "completions": replies,
        "completion_ids": [list(c.ids) for c in completions],
        "template_opening": [c.opening for c in completions],
        "episode": [c.episode for c in completions],
        "trainer_state": TrainerState(max(c.version for c in completions)),
        "log_extra": logged.extra,
        "log_metric": logged.metric,
    }


# ------------------------------------------------------------------------------------------------------------ results


def results_of(begun: list[object], runner: asyncio.Runner) -> list[object]:
    """Await the awaitables of `RewardFunction.begin`, all concurrently; an exception becomes a `Score`, as there."""
    return runner.run(_all(begun)) if any(map(inspect.isawaitable, begun)) else begun


def known_score(episode: Episode) -> Score | None:
    """Return the score of an episode that failed, or whose workflow set a reward; None if it has to be scored."""
    root = episode.trajectories[0]
    if root.outcome.is_failed:
        return Score(None, root.outcome.reason)
    return None if root.reward is None else score_of(root.reward)


def judged_agents(episodes: Sequence[Episode]) -> list[tuple[int, int]]:
    """Return index and trajectory of each agent, not a root, that the reward functions judge in episodes that did not
    fail."""
    return [
        (e, t)
        for e, episode in enumerate(episodes)
        for t, trajectory in enumerate(episode.trajectories)
        if t and trajectory.is_judged and trajectory.reward is None
        if not (trajectory.outcome.is_failed or episode.trajectories[0].outcome.is_failed)
    ]


def score_of(value: object) -> Score:
    """Convert a return value to a score.

    Any number up to `GREATEST` is valid, also from NumPy or a one-element tensor. A dict contains the value as `score`;
    its other such numbers are parts of the score. An object of a class of the user's own is read here, because the
    worker does not have that class; what it raises is a failure.
    """
    if isinstance(value, float):  # first, because asking for protocols takes longer
        return _finite(float(value))
    try:
        return _score_of(value)
    except Exception as error:  # noqa: BLE001  (the boundary to user code)
        return _failure(error)


def _score_of(value: object) -> Score:
    if isinstance(value, Score):
        parts = {str(name): float(part) for name, part in value.parts.items()}
        score = Score(None, str(value.failure)) if value.value is None else _finite(float(value.value))
        return replace(score, parts=parts, others={i: _score_of(s) for i, s in value.others.items()}, down=value.down)
    if isinstance(value, Mapping):
        if "score" not in value:
            return Score(None, f"returned {_value_excerpt(value)}, which has no `score`")
        score = score_of(value["score"])
        if score.value is None:
            return score
        parts = {encodable(str(name)): score_of(part).value for name, part in value.items() if name != "score"}
        return Score(score.value, parts={name: part for name, part in parts.items() if part is not None})
    if value is None:
        return NOT_APPLICABLE
    if not isinstance(value, SupportsFloat):
        return Score(None, f"returned {_value_excerpt(value)}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return Score(None, f"returned {_value_excerpt(value)}, not a number")
    return _finite(number)


def _finite(number: float) -> Score:
    if abs(number) <= GREATEST:
        return Score(number)
    too_large = f", whose size is more than {GREATEST:g}" if math.isfinite(number) else ""
    return Score(None, f"returned {number:g}{too_large}")


def scores_of_list(result: object, num_completions: int) -> list[Score]:
    """Convert a list to scores; any other result than one value per completion fails all of them."""
    values: list[object] | None = None
    if isinstance(result, Collection) and not isinstance(result, str | Mapping | Set):
        with suppress(TypeError):  # a zero-dimensional tensor
            values = list(result)
    if values is None:
        problem = f"returned {_value_excerpt(result)}, not a list of {num_completions} numbers"
    elif len(values) != num_completions:
        problem = f"returned {len(values)} rewards for {num_completions} completions"
    else:
        return [score_of(value) for value in values]
    return [Score(None, problem)] * num_completions


async def _all(results: Sequence[object]) -> list[object]:
    return await asyncio.gather(*map(_await_result, results))


async def _await_result(result: object) -> object:
    try:
        return await result if inspect.isawaitable(result) else result
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  (the boundary to user code)
        return _failure(error)


def check_answered(scores: Iterable[Score]) -> None:
    """Raise `EndpointDown` if a score is missing because a server did not answer."""
    for score in scores:
        if score.down is not None:
            raise score.down
        check_answered(score.others.values())


def _failure(error: BaseException) -> Score:
    if isinstance(error, EndpointDown):
        return Score(None, str(error), down=error)
    return Score(None, str(error) if isinstance(error, CannotScore) else f"raised {describe_error(error, through=1)}")


def _value_excerpt(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
