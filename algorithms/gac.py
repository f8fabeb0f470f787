"""Gradient alignment control: shortens gradients of old samples that are aligned with the previous one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, PositiveInt, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from rlsys.errors import CheckpointError
from rlsys.stabilizer import GradientDecision, StabilizerPlugin, Updates, inner_product
from rlsys.util.number_ranges import Fraction

if TYPE_CHECKING:
    from torch import Tensor

    from rlsys.stabilizer import AllReduce, Gradients

QUANTILE = 0.95
"""Share of the cosines of the synchronous steps that a calibrated `c_low` counts as safe."""
SMALLEST = 1e-30
"""Length of a gradient below which it counts as 0: its direction is lost in the last bits of fp32."""
MIN_STEPS, MAX_STEPS = 10, 1000
"""Fewest and most calibration steps. The record has room for `MAX_STEPS`, so that a checkpoint loads with any
`calibrate_steps`."""


@dataclass(frozen=True, kw_only=True, config=RULES)
class GAC(StabilizerPlugin):
    """Gradient alignment control. Off by default: it then only measures.

    Training on stale samples aligns consecutive gradients, while synchronous ones are nearly orthogonal; the policy
    then overshoots. With c the cosine of a gradient g and the previous raw gradient p:

        safe        c <= c_low             g as it is, also if it opposes p
        projected   c_low < c <= c_high    the part of g along p is shortened to c_low |g|
        skipped     c > c_high             no update at all, if `max_skips` allows one

    It acts on no gradient of fresh samples alone. The rule is a reconstruction from the abstract of arXiv:2603.01501
    and summaries by others. That it acts on aligned gradients of old samples alone is ours: fresh samples need no such
    correction, and a gradient opposing p undoes an overshoot. It acts after gradients were summed over micro-batches
    and ranks, and before they are clipped, so that clipping does not scale a shortened gradient up again. The
    thresholds depend on the run: see `calibrate_steps`.
    """

    enabled: bool = False
    """Act on gradients. If false, only measure and report."""
    c_low: Fraction = 0.05
    """Largest cosine of consecutive gradients that is safe. From 0 to `c_high`. Ignored with `calibrate_steps`."""
    c_high: Fraction = 0.3
    """Cosine above which `max_skips` updates are skipped. From `c_low` to 1. Ignored with `calibrate_steps`."""
    max_skips: Annotated[int, Field(ge=0)] = 0
    """Most updates skipped in a row; the next one is projected. Unchanged weights give the same gradient again, so
    unbounded skipping would never end. 0 skips none: all are projected."""
    where: Literal["gradient", "update"] = "gradient"
    """The vector that is projected. `gradient`: the gradient, along the previous one. Adam's second moment then shrinks
    along it, which cancels part of the effect. `update`: Adam's update, along the previous update, whose part is
    shortened by the same factor, c_low / c; the moments see raw gradients. In both modes the cosine of the gradients
    decides, also on skips."""
    calibrate_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Calibration steps at the start, which run synchronously and are only measured; 10 to 1000. Each step counts with
    the largest cosine of its updates, at least 0; the first does not count, for lack of a previous gradient. `c_low` is
    the 95th percentile of these. `c_high` is its square root, half way to 1 on a logarithmic scale, or their maximum if
    larger: no synchronous step would have been skipped. A resumed run keeps calibrated thresholds, unless this is then
    0. 0: use the configured thresholds."""

    update_every: PositiveInt = 10
    """Updates between two measurements of the cosine of Adam's update, which start at the first. One takes several
    passes over weights and moments; the cosine of the gradients takes three."""

    @field_validator("c_high")
    @classmethod
    def _is_the_larger(cls, c_high: float, info: ValidationInfo) -> float:
        if c_high < info.data.get("c_low", 0.0):
            raise ValueError(f"{c_high:g} is less than c_low, which is {info.data['c_low']:g}")
        return c_high

    @field_validator("calibrate_steps")
    @classmethod
    def _is_enough_for_a_quantile(cls, calibrate_steps: int) -> int:
        if 0 < calibrate_steps < MIN_STEPS:
            raise ValueError(f"{calibrate_steps} are too few to set thresholds from; take {MIN_STEPS} or more, or 0")
        return calibrate_steps

    @property
    def synchronous_steps(self) -> int:
        return self.calibrate_steps

    def start(self, shapes: Mapping[str, Tensor]) -> Alignment:
        return Alignment(self, shapes)


