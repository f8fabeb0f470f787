"""What a run tells of its groups, its workers and its replicas: enough to follow each of them from the events alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan
from rlsys.errors import NoProgress, WorkerDied
from rlsys.loop.driver import Driver
from rlsys.loop.replica_events import AGAIN_S, AT_ONCE, PLACES_AT_ONCE, RAREST_S, ReplicaWatcher
from rlsys.monitoring.events import (
    ACTIVITIES,
    GroupDropped,
    GroupIssued,
    GroupPlaced,
    GroupReissued,
    GroupRolledOut,
    GroupScored,
    QueueSeen,
    ReplicaSeen,
    RolloutsWritten,
    StepDone,
    WorkerBusy,
)
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.replay.rollout_parquet import read_records
from rlsys.testing import EventRecorder, FakeActor, FakeCritic, FakeRollouts, FakeWorld, Fault, run_virtual
from rlsys.types import EngineStats, Group, Ref, ReplicaLoad
from rlsys.weight_sync.sync import WeightSync
from tests.simulate.joint import Session
from tests.simulate.world import driver_on

STEPS = 4


def watch(driver: Driver, look_s: float) -> None:
    """Let replicas and queue be observed every `look_s` seconds; 0: never."""
    if look_s:
        watcher = ReplicaWatcher(driver.workers.rollouts, driver.queue, driver.events, look_s)
        driver.companions = [*driver.companions, watcher]


def told_by(driver: Driver, *, look_s: float = 0.0) -> EventRecorder:
    """What a whole run emits."""
    recorder = EventRecorder()
    driver.events.attach(recorder)
    watch(driver, look_s)
    run_virtual(driver.run(0))
    return recorder


def test_every_trained_group_has_events_from_issue_to_step(tmp_path):
    told = told_by(driver_on(FakeWorld(), tmp_path, steps=STEPS, max_staleness=1))
    trained = [group_id for step in told.of(StepDone) for group_id in step.group_ids]
    assert trained == list(range(3 * STEPS))
    stages = (GroupIssued, GroupRolledOut, GroupScored)
    places = {kind: {e.group_id: i for i, e in enumerate(told.events) if isinstance(e, kind)} for kind in stages}
    done = {group_id: i for i, e in enumerate(told.events) if isinstance(e, StepDone) for group_id in e.group_ids}
    for group_id in trained:
        passed = [*(places[kind][group_id] for kind in stages), done[group_id]]
        assert passed == sorted(passed), group_id
    tasks = {e.group_id: e.task_id for e in told.of(GroupIssued)}
    assert {e.group_id: e.task_id for e in told.of(GroupScored)} == tasks
    assert {e.rewards for e in told.of(GroupScored)} == {(0.0, 1.0), (1.0, 0.0)}
    assert {e.lengths for e in told.of(GroupRolledOut)} == {(3, 3)}


def test_a_failed_group_is_reported_as_scored_and_then_dropped(tmp_path):
    world = FakeWorld(reward=lambda group_id, episode: None if group_id == 2 else float(episode))
    told = told_by(driver_on(world, tmp_path, steps=STEPS))
    assert [e.group_id for e in told.of(GroupDropped)] == [2]
    assert 2 in {e.group_id for e in told.of(GroupRolledOut)}
    of_it = [e for e in told.events if isinstance(e, GroupScored | GroupDropped) and e.group_id == 2]
    assert [type(e) for e in of_it] == [GroupScored, GroupDropped]
    assert next(e.rewards for e in told.of(GroupScored) if e.group_id == 2) == (None, None)


def test_a_lost_group_is_told_to_be_issued_again(tmp_path):
    told = told_by(driver_on(FakeWorld(payload_losses={"fetch": {1}}), tmp_path, steps=STEPS))
    lost = [e.group_id for e in told.of(GroupReissued)]
    assert lost
    issued = [e.group_id for e in told.of(GroupIssued)]
    assert {group_id: issued.count(group_id) for group_id in lost} == dict.fromkeys(lost, 2)


def test_spans_of_work_say_who_did_what_when(tmp_path):
    world = FakeWorld(
        num_replicas=1, rollout_s=lambda n: 2.0, reward_s=lambda n: 0.5, train_s=lambda v: 3.0, critic_s=lambda n: 1.5
    )
    columns = frozenset({Column.REFERENCE_LOGPROBS, Column.VALUES})
    driver = driver_on(world, tmp_path, steps=1, groups_per_step=1, columns=columns)
    told = [(e.worker, e.activity, e.start_s, e.end_s) for e in told_by(driver).of(WorkerBusy)]
    published = world.publish_s
    scored_s = published + 2.0 + 0.5
    assert {activity for _, activity, _, _ in told} <= ACTIVITIES.keys()
    expected = [
        ("reference", "annotating", published + 2.0, published + 2.1),
        ("rollout-0", "generating", published, published + 2.0),
        ("reward-0", "scoring", published + 2.0, scored_s),
        ("actor", "training", scored_s, scored_s + 3.0),
        ("critic", "training", scored_s + 3.0, scored_s + 4.5),
        ("actor", "publishing", scored_s + 4.5, scored_s + 4.5 + published),
    ]
    assert [span[:2] for span in sorted(told)] == [span[:2] for span in sorted(expected)]
    for span, right in zip(sorted(told), sorted(expected), strict=True):
        assert span[2:] == pytest.approx(right[2:]), span


class Unhurried(WeightSync):
    """Takes its time to verify a group."""

    async def verify(self, group: Group) -> None:
        await asyncio.sleep(30.0)
        await super().verify(group)


def test_slow_verification_does_not_shift_the_reported_generation_time(tmp_path):
    world = FakeWorld(num_replicas=1, rollout_s=lambda n: 2.0)
    driver = driver_on(world, tmp_path, steps=1, groups_per_step=1)
    weights = Unhurried(driver.workers.actor, driver.workers.relays, transfer_s=60.0, max_age=1)
    driver.weights = driver.production.weights = weights
    told = [e for e in told_by(driver).of(WorkerBusy) if e.activity == "generating"]
    assert [(e.start_s, e.end_s) for e in told] == [pytest.approx((world.publish_s, world.publish_s + 2.0))]


class SlowCritic(FakeCritic):
    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        await asyncio.sleep(2.0)
        return await super().annotate_step(groups, plan, column)


class SlowRecorder(FakeActor):
    async def copy_columns(self) -> None:
        await asyncio.sleep(3.0)
        await super().copy_columns()


def test_preparing_columns_is_reported_as_work_of_their_annotator(tmp_path):
    critic = SlowCritic(world := FakeWorld())
    workers = replace(world.workers(), critic=critic, step_annotators={Column.VALUES: critic})
    driver = driver_on(world, tmp_path, steps=2, columns=frozenset({Column.VALUES}), workers=workers)
    assert {e.worker for e in told_by(driver).of(WorkerBusy) if e.activity == "preparing"} == {"critic"}


def test_recording_rollouts_is_reported_and_counted_in_its_step(tmp_path):
    world = FakeWorld()
    driver = driver_on(world, tmp_path, steps=3, workers=replace(world.workers(), actor=SlowRecorder(world)))
    driver.records.every = 1
    told = told_by(driver)
    spans = [e for e in told.of(WorkerBusy) if e.activity == "recording"]
    assert [(e.worker, e.end_s - e.start_s) for e in spans] == [("actor", pytest.approx(3.0))] * 3
    assert [step.metrics.get("time/record") for step in told.of(StepDone)] == [None, *[pytest.approx(3.0)] * 2]
    assert undocumented_names(["time/record"]) == []


def test_time_train_stays_what_the_models_say_of_themselves(tmp_path):
    world = FakeWorld(train_s=lambda version: 3.0, critic_s=lambda step: 1.5)
    told = told_by(driver_on(world, tmp_path, steps=2, columns=frozenset({Column.VALUES})))
    assert [step.metrics["time/train"] for step in told.of(StepDone)] == [4.5, 4.5]


def test_pulling_weights_is_reported_once_per_version_and_replica(tmp_path):
    world = FakeWorld(num_replicas=1, broadcast_s=0.5)
    told = told_by(driver_on(world, tmp_path, steps=2)).of(WorkerBusy)
    pulls = [(e.start_s, e.end_s) for e in told if e.activity == "pulling"]
    arrived = [e.end_s + 0.5 for e in told if e.activity == "publishing"][:1]
    assert [end for _, end in pulls] == pytest.approx([world.publish_s + 0.5, *arrived])
    assert [end - start for start, end in pulls] == pytest.approx([0.5, 0.5])
    generated = [e.start_s for e in told if e.activity == "generating"]
    assert sorted(set(generated)) == pytest.approx([end for _, end in pulls])


def test_a_step_whose_rollouts_are_written_says_where(tmp_path):
    driver = driver_on(FakeWorld(), tmp_path, steps=STEPS)
    driver.records.every = 2
    told = told_by(driver)
    written = told.of(RolloutsWritten)
    assert [e.step for e in written] == [2, 4]
    group_ids = {step.step: step.group_ids for step in told.of(StepDone)}
    assert [tuple(r.group.group_id for r in read_records(Path(e.path))) for e in written] == [
        group_ids[2],
        group_ids[4],
    ]


# ---------------------------------------------------------------------------------------------------------------- looks


def test_nobody_looks_unless_told_to(tmp_path):
    told = told_by(driver_on(FakeWorld(), tmp_path, steps=STEPS))
    assert told.of(ReplicaSeen) == told.of(QueueSeen) == told.of(GroupPlaced) == []


def test_a_look_tells_where_groups_are_once_for_each_place(tmp_path):
    world = FakeWorld(rollout_s=lambda group_id: 10.0)
    told = told_by(driver_on(world, tmp_path, steps=2), look_s=1.0)
    owners = {e.group_id: e.worker for e in told.of(GroupRolledOut)}
    placed = [(e.group_id, e.worker) for e in told.of(GroupPlaced)]
    assert sorted(placed) == sorted(owners.items())


def test_a_hanging_group_is_reported_with_its_replica(tmp_path):
    world = FakeWorld(rollout_faults={1: Fault.HANGS}, group_s=1e6)
    recorder = EventRecorder()
    driver = driver_on(world, tmp_path, steps=STEPS, no_progress_s=60.0, recorder=recorder)
    watch(driver, 2.0)
    with pytest.raises(NoProgress):
        run_virtual(driver.run(0))
    pending = {e.group_id for e in recorder.of(GroupIssued)} - {e.group_id for e in recorder.of(GroupRolledOut)}
    assert [(e.group_id, e.worker) for e in recorder.of(GroupPlaced) if e.group_id in pending] == [(1, "rollout-1")]


def test_the_queue_is_told_when_it_changes_and_not_else(tmp_path):
    world = FakeWorld(rollout_s=lambda group_id: 10.0, train_s=lambda version: 10.0)
    depths = told_by(driver_on(world, tmp_path, steps=2), look_s=1.0).of(QueueSeen)
    assert depths[0] == QueueSeen(3, 0)
    assert all(depth != following for depth, following in pairwise(depths))
    assert max(depth.num_open for depth in depths) == 3


class Stuck(FakeRollouts):
    """The first replica holds version 0 for ever, and the second one does not answer in the second step."""

    async def loads(self) -> Sequence[ReplicaLoad]:
        first, second = await super().loads()
        stats = EngineStats(num_running=1, num_waiting=2, kv_used=0.5, num_tokens=99)
        first = replace(first, version=0, stats=stats)
        return [first] if second.version == 1 else [first, second]


def looked_at(tmp_path: Path) -> dict[str, list[ReplicaSeen]]:
    world = FakeWorld(rollout_s=lambda group_id: 4.0)
    workers = replace(world.workers(), rollouts=Stuck(world))
    told = told_by(driver_on(world, tmp_path, steps=6, workers=workers), look_s=2.0)
    by_worker: dict[str, list[ReplicaSeen]] = defaultdict(list)
    for seen in told.of(ReplicaSeen):
        by_worker[seen.worker].append(seen)
    return by_worker


def test_a_replica_stuck_on_an_old_version_is_reported(tmp_path):
    seen = looked_at(tmp_path)
    assert {e.version for e in seen["rollout-0"]} == {0}
    assert seen["rollout-0"][0] == ReplicaSeen("rollout-0", 0, False, 1, 2, 0.5, 99)
    assert seen["rollout-1"][-1].version >= 4


def test_unchanged_replicas_are_reported_periodically_and_unreachable_ones_never(tmp_path):
    seen = looked_at(tmp_path)
    run_s = 6 * 5.0
    assert len(seen["rollout-0"]) == pytest.approx(run_s / AGAIN_S, abs=1)
    assert 1 not in {e.version for e in seen["rollout-1"]}


class Silent(FakeRollouts):
    """A pool that cannot be asked."""

    async def loads(self) -> Sequence[ReplicaLoad]:
        raise WorkerDied("rollout-0", "telling its load", "the process is gone")


def test_a_pool_that_cannot_be_asked_ends_no_run(tmp_path):
    world = FakeWorld()
    workers = replace(world.workers(), rollouts=Silent(world))
    told = told_by(driver_on(world, tmp_path, steps=STEPS, workers=workers), look_s=0.5)
    assert told.of(StepDone)[-1].step == STEPS
    assert told.of(ReplicaSeen) == []
    assert told.of(QueueSeen), "the queue is the driver's own"


def watching(tmp_path: Path, every_s: float = 2.0, groups_per_step: int = 3) -> ReplicaWatcher:
    driver = driver_on(FakeWorld(), tmp_path, groups_per_step=groups_per_step)
    return ReplicaWatcher(driver.workers.rollouts, driver.queue, driver.events, every_s)


def test_the_polling_pause_grows_with_the_number_of_replicas(tmp_path):
    looks = watching(tmp_path)
    assert [looks.pause_s(n) for n in (0, 8, AT_ONCE, 5 * AT_ONCE, 10**6)] == [2.0, 2.0, 2.0, 10.0, RAREST_S]
    assert watching(tmp_path, every_s=60.0).pause_s(10**6) == 60.0, "who looks more rarely is not hurried"


def test_each_look_reports_a_bounded_number_of_new_placements(tmp_path):
    looks, recorder = watching(tmp_path, groups_per_step=PLACES_AT_ONCE + 5), EventRecorder()
    looks.events.attach(recorder)
    group_ids = range(PLACES_AT_ONCE + 5)
    placements = dict.fromkeys(reversed(group_ids), "rollout-0")

    async def three_looks() -> list[int]:
        looks._see(await looks.rollouts.loads())
        counts = []
        async with AsyncExitStack() as permits:
            for _ in group_ids:
                looks.queue.start_rollout(await permits.enter_async_context(looks.queue.permit()))
            for _ in range(3):
                looks._place(placements)
                counts.append(len(recorder.of(GroupPlaced)))
        return counts

    assert run_virtual(three_looks()) == [PLACES_AT_ONCE, PLACES_AT_ONCE + 5, PLACES_AT_ONCE + 5]
    assert [e.group_id for e in recorder.of(GroupPlaced)] == list(group_ids)


def test_looking_changes_nothing_of_what_is_trained(tmp_path):
    def trained(look_s: float) -> tuple[int, list[int]]:
        world = FakeWorld(rollout_s=lambda group_id: 1.0 + group_id % 3, weight_change="inflight")
        told_by(driver_on(world, tmp_path / str(look_s), steps=STEPS, max_staleness=2), look_s=look_s)
        return world.weights, world.trained_group_ids

    assert trained(0.3) == trained(0.0)


def test_each_policy_gets_events_of_its_own_placements_only(tmp_path):
    slow = FakeWorld(train_s=lambda version: 30.0)
    session = Session({"proposer": FakeWorld(rollout_s=lambda group_id: 5.0), "solver": slow}, tmp_path)
    recorders = {name: EventRecorder() for name in session.drivers}
    for name, driver in session.drivers.items():
        driver.events.attach(recorders[name])
        watch(driver, 1.0)
    session.run()
    for told in recorders.values():
        issued = {e.group_id for e in told.of(GroupIssued)}
        placed = told.of(GroupPlaced)
        assert {e.group_id for e in placed} <= issued
        assert {e.worker for e in placed} == {"rollout-0", "rollout-1"}
