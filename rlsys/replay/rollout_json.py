"""Decoders from parsed JSON to dataclasses, for the files of `rlsys.replay.rollout_log`.

JSON has no NaN: `orjson` writes null for each number that is not finite, and null is read as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.replay.token_stats import EpisodeReading, TokenStats
from rlsys.types import (
    Acknowledged,
    Episode,
    EpisodeMeta,
    Group,
    Outcome,
    OutcomeKind,
    SampleMeta,
    Sampling,
    Task,
    Trajectory,
    TrajectoryMeta,
    Turn,
    VersionSpan,
)

Noun = TypeVar("Noun")

Fields: TypeAlias = Mapping[str, Any]
"""Parsed JSON object with the fields of one dataclass."""


def all_of(decode: Callable[[Any], Noun], items: Iterable[Any]) -> tuple[Noun, ...]:
    """Decode each item of a JSON list."""
    return tuple(map(decode, items))


def assigned_of(f: Fields) -> TrajectoryAdvantage:
    """Decode an advantage."""
    return TrajectoryAdvantage(f["episode"], f["trajectory"], _float(f["advantage"]), f["sample"])


def reading_of(of_trajectories: Iterable[Iterable[Fields]]) -> EpisodeReading:
    """Decode the token statistics of one episode."""
    return tuple(all_of(_turn_reading, of_turns) for of_turns in of_trajectories)


def _turn_reading(f: Fields) -> TokenStats:
    floats = {name: floats_of(f[name]) for name in ("trainer_logprobs", "entropies", "advantages")}
    return TokenStats(said=f["said"], pieces=tuple(f["pieces"]), is_masked=tuple(f["is_masked"]), **floats)


def floats_of(values: Iterable[float | None]) -> tuple[float, ...]:
    """Decode a column."""
    return tuple(map(_float, values))


def _float(value: float | None) -> float:
    return math.nan if value is None else value


def task_of(f: Fields) -> Task:
    """Decode a task."""
    prompt = f["prompt"] if isinstance(f["prompt"], str) else tuple(f["prompt"])
    return Task(**{**f, "prompt": prompt})


def episode_of(f: Fields) -> Episode:
    """Decode an episode."""
    return Episode(**{**f, "trajectories": all_of(_trajectory, f["trajectories"])})


def _trajectory(f: Fields) -> Trajectory:
    return Trajectory(**{**f, "turns": all_of(_turn, f["turns"]), "outcome": _outcome(f["outcome"])})


def _turn(f: Fields) -> Turn:
    columns = {name: tuple(f[name]) for name in ("prompt_ids", "output_ids")}
    columns["logprobs"] = floats_of(f["logprobs"])
    return Turn(**{**f, **columns, "versions": all_of(_span, f["versions"]), "sampling": Sampling(**f["sampling"])})


def _outcome(f: Fields) -> Outcome:
    return Outcome(OutcomeKind(f["kind"]), f["reason"])


def _span(f: Fields) -> VersionSpan:
    return VersionSpan(**f)


def group_of(f: Fields) -> Group:
    """Decode the metadata of a group."""
    return Group(
        **{
            **f,
            "episodes": all_of(_episode_meta, f["episodes"]),
            "versions": all_of(_span, f["versions"]),
            "weights": all_of(lambda w: Acknowledged(**w), f["weights"]),
        }
    )


def _episode_meta(f: Fields) -> EpisodeMeta:
    """Decode by field: orjson also writes cached properties, and files of older versions lack the counts."""
    trajectories = all_of(_trajectory_meta, f["trajectories"])
    return EpisodeMeta(trajectories, f.get("num_tool_calls", 0), f.get("num_sequential", 0))


def _trajectory_meta(f: Fields) -> TrajectoryMeta:
    samples = all_of(lambda s: SampleMeta(**s), f["samples"])
    return TrajectoryMeta(**{**f, "outcome": _outcome(f["outcome"]), "samples": samples})
