"""Descent on a quadratic with stale gradients, where the effect of staleness has a closed form.

On curvature λ, with gradients s steps old and a learning rate η, a coordinate follows

    x[t+1] = x[t] - η λ x[t-s]

whose modes are the roots z of z^(s+1) - z^s + η λ. At the largest η λ that is stable they lie on the unit circle, at
the angle π / (2 s + 1): gradients then turn by that angle a step. So the cosine of consecutive gradients shows the
distance from the limit: -1 for s = 0, .5 for 1, .94 for 4, .995 for 16.

Shape suffix: `D` coordinates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import cos, pi, sin

import numpy as np
import torch
from torch import Tensor

from algorithms.gac import GAC
from rlsys.stabilizer import StabilizerPlugin, alone

CONTROL = GAC(enabled=True, c_low=0.15, c_high=0.4, max_skips=1)
"""Thresholds for `descend`: fresh gradients there are mostly noise, and the cosine of noise in 200 dimensions has a
standard deviation of .07. The defaults, .05 and .3, would project half of all fresh gradients, for 3 % more loss."""
NUM_COORDINATES, RATE = 200, 0.25
"""Coordinates and learning rate of `descend`."""
NAME = "x"
"""Name of the only parameter."""
GONE = 1e12
"""A loss above this has diverged."""


def stability_limit(staleness: int) -> float:
    """Return the η λ below which descent on gradients of that staleness converges: 2 sin(π / (2 (2 s + 1))).

    From z = e^iφ in the roots above: z^s (1 - z) = η λ is real and positive only for φ = π / (2 s + 1), and |1 - z| is
    then 2 sin(φ / 2).
    """
    return 2 * sin(pi / (2 * (2 * staleness + 1)))


def boundary_cosine(staleness: int) -> float:
    """Return the cosine of consecutive gradients at that limit: cos(π / (2 s + 1))."""
    return cos(pi / (2 * staleness + 1))


def growth(step_size: float, staleness: int) -> float:
    """Return the growth per step of the largest mode with η λ = `step_size`; descent converges if it is less than 1."""
    coefficients = np.zeros(staleness + 2)
    coefficients[0] = 1
    coefficients[1] -= 1
    coefficients[-1] += step_size
    return float(np.abs(np.roots(coefficients)).max())


@dataclass(slots=True)
class Descent:
    """Record of a descent, one entry per step; it ends early on divergence."""

    losses: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    regimes: list[int] = field(default_factory=list)
    """As the metric `gac/regime`."""

    @property
    def has_diverged(self) -> bool:
        return not self.losses[-1] < GONE

    def final(self, num_steps: int = 100) -> float:
        """Mean loss of the last steps; infinite if it diverged."""
        last = self.losses[-num_steps:]
        return float("inf") if self.has_diverged else sum(last) / len(last)


def descend(
    staleness: int, control: StabilizerPlugin, *, num_steps: int = 400, noise: float = 0.2, seed: int = 0
) -> Descent:
    """Run noisy gradient descent on ½ Σ λ x² from a standard normal start, with a stabilizer as in a training run.

    The curvatures are `NUM_COORDINATES` evenly between 0 and 1; at `RATE` the stiffest coordinates are stable up to a
    staleness of 5.
    """
    chance = torch.Generator().manual_seed(seed)
    start_D = torch.randn(NUM_COORDINATES, generator=chance)
    noises = (noise * torch.randn(NUM_COORDINATES, generator=chance) for _ in range(num_steps))
    curvatures_D = torch.arange(1, NUM_COORDINATES + 1) / NUM_COORDINATES
    return follow([start_D] * (staleness + 1), curvatures_D, noises, RATE, control)


def follow(
    versions: Sequence[Tensor], curvatures_D: Tensor, noises: Iterable[Tensor], rate: float, control: StabilizerPlugin
) -> Descent:
    """Descend from the last of `versions`, a step for each noise, with each gradient at the oldest version: the
    staleness is their number minus one. The steps that `control` must see fresh come first; older versions are then
    dropped, as by the queue of a training run."""
    queue, x_D = deque(versions, maxlen=len(versions)), versions[-1]
    stabilizer = control.start({NAME: x_D})
    before_D = torch.zeros_like(x_D)
    done = Descent()
    for noise_D in noises:
        staleness = len(versions) - 1
        if stabilizer.synchronous_steps_left:
            queue.extend([x_D] * len(versions))
            staleness = 0
        gradients = {NAME: curvatures_D * queue[0] + noise_D}
        steered = stabilizer.steer(gradients, float(gradients[NAME].square().sum()), alone, staleness)
        if not steered.is_skipped:
            update = Direction(gradients[NAME], before_D)
            stabilizer.correct(update, alone)
            x_D = x_D - rate * (update.now_D + update.more_D)
            before_D = update.now_D
        stabilizer.end_step()
        queue.append(x_D)
        done.losses.append(float((curvatures_D * x_D.square()).sum() / 2))
        done.cosines.append(steered.metrics.get("gac/cosine", 0.0))
        done.regimes.append(int(steered.metrics.get("gac/regime", 0)))
        if done.has_diverged:
            break
    return done


class Direction:
    """`Updates` of plain gradient descent, in one piece: the direction is the gradient."""

    name = NAME

    def __init__(self, now_D: Tensor, before_D: Tensor) -> None:
        self.now_D, self.before_D, self.more_D = now_D, before_D, torch.zeros_like(now_D)

    def pieces(self) -> Iterator[Direction]:
        yield self

    def before(self) -> Tensor:
        return self.before_D

    def now(self) -> Tensor:
        return self.now_D

    def add(self, direction: Tensor, scale: float) -> None:
        self.more_D.add_(direction, alpha=scale)
