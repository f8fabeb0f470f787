"""What the driver relies on of rollouts, rewards and the actor: the same suite on the fakes and on Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from algorithms.grpo import GRPO
from rlsys.algorithm import Algorithm
from rlsys.batch.packing import plan_batch
from rlsys.contracts import Arrival, PinnedRollouts, Replacement, Rewards, Rollouts, TrainedGroup, Workers
from rlsys.errors import WeightsMismatch, WorkerDied
from rlsys.loop.checkpoint import copy_and_write
from rlsys.loop.checkpoint_files import hash_files
from rlsys.loop.shared_place import check_shared
from rlsys.replay.rollout_parquet import read_records
from rlsys.testing import FakePinnedRollouts, FakeRewards, FakeRollouts, FakeWorld, Fault, RewardAsAdvantage
from rlsys.types import Assignment, Group, GroupKey, Task, Turn
from rlsys.util.hashed_files import SavedFile
from tests.groups import num_ok, report_of
from tests.jobs import config_of
from tests.ray_workers import kill_for_good, kill_worker
from workers.ray.fault_tolerant_pool import Pool
from workers.reward.reward_worker import RewardPool
from workers.worker_set import WorkerSet

T = TypeVar("T")
SIZE = 4
PUBLISH = "actor-0 publish"
TASK = Task(id="t", prompt="312>", answer="123")


@dataclass
class Kit:
    """Workers of one make, in an event loop of their own, and how to kill the next one of a kind that is given work."""

    runner: asyncio.Runner
    workers: Workers
    algorithm: Algorithm
    kill_rollout: Callable[[], None]
    kill_reward: Callable[[], None]
    kill_evaluation: Callable[[], None]
    kill_actor: Callable[[], None]
    """For the fakes, it dies in its next publish."""

    def play(self, scenario: Coroutine[object, object, T]) -> T:
        return self.runner.run(asyncio.wait_for(scenario, 200))


@pytest.fixture(params=["fakes", "ray"])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    if request.param == "fakes":
        with asyncio.Runner() as runner:
            yield fakes(runner)
    else:
        yield request.getfixturevalue("on_ray")


def fakes(runner: asyncio.Runner) -> Kit:
    rollout_faults: dict[int, Fault] = {}
    reward_faults: dict[int, Fault] = {}
    eval_faults: dict[int, Fault] = {}
    training_deaths: dict[str, set[int]] = {}
    world = FakeWorld(
        rollout_s=lambda group_id: 0.0,
        reward_s=lambda group_id: 0.0,
        train_s=lambda version: 0.0,
        publish_s=0.0,
        restart_s=0.0,
        rollout_faults=rollout_faults,
        reward_faults=reward_faults,
        eval_s=lambda group_id: 0.0,
        eval_faults=eval_faults,
        training_deaths=training_deaths,
    )
    workers = world.workers()
    rollouts, rewards, evaluation = workers.rollouts, workers.rewards, workers.evaluation
    assert isinstance(rollouts, FakeRollouts) and isinstance(rewards, FakeRewards)
    assert isinstance(evaluation, FakePinnedRollouts)
    return Kit(
        runner,
        workers,
        RewardAsAdvantage(),
        lambda: rollout_faults.update({rollouts.num_calls: Fault.DIES}),
        lambda: reward_faults.update({rewards.num_calls: Fault.DIES}),
        lambda: eval_faults.update({evaluation.num_calls: Fault.DIES}),
        lambda: training_deaths.update({PUBLISH: {world.num_calls[PUBLISH]}}),
    )


@pytest.fixture(scope="module")
def on_ray(cluster, model_path: Path, data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    overrides = ["rollout.replicas=2", "eval.every=1", f"eval.data={data_path}"]
    crew = WorkerSet.of(config_of(model_path, data_path, tmp_path_factory.mktemp("runs"), overrides))
    pinned = crew.evaluation
    assert pinned is not None and isinstance(crew.rewards, RewardPool)
    with asyncio.Runner() as runner:
        runner.run(crew.ready())
        yield Kit(
            runner,
            crew.workers(),
            GRPO(group_size=SIZE),
            partial(kill_for_good, crew.rollouts),
            partial(kill_for_good, crew.rewards),
            partial(kill_for_good, pinned),
            partial(kill_worker, "ActorRank"),
        )
        runner.run(crew.close())


def assignment(group_id: int = 0, version: int = 0) -> Assignment:
    return Assignment(GroupKey(group_id, 1), TASK, SIZE, version, seed=99)


async def published(kit: Kit, version: int) -> Arrival:
    """Publish, and wait until the relays have it."""
    await kit.workers.actor.publish(version)
    return await kit.workers.relays.arrival(version)


async def replaced(pool: Rollouts | Rewards, worker: str) -> None:
    """Replace a dead worker, and wait until its successor is ready."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    await pool.restart(worker, lambda name, seconds: told.set_result(name))
    if isinstance(pool, Pool):  # which may have noticed the death before the group did: then it hears of the recovery
        while not all(member.is_live for member in pool.members):  # noqa: ASYNC110  (the pool tells only one of them)
            await asyncio.sleep(0.01)
    else:
        assert await told == worker


