"""A rank of actor or critic, or the reference, dies: the run goes on from its newest checkpoint, and loses nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.algorithm import Column
from rlsys.contracts import MarkerReply
from rlsys.errors import CheckpointError, ConfigError, RunAborted
from rlsys.loop.checkpoint import read_state
from rlsys.monitoring.events import (
    CheckpointSaved,
    Event,
    RolledBack,
    StepDone,
    WeightsPublished,
    WorkerFailed,
    WorkerRestarted,
)
from rlsys.testing import EventRecorder, FakeWorld, RewardAsAdvantage, run_virtual
from rlsys.testing.fake_run import go_on
from rlsys.testing.fake_training import FakeActor
from rlsys.util.any_paths import AnyPath
from tests.simulate.world import driver_on

ALL = RewardAsAdvantage(needs=frozenset(Column))
CALLS = (
    *(f"actor-0 {call}" for call in ("fetch", "train_step", "publish", "save", "save_groups")),
    *(f"critic-0 {call}" for call in ("fetch", "annotate_step", "train_step", "save")),
)


@dataclass
class Hearing:
    """Calls a function for every event of one kind."""

    kind: type[Event]
    call: Callable[[Any], object]

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, self.kind):
            self.call(event)

    def close(self) -> None: ...


def ran(folder: Path, deaths: dict[str, set[int]], **settings: Any) -> tuple[FakeWorld, EventRecorder]:
    """A run of six steps with these deaths, and what it told."""
    world, recorder = FakeWorld(training_deaths=deaths), EventRecorder()
    chosen: dict[str, Any] = {"algorithm": ALL, "checkpoint_every": 2, **settings}
    driver = driver_on(world, folder, recorder=recorder, **chosen)
    assert run_virtual(go_on(driver)) == driver.end == 6 + driver.position.num_lost
    assert driver.queue.dropped["stale"] == 0
    assert not driver.queue.ledger.open
    return world, recorder


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [1, 4])
def test_a_death_changes_no_step_of_a_synchronous_run(call, number, tmp_path):
    calm, _ = ran(tmp_path / "calm", {})
    world, recorder = ran(tmp_path / "run", {call: {number}})
    assert len(recorder.of(RolledBack)) == (number == 1 or "save" not in call)
    assert (world.trained_group_ids, world.consumed) == (calm.trained_group_ids, calm.consumed)


@pytest.mark.parametrize("seed", range(12))
def test_every_task_is_trained_once_under_any_deaths(seed, tmp_path):
    chance = random.Random(seed)
    staleness, window = chance.choice((0, 1, 4)), chance.choice((1, 3))
    settings = {"max_staleness": staleness, "window": window, "checkpoint_every": chance.choice((0, 1, 3))}
    calm, _ = ran(tmp_path / "calm", {}, **settings)
    deaths = {call: {chance.randint(1, 9)} for call in chance.sample(CALLS, 4)}
    world, recorder = ran(tmp_path / "run", deaths, max_attempts=9, **settings)
    assert world.consumed == calm.consumed
    assert sorted(world.trained_group_ids) == sorted(calm.trained_group_ids)
    assert max(world.staleness) <= staleness + (window > 1)
    published = Counter(event.version for event in recorder.of(WeightsPublished))
    assert set(published.values()) == {1}
    steps = [event.step for event in recorder.of(StepDone)]
    assert steps == sorted(set(steps))


def test_restored_weights_have_a_new_version(tmp_path):
    _, recorder = ran(tmp_path, {"actor-0 train_step": {3}})
    (back,) = recorder.of(RolledBack)
    assert (back.version, back.restored, back.num_lost, back.total_steps) == (4, 2, 2, 8)
    assert [event.step for event in recorder.of(StepDone)] == [1, 2, 3, 5, 6, 7, 8]
    (failed,), (restarted,) = recorder.of(WorkerFailed), recorder.of(WorkerRestarted)
    assert failed.worker == restarted.worker == "actor-0"
    assert read_state(tmp_path / "checkpoints" / "step_000008").num_lost == 2


def test_a_run_resumes_with_its_lost_versions(tmp_path):
    ran(tmp_path, {"actor-0 train_step": {3}})
    longer_world = FakeWorld()
    longer = driver_on(longer_world, tmp_path, algorithm=ALL, steps=8)
    assert run_virtual(go_on(longer)) == 10
    calm = FakeWorld()
    run_virtual(go_on(driver_on(calm, tmp_path / "calm", algorithm=ALL, steps=8)))
    assert longer_world.consumed == calm.consumed


def test_steps_without_staleness_are_counted_anew(tmp_path):
    deaths, settings = {"actor-0 train_step": {2}}, {"synchronous_steps": 2, "max_staleness": 2}
    world, _ = ran(tmp_path, deaths, checkpoint_every=0, **settings)
    assert [most for _, most in sorted(world.staleness_by_version.items())][:2] == [0, 0]


def test_an_idle_actor_that_dies_is_replaced_at_once(tmp_path):
    world = FakeWorld(rollout_s=lambda group_id: 50.0, save_s=20.0, training_deaths={"actor-0 save_groups": {0}})
    recorder = EventRecorder()
    driver = driver_on(world, tmp_path, recorder=recorder, checkpoint_every=2)
    assert run_virtual(go_on(driver)) == driver.end
    assert [event.restored for event in recorder.of(RolledBack)] == [0]


def test_endless_deaths_end_the_run(tmp_path):
    with pytest.raises(RunAborted, match=r"actor-0\.2 while train_step: the process is gone") as ended:
        ran(tmp_path, {"actor-0 train_step": {2, 3, 4, 5, 6, 7}}, max_attempts=3)
    assert any("step 2 is saved; go on with run.resume=auto" in note for note in ended.value.__notes__)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_rolled_back(tmp_path):
    driver = driver_on(FakeWorld(training_deaths={"actor-0 train_step": {3}}), tmp_path, checkpoint_every=2)
    driver.events.attach(Hearing(CheckpointSaved, lambda event: (Path(event.path) / "driver.json").write_text("{}")))
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        run_virtual(go_on(driver))


def test_a_rank_that_is_replaced_on_a_machine_with_another_disk_ends_the_run(tmp_path):
    class Elsewhere(FakeActor):
        async def answer_marker(self, folder: AnyPath) -> list[MarkerReply]:
            return [MarkerReply(self.name, "gpu-02", "cannot read what the driver wrote")]

    world = FakeWorld(training_deaths={"actor-0 train_step": {0}})
    driver = driver_on(world, tmp_path, workers=replace(world.workers(), actor=Elsewhere(world)))
    with pytest.raises(ConfigError, match=r"actor-0\.1 on node gpu-02 cannot read what the driver wrote"):
        run_virtual(go_on(driver))


def test_stop_ends_a_rollback(tmp_path):
    world, recorder = FakeWorld(training_deaths={"actor-0 train_step": {3}}, restart_s=1000.0), EventRecorder()
    driver = driver_on(world, tmp_path, recorder=recorder, checkpoint_every=2)
    driver.events.attach(Hearing(WorkerFailed, lambda event: driver.stop()))
    run_virtual(go_on(driver))
    assert driver.saver.checkpoints.last_saved == 2
    assert not recorder.of(RolledBack)


@pytest.mark.parametrize("call", ["annotate", "annotate_step"])
def test_a_dead_reference_is_replaced_without_a_rollback(call, tmp_path):
    calm, _ = ran(tmp_path / "calm", {})
    world, recorder = ran(tmp_path / "run", {f"reference {call}": {1, 2}})
    assert (world.trained_group_ids, world.consumed) == (calm.trained_group_ids, calm.consumed)
    assert not recorder.of(RolledBack)
    assert [event.worker for event in recorder.of(WorkerRestarted)] == ["reference", "reference.1"]
