"""The real driver on fake workers and a virtual clock: staleness, faults, resume, shutdown."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithm import Column
from rlsys.contracts import GroupScores
from rlsys.errors import CheckpointError, NoProgress, RunAborted, WorkerDied
from rlsys.loop.checkpoint import read_state
from rlsys.loop.checkpoint_files import find_latest
from rlsys.loop.driver import Driver
from rlsys.monitoring.events import (
    CheckpointSaved,
    Event,
    FileSkipped,
    GroupDropped,
    GroupReissued,
    StepDone,
    WorkerFailed,
    WorkerRestarted,
)
from rlsys.replay.rollout_json import read_groups
from rlsys.testing import (
    EventRecorder,
    FakeReference,
    FakeRewards,
    FakeRollouts,
    FakeWorld,
    Fault,
    VirtualLoop,
    run_virtual,
)
from rlsys.types import Assignment, Group, Score, Task
from tests.simulate.schedules import LOSABLE
from tests.simulate.world import StopAfter, driver_on, go_on, latencies


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
    assert max(world.staleness) <= driver.queue.bound.versions
    assert driver.queue.dropped["stale"] == 0
    if window == 1:
        assert driver.queue.bound.versions == max_staleness


def test_the_bound_is_reached_so_it_is_not_loose(tmp_path):
    world = FakeWorld(rollout_s=lambda group_id: 0.1, train_s=lambda version: 10.0)
    run_virtual(driver_on(world, tmp_path, steps=12, max_staleness=4).run(0))
    assert max(world.staleness) == 4


def test_staleness_zero_never_generates_while_training(tmp_path):
    world = FakeWorld()
    recorder = EventRecorder()
    run_virtual(driver_on(world, tmp_path, recorder=recorder).run(0))
    assert set(world.staleness) == {0}
    steps = recorder.of(StepDone)
    assert [s.metrics["time/wait_permit"] for s in steps[1:]] == pytest.approx([1.1] * 5)


def test_asynchrony_overlaps_generation_with_training(tmp_path):
    def duration_s(max_staleness: int) -> float:
        recorder = EventRecorder()
        world = FakeWorld(rollout_s=lambda group_id: 2.0, train_s=lambda version: 2.0)
        run_virtual(
            driver_on(
                world, tmp_path / str(max_staleness), steps=10, max_staleness=max_staleness, recorder=recorder
            ).run(0)
        )
        return sum(s.metrics["time/step"] for s in recorder.of(StepDone))

    assert duration_s(0) / duration_s(2) > 1.7


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
        assert run_virtual(go_on(resumed)) == 9
    assert whole.consumed == second.consumed
    if max_staleness == 0:
        assert whole.weights == second.weights


@given(
    seed=st.integers(0, 10**6),
    rollout_faults=st.dictionaries(
        st.integers(0, 40), st.sampled_from([Fault.DIES, Fault.HANGS, Fault.WRONG_WEIGHTS]), max_size=4
    ),
    reward_faults=st.dictionaries(st.integers(0, 40), st.sampled_from([Fault.DIES, Fault.HANGS]), max_size=4),
    max_staleness=st.sampled_from([0, 2]),
)
def test_worker_faults_do_not_change_the_consumed_tasks(seed, rollout_faults, reward_faults, max_staleness):
    def run(**faults) -> FakeWorld:
        world = FakeWorld(rollout_s=latencies(seed, 9.0), reward=lambda group_id, episode: 1.0, **faults)
        with TemporaryDirectory() as folder:
            driver = driver_on(world, Path(folder), steps=8, max_staleness=max_staleness, max_attempts=10)
            run_virtual(driver.run(0))
        return world

    assert run(rollout_faults=rollout_faults, reward_faults=reward_faults).consumed == run().consumed


@given(
    seed=st.integers(0, 10**6),
    losses=st.dictionaries(st.sampled_from(LOSABLE), st.sets(st.integers(0, 10), max_size=3)),
    max_staleness=st.sampled_from([0, 2]),
    window=st.sampled_from([1, 3]),
)
def test_lost_payloads_are_reissued_and_the_same_tasks_consumed(seed, losses, max_staleness, window):
    def run(losses: Mapping[str, set[int]]) -> tuple[FakeWorld, Driver]:
        world = FakeWorld(rollout_s=latencies(seed, 9.0), train_s=latencies(seed + 1, 5.0), payload_losses=losses)
        with TemporaryDirectory() as folder:
            driver = driver_on(
                world,
                Path(folder),
                steps=8,
                max_staleness=max_staleness,
                window=window,
                checkpoint_every=2,
                columns=frozenset(Column),
                max_attempts=100,
            )
            run_virtual(driver.run(0))
        return world, driver

    (world, driver), (undisturbed, _) = run(losses), run({})
    assert world.consumed == undisturbed.consumed
    assert max(world.staleness) <= driver.queue.bound.versions
    assert not driver.queue.dropped


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path):
    def play(folder: Path, save_s: float) -> Timed:
        recorder = Timed()
        run_virtual(driver_on(FakeWorld(save_s=save_s), folder, checkpoint_every=2, recorder=recorder).run(0))
        return recorder

    at_once, beside = play(tmp_path / "at_once", 0.0), play(tmp_path / "beside", 1.5)
    assert beside.times[StepDone] == at_once.times[StepDone]
    assert [saved.step for saved in beside.of(CheckpointSaved)] == [2, 4, 6]
    assert beside.times[CheckpointSaved] == [began_s + 1.5 for began_s in at_once.times[CheckpointSaved]]


class Timed(EventRecorder):
    """Keeps the times of events too, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[type[Event], list[float]] = defaultdict(list)

    def handle(self, event: Event, time_s: float) -> None:
        super().handle(event, time_s)
        self.times[type(event)].append(time_s)


