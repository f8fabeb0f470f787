"""Results of `rlsys replay`: a failed step by samples, and steps of a run compared bit by bit with their record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Literal, TypeAlias

import orjson

from rlsys.types import Json, PolicyVersion

Value: TypeAlias = "str | float | None"

_SHOWN = 40
"""Most rows of the table; the JSON has all of them."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Number that is not finite."""

    what: str
    """Name of the number: `logprob`, `reference_logprobs`, `gradient of model.norm.weight`, ..."""
    value: str
    """`nan`, `inf` or `-inf`."""
    token: int | None = None
    """Index of the trained token in the sample, from 0; None if the number belongs to no single token."""
    text: str = ""
    """The token, decoded."""

    def __str__(self) -> str:
        place = "" if self.token is None else f" of token {self.token} ({self.text!r})"
        return f"{self.what}{place} is {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedSample:
    """One sample, computed alone with the saved weights."""

    model: Literal["policy", "critic"]
    update: int
    """Index of its update in the step, from 0."""
    group: int
    """Group id."""
    task_id: str
    episode: int
    trajectory: int
    sample: int
    num_tokens: int
    """Trained tokens."""
    loss: float
    """Contribution to the loss of its update."""
    grad_norm: float
    """Norm of the gradient of that contribution."""
    log_ratio_max: float | None
    """Largest |log-ratio| of trainer to sampler over its tokens, in nats; None for the critic."""
    non_finite: NonFinite | None
    """First non-finite number, in the order of computation."""

    @property
    def place(self) -> str:
        """Location of the sample in words."""
        return f"group {self.group}, episode {self.episode}, trajectory {self.trajectory}, sample {self.sample}"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A failed step, computed again."""

    step: PolicyVersion
    """Number of the failed step, as in `metrics.jsonl`."""
    error: str
    """Error that ended the run."""
    weights: NonFinite | None
    """First parameter that was not finite before the step."""
    samples: tuple[ReplayedSample, ...]
    """Samples of the update that failed."""
    not_reproduced: str | None = None
    """Input of the step that could not be recomputed; None if all could."""

    @property
    def is_fine(self) -> bool:
        """True if all of it was computed again and every number is finite."""
        return self.first is None and self.not_reproduced is None

    @property
    def first(self) -> str | None:
        """First non-finite number and its location; None if there is none."""
        if self.weights is not None:
            return f"before the step: {self.weights}"
        found = next((sample for sample in self.samples if sample.non_finite), None)
        return f"{found.model}, {found.place} (task {found.task_id}): {found.non_finite}" if found else None

    def as_json(self) -> dict[str, Json]:
        """Return the step as JSON, where a number that is not finite is null."""
        return {**orjson.loads(orjson.dumps(self)), "first": self.first}

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: samples with non-finite numbers first, then by gradient norm, largest first."""
        yield f"step {self.step} failed with: {self.error.splitlines()[0]}"
        rows = sorted(self.samples, key=lambda s: (s.non_finite is None, -s.grad_norm if s.non_finite is None else 0))
        yield _row("model", "update", "group", "episode", "traj", "sample", "tokens", "loss", "grad norm", "log-ratio")
        for s in rows[:_SHOWN]:
            ratio = "" if s.log_ratio_max is None else f"{s.log_ratio_max:.3g}"
            numbers = (s.num_tokens, f"{s.loss:.3g}", f"{s.grad_norm:.3g}", ratio)
            row = _row(s.model, s.update, s.group, s.episode, s.trajectory, s.sample, *numbers)
            yield f"{row}  {s.non_finite or ''}".rstrip()
        if len(rows) > _SHOWN:
            yield f"... and {len(rows) - _SHOWN} more; --json has all"
        if self.not_reproduced:
            yield f"could not be made again: {self.not_reproduced}"
        if self.first:
            yield f"first: {self.first}"
        else:
            yield "every number is finite on this machine" if self.is_fine else "of the rest, every number is finite"


def _row(model: object, *cells: object) -> str:
    return f"{model:<7}" + "".join(f"{cell!s:>10}" for cell in cells)


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
        found = {**asdict(self), "is_equal": self.is_equal, "first": self.first}
        return orjson.loads(orjson.dumps(found))

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
        return "is not recorded: the run ended before it arrived"
    return "equal" if each.is_equal else f"differs: it was {each.told}"


def compare_metrics(recorded: Mapping[str, float], found: Mapping[str, float]) -> tuple[Comparison, ...]:
    """Compare the metrics present in both."""
    return tuple(
        Comparison(name, _finite_or_text(recorded[name]), _finite_or_text(value))
        for name, value in found.items()
        if name in recorded
    )


def _finite_or_text(value: float) -> Value:
    return value if isfinite(value) else "not finite"
