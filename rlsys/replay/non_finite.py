"""What `rlsys replay` finds: every sample of a step that failed, and the first number of each that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from rlsys.types import Json, PolicyVersion

_SHOWN = 40
"""Rows of the table; the JSON has all."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A number that is not finite."""

    what: str
    """E.g. `logprob`, `reference_logprobs`, or `gradient of model.norm.weight`."""
    value: str
    """`nan`, `inf` or `-inf`."""
    token: int | None = None
    """Which trained token of the sample, from 0; None for what is of no one token."""
    text: str = ""
    """That token, decoded."""

    def __str__(self) -> str:
        place = "" if self.token is None else f" of token {self.token} ({self.text!r})"
        return f"{self.what}{place} is {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedSample:
    """One sample, computed alone under the weights that were kept."""

    model: Literal["policy", "critic"]
    update: int
    """Which update of the step trains it, from 0."""
    group: int
    """Serial of its group."""
    task_id: str
    episode: int
    trajectory: int
    sample: int
    num_tokens: int
    """Trained tokens."""
    loss: float
    """Its share of the loss of its update."""
    grad_norm: float
    """Norm of the gradient of that share."""
    log_ratio_max: float | None
    """Largest |log-ratio| of trainer to sampler over its tokens, in nats; None for the critic."""
    non_finite: NonFinite | None
    """The first thing that is not finite, in the order in which it is computed."""

    @property
    def place(self) -> str:
        """Where the sample is found, in words."""
        return f"group {self.group}, episode {self.episode}, trajectory {self.trajectory}, sample {self.sample}"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step computed again."""

    step: PolicyVersion
    """The step that failed, as `metrics.jsonl` would have numbered it."""
    error: str
    """What ended the run."""
    weights: NonFinite | None
    """The first parameter that was not finite before the step."""
    samples: tuple[ReplayedSample, ...]
    """Those of the update that failed."""
    not_reproduced: str | None = None
    """What the step read that could not be made again; None if all could."""

    @property
    def is_fine(self) -> bool:
        """Was all of it computed again, and every number finite?"""
        return self.first is None and self.not_reproduced is None

    @property
    def first(self) -> str | None:
        """The first thing that is not finite, and where it is; None if there is nothing."""
        if self.weights is not None:
            return f"before the step: {self.weights}"
        found = next((sample for sample in self.samples if sample.non_finite), None)
        return found and f"{found.model}, {found.place} (task {found.task_id}): {found.non_finite}"

    def as_json(self) -> dict[str, Json]:
        """For JSON, which has no NaN: a number that is not finite is null."""
        found = {name: _finite(value) for name, value in asdict(self).items()}
        return {**found, "first": self.first}

    def lines(self) -> Iterator[str]:
        """For a terminal: samples that are not finite first, then by the norm of their gradient, largest first."""
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


def _finite(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
