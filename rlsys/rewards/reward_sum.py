"""Weighted sum of several reward functions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rlsys.rewards.reward_function import RewardFunction, RewardInput
from rlsys.rewards.reward_results import NOT_APPLICABLE, results_of, score_of
from rlsys.types import Json, Score, Task

MODEL = "model"
"""Name of the reward model in metrics and failures; it is weighted and summed like a function."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function of a run, e.g. `RewardSpec("my.py:fmt", "format", 0.2, {"pattern": ".+"})`."""

    fn: str
    name: str
    """Name in metrics and failures, unique in a run."""
    weight: float = 1.0
    args: Mapping[str, Json] = field(default_factory=dict)
    """Extra arguments, by name."""


class RewardSum:
    """Reward functions of a run: the reward is the weighted sum of their values."""

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        """Load every function. Raises `ConfigError`, see `RewardFunction.load`."""
        self._functions = [(spec, RewardFunction.load(spec.fn, spec.args)) for spec in specs]
        self._runner = asyncio.Runner()
        """One event loop for all groups, so that functions can keep connections open; started on first use."""

    def check(self, columns: Iterable[str]) -> None:
        """Raise `ConfigError` if a function requires an argument that some rows lack."""
        names = list(columns)
        for _, function in self._functions:
            function.check(names)

    @property
    def wants_ids(self) -> bool:
        """True if a function requests the tokens of completions."""
        return any(function.wants_ids for _, function in self._functions)

    def score(self, task: Task, completions: Sequence[RewardInput]) -> list[Score]:
        """Score completions of one task, in order. An exception of a function becomes a score without a value."""
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
        """Close the event loop."""
        self._runner.close()


def weighted(score: Score, name: str, weight: float) -> Score:
    """Weight the score of one function; its value and parts are listed under the function's name."""
    if score.value is None:
        return score if score == NOT_APPLICABLE else Score(None, f"{name}: {score.failure}")
    parts = {f"{name}/{part}": value for part, value in score.parts.items()}
    return Score(weight * score.value, parts={name: score.value, **parts})


def total(scores: Sequence[Score]) -> Score:
    """Sum the applicable scores. One failure fails the sum, since a missing part must not count as 0."""
    applicable = [score for score in scores if score != NOT_APPLICABLE]
    if not applicable:
        return NOT_APPLICABLE
    if failures := [score.failure for score in applicable if score.value is None]:
        return Score(None, "; ".join(failures))
    value = score_of(sum(score.value for score in applicable if score.value is not None))
    parts = {name: part for score in applicable for name, part in score.parts.items()}
    return Score(value.value, value.failure, parts)
