"""A run that is stopped, or fails, saves its last finished step, whatever it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.batch.packing import BatchPlan
from rlsys.contracts import Published, Workers
from rlsys.errors import CheckpointError, DeadlineExceeded, NoProgress, RunAborted, TrainingError, WorkerDied, full_text
from rlsys.loop.checkpoint_files import find_latest, step_of
from rlsys.loop.driver import SAVE_S, STOP_S, Driver
from rlsys.monitoring.events import RolledBack, StepDone, WorkerFailed
from rlsys.testing import EventRecorder, FakeActor, FakeWorld, Fault, run_virtual
from rlsys.types import Group, PolicyVersion
from tests.simulate.test_evaluation_lane import evaluated
from tests.simulate.world import driver_on, go_on

NEVER_S = 1e9
SILENCE_S = 30.0
MODEL_CALLS = [
    *(f"actor-0 {call}" for call in ("fetch", "train_step", "publish", "save", "save_groups")),
    *(f"critic-0 {call}" for call in ("fetch", "train_step", "save")),
]
"""Calls of fake models; only an algorithm that asks for values calls the critic's `annotate_step`."""
STOPPED_AT_S = 40.0
"""Long after the worker of each test hangs, which it does in the third step or behind it."""


class StuckActor(FakeActor):
    """Takes `stuck_s` more for one of its calls, once it has taken two steps."""

    def __init__(self, world: StuckWorld) -> None:
        super().__init__(world)
        self.stuck, self.is_stuck = world, asyncio.Event()

    async def _maybe_wait(self, call: str) -> None:
        if call == self.stuck.call and len(self.stuck.trained) >= self.stuck.after:
            self.is_stuck.set()
            await asyncio.sleep(self.stuck.stuck_s)

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        await self._maybe_wait("fetch")
        await super().fetch(groups, plan)

    async def publish(self, version: PolicyVersion) -> Published:
        await self._maybe_wait("publish")
        return await super().publish(version)

    async def copy_state(self) -> str:
        await self._maybe_wait("save")
        return await super().copy_state()

    async def copy_columns(self) -> None:
        await self._maybe_wait("record")
        await super().copy_columns()


@dataclass
class StuckWorld(FakeWorld):
    call: str = ""
    stuck_s: float = NEVER_S
    after: int = 6
    """Trained groups from which on the call takes so long."""
    group_s: float = NEVER_S

    def workers(self) -> Workers:
        return replace(super().workers(), actor=StuckActor(self))


def hanging_rollouts(group_id: int) -> float:
    return NEVER_S if group_id >= 6 else 1.0


def slow_third_step(seconds: float) -> Callable[[PolicyVersion], float]:
    return lambda version: seconds if version == 2 else 1.0


def seconds_to_end(driver: Driver, stopped_at_s: float = STOPPED_AT_S) -> float:
    """Run, and stop at a time; return the seconds from there to the end."""

    async def ended_s() -> float:
        loop = asyncio.get_running_loop()
        loop.call_at(stopped_at_s, driver.stop)
        await driver.run(0)
        return loop.time() - stopped_at_s

    return run_virtual(ended_s())


def saved_step(folder: Path) -> int | None:
    latest = find_latest(folder / "checkpoints")
    return None if latest is None else step_of(latest)


@pytest.mark.parametrize(
    ("world", "step", "within_s"),
    [
        (StuckWorld(rollout_s=hanging_rollouts), 2, 0.0),
        (StuckWorld(reward_s=hanging_rollouts), 2, 0.0),
        (StuckWorld(call="fetch"), 2, STOP_S),
        (StuckWorld(train_s=slow_third_step(60.0)), 3, STOP_S),
        (StuckWorld(call="publish", after=9), 3, 0.0),
        (StuckWorld(call="save", after=9, stuck_s=STOPPED_AT_S), 3, STOPPED_AT_S),
        (StuckWorld(call="record", after=9), 3, STOP_S),
    ],
    ids=["groups", "rewards", "the data of a step", "training", "a publish", "a checkpoint", "a rollout file"],
)
def test_a_stopped_run_saves_from_every_wait(tmp_path: Path, world: StuckWorld, step: int, within_s: float):
    recorder = EventRecorder()
    driver = driver_on(world, tmp_path, checkpoint_every=3, recorder=recorder)
    driver.records.every = 1
    assert seconds_to_end(driver) <= within_s
    assert saved_step(tmp_path) == step
    assert [done.step for done in recorder.of(StepDone)] == list(range(1, step + 1))
    resumed = FakeWorld()
    run_virtual(go_on(driver_on(resumed, tmp_path)))
    assert resumed.consumed == trained_without_a_stop(tmp_path / "whole").consumed


