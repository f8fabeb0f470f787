"""Descent with stale gradients, where the answer is known, under the real stabilizer."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from math import pi
from statistics import fmean

import pytest
import torch

from algorithms.gac import GAC, Regime
from examples.stability.quadratic import (
    CONTROL,
    boundary_cosine,
    descend,
    follow,
    growth,
    stability_limit,
)

pytestmark = pytest.mark.slow

AGES = (0, 1, 2, 4, 8, 16, 32)


def losses_at(staleness: int, share: float, num_steps: int) -> list[float]:
    """Of 400 coordinates of curvature 1, with random histories, at a share of the limit."""
    chance = torch.Generator().manual_seed(staleness)
    versions = list(torch.randn(staleness + 1, 400, generator=chance))
    silence = repeat(torch.zeros(()), num_steps)
    return follow(versions, torch.ones(400), silence, share * stability_limit(staleness), GAC()).losses


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
    silence = repeat(torch.zeros(()), 3 * (2 * staleness + 1))
    done = follow(versions, torch.ones(400), silence, stability_limit(staleness), GAC())
    assert done.cosines[1:] == pytest.approx([boundary_cosine(staleness)] * (len(done.cosines) - 1), abs=1e-4)


def test_control_bounds_gradients_of_staleness_sixteen_that_otherwise_diverge() -> None:
    for seed in range(3):
        assert descend(16, GAC(), seed=seed).has_diverged
        start = descend(16, CONTROL, seed=seed).losses[0]
        controlled = descend(16, CONTROL, num_steps=1200, seed=seed)
        assert max(controlled.losses) < 2 * start
        assert controlled.final() < start


@pytest.mark.parametrize("control", [CONTROL, GAC(enabled=True), GAC(enabled=True, max_skips=1)])
def test_fresh_gradients_are_not_disturbed(control: GAC) -> None:
    assert descend(0, control).losses == descend(0, GAC()).losses


@pytest.mark.parametrize("control", [CONTROL, GAC(enabled=True)])
def test_gradients_a_step_old_are_hardly_disturbed(control: GAC) -> None:
    """Within 5 %, over three seeds."""
    plain, controlled = (fmean(descend(1, c, seed=s).final() for s in range(3)) for c in (GAC(), control))
    assert controlled == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_thresholds_calibrated_from_a_fresh_start_bound_stale_gradients(seed: int) -> None:
    """What users are told to do: synchronous steps first, 100 of them, then old gradients for a thousand."""
    arms = (GAC(enabled=on, calibrate_steps=100, max_skips=1) for on in (False, True))
    watched, controlled = (descend(16, arm, num_steps=1100, seed=seed) for arm in arms)
    assert watched.has_diverged
    assert watched.losses[:100] == controlled.losses[:100]
    assert max(controlled.losses) < 4 * controlled.losses[0]
    assert controlled.final() < 1.5 * controlled.losses[0]


def test_thresholds_of_a_fresh_start_leave_fresh_gradients_alone() -> None:
    plain, controlled = (descend(0, GAC(enabled=on, calibrate_steps=100)) for on in (False, True))
    assert controlled.losses == plain.losses


def test_earlier_calibration_gives_weaker_control() -> None:
    """The first gradients of a descent all point downhill, so that their cosines are large without any staleness."""
    finals = [descend(8, GAC(enabled=True, calibrate_steps=n), num_steps=600).final() for n in (20, 100, 200)]
    assert finals == sorted(finals, reverse=True)
    assert finals[0] > 4 * finals[-1]


def test_watching_changes_nothing() -> None:
    watched = descend(4, GAC(c_low=0.0, c_high=0.0))
    assert watched.losses == descend(4, GAC()).losses


def test_skipping_without_a_bound_never_ends() -> None:
    """Weights that stay give the same gradient again, which is skipped again: without noise, for ever."""
    forever = descend(1, replace(CONTROL, max_skips=400), noise=0.0)
    assert forever.regimes[1:] == [Regime.SKIPPED] * 399
    assert len(set(forever.losses)) == 1
    bounded = descend(1, CONTROL, noise=0.0)
    assert bounded.losses[-1] < forever.losses[-1]


def test_without_a_preconditioner_both_placements_are_the_same() -> None:
    gradient, update = (descend(8, GAC(enabled=True, max_skips=0, where=w)) for w in ("gradient", "update"))
    assert gradient.losses == pytest.approx(update.losses, rel=1e-3)
    assert gradient.regimes == update.regimes
    assert Regime.PROJECTED in gradient.regimes
