"""Decoder from lines of a run's files to events, for all versions of rlsys.

A missing field takes its default; without a default, a measurement is NaN, a count 0 and a text empty. An unknown field
is ignored. Null in place of a number is NaN, as the sink writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from math import nan
from typing import Any, TypeAlias, TypeGuard, get_type_hints

import orjson

from rlsys.monitoring.events import EVENT_TYPES, EvalDone, Event, StepDone
from rlsys.types import Json

WHOLE = 2**53
"""Whole numbers are smaller than this: JavaScript cannot represent larger ones."""
_END_S = 1e11
"""No event is later: the year 5138, in Unix seconds."""


class Unreadable(ValueError):
    """Invalid line: cut off, damaged, with a field of another type, or without the main field of its event."""


class UnknownKind(ValueError):
    """Event of a kind that this version does not know."""


def decode(line: bytes) -> tuple[Event, float]:
    """Decode a line of `events.jsonl` to its event and time. Raises `Unreadable` or `UnknownKind`."""
    row = _row(line)
    kind, time_s = row.get("kind"), row.get("time_s")
    if not isinstance(kind, str) or not is_time(time_s):
        raise Unreadable("it has no kind or no time")
    if kind not in _READERS:
        raise UnknownKind(kind)
    make, readers, absent = _READERS[kind]
    try:
        # Fast path: most values already have the right type, and there may be millions of them.
        values = {
            name: value if type(value := row[name]) is exact else read(value)
            for name, exact, read in readers
            if name in row
        }
        return make(**(values if len(values) == len(readers) else {**absent, **values})), time_s
    except TypeError as error:
        raise Unreadable(f"{kind}: {error}") from error


def decode_metrics(line: bytes) -> tuple[StepDone | EvalDone, float]:
    """Decode a line of `metrics.jsonl`, for runs without other files. Raises `Unreadable`."""
    row = _row(line)
    step, time_s = row.pop("step", None), row.pop("time_s", 0.0)
    if not isinstance(step, int) or abs(step) >= WHOLE or not is_time(time_s):
        raise Unreadable("it has no step or no time")
    metrics = _metrics(row)
    if metrics and all(name.startswith("eval/") for name in metrics):
        return EvalDone(step, next(iter(metrics)).split("/")[1], "", 0.0, metrics), time_s
    return StepDone(step, metrics), time_s


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise Unreadable(str(error)) from error
    if not isinstance(row, dict):
        raise Unreadable("it is no JSON object")
    return row


def is_time(value: Json) -> TypeGuard[float]:
    """True for Unix seconds of an event."""
    return isinstance(value, float | int) and 0 <= value < _END_S


def _int(value: Json) -> int:
    if not isinstance(value, int) or abs(value) >= WHOLE:
        raise TypeError(f"{value!r:.50} is no whole number below 2**53")
    return value


def _float(value: Json) -> float:
    if value is None:
        return nan
    if not isinstance(value, float | int):
        raise TypeError(f"{value!r:.50} is no number")
    return value


def _str(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.50} is no text")
    return value


def _metrics(value: Json) -> Mapping[str, float]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.50} are no metrics")
    return {name: nan if v is None else v for name, v in value.items() if v is None or isinstance(v, float | int)}


def _ints(value: Json) -> tuple[int, ...]:
    return tuple(map(_int, _list(value)))


def _rewards(value: Json) -> tuple[float | None, ...]:
    return tuple(None if v is None else _float(v) for v in _list(value))


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.50} is no list")
    return value


_Reader: TypeAlias = tuple[str, type | None, Callable[[Json], object]]
"""Field, the type of values that need no conversion, and a function that converts or rejects others."""

_BY_TYPE: Mapping[Any, tuple[type | None, Callable[[Json], object]]] = {
    int: (None, _int),
    float: (float, _float),
    str: (str, _str),
    bool: (bool, bool),
    Mapping[str, float]: (None, _metrics),
    tuple[int, ...]: (None, _ints),
    tuple[float | None, ...]: (None, _rewards),
}


def _readers(event: type) -> list[_Reader]:
    hints = get_type_hints(event)
    return [(field.name, *_BY_TYPE[hints[field.name]]) for field in fields(event)]


def _absent(event: type) -> dict[str, object]:
    """Defaults of fields that a version did not write. The main fields of an event have no default."""
    empty: Mapping[Any, object] = {float: nan, str: "", bool: False, Mapping[str, float]: {}}
    hints = get_type_hints(event)
    needed = [f.name for f in fields(event) if f.default is MISSING and f.name not in ("worker", "task_id")]
    counts: dict[str, object] = {name: 0 for name in needed if name.startswith("num_")}
    return counts | {name: empty[hints[name]] for name in needed if hints[name] in empty}


_READERS: Mapping[str, tuple[Callable[..., Event], list[_Reader], Mapping[str, object]]] = {
    kind: (event, _readers(event), _absent(event)) for kind, event in EVENT_TYPES.items()
}
