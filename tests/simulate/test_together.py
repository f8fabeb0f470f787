"""Roles that share a device in turns: nothing computes without it, and steps are as on devices of their own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.monitoring.events import RolledBack, StepDone
from rlsys.testing import EventRecorder, FakeWorld, run_virtual
from rlsys.testing.fake_run import go_on
from tests.simulate.schedules import MOVING, ROLES
from tests.simulate.test_rollback import ALL
from tests.simulate.world import StopAfter, driver_on, latencies


def ran(world: FakeWorld, folder: Path, **settings: Any) -> EventRecorder:
    """A run of six steps in this world, to its end."""
    recorder = EventRecorder()
    chosen: dict[str, Any] = {"algorithm": ALL, "checkpoint_every": 2, "max_attempts": 9, **settings}
    driver = driver_on(world, folder, recorder=recorder, **chosen)
    assert run_virtual(go_on(driver)) == driver.end == 6 + driver.position.num_lost
    assert driver.queue.dropped["stale"] == 0
    assert not driver.queue.ledger.open
    return recorder


def world_of(seed: int, **settings: Any) -> FakeWorld:
    return FakeWorld(rollout_s=latencies(seed, 20.0), train_s=latencies(seed + 1, 5.0), **settings)


@pytest.mark.parametrize("count", range(2, len(ROLES) + 1))
def test_a_synchronous_run_trains_the_same_steps_as_one_on_devices_of_their_own(count, tmp_path):
    split, together = world_of(3), world_of(3, together=ROLES[:count])
    ran(split, tmp_path / "split")
    ran(together, tmp_path / "together")
    assert together.weights == split.weights
    assert together.trained_group_ids == split.trained_group_ids


def test_hand_overs_are_a_phase_of_the_step(tmp_path):
    recorder = ran(world_of(3, together=("actor", "rollout"), move_s=0.25), tmp_path)
    times = [event.metrics["time/hand_over"] for event in recorder.of(StepDone)]
    assert times[1:] == pytest.approx([1.0] * 5), "there and back, each a sleep and a wake"


@pytest.mark.parametrize("seed", range(40))
def test_two_deaths_at_any_point_of_hand_overs_lose_nothing(seed, tmp_path):
    chance = random.Random(seed)
    settings = {"max_staleness": chance.choice((0, 1, 4)), "window": chance.choice((1, 3))}
    world = world_of(seed, together=ROLES[: chance.randint(3, len(ROLES))])
    calm = replace(world)
    ran(calm, tmp_path / "calm", **settings)
    world.training_deaths = {call: {chance.randint(1, 6)} for call in chance.sample(MOVING, 2)}
    recorder = ran(world, tmp_path / "run", **settings)
    assert world.consumed == calm.consumed
    assert sorted(world.trained_group_ids) == sorted(calm.trained_group_ids)
    assert max(world.staleness) <= settings["max_staleness"] + (settings["window"] > 1)
    num_deaths = sum(world.num_calls[call] > min(at) for call, at in world.training_deaths.items())
    assert num_deaths
    if not any(call.startswith("rollout") for call in world.training_deaths):
        assert recorder.of(RolledBack)


@pytest.mark.parametrize("step", range(1, 6))
def test_a_run_that_is_stopped_goes_on_from_what_it_saved(step, tmp_path):
    together = ROLES[:3]
    calm, first, second = (world_of(5, together=together) for _ in range(3))
    ran(calm, tmp_path / "calm")
    driver = driver_on(first, tmp_path / "run", algorithm=ALL)
    driver.events.attach(StopAfter(driver, step))
    assert run_virtual(driver.run(0)) == step
    ran(second, tmp_path / "run")
    assert second.weights == calm.weights
