"""Episodes and groups as JSON, one group a line: rollouts for people to read, finished groups for checkpoints.

Writing is `orjson` on the dataclasses themselves, so a record holds every field under its own name;
`rlsys.replay.rollout_json` is the way back. The round trip is exact, floats included, as long as they are finite: JSON
has no NaN. A logprob that is not finite comes back as NaN, so that a step which failed on it fails again.

Rollouts serve two readers: people, who want texts and numbers by token (`readings`), and `rlsys replay`, which trains
them again (`assigned`, `columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import orjson

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.batch.samples import meta_of, versions_of
from rlsys.errors import DataError
from rlsys.replay.rollout_json import Fields, all_of, assigned_of, episode_of, floats_of, group_of, reading_of, task_of
from rlsys.replay.token_stats import EpisodeReading
from rlsys.types import (
    POLICY,
    Episode,
    EpisodeMeta,
    Group,
    PolicyVersion,
    Task,
)

Record = TypeVar("Record")

Rows: TypeAlias = tuple[tuple[float, ...], ...]
"""A column of a group: one row per sample in the order of `samples_in`, in it one float per completion token."""

ROLLOUT_FORMAT = 2
"""Of a line of rollouts. Lines of format 1 have no number; they hold no columns and no readings, and one advantage for
each trajectory."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One trained group: what was asked, what was said, how it was scored, and what was made of it."""

    step: int
    """Steps behind the weights after it was trained."""
    group_id: int
    task: Task
    replica: str
    permit_version: PolicyVersion
    episodes: tuple[Episode, ...]
    """With the rewards and outcomes that scoring gave."""
    assigned: tuple[TrajectoryAdvantage, ...]
    """The advantages that it was trained with."""
    parts: tuple[Mapping[str, float], ...]
    """Of each episode: what its reward is made of, see `Score.parts`."""
    policy: str = POLICY
    """Name of the policy that was trained on it."""
    columns: Mapping[str, Rows] = field(default_factory=dict)
    """By `Signal`. Those that an annotator made as groups came: what it says of a token depends, in the last bits, on
    what it was handed together with it, so that it cannot be made again."""
    readings: tuple[EpisodeReading, ...] = ()
    """What the trainer made of each token, and how it is spelled; empty if that was not recorded."""
    record_v: int = ROLLOUT_FORMAT
    """The format it was read from."""

    @classmethod
    def of(
        cls, step: int, task: Task, group: Group, episodes: Sequence[Episode], assigned: Iterable[TrajectoryAdvantage]
    ) -> RolloutRecord:
        """Join a group's metadata with its payload and with the advantages it was given.

        Values of the task's row that JSON lacks, such as decimals, become text.
        """
        row = task_of(orjson.loads(orjson.dumps(task, default=str)))
        scored = tuple(_scored(e, meta) for e, meta in zip(episodes, group.episodes, strict=True))
        parts = tuple(meta.trajectories[0].parts for meta in group.episodes)
        return cls(
            step, group.group_id, row, group.replica, group.permit_version, scored, tuple(assigned), parts, group.policy
        )

    @property
    def advantages(self) -> tuple[tuple[float | None, ...], ...]:
        """Of each trajectory of each episode; None where none was assigned, or each sample has its own."""
        whole = {(a.episode, a.trajectory): a.advantage for a in self.assigned if a.sample is None}
        return tuple(
            tuple(whole.get((e, t)) for t in range(len(episode.trajectories)))
            for e, episode in enumerate(self.episodes)
        )

    @property
    def group(self) -> Group:
        """The metadata that a step is planned from, without payload and columns, and without what verified it."""
        return Group(
            group_id=self.group_id,
            task_id=self.task.id,
            permit_version=self.permit_version,
            replica=self.replica,
            episodes=meta_of(self.episodes),
            versions=versions_of(self.episodes, self.policy),
            weights=(),
            payload=None,
            policy=self.policy,
        )


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


def rollout_of(line: bytes) -> RolloutRecord:
    """One line of a file of rollouts. Raises `DataError` if it is no record."""
    return _decoded(line, _rollout, "a line of rollouts")


def write_groups(path: Path, records: Iterable[GroupRecord]) -> None:
    """Write finished groups for `read_groups`."""
    _write(path, (replace(r, group=replace(r.group, payload=None, columns={})) for r in records))


def read_groups(path: Path) -> list[GroupRecord]:
    """What `write_groups` wrote. Raises `DataError` naming the line that is no such record."""
    return _read(path, lambda f: GroupRecord(group_of(f["group"]), all_of(episode_of, f["episodes"])))


def _scored(episode: Episode, meta: EpisodeMeta) -> Episode:
    pairs = zip(episode.trajectories, meta.trajectories, strict=True)
    scored = tuple(replace(t, reward=m.reward, outcome=m.outcome) for t, m in pairs)
    return replace(episode, trajectories=scored)


def _write(path: Path, records: Iterable[object]) -> None:
    """Numbers of numpy and torch, which algorithms and workflows may give, are written as floats."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(b"".join(orjson.dumps(r, default=float, option=orjson.OPT_APPEND_NEWLINE) for r in records))
    partial.replace(path)


def _read(path: Path, decode: Callable[[Fields], Record]) -> list[Record]:
    return [_decoded(line, decode, f"{path}:{number}") for number, line in enumerate(path.read_bytes().splitlines(), 1)]


def _decoded(line: bytes, decode: Callable[[Fields], Record], where: str) -> Record:
    try:
        return decode(orjson.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: not a record of this version of rlsys: {error!r}") from error


def _rollout(f: Fields) -> RolloutRecord:
    first = {name: f[name] for name in ("step", "group_id", "replica", "permit_version")}
    record = RolloutRecord(
        **first,
        task=task_of(f["task"]),
        episodes=all_of(episode_of, f["episodes"]),
        assigned=all_of(assigned_of, f["assigned"]) if "assigned" in f else _assigned_of_format_1(f),
        parts=tuple(f["parts"]),
        record_v=f.get("record_v", 1),
    )
    if record.record_v == 1:
        return record
    columns = {name: all_of(floats_of, rows) for name, rows in f["columns"].items()}
    return replace(record, policy=f["policy"], columns=columns, readings=all_of(reading_of, f["readings"]))


def _assigned_of_format_1(f: Fields) -> tuple[TrajectoryAdvantage, ...]:
    return tuple(
        TrajectoryAdvantage(e, t, advantage)
        for e, of_episode in enumerate(f["advantages"])
        for t, advantage in enumerate(of_episode)
        if advantage is not None
    )