@pytest.mark.parametrize("call", LOSABLE)
def test_a_group_with_a_lost_payload_keeps_its_group_id(tmp_path, call):
    recorder = EventRecorder()
    world = FakeWorld(payload_losses={call: {1}})
    driver = driver_on(
        world, tmp_path, max_staleness=2, checkpoint_every=1, columns=frozenset(Column), recorder=recorder
    )
    run_virtual(driver.run(0))
    lost = recorder.of(GroupReissued)
    assert lost
    assert all(re.search(rf"the bytes of group.*\b{e.group_id}\b.* are gone", e.reason) for e in lost)
    assert (driver.queue.num_reissued, driver.queue.dropped, driver.queue.ledger.next_group_id) == (len(lost), {}, 18)
    assert world.consumed.total() == 18


def test_a_payload_that_is_lost_every_time_ends_the_run(tmp_path):
    world = FakeWorld(payload_losses={"fetch": range(1000)})
    with pytest.raises(RunAborted, match=r"gave up after 3 attempts at one group.*the bytes of group 0, 2 are gone"):
        run_virtual(driver_on(world, tmp_path).run(0))


@given(
    failures=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=3),
    kind=st.sampled_from([Fault.DIES, Fault.HANGS]),
)
def test_failures_below_the_limit_of_each_kind_are_survived(failures, kind):
    """`failures`: of rolling out and of scoring, each time that group 0 is issued; all but the last are lost."""
    rollout_faults: list[bool] = []
    reward_faults: list[bool] = []
    for num_rollout, num_reward in failures:
        rollout_faults += [*[True] * num_rollout, False]
        reward_faults += [*[True] * num_reward, False]
    world = FakeWorld(
        rollout_faults={call: kind for call, is_broken in enumerate(rollout_faults) if is_broken},
        reward_faults={call: kind for call, is_broken in enumerate(reward_faults) if is_broken},
        payload_losses={"fetch": range(len(failures) - 1)},
    )
    with TemporaryDirectory() as folder:
        assert run_virtual(driver_on(world, Path(folder), steps=2, groups_per_step=1, max_attempts=3).run(0)) == 2
    assert world.consumed.total() == 2


def test_a_late_notice_of_a_loss_spares_the_next_attempt(tmp_path):
    """Two losses would end the run; the judges notice the annotator's while their groups' next attempts are trained."""
    recorder = EventRecorder()
    world = FakeWorld(
        rollout_s=lambda group_id: 1.0 if group_id < 3 else 3.0,
        reward_s=lambda group_id: 1.0,
        train_s=lambda version: 20.0,
        payload_losses={"annotate": {1}},
        notice_s=lambda number: 40.0 if number else 0.0,
    )
    columns = frozenset(Column)
    driver = driver_on(world, tmp_path, steps=10, max_staleness=1, max_attempts=2, columns=columns, recorder=recorder)
    run_virtual(driver.run(0))
    assert [e.group_id for e in recorder.of(GroupReissued)] == [3, 5]
    assert (driver.queue.dropped, driver.queue.num_permits, driver.queue.ledger.open) == ({}, 0, {})
    assert world.consumed.total() == 30


def test_a_late_failure_of_an_ended_attempt_drops_nothing(tmp_path):
    class LateAndVoid(FakeRewards):
        """Has the first payload before it is lost, and takes its time to fail on it."""

        async def score(self, task: Task, group: Group) -> GroupScores:
            is_first = self.num_calls == 0
            scored = await super().score(task, group)
            if not is_first:
                return scored
            await asyncio.sleep(5.0)
            return replace(scored, scores=tuple(Score(None, "the judge raised") for _ in scored.scores))

    world = FakeWorld(payload_losses={"annotate": {0}}, reward_s=lambda group_id: 0.0, annotate_s=lambda group_id: 1.0)
    workers = replace(world.workers(), rewards=LateAndVoid(world))
    driver = driver_on(world, tmp_path, groups_per_step=1, columns=frozenset(Column), failed_share=0.0, workers=workers)
    assert run_virtual(driver.run(0)) == 6
    assert (driver.queue.dropped, driver.queue.num_reissued, driver.queue.num_refused) == ({}, 1, 1)


