"""Moving trajectories in a whole run on a virtual clock: stragglers come together, and the same is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.loop.repack import Repacker
from rlsys.monitoring.events import StepDone, TrajectoriesMoved
from rlsys.testing import EventRecorder, FakeWorld, run_virtual
from tests.simulate.world import driver_on


def trained(folder: Path, *, every_s: float | None) -> tuple[FakeWorld, EventRecorder]:
    """A run in which every fifth group takes long, so that it outlives the version it began on."""
    world = FakeWorld(num_replicas=3, rollout_s=lambda group_id: 40.0 if group_id % 5 == 4 else 1.0 + group_id % 3)
    recorder = EventRecorder()
    driver = driver_on(world, folder, steps=8, max_staleness=4, window=12, recorder=recorder)
    if every_s is not None:
        driver.companions = [Repacker(driver.workers.rollouts, every_s, num_slots=8, events=driver.events)]
    assert run_virtual(driver.run(0)) == 8
    return world, recorder


def test_stragglers_of_old_versions_move_together_and_are_counted(tmp_path):
    _, recorder = trained(tmp_path, every_s=1.0)
    moved = recorder.of(TrajectoriesMoved)
    assert moved
    newest = 0
    for event in recorder.events:
        if isinstance(event, StepDone):
            newest = event.step
        if isinstance(event, TrajectoriesMoved):
            assert event.version < newest + 1
            assert event.source != event.to
    counts = [event.metrics["async/moved"] for event in recorder.of(StepDone)]
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= sum(event.num_groups for event in moved)


@pytest.mark.parametrize("every_s", [None, 1.0])
def test_what_is_trained_does_not_depend_on_it(tmp_path, every_s):
    world, _ = trained(tmp_path, every_s=every_s)
    assert world.consumed.total() == 24
    assert world.consumed == trained(tmp_path / "other", every_s=None)[0].consumed
