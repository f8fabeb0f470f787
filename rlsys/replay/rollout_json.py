"""Recorded episodes and groups, and their form as JSON, one group a line: finished groups for checkpoints.

`orjson` writes the dataclasses themselves, so a record has every field under its name; reading follows the types of the
fields. The round trip is exact for finite floats. A logprob that is not finite comes back as NaN, because JSON has no
NaN and `orjson` writes null, so that a step which failed on it fails again.

Rollouts, which `rlsys.replay.rollout_parquet` writes, have two readers: people, who need texts and numbers by token
(`readings`), and `rlsys replay`, which trains them again (`assigned`, `columns`).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from math import nan
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import orjson

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.batch.samples import meta_of, versions_of
from rlsys.errors import DataError
from rlsys.number_arrays import BoolArray, FloatArray, IntArray, NumberArray
from rlsys.types import POLICY, Episode, EpisodeMeta, Group, GroupKey, PolicyVersion, Task
from rlsys.util.any_paths import AnyPath, reading, writing
from rlsys.util.hashed_files import SavedFile

Record = TypeVar("Record")

Fields: TypeAlias = Mapping[str, Any]
"""Parsed JSON object with the fields of one dataclass."""

Rows: TypeAlias = Sequence[Sequence[float]]
"""Column of a group: one row per sample in the order of `samples_in`, with one float per completion token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Statistics of one turn. A list has one entry per output token, or is empty. An untrained turn has only `said` and
    `pieces`: its trajectory failed, has no advantage or one of 0, or belongs to another policy."""

    said: str = ""
    """New part of the prompt, decoded, with special tokens. It is the whole prompt in the first turn, and after the
    context was rewritten."""
    pieces: tuple[str, ...] = ()
    """Text of each output token, with special tokens; bytes of an incomplete character are U+FFFD."""
    trainer_logprobs: Sequence[float] = ()
    """Logprobs under the trainer's weights at the start of the step, at the sampling temperature, in nats."""
    entropies: Sequence[float] = ()
    """Entropy of the trainer's distribution for the token, at the time the token was trained, in nats."""
    advantages: Sequence[float] = ()
    """Advantages used by the loss; empty where each is that of the trajectory, neither shaped nor whitened."""
    is_masked: Sequence[bool] = ()
    """True for a token with an advantage but no gradient, because it was clipped or masked by a correction. Empty if
    there are none."""


EpisodeReading: TypeAlias = tuple[tuple[TokenStats, ...], ...]
"""Token statistics by trajectory and turn."""