async def given(kit: Kit, group_id: int) -> str:
    """The replica that a group which begins now is given to."""
    while (worker := kit.workers.rollouts.placements().get(group_id)) is None:  # noqa: ASYNC110  (nobody tells)
        await asyncio.sleep(0)
    return worker


def unheard(worker: str, seconds: float) -> None:
    raise AssertionError(f"nobody replaces {worker} twice")


async def rolled_out(kit: Kit, *, version: int, group_id: int = 0) -> Group:
    return (await kit.workers.rollouts.run(assignment(group_id, version)))[0]


async def scored(kit: Kit, group: Group) -> Group:
    return group.with_scores((await kit.workers.rewards.score(TASK, group)).scores)


async def turns_of(kit: Kit, group: Group, folder: Path) -> list[Turn]:
    """What was said in a group, as its record shows."""
    path = folder / f"{group.replica}-{group.group_id}.parquet"
    await copy_and_write(kit.workers.actor.record(path, 1, [TrainedGroup(0, TASK, group, ())]))
    (record,) = read_records(path)
    return [replace(t, versions=()) for e in record.episodes for j in e.trajectories for t in j.turns]


# --------------------------------------------------------------------------------------------------------- rollouts


def test_a_group_has_its_episodes_and_acknowledges_what_was_published(kit, tmp_path):
    async def scenario() -> None:
        receipt = await published(kit, 3)
        done = await kit.workers.rollouts.run(assignment(group_id=5, version=3))
        group = done[0]
        assert (group.group_id, group.task_id, group.permit_version, len(group.episodes)) == (5, "t", 3, SIZE)
        assert group.oldest_version >= 3
        assert {(a.version, a.hash) for a in group.weights} == {(3, receipt.hash)}
        assert {a.replica for a in group.weights} == {group.replica, report_of(done).busy.worker}
        assert sum(span.num_tokens for span in group.versions) == group.num_trained > 0
        assert report_of(done).busy.start_s <= report_of(done).busy.end_s
        turns = await turns_of(kit, group, tmp_path)
        assert sum(len(t.output_ids) for t in turns) == group.num_trained
        assert all(len(t.output_ids) == len(t.logprobs) for t in turns)

    kit.play(scenario())


def test_a_rollout_waits_for_weights_as_new_as_its_permit(kit):
    async def scenario() -> None:
        waiting = asyncio.create_task(rolled_out(kit, version=5))
        await kit.workers.actor.publish(4)
        receipt = await published(kit, 5)
        group = await waiting
        assert group.oldest_version == 5
        assert (5, receipt.hash) in {(a.version, a.hash) for a in group.weights}

    kit.play(scenario())


def test_the_same_seed_and_weights_sample_alike_on_another_replica(kit, tmp_path):
    async def scenario() -> None:
        await kit.workers.actor.publish(6)
        one, other = await asyncio.gather(rolled_out(kit, version=6), rolled_out(kit, version=6))
        assert one.replica != other.replica
        assert await turns_of(kit, one, tmp_path) == await turns_of(kit, other, tmp_path)

    kit.play(scenario())