def trained_without_a_stop(folder: Path) -> FakeWorld:
    world = FakeWorld()
    run_virtual(driver_on(world, folder).run(0))
    return world


def test_a_stop_does_not_wait_for_an_evaluation(tmp_path: Path):
    driver = evaluated(FakeWorld(eval_s=lambda group_id: NEVER_S), tmp_path, EventRecorder())
    assert seconds_to_end(driver) == 0.0
    assert saved_step(tmp_path) == 2
    assert driver.evaluation is not None
    assert driver.evaluation.was_given_up


def test_a_stop_before_the_first_publish_ends_at_once(tmp_path: Path):
    driver = driver_on(StuckWorld(call="publish", after=0), tmp_path)
    assert seconds_to_end(driver) == 0.0
    assert saved_step(tmp_path) is None


def test_a_step_that_never_ends_is_left_after_its_grace(tmp_path: Path):
    driver = driver_on(FakeWorld(train_s=slow_third_step(NEVER_S)), tmp_path, checkpoint_every=1)
    assert seconds_to_end(driver) == STOP_S
    assert saved_step(tmp_path) == 2


def test_a_step_may_take_as_long_as_earlier_ones(tmp_path: Path):
    world = FakeWorld(train_s=lambda version: 200.0)
    driver = driver_on(world, tmp_path)
    assert STOP_S < seconds_to_end(driver, 210.0) < 200.0
    assert saved_step(tmp_path) == 2


def test_an_actor_that_hangs_does_not_hold_the_end(tmp_path: Path):
    driver = driver_on(StuckWorld(call="save"), tmp_path, steps=3)
    with pytest.raises(CheckpointError, match="step 3 was not written within 300 s"):
        seconds_to_end(driver)
    assert SAVE_S == 300


class FrozenActor(StuckActor):
    """Its process answers no heartbeat either once a call is stuck."""

    async def watch(self, on_progress: Callable[[], None]) -> None:
        await self.is_stuck.wait()
        await asyncio.sleep(SILENCE_S)
        raise DeadlineExceeded("actor-0", "answering a heartbeat", f"no answer within {SILENCE_S:g} s")


@pytest.mark.parametrize("call", ["fetch", "save"])
def test_a_stop_while_a_rank_is_frozen_ends_with_the_newest_checkpoint(tmp_path: Path, call: str):
    world, recorder = StuckWorld(call=call), EventRecorder()
    workers = replace(world.workers(), actor=FrozenActor(world))
    driver = driver_on(world, tmp_path, checkpoint_every=1, workers=workers, recorder=recorder)
    assert seconds_to_end(driver, stopped_at_s=12.0) <= STOP_S + SILENCE_S
    assert driver.saver.lost is not None
    assert saved_step(tmp_path) == driver.saver.checkpoints.last_saved == (2 if call == "fetch" else 1)
    assert [failed.worker for failed in recorder.of(WorkerFailed)] == ["actor-0"]


