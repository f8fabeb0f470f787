"""Several reward functions with weights, and the one reward they make of a completion."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rlsys.rewards.reward_function import RewardFunction, RewardInput
from rlsys.rewards.reward_results import NOT_APPLICABLE, results_of, score_of
from rlsys.types import Json, Score, Task

MODEL = "model"
"""What metrics and reasons of failure call the reward model, which is weighed and added like a function."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One of the functions of a run, e.g. `RewardSpec("my.py:fmt", "format", 0.2, {"pattern": ".+"})`."""

    fn: str
    name: str
    """What metrics and reasons of failure call it; no two of a run have the same."""
    weight: float = 1.0
    args: Mapping[str, Json] = field(default_factory=dict)
    """Extra arguments, by name."""


class RewardSum:
    """The functions of a run: their values, weighted and summed, are the reward."""

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        """Find every function. Raises `ConfigError`, see `RewardFunction.load`."""
        self._functions = [(spec, RewardFunction.load(spec.fn, spec.args)) for spec in specs]
        self._runner = asyncio.Runner()
        """One event loop for all groups, so that functions may keep connections open; it starts on first use."""

    def check(self, columns: Iterable[str]) -> None:
        """Raises `ConfigError` if a function asks for an argument that not every row has."""
        names = list(columns)
        for _, function in self._functions:
            function.check(names)

    @property
    def wants_ids(self) -> bool:
        """Some function asks for the tokens of completions."""
        return any(function.wants_ids for _, function in self._functions)

    def score(self, task: Task, completions: Sequence[RewardInput]) -> list[Score]:
        """Judge completions of one task, in order. Whatever a function raises is a score without a value."""
        if not completions:
            return []
        calls = [function.calls(task, completions) for _, function in self._functions]
        results = iter(results_of([call for one in calls for call in one], self._runner))
        contributions: list[list[Score]] = []
        for (spec, function), own in zip(self._functions, calls, strict=True):
            scores = function.scores(list(islice(results, len(own))), len(completions))
            contributions.append([weighted(score, spec.name, spec.weight) for score in scores])
        return [total(scores) for scores in zip(*contributions, strict=True)]

    def close(self) -> None:
        """End the event loop."""
        self._runner.close()


def weighted(score: Score, name: str, weight: float) -> Score:
    """What one function contributes: its value times `weight`, with its value and its parts under its name."""
    if score.value is None:
        return score if score == NOT_APPLICABLE else Score(None, f"{name}: {score.failure}")
    parts = {f"{name}/{part}": value for part, value in score.parts.items()}
    return Score(weight * score.value, parts={name: score.value, **parts})


def total(scores: Sequence[Score]) -> Score:
    """The sum of what applies. One failure fails the whole: a part that is missing must not count as 0."""
    applicable = [score for score in scores if score != NOT_APPLICABLE]
    if not applicable:
        return NOT_APPLICABLE
    if failures := [score.failure for score in applicable if score.value is None]:
        return Score(None, "; ".join(failures))
    value = score_of(sum(score.value for score in applicable if score.value is not None))
    parts = {name: part for score in applicable for name, part in score.parts.items()}
    return Score(value.value, value.failure, parts)
