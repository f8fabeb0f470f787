"""Episodes and groups as JSON, one group a line: rollouts for people to read, finished groups for checkpoints.

Writing is `orjson` on the dataclasses themselves, so a record holds every field under its own name; most of this module
is the way back. The round trip is exact, floats included, as long as they are finite: JSON has no NaN. A logprob that
is not finite comes back as NaN, so that a step which failed on it fails again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import orjson

from rlsys.algorithm import Assigned
from rlsys.errors import DataError
from rlsys.types import (
    Acknowledged,
    Episode,
    EpisodeMeta,
    Group,
    Outcome,
    OutcomeKind,
    PolicyVersion,
    SampleMeta,
    Sampling,
    Task,
    Trajectory,
    TrajectoryMeta,
    Turn,
    VersionSpan,
)

Record = TypeVar("Record")

_Fields: TypeAlias = Mapping[str, Any]
"""A parsed JSON object that holds the fields of one dataclass."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One trained group: what was asked, what was said, how it was judged, and what was made of it."""

    step: int
    """Steps behind the weights after it was trained."""
    serial: int
    task: Task
    replica: str
    permit_version: PolicyVersion
    episodes: tuple[Episode, ...]
    """With the rewards and outcomes that judging gave."""
    advantages: tuple[tuple[float | None, ...], ...]
    """Of each trajectory of each episode; None where none was assigned."""
    parts: tuple[Mapping[str, float], ...]
    """Of each episode: what its reward is made of, see `Score.parts`."""

    @classmethod
    def of(
        cls, step: int, task: Task, group: Group, episodes: Sequence[Episode], assigned: Iterable[Assigned]
    ) -> RolloutRecord:
        """Join a group's metadata with its payload and with the advantages it was given."""
        advantage = {(a.episode, a.trajectory): a.advantage for a in assigned}
        judged = tuple(_judged(e, meta) for e, meta in zip(episodes, group.episodes, strict=True))
        advantages = tuple(
            tuple(advantage.get((e, t)) for t in range(len(episode.trajectories))) for e, episode in enumerate(judged)
        )
        parts = tuple(meta.trajectories[0].parts for meta in group.episodes)
        return cls(step, group.serial, task, group.replica, group.permit_version, judged, advantages, parts)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A finished group and its payload. References outlive no process: `payload` and `columns` come back empty."""

    group: Group
    episodes: tuple[Episode, ...]


def write_rollouts(path: Path, records: Iterable[RolloutRecord]) -> None:
    """Write the records of one step. The file appears whole or not at all, like every file of this module."""
    _write(path, records)


def read_rollouts(path: Path) -> list[RolloutRecord]:
    """What `write_rollouts` wrote. Raises `DataError` naming the line that is no such record."""
    return _read(path, _rollout)


def write_groups(path: Path, records: Iterable[GroupRecord]) -> None:
    """Write finished groups for `read_groups`."""
    _write(path, (replace(r, group=replace(r.group, payload=None, columns={})) for r in records))


def read_groups(path: Path) -> list[GroupRecord]:
    """What `write_groups` wrote. Raises `DataError` naming the line that is no such record."""
    return _read(path, lambda f: GroupRecord(_group(f["group"]), _all(_episode, f["episodes"])))


def _judged(episode: Episode, meta: EpisodeMeta) -> Episode:
    pairs = zip(episode.trajectories, meta.trajectories, strict=True)
    judged = tuple(replace(t, reward=m.reward, outcome=m.outcome) for t, m in pairs)
    return replace(episode, trajectories=judged)


def _write(path: Path, records: Iterable[object]) -> None:
    """Values of a row that JSON lacks, such as dates, are written as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(b"".join(orjson.dumps(r, default=str, option=orjson.OPT_APPEND_NEWLINE) for r in records))
    partial.replace(path)


def _read(path: Path, decode: Callable[[_Fields], Record]) -> list[Record]:
    records: list[Record] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            records.append(decode(orjson.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number}: not a record of this version of rlsys: {error!r}") from error
    return records


def _all(decode: Callable[[Any], Record], items: Iterable[Any]) -> tuple[Record, ...]:
    return tuple(map(decode, items))


def _rollout(f: _Fields) -> RolloutRecord:
    columns = {"advantages": _all(tuple, f["advantages"]), "parts": tuple(f["parts"])}
    return RolloutRecord(**{**f, "task": _task(f["task"]), "episodes": _all(_episode, f["episodes"]), **columns})


def _task(f: _Fields) -> Task:
    prompt = f["prompt"] if isinstance(f["prompt"], str) else tuple(f["prompt"])
    return Task(**{**f, "prompt": prompt})


def _episode(f: _Fields) -> Episode:
    return Episode(**{**f, "trajectories": _all(_trajectory, f["trajectories"])})


def _trajectory(f: _Fields) -> Trajectory:
    return Trajectory(**{**f, "turns": _all(_turn, f["turns"]), "outcome": _outcome(f["outcome"])})


def _turn(f: _Fields) -> Turn:
    columns = {name: tuple(f[name]) for name in ("prompt_ids", "output_ids")}
    columns["logprobs"] = tuple(math.nan if logprob is None else logprob for logprob in f["logprobs"])
    return Turn(**{**f, **columns, "versions": _all(_span, f["versions"]), "sampling": Sampling(**f["sampling"])})


def _outcome(f: _Fields) -> Outcome:
    return Outcome(OutcomeKind(f["kind"]), f["reason"])


def _span(f: _Fields) -> VersionSpan:
    return VersionSpan(**f)


def _group(f: _Fields) -> Group:
    return Group(
        **{
            **f,
            "episodes": _all(_episode_meta, f["episodes"]),
            "versions": _all(_span, f["versions"]),
            "weights": _all(lambda w: Acknowledged(**w), f["weights"]),
        }
    )


def _episode_meta(f: _Fields) -> EpisodeMeta:
    """orjson writes what a cached property holds as well, and files of older versions lack the counts."""
    trajectories = _all(_trajectory_meta, f["trajectories"])
    return EpisodeMeta(trajectories, f.get("num_tool_calls", 0), f.get("num_sequential", 0))


def _trajectory_meta(f: _Fields) -> TrajectoryMeta:
    samples = _all(lambda s: SampleMeta(**s), f["samples"])
    return TrajectoryMeta(**{**f, "outcome": _outcome(f["outcome"]), "samples": samples})