def test_columns_are_added_while_other_groups_are_still_rolled_out(tmp_path):
    def duration_s(num_slow: int) -> float:
        recorder = EventRecorder()
        world = FakeWorld(rollout_s=lambda group_id: 1.0 + group_id % 3, annotate_s=lambda group_id: 1.0 * num_slow)
        driver = driver_on(world, tmp_path / str(num_slow), columns=frozenset(Column), recorder=recorder)
        run_virtual(driver.run(0))
        assert [e.metrics["time/annotate"] for e in recorder.of(StepDone)] == pytest.approx([3.0 * num_slow] * 6)
        return sum(e.metrics["time/step"] for e in recorder.of(StepDone))

    assert duration_s(1) - duration_s(0) == pytest.approx(6 * 0.9), "only the last group's is waited for"


def test_an_annotator_that_fails_ends_the_run_with_its_words(tmp_path):
    class Dead(FakeReference):
        async def annotate(self, groups: Sequence[Group], column: Column) -> list[Group]:
            raise WorkerDied("reference", "scoring 1 groups", "the process is gone")

    world = FakeWorld()
    workers = replace(world.workers(), annotators={Column.REFERENCE_LOGPROBS: Dead(world)})
    driver = driver_on(world, tmp_path, columns=frozenset(Column), workers=workers)
    with pytest.raises(RunAborted, match=r"3 attempts.*reference while scoring 1 groups: the process is gone"):
        run_virtual(driver.run(0))