def test_a_replaced_replica_retries_a_group_with_the_same_tokens(kit, tmp_path):
    async def scenario() -> None:
        rollouts = kit.workers.rollouts
        await kit.workers.actor.publish(7)
        first = await rolled_out(kit, version=7)
        kit.kill_rollout()
        with pytest.raises(WorkerDied) as raised:
            await rolled_out(kit, version=7, group_id=1)
        dead = raised.value.worker
        assert dead.startswith("rollout-")
        await replaced(rollouts, dead)
        again = await asyncio.gather(rolled_out(kit, version=7), rolled_out(kit, version=7))
        assert dead not in {group.replica for group in again}
        for group in again:
            assert await turns_of(kit, group, tmp_path) == await turns_of(kit, first, tmp_path)
        holding = {load.replica for load in await rollouts.loads()}
        await rollouts.restart(dead, unheard)
        assert {load.replica for load in await rollouts.loads()} == holding, (
            "a name that is gone is not restarted again"
        )

    kit.play(scenario())


def test_whereabouts_are_those_of_groups_that_run(kit):
    async def scenario() -> None:
        rollouts = kit.workers.rollouts
        await published(kit, 8)
        running = asyncio.create_task(rolled_out(kit, version=8, group_id=17))
        where = await given(kit, 17)
        group = await running
        assert group.replica == where
        assert 17 not in rollouts.placements()

    kit.play(scenario())


def test_loads_report_version_and_running_requests_of_every_live_replica(kit):
    async def scenario() -> None:
        rollouts = kit.workers.rollouts
        await published(kit, 12)
        groups = await asyncio.gather(*(rolled_out(kit, version=12, group_id=s) for s in (21, 22)))
        loads = await rollouts.loads()
        assert {load.replica for load in loads} == {group.replica for group in groups}
        assert {(load.version, load.stats.num_running, load.is_loading) for load in loads} == {(12, 0, False)}

    kit.play(scenario())


def test_a_group_of_a_drained_replica_samples_the_same_tokens(kit, tmp_path):
    async def scenario() -> None:
        rollouts = kit.workers.rollouts
        await published(kit, 13)
        groups = await asyncio.gather(*(rolled_out(kit, version=13, group_id=s) for s in (31, 32)))
        one, other = (group.replica for group in groups)
        assert await rollouts.drain(one, other) == 0
        assert await rollouts.drain("rollout-999", other) == 0
        again = asyncio.create_task(rolled_out(kit, version=13, group_id=31))
        source = await given(kit, 31)
        assert await rollouts.drain(source, other if source == one else one) in (0, 1)  # it may have ended first
        group = await again
        assert {span.version for span in group.versions} == {13}
        assert await turns_of(kit, group, tmp_path) == await turns_of(kit, groups[0], tmp_path)

    kit.play(scenario())


# ---------------------------------------------------------------------------------------------------------- rewards


def test_every_episode_gets_one_score(kit):
    async def scenario() -> None:
        await kit.workers.actor.publish(9)
        group = await rolled_out(kit, version=9)
        scored = await kit.workers.rewards.score(TASK, group)
        assert len(scored.scores) == SIZE
        assert all(score.value is not None and not score.failure for score in scored.scores)
        assert scored.busy.worker.startswith("reward-")
        assert (await kit.workers.rewards.score(TASK, group)).scores == scored.scores

    kit.play(scenario())


def test_a_replaced_reward_worker_gives_the_same_scores(kit):
    async def scenario() -> None:
        rewards = kit.workers.rewards
        await kit.workers.actor.publish(10)
        group = await rolled_out(kit, version=10)
        before = (await rewards.score(TASK, group)).scores
        kit.kill_reward()
        with pytest.raises(WorkerDied) as raised:
            await rewards.score(TASK, group)
        dead = raised.value.worker
        assert dead.startswith("reward-")
        await replaced(rewards, dead)
        await rewards.restart(dead, unheard)
        after = await rewards.score(TASK, group)
        assert after.scores == before
        assert after.busy.worker != dead

    kit.play(scenario())


def test_a_stored_episode_replaces_one_and_the_versions_are_those_of_the_others(kit, tmp_path):
    async def scenario() -> None:
        await published(kit, 14)
        donor = await scored(kit, await rolled_out(kit, version=14, group_id=41))
        await published(kit, 15)
        group = await scored(kit, await rolled_out(kit, version=15, group_id=42))
        composed = await kit.workers.composer.replace_episode(Replacement(group, 1, donor, 3))
        before, given = [await turns_of(kit, g, tmp_path) for g in (group, donor)]
        expected = [*before[:1], given[3], *before[2:]]
        assert await turns_of(kit, replace(composed, replica="composed"), tmp_path) == expected
        stored = replace(donor.episodes[3], origin="stored")
        episodes = (*group.episodes[:1], stored, *group.episodes[2:])
        assert composed.episodes == tuple(episode.without_order() for episode in episodes)
        assert {(a.replica, a.version) for a in composed.weights} == {(group.replica, 15)}, "those of its own tokens"
        num_own = sum(len(turn.output_ids) for turn in expected) - len(given[3].output_ids)
        assert [(s.version, s.num_tokens) for s in composed.versions] == [(15, num_own)]
        assert (composed.group_id, composed.columns) == (42, {})
        assert num_ok(await scored(kit, composed)) == SIZE, "it is a group like any other"

    kit.play(scenario())