@settings(deadline=None)
@given(st.sampled_from(MODEL_CALLS), st.integers(1, 6), st.floats(0.0, 25.0), st.sampled_from((0, 3)))
def test_a_death_during_a_stop_fails_nothing(tmp_path_factory, call: str, number: int, stop_s: float, staleness: int):
    folder = tmp_path_factory.mktemp("run")
    world = FakeWorld(training_deaths={call: {number}}, save_s=2.0)
    driver = driver_on(world, folder, checkpoint_every=2, max_staleness=staleness)
    assert seconds_to_end(driver, stop_s) <= STOP_S
    newest = find_latest(folder / "checkpoints")
    assert (newest and step_of(newest)) == driver.saver.checkpoints.last_saved
    resumed, calm = FakeWorld(), FakeWorld()
    resuming = driver_on(resumed, folder, max_staleness=staleness)
    run_virtual(resuming.run(0) if newest is None else go_on(resuming))
    run_virtual(driver_on(calm, folder / "calm", max_staleness=staleness).run(0))
    assert resumed.consumed == calm.consumed


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_long_step_whose_ranks_make_progress_is_no_standstill(tmp_path: Path):
    slow = FakeWorld(train_s=slow_third_step(5000.0), progress_s=100.0)
    assert run_virtual(driver_on(slow, tmp_path / "slow", no_progress_s=500.0).run(0)) == 6
    silent = FakeWorld(train_s=slow_third_step(5000.0))
    with pytest.raises(NoProgress):
        run_virtual(driver_on(silent, tmp_path / "silent", no_progress_s=500.0).run(0))


def test_a_standstill_saves_and_says_how_to_go_on(tmp_path: Path):
    driver = driver_on(StuckWorld(rollout_s=hanging_rollouts), tmp_path, no_progress_s=500.0)
    with pytest.raises(NoProgress, match=r"step 2 is saved; go on with run\.resume=auto$"):
        run_virtual(driver.run(0))
    assert saved_step(tmp_path) == 2


@pytest.mark.parametrize("max_staleness", [0, 3], ids=["waiting for groups", "training"])
def test_a_failure_of_rollouts_saves_all_finished_steps(tmp_path: Path, max_staleness: int):
    faults = dict.fromkeys(range(9, 1000), Fault.DIES)
    world = FakeWorld(rollout_faults=faults, train_s=lambda version: 10.0)
    driver = driver_on(world, tmp_path, max_staleness=max_staleness)
    with pytest.raises(RunAborted, match=r"rollout-\d(.|\n)*step (\d) is saved; go on with run\.resume=auto$"):
        run_virtual(driver.run(0))
    step = saved_step(tmp_path)
    assert step is not None
    assert step * 3 == len(world.trained) > 0
    resumed = FakeWorld()
    assert run_virtual(go_on(driver_on(resumed, tmp_path, max_staleness=max_staleness))) == 6
    assert resumed.consumed == trained_without_a_stop(tmp_path / "whole").consumed


class MortalActor(FakeActor):
    """Dies at version 2 and above, after every restart too."""

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        self._refuse()
        await super().fetch(groups, plan)

    async def copy_state(self) -> str:
        self._refuse()
        return await super().copy_state()

    def _refuse(self) -> None:
        if self.version >= 2:
            raise WorkerDied(
                "actor-0", "fetching the data of a step", "no step is saved; begin anew with run.resume=auto"
            )


@pytest.mark.parametrize(
    ("every", "told"),
    [(1, "step 1 is saved; go on with run.resume=auto"), (0, "no step is saved; begin anew with run.resume=auto")],
)
def test_a_dead_actor_leaves_the_last_checkpoint(tmp_path: Path, every: int, told: str):
    world = FakeWorld()
    workers = replace(world.workers(), actor=MortalActor(world))
    recorder = EventRecorder()
    driver = driver_on(world, tmp_path, checkpoint_every=every, workers=workers, recorder=recorder)
    with pytest.raises(RunAborted) as raised:
        run_virtual(driver.run(0))
    assert full_text(raised.value).endswith(told)
    assert "could not be saved" not in full_text(raised.value), "the lost step is told when the run goes back"
    assert recorder.of(RolledBack)[0].restored == every


def test_a_failed_step_is_kept_and_not_saved(tmp_path: Path):
    with pytest.raises(TrainingError, match="rlsys replay"):
        run_virtual(driver_on(FakeWorld(nan_at=2), tmp_path, checkpoint_every=1).run(0))
    assert saved_step(tmp_path) == 2
    assert (tmp_path / "failed" / "step_000003" / "step.json").exists()