def test_lost_groups_run_elsewhere_before_the_replacement_is_ready(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(rollout_faults={0: Fault.DIES}, restart_s=1000.0)
    run_virtual(driver_on(world, tmp_path, recorder=recorder).run(0))
    assert [type(e).__name__ for e in recorder.events if isinstance(e, WorkerFailed | WorkerRestarted)] == [
        "WorkerFailed"
    ]
    assert world.consumed.total() == 18


def test_a_suspended_process_continues_without_restarting_workers(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(rollout_s=lambda group_id: 20.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(50.0, loop.jump, 10_000.0)
        await driver_on(world, tmp_path, no_progress_s=100.0, recorder=recorder).run(0)

    run_virtual(main())
    assert not recorder.of(WorkerFailed)
    assert world.consumed.total() == 18


def test_a_dead_replica_is_replaced_once_and_its_groups_reissued(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(rollout_faults={0: Fault.DIES})
    driver = driver_on(world, tmp_path, recorder=recorder)
    run_virtual(driver.run(0))
    assert [e.worker for e in recorder.of(WorkerRestarted)] == ["rollout-0"]
    assert world.consumed.total() == 18


def test_a_dead_worker_is_reported_once_for_all_its_groups(tmp_path):
    class Rollouts(FakeRollouts):
        async def run(self, assignment: Assignment) -> tuple[Group, ...]:
            if (owner := self.members[0]) == "rollout-0":
                await asyncio.sleep(1.0 + assignment.group_id)
                raise WorkerDied(owner, f"rolling out group {assignment.group_id}", "the process is gone")
            return await super().run(assignment)

    recorder, world = EventRecorder(), FakeWorld(num_replicas=1)
    workers = replace(world.workers(), rollouts=Rollouts(world))
    driver = driver_on(world, tmp_path, recorder=recorder, workers=workers)
    run_virtual(driver.run(0))
    failures = [(e.worker, e.phase) for e in recorder.of(WorkerFailed)]
    assert failures == [("rollout-0", "rolling out group 0")], "groups 1 and 2 were there, too"
    assert [e.worker for e in recorder.of(WorkerRestarted)] == ["rollout-0"]
    assert world.consumed.total() == 18


def test_a_dead_relay_is_reported_and_delays_nothing(tmp_path):
    def run(folder: Path, deaths_s: Sequence[float]) -> tuple[float, EventRecorder, FakeWorld]:
        world, recorder, loop = FakeWorld(relay_deaths_s=deaths_s), EventRecorder(), VirtualLoop()
        driver = driver_on(world, folder, recorder=recorder)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            assert runner.run(driver.run(0)) == 6
            return loop.time(), recorder, world

    quiet_s, _, quiet = run(tmp_path / "quiet", [])
    took_s, recorder, world = run(tmp_path / "deaths", [2.0, 5.0])
    assert [(e.worker, e.phase) for e in recorder.of(WorkerFailed)] == [("relay-0", "keeping weights")] * 2
    assert [(e.worker, e.seconds) for e in recorder.of(WorkerRestarted)] == [("relay-0", 1.0)] * 2
    assert (took_s, world.weights) == (quiet_s, quiet.weights)


def test_a_checkpoint_has_its_groups_hashes_without_awaiting_later_versions(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(broadcast_s=7.0, train_s=lambda version: 30.0)
    driver = driver_on(world, tmp_path, steps=3, max_staleness=2, checkpoint_every=1, recorder=recorder)
    run_virtual(driver.run(0))
    state = read_state(tmp_path / "checkpoints" / "step_000002")
    versions = {
        span.version
        for record in read_groups(tmp_path / "checkpoints" / "step_000002" / "groups.jsonl")
        for span in record.group.versions
    }
    assert versions
    assert state.published.items() >= {(version, world.hash(version)) for version in versions}
    assert 2 not in state.published, "it is still on its way"


def test_stopping_does_not_wait_for_a_slow_broadcast(tmp_path):
    driver = driver_on(FakeWorld(broadcast_s=20.0), tmp_path, steps=6)
    driver.events.attach(StopAfter(driver, 1))

    async def seconds() -> float:
        assert await driver.run(0) == 1
        return asyncio.get_running_loop().time()

    assert run_virtual(seconds()) < 20.0 + 5.0
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000001"


def test_a_replica_with_unpublished_weights_is_caught_and_replaced(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(rollout_faults={4: Fault.WRONG_WEIGHTS})
    run_virtual(driver_on(world, tmp_path, recorder=recorder).run(0))
    assert len(recorder.of(WorkerRestarted)) == 1
    assert world.consumed.total() == 18


def test_repeated_failure_ends_the_run_and_names_the_worker(tmp_path):
    world = FakeWorld(rollout_faults=dict.fromkeys(range(1000), Fault.DIES))
    with pytest.raises(RunAborted, match=r"gave up after 3 attempts.*rollout-.*the process is gone"):
        run_virtual(driver_on(world, tmp_path).run(0))


def test_a_group_nobody_can_judge_is_dropped_and_replaced(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(reward_faults={1: Fault.FAILS, 5: Fault.FAILS})
    driver = driver_on(world, tmp_path, recorder=recorder)
    run_virtual(driver.run(0))
    assert [e.reason for e in recorder.of(GroupDropped)] == ["failed", "failed"]
    assert driver.queue.dropped == {"failed": 2}
    assert world.consumed.total() == 18


def test_an_always_failing_judge_ends_the_run_with_its_error(tmp_path):
    world = FakeWorld(reward=lambda group_id, episode: None)
    with pytest.raises(RunAborted, match=r"each of the first 16 groups failed.*the judge raised"):
        run_virtual(driver_on(world, tmp_path).run(0))


def test_a_silent_standstill_ends_the_run_with_a_table(tmp_path):
    world = FakeWorld(rollout_s=lambda group_id: 10.0 if group_id < 4 else 1e9, group_s=600.0)
    line = r"group 5: task task-\d, attempt 1, rollout-\d since 510 s"
    with pytest.raises(NoProgress, match=rf"nothing moved for 500 s(.|\n)*group 3: .* trained\n(.|\n)*{line}"):
        run_virtual(driver_on(world, tmp_path, no_progress_s=500.0).run(0))


def test_a_failed_checkpoint_names_the_last_good_one(tmp_path):
    world = FakeWorld()
    driver = driver_on(world, tmp_path, checkpoint_every=2)
    world.disk_is_full_at = "step_000004"
    with pytest.raises(CheckpointError, match=r"step 4 .*No space left(.|\n)*last good one is .*step_000002"):
        run_virtual(driver.run(0))
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000002"
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_the_last_step_leaves_no_group_unused(tmp_path):
    world = FakeWorld()
    driver = driver_on(world, tmp_path, steps=5, max_staleness=3)
    run_virtual(driver.run(0))
    assert driver.queue.ledger.next_group_id == 15
    assert not driver.queue.ledger.open


def test_rollouts_that_cannot_be_written_end_nothing(tmp_path: Path):
    (tmp_path / "rollouts").write_text("a file where a folder should be")
    recorder = EventRecorder()
    driver = driver_on(FakeWorld(), tmp_path, recorder=recorder)
    driver.records.every = 2
    assert run_virtual(driver.run(0)) == 6
    assert [Path(event.path).name for event in recorder.of(FileSkipped)] == [
        "step_000002.parquet",
        "step_000004.parquet",
        "step_000006.parquet",
    ]