def test_a_new_reward_worker_replaces_the_same(kit, tmp_path):
    async def scenario() -> None:
        rewards = kit.workers.rewards
        await kit.workers.actor.publish(16)
        group, donor = [await scored(kit, await rolled_out(kit, version=16, group_id=s)) for s in (43, 44)]
        before = await rewards.replace_episode(Replacement(group, 0, donor, 0))
        kit.kill_reward()
        with pytest.raises(WorkerDied) as raised:
            await rewards.replace_episode(Replacement(group, 0, donor, 0))
        await replaced(rewards, raised.value.worker)
        after = await rewards.replace_episode(Replacement(group, 0, donor, 0))
        assert replace(after, payload=None) == replace(before, payload=None)
        turns = [await turns_of(kit, replace(g, replica=n), tmp_path) for n, g in (("a", before), ("b", after))]
        assert turns[0] == turns[1]

    kit.play(scenario())


@pytest.mark.parametrize("kind", ["rollout", "reward"])
def test_restarting_a_worker_that_never_was_changes_nothing(kit, kind):
    async def scenario() -> None:
        pool = kit.workers.rollouts if kind == "rollout" else kit.workers.rewards
        await pool.restart(f"{kind}-999", unheard)
        await kit.workers.actor.publish(11)
        assert num_ok(await scored(kit, await rolled_out(kit, version=11))) == SIZE

    kit.play(scenario())


# ----------------------------------------------------------------------------------------------------------- relays


def test_an_arrival_is_the_same_for_every_caller(kit):
    async def scenario() -> None:
        receipt = await kit.workers.actor.publish(17)
        first, second = await asyncio.gather(*(kit.workers.relays.arrival(17) for _ in range(2)))
        assert first == second == await kit.workers.relays.arrival(17)
        assert (first.version, first.num_bytes) == (17, receipt.num_bytes)
        assert 0 <= first.num_sent <= first.num_bytes and first.seconds >= 0

    kit.play(scenario())


# ------------------------------------------------------------------------------------------------------------ actor


async def trained(kit: Kit, version: int) -> Arrival:
    """Publish `version`, train one step on groups of it, and publish what came of it."""
    await kit.workers.actor.publish(version)
    groups = [await scored(kit, await rolled_out(kit, version=version, group_id=s)) for s in range(3)]
    assigned = [tuple(kit.algorithm.advantages(g)) for g in groups]
    plan = plan_batch(groups, assigned, kit.algorithm.aggregation, num_ranks=1, max_tokens=40)
    await kit.workers.actor.fetch(groups, plan)
    stats = await kit.workers.actor.train_step(plan, {})
    assert stats.train_s >= 0
    assert "loss" in stats.metrics
    return await published(kit, version + 1)


def test_a_step_changes_weights_and_a_load_restores_them(kit, tmp_path):
    async def scenario() -> None:
        actor = kit.workers.actor
        before = await published(kit, 20)
        await copy_and_write(actor.save(tmp_path / "actor"))
        after = await trained(kit, 20)
        assert (after.version, after.num_bytes) == (21, before.num_bytes)
        assert after.hash != before.hash
        await actor.load(tmp_path / "actor")
        assert (await published(kit, 20)).hash == before.hash

    kit.play(scenario())


def test_a_save_reports_its_files_with_their_sizes_and_hashes(kit, tmp_path):
    async def scenario() -> None:
        files = await copy_and_write(kit.workers.actor.save(tmp_path / "actor"))
        assert files == hash_files(tmp_path / "actor") != {}

    kit.play(scenario())


