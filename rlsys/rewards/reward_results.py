"""Results of reward functions: every return value or exception becomes a score."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import SupportsFloat

from rlsys.errors import CannotScore
from rlsys.rewards.reward_registry import described
from rlsys.types import Episode, Score

NOT_APPLICABLE = Score(None, "not applicable")


def results_of(calls: Sequence[Callable[[], object]], runner: asyncio.Runner) -> list[object]:
    """Run each call, and return the results in order; an exception becomes a `Score` without a value.

    Plain functions run first, one after the other and outside the event loop, so that they may start a loop. Then all
    async functions run concurrently.
    """
    results = [_called(call) for call in calls]
    waiting = {i: result for i, result in enumerate(results) if inspect.isawaitable(result)}
    if waiting:
        for i, result in zip(waiting, runner.run(_all(waiting.values())), strict=True):
            results[i] = result
    return results


def known_score(episode: Episode) -> Score | None:
    """Return the score of an episode that failed, or whose workflow set a reward; None if it has to be scored."""
    root = episode.trajectories[0]
    if root.outcome.is_failed:
        return Score(None, root.outcome.reason)
    return None if root.reward is None else score_of(root.reward)


def score_of(value: object) -> Score:
    """Convert a return value to a score.

    Any finite number is valid, also from NumPy or a one-element tensor. A dict contains the value as `score`; its other
    finite numbers are parts of the score.
    """
    if isinstance(value, Score):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            return Score(None, f"returned {_shown(value)}, which has no `score`")
        score = score_of(value["score"])
        if score.value is None:
            return score
        parts = {str(name): score_of(part).value for name, part in value.items() if name != "score"}
        return Score(score.value, parts={name: part for name, part in parts.items() if part is not None})
    if value is None:
        return NOT_APPLICABLE
    if not isinstance(value, SupportsFloat):
        return Score(None, f"returned {_shown(value)}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return Score(None, f"returned {_shown(value)}, not a number")
    return Score(number) if math.isfinite(number) else Score(None, f"returned {number}")


def scores_of_list(result: object, num_completions: int) -> list[Score]:
    """Convert a list to scores; any other result than one value per completion fails all of them."""
    values: list[object] | None = None
    if isinstance(result, Collection) and not isinstance(result, str | Mapping | Set):
        with suppress(TypeError):  # a zero-dimensional tensor
            values = list(result)
    if values is None:
        problem = f"returned {_shown(result)}, not a list of {num_completions} numbers"
    elif len(values) != num_completions:
        problem = f"returned {len(values)} rewards for {num_completions} completions"
    else:
        return [score_of(value) for value in values]
    return [Score(None, problem)] * num_completions


def _called(call: Callable[[], object]) -> object:
    try:
        return call()
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the boundary to user code)
        return _failure(error)


async def _all(waiting: Iterable[Awaitable[object]]) -> list[object]:
    return await asyncio.gather(*map(_awaited, waiting))


async def _awaited(result: Awaitable[object]) -> object:
    try:
        return await result
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  (the boundary to user code)
        return _failure(error)


def _failure(error: BaseException) -> Score:
    return Score(None, str(error) if isinstance(error, CannotScore) else f"raised {described(error, through=1)}")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
