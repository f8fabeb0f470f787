"""What `rlsys replay RUN --step N` finds: steps that a run took, trained again, and whether every bit is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TypeAlias

from rlsys.types import Json

Value: TypeAlias = "str | float | None"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing that the run told, and what came of it this time."""

    what: str
    """E.g. `weights of version 3`, a hash; or `policy/entropy`, a metric of the step."""
    told: Value
    """None: the run did not live to tell."""
    found: Value

    @property
    def is_equal(self) -> bool:
        """To the last bit? What was not told differs from nothing."""
        return self.told == self.found or self.told is None

    def __str__(self) -> str:
        return f"{self.what}: the run had {self.told}, this time it is {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainedSteps:
    """A step of a run, trained again after those before it."""

    run: str
    step: int
    beginning: str
    """What the first of them was trained from, in words."""
    weights: tuple[Comparison, ...]
    """Before the first step, then after each."""
    metrics: tuple[Comparison, ...]
    """What the ranks report of the step."""
    device: str
    """The models that were computed on another kind of device than the run had, in words; empty if none was."""
    changed: tuple[str, ...] = ()
    """Keys of the configuration of which steps before `step` had other values; they were trained with those of `step`.
    """

    @property
    def first(self) -> Comparison | None:
        """The first that differs: of weights, from the oldest on, then of metrics; None if all is equal."""
        return next((each for each in (*self.weights, *self.metrics) if not each.is_equal), None)

    @property
    def is_equal(self) -> bool:
        """Bit for bit, as far as the run told?"""
        return self.first is None

    def as_json(self) -> dict[str, Json]:
        """All of it."""
        first: Json = None if self.first is None else asdict(self.first)
        fields: dict[str, Json] = asdict(self)
        return {**fields, "is_equal": self.is_equal, "first": first}

    def lines(self) -> Iterator[str]:
        """For a terminal."""
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
    """The metrics that are in both; files have null for each that is not finite."""
    return tuple(Comparison(name, _named(told[name]), _named(value)) for name, value in found.items() if name in told)


def _named(value: float | None) -> Value:
    return value if value is not None and isfinite(value) else "not finite"