def test_a_dead_actor_is_noticed_and_its_successor_loads_its_state(kit, tmp_path):
    async def scenario() -> None:
        actor = kit.workers.actor
        await trained(kit, 22)
        await copy_and_write(actor.save(tmp_path / "actor"))
        noticed = asyncio.create_task(actor.watch(lambda: None))
        kit.kill_actor()
        with pytest.raises(WorkerDied, match="actor-0"):
            await actor.publish(24)
        with pytest.raises(WorkerDied, match="actor-0"):
            await noticed
        await actor.restart()
        await actor.load(tmp_path / "actor")
        arrival = await published(kit, 25)
        assert {a.hash for a in (await rolled_out(kit, version=25)).weights} == {arrival.hash}
        await trained(kit, 26)

    kit.play(scenario())


def test_every_rank_answers_the_marker_of_the_driver(kit, tmp_path):
    kit.play(check_shared(kit.workers, tmp_path / "checkpoints"))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_ranks_name_a_damaged_file(kit, tmp_path):
    async def scenario() -> None:
        (tmp_path / "a").write_bytes(b"a")
        (tmp_path / "b").write_bytes(b"b")
        files = hash_files(tmp_path)
        assert await kit.workers.actor.find_damage(tmp_path, files) is None
        (tmp_path / "b").write_bytes(b"x")
        problem = await kit.workers.actor.find_damage(tmp_path, files)
        assert problem == f"{tmp_path / 'b'} has other contents than were saved"

    kit.play(scenario())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_finished_groups_survive_a_restart(kit, tmp_path, count):
    async def scenario() -> None:
        actor = kit.workers.actor
        await actor.publish(30)
        groups = [await scored(kit, await rolled_out(kit, version=30, group_id=s)) for s in range(count)]
        path = tmp_path / "groups.jsonl"
        assert await actor.save_groups(path, groups) == SavedFile.of(path.read_bytes())
        loaded = await actor.load_groups(path)
        groups = [replace(group, key=GroupKey(group.group_id, 0)) for group in groups]
        assert [replace(g, payload=None) for g in loaded] == [replace(g, payload=None) for g in groups]
        for before, after in zip(groups, loaded, strict=True):
            assert await turns_of(kit, after, tmp_path) == await turns_of(kit, before, tmp_path)
            assert await scored(kit, after) == replace(before, payload=after.payload)

    kit.play(scenario())


# ------------------------------------------------------------------------------------------------- pinned rollouts


def pinned_rollouts(kit: Kit) -> PinnedRollouts:
    assert kit.workers.evaluation is not None
    return kit.workers.evaluation


def test_a_pinned_pool_samples_from_the_pinned_version_alone(kit):
    async def scenario() -> None:
        pinned = pinned_rollouts(kit)
        receipt = await published(kit, 42)
        await pinned.pin(42)
        for version in range(43, 47):
            await kit.workers.actor.publish(version)
        group = (await pinned.run(assignment(version=42)))[0]
        assert {span.version for span in group.versions} == {42}
        assert {(a.version, a.hash) for a in group.weights} == {(42, receipt.hash)}
        assert group.replica.startswith("eval-")
        await pinned.pin(46)
        assert {span.version for span in (await pinned.run(assignment(version=46)))[0].versions} == {46}

    kit.play(scenario())


def test_a_replaced_pinned_replica_loads_the_pinned_version(kit, tmp_path):
    async def scenario() -> None:
        pinned = pinned_rollouts(kit)
        await kit.workers.actor.publish(47)
        await pinned.pin(47)
        first = (await pinned.run(assignment(version=47)))[0]
        for version in range(48, 52):
            await kit.workers.actor.publish(version)
        kit.kill_evaluation()
        with pytest.raises(WorkerDied) as raised:
            await pinned.run(assignment(version=47))
        await replaced(pinned, raised.value.worker)
        again = (await pinned.run(assignment(version=47)))[0]
        assert again.replica != first.replica
        assert {span.version for span in again.versions} == {47}
        assert await turns_of(kit, again, tmp_path) == await turns_of(kit, first, tmp_path)

    kit.play(scenario())


def test_a_version_that_is_gone_cannot_be_held(kit):
    async def scenario() -> None:
        for version in range(52, 57):
            await kit.workers.actor.publish(version)
        with pytest.raises(WeightsMismatch, match="pinning version 53"):
            await pinned_rollouts(kit).pin(53)

    kit.play(scenario())
