"""Result of `rlsys replay RUN --step N`: the steps of a run, trained again and compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TypeAlias

from rlsys.types import Json

Value: TypeAlias = "str | float | None"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded value and its counterpart from the replay."""

    what: str
    """Name: `weights of version 3` for a hash, or `policy/entropy` for a metric of the step."""
    told: Value
    """Recorded value; None: the run ended before it was recorded."""
    found: Value

    @property
    def is_equal(self) -> bool:
        """True if both values are identical, or none was recorded."""
        return self.told == self.found or self.told is None

    def __str__(self) -> str:
        return f"{self.what}: the run had {self.told}, this time it is {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainedSteps:
    """A step of a run, trained again after those before it."""

    run: str
    step: int
    beginning: str
    """Name of the starting weights, in words."""
    weights: tuple[Comparison, ...]
    """Hashes before the first step, then after each step."""
    metrics: tuple[Comparison, ...]
    """Metrics that the ranks report for the step."""
    device: str
    """Models computed on another kind of device than in the run, in words; empty if there are none."""
    changed: tuple[str, ...] = ()
    """Configuration keys that had other values in steps before `step`; the replay uses those of `step` for all
    steps."""

    @property
    def first(self) -> Comparison | None:
        """First difference: in the weights, oldest first, then in the metrics; None if all values are equal."""
        return next((each for each in (*self.weights, *self.metrics) if not each.is_equal), None)

    @property
    def is_equal(self) -> bool:
        """True if all recorded values are identical, bit for bit."""
        return self.first is None

    def as_json(self) -> dict[str, Json]:
        first: Json = None if self.first is None else asdict(self.first)
        fields: dict[str, Json] = asdict(self)
        return {**fields, "is_equal": self.is_equal, "first": first}

    def lines(self) -> Iterator[str]:
        """Lines for a terminal."""
        yield f"step {self.step} of {self.run}, trained again from {self.beginning}"
        for each in self.weights:
            yield f"{each.what:<24} {each.found}  {_verdict(each)}"
        num_equal = sum(each.is_equal for each in self.metrics)
        yield f"{'metrics of the step':<24} {num_equal} of {len(self.metrics)} equal"
        if self.device:
            yield self.device
        if self.changed:
            yield f"steps before {self.step} had another configuration, and were trained with that of {self.step}:"
            yield f"  other values of {', '.join(self.changed)}"
        if self.first is None:
            yield "equal bit for bit"
            return
        yield f"first difference: {self.first}"
        yield (
            "bits are those of one kind of machine, one version of torch, and one configuration; where these are "
            "alike, what was recorded was changed, or the step is not deterministic"
        )


def _verdict(each: Comparison) -> str:
    if each.told is None:
        return "was not told: the run ended before it arrived"
    return "equal" if each.is_equal else f"differs: it was {each.told}"


def compared(told: Mapping[str, float | None], found: Mapping[str, float]) -> tuple[Comparison, ...]:
    """Compare the metrics present in both; files have null for each that is not finite."""
    return tuple(Comparison(name, _named(told[name]), _named(value)) for name, value in found.items() if name in told)


def _named(value: float | None) -> Value:
    return value if value is not None and isfinite(value) else "not finite"
