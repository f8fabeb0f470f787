"""The real driver on fake workers and a virtual clock: staleness, faults, resume, shutdown."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.checkpoint import find_latest
from rlsys.driver import Driver
from rlsys.errors import CheckpointError, NoProgress, RunAborted
from rlsys.events import Event, GroupDropped, StepDone, WorkerRestarted
from rlsys.testing import FakeWorld, Fault, run_virtual
from tests.simulate.world import Recorder, driver_on


def latencies(seed: int, longest_s: float):
    """Heavy-tailed seconds, a pure function of (seed, number)."""
    return lambda number: random.Random(seed * 1_000_003 + number).paretovariate(1.1) % longest_s


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.sampled_from([0, 1, 2, 4, 8]),
    groups_per_step=st.integers(1, 5),
    window=st.sampled_from([1, 1, 2, 5]),
    inflight=st.booleans(),
    broadcast_s=st.sampled_from([0.0, 0.7, 5.0]),
)
def test_no_trained_token_is_staler_than_the_bound(seed, max_staleness, groups_per_step, window, inflight, broadcast_s):
    world = FakeWorld(
        rollout_s=latencies(seed, 50.0),
        train_s=latencies(seed + 1, 5.0),
        broadcast_s=broadcast_s,
        weight_change="inflight" if inflight else "between",
    )
    with TemporaryDirectory() as folder:
        driver = driver_on(
            world, Path(folder), steps=12, groups_per_step=groups_per_step, max_staleness=max_staleness, window=window
        )
        assert run_virtual(driver.run(0)) == 12
    assert max(world.staleness) <= driver.queue.staleness_bound
    assert driver.queue.dropped["stale"] == 0
    if window == 1:
        assert driver.queue.staleness_bound == max_staleness


def test_the_bound_is_reached_so_it_is_not_loose(tmp_path):
    world = FakeWorld(rollout_s=lambda serial: 0.1, train_s=lambda version: 10.0)
    run_virtual(driver_on(world, tmp_path, steps=12, max_staleness=4).run(0))
    assert max(world.staleness) == 4


def test_staleness_zero_never_generates_while_training(tmp_path):
    world = FakeWorld()
    recorder = Recorder()
    run_virtual(driver_on(world, tmp_path, recorder=recorder).run(0))
    assert set(world.staleness) == {0}
    steps = recorder.of(StepDone)
    assert [s.metrics["time/wait_permit"] for s in steps[1:]] == pytest.approx([1.1] * 5)


def test_asynchrony_overlaps_generation_with_training(tmp_path):
    def duration_s(max_staleness: int) -> float:
        recorder = Recorder()
        world = FakeWorld(rollout_s=lambda serial: 2.0, train_s=lambda version: 2.0)
        run_virtual(
            driver_on(
                world, tmp_path / str(max_staleness), steps=10, max_staleness=max_staleness, recorder=recorder
            ).run(0)
        )
        return sum(s.metrics["time/step"] for s in recorder.of(StepDone))

    assert duration_s(0) / duration_s(2) > 1.7


@dataclass
class StopAfter:
    """A user who presses Ctrl-C during a step."""

    driver: Driver
    step: int

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, StepDone) and event.step == self.step:
            self.driver.stop()

    def close(self) -> None:
        pass


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), stop_at=st.integers(1, 8), max_staleness=st.sampled_from([0, 1, 3]))
def test_an_interrupted_run_consumes_what_an_uninterrupted_one_does(seed, stop_at, max_staleness):
    def world() -> FakeWorld:
        return FakeWorld(rollout_s=latencies(seed, 9.0), train_s=latencies(seed + 1, 3.0))

    with TemporaryDirectory() as folder:
        whole = world()
        run_virtual(driver_on(whole, Path(folder) / "whole", steps=9, max_staleness=max_staleness).run(0))
        first, second = world(), world()
        cut = driver_on(first, Path(folder) / "cut", steps=9, max_staleness=max_staleness)
        cut.events.attach(StopAfter(cut, stop_at))
        assert run_virtual(cut.run(0)) == stop_at
        resumed = driver_on(second, Path(folder) / "cut", steps=9, max_staleness=max_staleness)

        async def go_on() -> int:
            checkpoint = find_latest(Path(folder) / "cut")
            assert checkpoint is not None
            return await resumed.run(await resumed.restore(checkpoint))

        assert run_virtual(go_on()) == 9
    assert whole.consumed == second.consumed
    if max_staleness == 0:
        assert whole.weights == second.weights


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    rollout_faults=st.dictionaries(
        st.integers(0, 40), st.sampled_from([Fault.DIES, Fault.HANGS, Fault.WRONG_WEIGHTS]), max_size=4
    ),
    reward_faults=st.dictionaries(st.integers(0, 40), st.sampled_from([Fault.DIES, Fault.HANGS]), max_size=4),
    max_staleness=st.sampled_from([0, 2]),
)
def test_whatever_dies_the_same_tasks_are_consumed_and_none_is_scored_zero(
    seed, rollout_faults, reward_faults, max_staleness
):
    def run(**faults) -> FakeWorld:
        world = FakeWorld(rollout_s=latencies(seed, 9.0), reward=lambda serial, episode: 1.0, **faults)
        with TemporaryDirectory() as folder:
            driver = driver_on(world, Path(folder), steps=8, max_staleness=max_staleness)
            driver.failures = type(driver.failures)(max_attempts=10, max_failed_groups=4)
            run_virtual(driver.run(0))
        return world

    assert run(rollout_faults=rollout_faults, reward_faults=reward_faults).consumed == run().consumed


def test_a_dead_replica_is_replaced_once_and_its_groups_are_issued_again(tmp_path):
    recorder = Recorder()
    world = FakeWorld(rollout_faults={0: Fault.DIES})
    driver = driver_on(world, tmp_path, recorder=recorder)
    run_virtual(driver.run(0))
    assert [e.worker for e in recorder.of(WorkerRestarted)] == ["rollout-0"]
    assert world.consumed.total() == 18


def test_a_replica_with_weights_nobody_published_is_caught_before_its_tokens_are_trained(tmp_path):
    recorder = Recorder()
    world = FakeWorld(rollout_faults={4: Fault.WRONG_WEIGHTS})
    run_virtual(driver_on(world, tmp_path, recorder=recorder).run(0))
    assert len(recorder.of(WorkerRestarted)) == 1
    assert world.consumed.total() == 18


def test_work_that_fails_every_time_ends_the_run_naming_the_worker(tmp_path):
    world = FakeWorld(rollout_faults=dict.fromkeys(range(1000), Fault.DIES))
    with pytest.raises(RunAborted, match=r"gave up after 3 attempts.*rollout-.*the process is gone"):
        run_virtual(driver_on(world, tmp_path).run(0))


def test_a_group_nobody_can_judge_is_dropped_and_replaced(tmp_path):
    recorder = Recorder()
    world = FakeWorld(reward_faults={1: Fault.FAILS, 5: Fault.FAILS})
    driver = driver_on(world, tmp_path, recorder=recorder)
    run_virtual(driver.run(0))
    assert [e.reason for e in recorder.of(GroupDropped)] == ["failed", "failed"]
    assert driver.queue.dropped == {"failed": 2}
    assert world.consumed.total() == 18


def test_a_judge_that_always_fails_ends_the_run_with_its_words(tmp_path):
    world = FakeWorld(reward=lambda serial, episode: None)
    with pytest.raises(RunAborted, match=r"4 groups were dropped one after the other.*the judge raised"):
        run_virtual(driver_on(world, tmp_path).run(0))


def test_a_silent_standstill_ends_the_run_with_a_table(tmp_path):
    world = FakeWorld(rollout_s=lambda serial: 10.0 if serial < 4 else 1e9, lease_s=1e9)
    with pytest.raises(NoProgress, match=r"nothing moved for 500 s(.|\n)*group 5: task task-\d, issued"):
        run_virtual(driver_on(world, tmp_path, no_progress_s=500.0).run(0))


def test_a_checkpoint_that_cannot_be_written_names_the_last_good_one(tmp_path):
    world = FakeWorld()
    driver = driver_on(world, tmp_path / "checkpoints", checkpoint_every=2)
    world.disk_is_full_at = "step_000004"
    with pytest.raises(CheckpointError, match=r"step 4 .*No space left(.|\n)*last good one is .*step_000002"):
        run_virtual(driver.run(0))
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000002"
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_the_last_step_leaves_no_group_unused(tmp_path):
    world = FakeWorld()
    driver = driver_on(world, tmp_path, steps=5, max_staleness=3)
    run_virtual(driver.run(0))
    assert driver.ledger.next_serial == 15
    assert not driver.ledger.open