_ARRAYS: Mapping[type, Callable[[Iterable[Any]], NumberArray]] = {int: IntArray, float: FloatArray, bool: BoolArray}
_LINES = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_SAVED = {f.name for f in fields(Group)} - {"key", "payload", "columns", "report"}
"""Fields of a finished group in a file, beside its id. References end with the process."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One trained group: its task, episodes, scores and advantages."""

    step: int
    """Optimizer steps behind the weights after the group was trained."""
    key: GroupKey
    task: Task
    replica: str
    permit_version: PolicyVersion
    episodes: tuple[Episode, ...]
    """Episodes with the rewards and outcomes of scoring."""
    assigned: tuple[TrajectoryAdvantage, ...]
    """Advantages that the group was trained with."""
    parts: tuple[Mapping[str, float], ...]
    """Components of the reward of each episode, see `Score.parts`."""
    policy: str = POLICY
    """Name of the policy trained on the group."""
    columns: Mapping[str, Rows] = field(default_factory=dict)
    """Arrays by `Column`, made by an annotator when groups arrived. They cannot be recomputed: the last bits of a
    value depend on the other tokens of its batch."""
    readings: tuple[EpisodeReading, ...] = ()
    """Decoded text and trainer statistics of each token; empty if not recorded."""

    @classmethod
    def of(
        cls, step: int, task: Task, group: Group, episodes: Sequence[Episode], assigned: Iterable[TrajectoryAdvantage]
    ) -> RolloutRecord:
        """Join the metadata of a group with its payload and its advantages.

        Values of the task's row that JSON lacks, such as decimals, become text.
        """
        row = decoder_of(Task)(orjson.loads(orjson.dumps(task, default=str)))
        scored = tuple(_with_scores(e, meta) for e, meta in zip(episodes, group.episodes, strict=True))
        parts = tuple(meta.trajectories[0].parts for meta in group.episodes)
        return cls(
            step, group.key, row, group.replica, group.permit_version, scored, tuple(assigned), parts, group.policy
        )

    @property
    def advantages(self) -> tuple[tuple[float | None, ...], ...]:
        """Advantage of each trajectory of each episode; None if it has none, or one per sample or turn."""
        whole = {(a.episode, a.trajectory): a.advantage for a in self.assigned if a.sample is None and not a.turns}
        return tuple(
            tuple(whole.get((e, t)) for t in range(len(episode.trajectories)))
            for e, episode in enumerate(self.episodes)
        )

    @property
    def group(self) -> Group:
        """Metadata for planning a step, without payload, columns and the task's verification data."""
        return Group(
            key=self.key,
            task_id=self.task.id,
            source=self.task.source,
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
    """A finished group and its payload. `payload` and `columns` are read as empty: references end with the process."""

    group: Group
    episodes: tuple[Episode, ...]


def write_groups(path: AnyPath, records: Iterable[GroupRecord]) -> SavedFile:
    """Write finished groups for `read_groups`; return the size and hash of the file.

    Bytes are written in base64, and each number of an array with as many digits as its type needs.
    """
    with writing(path) as file:
        for record in records:
            file.write(orjson.dumps(_bare(record), default=as_plain, option=_LINES))
    return file.report


def _bare(record: GroupRecord) -> Fields:
    """Return the fields of a record in a file."""
    group = {name: value for name, value in vars(record.group).items() if name in _SAVED}
    return {"group": {"group_id": record.group.group_id, **group, "payload": None}, "episodes": record.episodes}


def read_groups(path: AnyPath) -> list[GroupRecord]:
    """Read a file of `write_groups`. Raises `DataError` with the line that is not a record."""
    with reading(path) as lines:
        return [_decode_record(line, _group_record, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _with_scores(episode: Episode, meta: EpisodeMeta) -> Episode:
    pairs = zip(episode.trajectories, meta.trajectories, strict=True)
    scored = tuple(replace(t, reward=m.reward, outcome=m.outcome) for t, m in pairs)
    return replace(episode, trajectories=scored)


def as_plain(value: Any) -> Any:  # noqa: ANN401
    """Convert a value that `orjson` does not encode: a number of numpy or torch, from algorithms and workflows, bytes,
    or an array."""
    if isinstance(value, NumberArray):
        return value.__array__()
    return b64encode(value).decode() if isinstance(value, bytes) else float(value)


def _decode_record(line: bytes, decode: Callable[[Fields], Record], where: str) -> Record:
    try:
        return decode(orjson.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{where}: not a record of this version of rlsys: {error!r}") from error


def _group_record(f: Fields) -> GroupRecord:
    """Decode a group that an earlier session finished, of which JSON has the id."""
    group = {**f["group"], "key": GroupKey(decoder_of(int)(f["group"]["group_id"]), 0)}
    return decoder_of(GroupRecord)({**f, "group": group})


@cache
def decoder_of(hint: object) -> Callable[[Any], Any]:
    """Decoder from parsed JSON to values of a type.

    Of an object, only the fields of the dataclass are read: `orjson` also writes cached properties. A field that a file
    of an older version lacks takes its default. Null is NaN where the type is `float`. Raises `TypeError` for another
    kind of value than a number, text or truth value that the type says.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        decoders = {f.name: decoder_of(hints[f.name]) for f in fields(hint)}
        return lambda f: hint(**{name: decode(f[name]) for name, decode in decoders.items() if name in f})
    if origin is tuple:
        each = decoder_of(arguments[0])
        kinds = _kinds_of(arguments[0])
        return (lambda items: tuple(_check_types(items, kinds))) if kinds else lambda items: tuple(map(each, items))
    if origin is Sequence and arguments[0] in _ARRAYS:
        kind = _ARRAYS[arguments[0]]
        return lambda items: kind(nan if item is None else item for item in items)
    if origin is Sequence:
        each = decoder_of(arguments[0])
        return lambda items: tuple(map(each, items))
    if origin is Mapping:
        each = decoder_of(arguments[1])
        return lambda items: {name: each(value) for name, value in items.items()}
    if any(get_origin(form) is tuple for form in arguments):
        return lambda value: tuple(value) if isinstance(value, list) else value
    if hint is bytes:
        return lambda value: b64decode(value, validate=True)
    if hint is float:
        return lambda value: nan if value is None else _check_types((value,), {int, float})[0]
    if kinds := _kinds_of(hint):
        return lambda value: _check_types((value,), kinds)[0]
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else lambda value: value


def _kinds_of(hint: object) -> Set[type]:
    """Types of the JSON values of a plain type, or union of them. Empty for others, and for `float`: it may be null."""
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    if hint is float or not kinds <= {int, str, bool, float, NoneType}:
        return set()
    return cast("Set[type]", kinds | {int} if float in kinds else kinds)


def _check_types(values: Sequence[Any], kinds: Set[type]) -> Sequence[Any]:
    if not set(map(type, values)) <= kinds:
        raise TypeError(f"a value should be {' or '.join(sorted(kind.__name__ for kind in kinds))}")
    return values