class Regime(IntEnum):
    """Action for a cosine; the value of the metric `gac/regime`."""

    SAFE = 0
    PROJECTED = 1
    SKIPPED = 2


class Thresholds(NamedTuple):
    """Bounds on the cosine in force."""

    low: float
    high: float

    @classmethod
    def from_cosines(cls, cosines: Tensor) -> Thresholds:
        """Compute the thresholds from the cosines of the calibration steps, as `GAC.calibrate_steps` describes."""
        low = float(cosines.quantile(QUANTILE))
        return cls(low, max(sqrt(low), float(cosines.max())))

    def regime(self, cosine: float) -> Regime:
        if cosine <= self.low:
            return Regime.SAFE
        return Regime.PROJECTED if cosine <= self.high else Regime.SKIPPED

    def projected_cosine(self, cosine: float) -> float:
        """Cosine after the projection: the part along the previous gradient is `low` of the original length."""
        length = sqrt(1 - cosine**2 + self.low**2)
        return self.low / length if length else 0.0


class Alignment:
    """One rank's gradient alignment control: a `Stabilizer`. Keeps one copy of the gradient, in fp32.

    A parameter without a gradient counts as one with gradient 0. Before the first gradient the previous one counts as
    0. The cosine with a gradient that is 0, or shorter than `SMALLEST`, is 0.
    """

    def __init__(self, config: GAC, shapes: Mapping[str, Tensor]) -> None:
        import torch

        def zero(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((), dtype=dtype)

        self._config = config
        self._previous = {n: torch.zeros_like(shard, dtype=torch.float32) for n, shard in shapes.items()}
        self._previous_square = zero(torch.float64)
        self._num_seen, self._skips_in_a_row = zero(), zero()
        self._num_recorded, self._num_wanted = zero(), zero()
        """Recorded calibration steps, and their total; both 0 before calibration begins."""
        self._record = torch.zeros(MAX_STEPS, dtype=torch.float64)
        """Largest cosine of each calibration step."""
        self._largest = 0.0
        """Largest cosine of the current step, at least 0."""
        self._excess = 0.0
        """Share of the part along the previous update that `correct` removes."""

    @property
    def synchronous_steps_left(self) -> int:
        """See `Stabilizer.synchronous_steps_left`."""
        wanted = int(self._num_wanted) or self._config.calibrate_steps
        return max(0, wanted - int(self._num_recorded)) if self._config.calibrate_steps else 0

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        """See `Stabilizer.steer`. One all-reduce of one number."""
        self._excess = 0.0
        products = {n: inner_product(gradients[n], p) for n, p in self._previous.items() if n in gradients}
        product, previous_square = all_reduce(products).item(), float(self._previous_square)
        cosine = _cosine(product, squared_norm, previous_square)
        thresholds = self._thresholds()
        self._largest = max(self._largest, cosine)
        self._num_seen += 1
        regime = thresholds.regime(cosine) if thresholds and staleness > 0 else Regime.SAFE
        metrics = {"gac/cosine": cosine, "gac/parallel_share": abs(cosine), "gac/cosine_after": cosine}
        removed = 0.0
        if self._config.enabled:
            regime = self._bound_skips(regime)
            if thresholds and regime is Regime.PROJECTED:
                excess = 1 - thresholds.low / cosine
                if self._config.where == "update":
                    self._excess = excess
                else:
                    removed = excess * product / previous_square
                    metrics["gac/cosine_after"] = thresholds.projected_cosine(cosine)
        self._remember(gradients, squared_norm, removed)
        metrics |= {"gac/regime": float(regime), "gac/skips_in_a_row": float(self._skips_in_a_row)}
        if thresholds:
            metrics |= {"gac/c_low": thresholds.low, "gac/c_high": thresholds.high}
        is_skipped = self._config.enabled and regime is Regime.SKIPPED
        return GradientDecision(is_skipped, is_edited=removed != 0, metrics=metrics)

    def correct(self, updates: Updates, all_reduce: AllReduce) -> Mapping[str, float]:
        """See `Stabilizer.correct`. One all-reduce of three numbers, if it measures or corrects."""
        is_measured = (self._num_seen - 1) % self._config.update_every == 0
        if not (is_measured or self._excess):
            return {}
        products = _products(updates)
        product, square, previous_square = all_reduce(products).tolist() if products else (0.0, 0.0, 0.0)
        if self._excess and previous_square:
            scale = -self._excess * product / previous_square
            for piece in updates.pieces():
                piece.add(piece.before(), scale)
        return {"gac/update_cosine": _cosine(product, square, previous_square)}

    def end_step(self) -> None:
        """See `Stabilizer.end_step`."""
        if self.synchronous_steps_left:
            self._num_wanted.fill_(self._config.calibrate_steps)
            self._record[self._num_recorded] = self._largest
            self._num_recorded += 1
        self._largest = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """The previous gradient, by parameter, and its square; the counters; and the calibration record, which
        determines the thresholds."""
        others = {
            "previous_square": self._previous_square,
            "num_seen": self._num_seen,
            "skips_in_a_row": self._skips_in_a_row,
            "num_recorded": self._num_recorded,
            "num_wanted": self._num_wanted,
            "record": self._record,
        }
        return {**self._previous, **{f"gac.{name}": tensor for name, tensor in others.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load, in place, a state from `state_dict`.

        Raises `CheckpointError` if the state is in the middle of a calibration of another length.
        """
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        wanted, configured = int(self._num_wanted), self._config.calibrate_steps
        if int(self._num_recorded) >= wanted:
            return
        if not configured:  # the calibration is given up
            self._num_recorded.zero_()
            self._num_wanted.zero_()
        elif configured != wanted:
            raise CheckpointError(
                f"stabilizer.calibrate_steps is {configured}, and the checkpoint is amid a calibration over {wanted} "
                f"steps, of which {int(self._num_recorded)} are done: go on with {wanted}, or with 0 and "
                "c_low and c_high of your own"
            )

    def _thresholds(self) -> Thresholds | None:
        """Return the thresholds in force; None during calibration."""
        config = self._config
        if not config.calibrate_steps:
            return Thresholds(config.c_low, config.c_high)
        if self.synchronous_steps_left:
            return None
        return Thresholds.from_cosines(self._record[1 : int(self._num_recorded)])

    def _bound_skips(self, regime: Regime) -> Regime:
        """Return the regime, with PROJECTED in place of a skip beyond `max_skips`."""
        if regime is Regime.SKIPPED and self._skips_in_a_row < self._config.max_skips:
            self._skips_in_a_row += 1
            return Regime.SKIPPED
        self._skips_in_a_row.zero_()
        return min(regime, Regime.PROJECTED)

    def _remember(self, gradients: Gradients, squared_norm: float, removed: float) -> None:
        """Store raw gradients, and subtract `removed` times the previous ones from the gradients, both in place."""
        self._previous_square.fill_(squared_norm)
        for name, previous in self._previous.items():
            gradient = gradients.get(name)
            if gradient is None:
                previous.zero_()
            elif removed:
                gradient.add_(previous, alpha=-removed)
                previous.mul_(removed).add_(gradient)  # the removed part plus the rest: the raw gradient again
            else:
                previous.copy_(gradient)


def _products(updates: Updates) -> dict[str, Tensor]:
    """<now, before>, <now, now> and <before, before> of the optimizer's updates, by parameter, in fp64."""
    import torch

    products: dict[str, list[Tensor]] = {}
    for piece in updates.pieces():
        now, before = piece.now(), piece.before()  # small enough for products in fp32
        products.setdefault(piece.name, []).append(torch.stack([now.dot(before), now.dot(now), before.dot(before)]))
    return {name: torch.stack(of_pieces).double().sum(0) for name, of_pieces in products.items()}


def _cosine(product: float, square: float, other_square: float) -> float:
    """Cosine of two vectors from their products; 0 if one is shorter than `SMALLEST`."""
    if min(square, other_square) < SMALLEST**2:
        return 0.0
    return max(-1.0, min(1.0, product / (sqrt(square) * sqrt(other_square))))
