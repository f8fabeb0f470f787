"""Groups in flight within the bound on staleness: as few as keep the trainer busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from rlsys.loop.build_driver import Constants
from rlsys.testing import FakeRun, FakeWorld
from tests.by_day import first_by_day
from tests.simulate.world import latencies

STEADY = 30
"""Steps after which the number has settled."""


@dataclass(frozen=True)
class Pace:
    step_s: float
    staleness: float
    target: float


def pace_of(
    folder: Path, rollout_s: Callable[[int], float], train_s: Callable[[int], float], *, adaptive: bool
) -> Pace:
    """Ninety steps of eight groups at a bound of 4."""
    world = FakeWorld(rollout_s=rollout_s, train_s=train_s, weight_change="inflight")
    run = FakeRun(
        folder / str(adaptive),
        world,
        run={"steps": 90},
        train={"groups_per_step": 8},
        rollout={"weight_change": "inflight"},
        asynchrony={"max_staleness": 4},
        constants=Constants(is_adaptive=adaptive),
    )
    run.train()
    steady = run.metrics[STEADY:]
    assert max(metrics["async/staleness_max"] for metrics in run.metrics) <= 4
    return Pace(
        *(fmean(metrics[name] for metrics in steady) for name in ("time/step", "async/staleness_mean")),
        target=steady[-1]["async/target_staleness"],
    )


@pytest.mark.parametrize("rollout_s", first_by_day([10.0, 1.0, 20.0]))
def test_a_busy_trainer_trains_fresher_tokens_at_the_same_speed(tmp_path: Path, rollout_s: float):
    adapted, full = (
        pace_of(tmp_path, lambda group_id: rollout_s, lambda version: 10.0, adaptive=each) for each in (True, False)
    )
    assert adapted.step_s == pytest.approx(full.step_s)
    assert full.staleness > 3.5 and adapted.staleness < 2.2
    assert adapted.target <= adapted.staleness + 0.5


def test_a_trainer_that_waits_for_slow_rollouts_keeps_all_permits(tmp_path: Path):
    adapted, full = (
        pace_of(tmp_path, lambda group_id: 40.0, lambda version: 1.0, adaptive=each) for each in (True, False)
    )
    assert adapted == full and adapted.target == 4.0


@pytest.mark.parametrize("seed", first_by_day(range(3)))
def test_rollouts_of_any_length_lose_little_speed(tmp_path: Path, seed: int):
    """Heavy-tailed rollouts and steps: a permit that was saved may be missing later, until it is added again."""
    adapted, full = (
        pace_of(tmp_path, latencies(seed + 40, 30.0), latencies(seed + 140, 20.0), adaptive=each)
        for each in (True, False)
    )
    assert adapted.step_s <= 1.05 * full.step_s
    assert adapted.staleness <= full.staleness
