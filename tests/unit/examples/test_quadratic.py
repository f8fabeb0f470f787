"""Descent with stale gradients, where the answer is known, under the real stabilizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import pi
from statistics import fmean

import pytest
import torch
from torch import Tensor

from algorithms.gac import GAC, Regime
from examples.stability.quadratic import (
    CONTROL,
    Problem,
    boundary_cosine,
    descend,
    follow,
    growth,
    stability_limit,
)

pytestmark = pytest.mark.slow

AGES = (0, 1, 2, 4, 8, 16, 32)


def silence() -> Iterator[Tensor]:
    while True:
        yield torch.zeros(())


def losses_at(staleness: int, share: float, num_steps: int) -> list[float]:
    """Of 400 coordinates of curvature 1, with random histories, at a share of the limit."""
    chance = torch.Generator().manual_seed(staleness)
    versions = list(torch.randn(staleness + 1, 400, generator=chance))
    return follow(versions, torch.ones(400), silence(), share * stability_limit(staleness), GAC(), num_steps).losses


@pytest.mark.parametrize("staleness", AGES)
def test_descent_converges_below_the_limit_and_diverges_above(staleness: int) -> None:
    limit = stability_limit(staleness)
    assert growth(0.999 * limit, staleness) < 1 < growth(1.001 * limit, staleness)
    assert growth(limit, staleness) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("staleness", [0, 1, 4, 16])
def test_descent_itself_does_as_its_largest_mode(staleness: int) -> None:
    num_steps = 40 * (2 * staleness + 1)
    below = losses_at(staleness, 0.9, num_steps)
    above = losses_at(staleness, 1.1, num_steps)
    turn = 2 * (2 * staleness + 1)
    assert max(below[-turn:]) < 0.5 * max(below[turn : 2 * turn])
    assert max(above[-turn:]) > 2 * max(above[turn : 2 * turn])


@pytest.mark.parametrize("staleness", AGES)
def test_at_the_limit_consecutive_gradients_turn_by_the_known_angle(staleness: int) -> None:
    """As the stabilizer itself measures it; every coordinate oscillates in the mode of the limit, at its own phase."""
    angle = pi / (2 * staleness + 1)
    phases = torch.arange(400) * (2 * pi / 400)
    versions = [torch.cos(phases + age * angle) for age in range(staleness + 1)]
    done = follow(versions, torch.ones(400), silence(), stability_limit(staleness), GAC(), 3 * (2 * staleness + 1))
    assert done.cosines[1:] == pytest.approx([boundary_cosine(staleness)] * (len(done.cosines) - 1), abs=1e-4)


def test_control_bounds_gradients_of_staleness_sixteen_that_otherwise_diverge() -> None:
    for seed in range(3):
        problem = Problem(seed=seed)
        assert descend(problem, 16, GAC()).has_diverged
        start = descend(problem, 16, CONTROL).losses[0]
        controlled = descend(replace(problem, num_steps=1200), 16, CONTROL)
        assert max(controlled.losses) < 2 * start
        assert controlled.final() < start


def test_fresh_gradients_are_hardly_disturbed() -> None:
    """Within 2 %, over three seeds."""
    plain, controlled = (fmean(descend(Problem(seed=s), 0, c).final() for s in range(3)) for c in (GAC(), CONTROL))
    assert controlled == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_thresholds_calibrated_from_a_fresh_start_bound_stale_gradients(seed: int) -> None:
    """What users are told to do: synchronous steps first, 100 of them, then old gradients for a thousand."""
    problem = Problem(seed=seed, num_steps=1100)
    watched, controlled = (descend(problem, 16, GAC(enabled=on, calibrate_steps=100)) for on in (False, True))
    assert watched.has_diverged
    assert watched.losses[:100] == controlled.losses[:100]
    assert max(controlled.losses) < 4 * controlled.losses[0]
    assert controlled.final() < 1.5 * controlled.losses[0]


def test_thresholds_of_a_fresh_start_leave_fresh_gradients_alone() -> None:
    plain, controlled = (descend(Problem(), 0, GAC(enabled=on, calibrate_steps=100)) for on in (False, True))
    assert controlled.final() == pytest.approx(plain.final(), rel=0.01)
    assert controlled.regimes.count(Regime.SAFE) > 0.98 * len(controlled.regimes)


def test_earlier_calibration_gives_weaker_control() -> None:
    """The first gradients of a descent all point downhill, so that their cosines are large without any staleness."""
    finals = [descend(Problem(num_steps=600), 8, GAC(enabled=True, calibrate_steps=n)).final() for n in (20, 100, 200)]
    assert finals == sorted(finals, reverse=True)
    assert finals[0] > 4 * finals[-1]


def test_watching_changes_nothing() -> None:
    watched = descend(Problem(), 4, GAC(c_low=0.0, c_high=0.0))
    assert watched.losses == descend(Problem(), 4, GAC()).losses


def test_skipping_without_a_bound_never_ends() -> None:
    """Weights that stay give the same gradient again, which is skipped again: without noise, for ever."""
    problem = Problem(noise=0.0)
    forever = descend(problem, 0, replace(CONTROL, max_skips=problem.num_steps))
    assert forever.regimes[1:] == [Regime.SKIPPED] * (problem.num_steps - 1)
    assert len(set(forever.losses)) == 1
    bounded = descend(problem, 0, CONTROL)
    assert bounded.losses[-1] < forever.losses[-1]


def test_without_a_preconditioner_both_placements_are_the_same() -> None:
    gradient, update = (descend(Problem(), 8, GAC(enabled=True, max_skips=0, where=w)) for w in ("gradient", "update"))
    assert gradient.losses == pytest.approx(update.losses, rel=1e-3)
    assert gradient.regimes == update.regimes
    assert Regime.PROJECTED in gradient.regimes
