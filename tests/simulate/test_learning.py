"""A step of learning in the real driver: what is worth training, what settling decides, who trains, what is kept."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithm import Algorithm, Column, StepAdvantages
from rlsys.batch.packing import BatchPlan
from rlsys.contracts import Files, TrainStats, Workers
from rlsys.errors import CheckpointError, ConfigError, OutOfMemory, RunAborted, TrainingError, WorkerDied
from rlsys.loop.checkpoint import read_failed
from rlsys.loop.checkpoint_files import find_latest
from rlsys.loop.driver import Driver
from rlsys.monitoring.events import CheckpointSaved, GroupDropped, StepDone, ZeroAdvantageWarning
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.replay.rollout_json import read_groups
from rlsys.testing import EventRecorder, FakeActor, FakeCritic, FakeReference, FakeWorld, RewardAsAdvantage, run_virtual
from rlsys.types import Group, Ref
from rlsys.util.any_paths import AnyPath
from rlsys.util.hashed_files import SavedFile
from tests.simulate.world import StopAfter, driver_on, go_on, latencies

ALL = frozenset(Column)


@dataclass(frozen=True, kw_only=True)
class Contrast(RewardAsAdvantage):
    """Learns from groups whose rewards differ."""

    def can_learn_from(self, group: Group) -> bool:
        return len({t.reward for _, t in group.trajectories()}) > 1


@dataclass(frozen=True, kw_only=True)
class Remembering(Contrast):
    """Reports the number of steps, which it knows from what it reported before."""

    seen: list[Mapping[str, float]] = field(default_factory=list)

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        self.seen.append(past)
        return replace(
            super().finalize_advantages(groups, past), metrics={"policy/entropy": past.get("policy/entropy", 0.0) + 1}
        )


@dataclass(frozen=True, kw_only=True)
class Without(RewardAsAdvantage):
    """Takes all advantages from groups of some group_ids, once it sees a whole step."""

    group_ids: tuple[int, ...]

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        settled = super().finalize_advantages(groups, past).groups
        kept = [() if group.group_id in self.group_ids else of for group, of in zip(groups, settled, strict=True)]
        return StepAdvantages(tuple(kept))


def equal_in_every_third(group_id: int, episode: int) -> float:
    return 1.0 if group_id % 3 == 0 else float(episode)


# ---------------------------------------------------------------------------------- dynamic sampling


def test_a_group_without_advantages_is_replaced_and_is_no_failure(tmp_path):
    recorder, world = EventRecorder(), FakeWorld(reward=equal_in_every_third)
    driver = driver_on(
        world, tmp_path, algorithm=Contrast(), failed_share=0.0, max_zero_advantage_groups=4, recorder=recorder
    )
    assert run_virtual(driver.run(0)) == 6
    dropped = recorder.of(GroupDropped)
    assert [(e.group_id % 3, e.reason) for e in dropped] == [(0, "zero_advantage")] * len(dropped)
    assert "equal rewards: [1.0]" in dropped[0].detail
    assert world.consumed.total() == 18
    assert driver.queue.ledger.next_group_id == 18 + len(dropped) == 27
    assert not driver.queue.ledger.open
    assert recorder.of(StepDone)[-1].metrics["curation/zero_advantage"] == len(dropped)


def test_replacing_groups_without_advantages_does_not_slow_a_busy_trainer(tmp_path):
    def duration_s(num_void: int) -> float:
        recorder = EventRecorder()
        world = FakeWorld(reward=lambda group_id, episode: 1.0 if 2 <= group_id < 2 + num_void else float(episode))
        world.train_s = lambda version: 20.0
        driver = driver_on(
            world,
            tmp_path / str(num_void),
            steps=3,
            groups_per_step=2,
            max_staleness=1,
            algorithm=Contrast(),
            recorder=recorder,
        )
        run_virtual(driver.run(0))
        return sum(e.metrics["time/step"] for e in recorder.of(StepDone))

    assert duration_s(6) == pytest.approx(duration_s(0))


@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5])
def test_a_constant_reward_ends_the_run_with_likely_causes(tmp_path, reward):
    driver = driver_on(
        FakeWorld(reward=lambda s, e: reward), tmp_path, algorithm=Contrast(), max_zero_advantage_groups=8
    )
    with pytest.raises(
        RunAborted, match=r"8 groups one after the other.*solved, or hopeless.*constant.*\[" + str(reward)
    ):
        run_virtual(driver.run(0))


def test_groups_with_only_frozen_agents_have_zero_advantage(tmp_path):
    frozen = RewardAsAdvantage(frozen_agents=("policy",))
    driver = driver_on(FakeWorld(), tmp_path, algorithm=frozen, failed_share=0.0, max_zero_advantage_groups=3)
    with pytest.raises(
        RunAborted, match=r"3 groups one after the other.*every trajectory belongs to algorithm\.frozen"
    ):
        run_virtual(driver.run(0))


def test_zero_advantages_are_reported_once_before_they_end_the_run(tmp_path):
    recorder, world = EventRecorder(), FakeWorld(reward=lambda group_id, episode: float(group_id >= 7 and episode))
    driver = driver_on(world, tmp_path, algorithm=Contrast(), max_zero_advantage_groups=50, recorder=recorder)
    assert run_virtual(driver.run(0)) == 6
    (told,) = recorder.of(ZeroAdvantageWarning)
    assert (told.num_groups, told.limit) == (5, 50)
    assert "equal rewards: [0.0]" in told.detail
    assert len(recorder.of(GroupDropped)) == 7


def test_steps_that_settling_empties_are_told_too(tmp_path):
    recorder, algorithm = EventRecorder(), Without(group_ids=tuple(range(12)))
    run_virtual(driver_on(FakeWorld(), tmp_path, algorithm=algorithm, recorder=recorder).run(0))
    assert [told.num_groups for told in recorder.of(ZeroAdvantageWarning)] == [6]


def test_failed_groups_do_not_reset_the_count_of_zero_advantages(tmp_path):
    world = FakeWorld(reward=lambda group_id, episode: None if group_id % 4 == 0 else 1.0)
    driver = driver_on(world, tmp_path, algorithm=Contrast(), max_zero_advantage_groups=30)
    with pytest.raises(RunAborted, match="30 groups one after the other"):
        run_virtual(driver.run(0))
    assert driver.queue.dropped["failed"] >= 8


# ---------------------------------------------------------------------------------- settling


def test_a_step_emptied_by_settling_makes_no_version(tmp_path):
    recorder, world = EventRecorder(), FakeWorld()
    driver = driver_on(world, tmp_path, max_staleness=1, algorithm=Without(group_ids=(3, 4, 5)), recorder=recorder)
    assert run_virtual(driver.run(0)) == 6
    assert [(e.group_id, e.reason) for e in recorder.of(GroupDropped)] == [(n, "zero_advantage") for n in (3, 4, 5)]
    assert [e.step for e in recorder.of(StepDone)] == [1, 2, 3, 4, 5, 6]
    assert world.consumed.total() == 18
    assert (driver.queue.ledger.next_group_id, driver.queue.ledger.open, driver.queue.num_permits) == (21, {}, 0)


def test_a_group_that_settling_empties_is_trained_with_its_step(tmp_path):
    world = FakeWorld()
    driver = driver_on(world, tmp_path, algorithm=Without(group_ids=(3, 4)))
    run_virtual(driver.run(0))
    assert (world.consumed.total(), driver.queue.dropped, driver.queue.ledger.next_group_id) == (18, {}, 18)


def test_settling_that_empties_every_step_ends_the_run(tmp_path):
    driver = driver_on(
        FakeWorld(), tmp_path, algorithm=Without(group_ids=tuple(range(1000))), max_zero_advantage_groups=7
    )
    with pytest.raises(RunAborted, match=r"9 groups one after the other(.|\n)*of a step of 3 groups nothing is left"):
        run_virtual(driver.run(0))


def test_settling_gets_the_metrics_of_the_previous_step(tmp_path):
    recorder, algorithm = EventRecorder(), Remembering()
    run_virtual(driver_on(FakeWorld(), tmp_path, algorithm=algorithm, recorder=recorder).run(0))
    reported = [e.metrics for e in recorder.of(StepDone)]
    assert [m["policy/entropy"] for m in reported] == [1, 2, 3, 4, 5, 6]
    assert algorithm.seen[0] == {}
    for past, metrics in zip(algorithm.seen[1:], reported, strict=False):
        assert past.items() <= metrics.items()
        assert {"loss", "policy/entropy"} <= past.keys()


@given(seed=st.integers(0, 10**6), stop_at=st.integers(1, 8), max_staleness=st.sampled_from([0, 2]))
def test_an_interrupted_run_settles_and_samples_like_a_whole_one(seed, stop_at, max_staleness):
    def session(folder: Path) -> tuple[FakeWorld, Remembering, Driver]:
        world = FakeWorld(rollout_s=latencies(seed, 9.0), train_s=latencies(seed + 1, 3.0), reward=equal_in_every_third)
        algorithm = Remembering(needs=ALL)
        return world, algorithm, driver_on(world, folder, steps=9, max_staleness=max_staleness, algorithm=algorithm)

    with TemporaryDirectory() as name:
        whole, uncut, driver = session(Path(name) / "whole")
        run_virtual(driver.run(0))
        _, before, driver = session(Path(name) / "cut")
        driver.events.attach(StopAfter(driver, stop_at))
        assert run_virtual(driver.run(0)) == stop_at
        second, after, driver = session(Path(name) / "cut")
        assert run_virtual(go_on(driver)) == 9
    assert whole.consumed == second.consumed
    if max_staleness == 0:
        assert whole.weights == second.weights
        assert uncut.seen == before.seen + after.seen


def test_settling_may_not_report_what_another_part_reports(tmp_path):
    class Loud(RewardAsAdvantage):
        def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
            return replace(super().finalize_advantages(groups, past), metrics={"loss": 0.0})

    with pytest.raises(ConfigError, match="the metrics loss are reported twice"):
        run_virtual(driver_on(FakeWorld(), tmp_path, algorithm=Loud()).run(0))


# ---------------------------------------------------------------------------------- who trains


def actor_of(driver: Driver) -> FakeActor:
    assert isinstance(driver.workers.actor, FakeActor)
    return driver.workers.actor


def test_the_critic_trains_after_the_actor_and_both_report(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(train_s=lambda version: 2.0, critic_s=lambda step: 5.0)
    driver = driver_on(world, tmp_path, columns=ALL, recorder=recorder)
    run_virtual(driver.run(0))
    for step in recorder.of(StepDone):
        assert {"loss", "critic/loss"} <= step.metrics.keys()
        assert step.metrics["time/train"] == 2.0 + 5.0
        assert step.metrics["time/step"] >= 7.0


def test_a_step_tells_how_long_fetching_and_its_columns_took(tmp_path):
    class Slow(FakeReference):
        async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
            await asyncio.sleep(3.0)
            return await super().annotate_step(groups, plan, column)

    class SlowToFetch(FakeActor):
        async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
            await asyncio.sleep(4.0)
            await super().fetch(groups, plan)

    recorder, world = EventRecorder(), FakeWorld()
    workers = world.workers()
    made = {**workers.step_annotators, Column.REFERENCE_MISMATCHED: Slow(world)}
    workers = replace(workers, actor=SlowToFetch(world), step_annotators=made)
    run_virtual(driver_on(world, tmp_path, columns=ALL, recorder=recorder, workers=workers).run(0))
    for step in recorder.of(StepDone):
        assert (step.metrics["time/fetch"], step.metrics["time/columns"]) == pytest.approx((4.0, 3.0))
        assert not undocumented_names(step.metrics)


def test_step_columns_are_made_per_rank_and_micro_batch(tmp_path):
    driver = driver_on(FakeWorld(), tmp_path, columns=ALL, num_updates=3)
    run_virtual(driver.run(0))
    assert actor_of(driver).last_step is not None
    plan, columns = actor_of(driver).last_step or (None, {})
    assert plan is not None
    assert len(plan[0].updates) == 3
    assert columns.keys() == {Column.REFERENCE_MISMATCHED, Column.VALUES}
    for column in columns.values():
        shape = [[len(values) for values in of_rank] for of_rank in column]  # type: ignore[union-attr]
        assert shape == [[3 * len(batch.samples) for batch in plan[rank].micro_batches] for rank in range(2)]


@pytest.mark.parametrize(
    ("taken", "missing"),
    [
        ({"annotators": {}}, "reference_logprobs"),
        ({"step_annotators": {}}, "reference_mismatched, values"),
        ({"critic": None}, "values"),
    ],
)
def test_a_column_without_a_worker_is_named_before_anything_runs(tmp_path, taken, missing):
    class Less(FakeWorld):
        def workers(self) -> Workers:
            return replace(super().workers(), **taken)

    with pytest.raises(ConfigError, match=f"RewardAsAdvantage asks for {missing}, and this run has no worker"):
        driver_on(Less(), tmp_path, columns=ALL)


class NoCritic(FakeWorld):
    def workers(self) -> Workers:
        return replace(super().workers(), critic=None, step_annotators={})


def test_the_critic_is_resumed_with_the_actor(tmp_path):
    driver = driver_on(FakeWorld(), tmp_path, steps=3, columns=ALL)
    run_virtual(driver.run(0))
    resumed = driver_on(FakeWorld(), tmp_path, steps=5, columns=ALL)
    assert run_virtual(go_on(resumed)) == 5
    critic = resumed.workers.critic
    assert isinstance(critic, FakeCritic)
    assert critic.num_steps == 5


def test_a_checkpoint_without_the_needed_critic_is_refused(tmp_path):
    run_virtual(driver_on(NoCritic(), tmp_path, steps=3).run(0))
    with pytest.raises(CheckpointError, match=r"step_000003 contains no critic, .* `rlsys export`"):
        run_virtual(go_on(driver_on(FakeWorld(), tmp_path, steps=5, columns=ALL)))


def fast_rollouts() -> FakeWorld:
    return FakeWorld(rollout_s=lambda group_id: 0.1, train_s=lambda version: 10.0)


@dataclass(frozen=True, kw_only=True)
class WarmsUp(RewardAsAdvantage):
    """Leaves the policy alone in its first steps."""

    warmup_steps: int = 0

    def trains_policy(self, version: int) -> bool:
        return version >= self.warmup_steps


def staleness_by_step(*worlds: FakeWorld) -> list[int]:
    """The most of each step of three groups."""
    staleness = [each for world in worlds for each in world.staleness]
    return [max(staleness[at : at + 3]) for at in range(0, len(staleness), 3)]


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize("stop_at", [2, 4])
def test_synchronous_steps_of_a_stabilizer_have_zero_staleness(tmp_path, warmup_steps, stop_at):
    def session() -> tuple[FakeWorld, Driver]:
        world, algorithm = fast_rollouts(), WarmsUp(warmup_steps=warmup_steps)
        return world, driver_on(
            world, tmp_path, steps=12, max_staleness=3, window=2, synchronous_steps=5, algorithm=algorithm
        )

    first, driver = session()
    driver.events.attach(StopAfter(driver, stop_at))
    assert run_virtual(driver.run(0)) == stop_at
    second, driver = session()
    assert run_virtual(go_on(driver)) == 12
    num_synchronous = warmup_steps + 5
    assert staleness_by_step(first, second) == [0] * num_synchronous + [0, 1, 2, 3, 3, 3, 3][: 12 - num_synchronous]


def test_a_stabilizer_added_on_resume_begins_with_synchronous_steps(tmp_path):
    first = fast_rollouts()
    driver = driver_on(first, tmp_path, steps=12, max_staleness=2)
    driver.events.attach(StopAfter(driver, 5))
    assert run_virtual(driver.run(0)) == 5
    assert staleness_by_step(first) == [0, 1, 2, 2, 2]
    assert driver.queue.finished_groups, "groups of older weights, which the checkpoint keeps"
    recorder, second = EventRecorder(), fast_rollouts()
    driver = driver_on(second, tmp_path, steps=12, max_staleness=2, synchronous_steps=3, recorder=recorder)
    assert run_virtual(go_on(driver)) == 12
    assert staleness_by_step(second) == [0, 0, 0, 0, 1, 2, 2]
    assert (recorder.of(GroupDropped), driver.queue.dropped) == ([], {}), "they are rolled out again instead"
    assert second.trained_group_ids == list(range(15, 36))


# ---------------------------------------------------------------------------------- what is kept


def test_a_dead_trainer_ends_the_run_with_the_resume_command(tmp_path):
    class Dies(FakeActor):
        async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
            raise WorkerDied("actor-1", "training a step", "a column is gone with its node")

    world = FakeWorld()
    workers = replace(world.workers(), actor=Dies(world))
    with pytest.raises(RunAborted, match=r"actor-1 while training a step: .*\n.*with run\.resume=auto$"):
        run_virtual(driver_on(world, tmp_path, workers=workers).run(0))


def kept_of(folder: Path) -> dict[str, object]:
    """What a step that failed left of the models, by file."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*/*.json")}


def test_a_step_with_nan_is_kept_and_can_be_replayed(tmp_path):
    driver = driver_on(FakeWorld(nan_at=2), tmp_path, columns=ALL, num_updates=2, checkpoint_every=1)
    folder = tmp_path / "failed" / "step_000003"
    with pytest.raises(TrainingError, match=rf"the loss of step 3 is nan\n(.|\n)*rlsys replay {folder}") as raised:
        run_virtual(driver.run(0))
    failed = read_failed(folder)
    assert (failed.version, failed.num_updates, failed.error) == (2, 2, "the loss of step 3 is nan")
    assert (failed.model, failed.update, raised.value.update) == ("actor", 1, 1)
    assert set(failed.columns) == ALL
    groups = [record.group for record in read_groups(folder / "groups.jsonl")]
    assert [group.group_id for group in groups] == [6, 7, 8]
    assert [[a.advantage for a in of_group] for of_group in failed.assigned] == [[0, 1], [1, 0], [0, 1]]
    names = {"actor", "critic", "groups.jsonl", "config.resolved.yaml", "step.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "config.resolved.yaml").read_text() == driver.learner.config() != ""
    saved = find_latest(tmp_path / "checkpoints")
    assert saved is not None
    assert kept_of(folder) == kept_of(saved), "both models are as they were before the step"
    resumed = driver_on(FakeWorld(), tmp_path, columns=ALL, num_updates=2)
    assert run_virtual(go_on(resumed)) == 6
    whole = FakeWorld()
    run_virtual(driver_on(whole, tmp_path / "whole", columns=ALL, num_updates=2).run(0))
    assert actor_of(resumed).world.weights == whole.weights, "a resumed run issues the groups again"


class DivergingCritic(FakeCritic):
    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        if self.num_steps < 2:
            return await super().train_step(plan, columns)
        await asyncio.sleep(0)
        raise TrainingError("the critic's loss of step 3 is nan", update=0)


class HungryCritic(FakeCritic):
    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        await asyncio.sleep(0)
        raise OutOfMemory("step 1: out of memory", update=0)

    async def copy_state(self) -> str:
        raise AssertionError("its ranks wait for the one that has failed")


def test_a_lack_of_memory_ends_the_run_without_a_call_to_the_ranks(tmp_path):
    workers, critic = (world := FakeWorld()).workers(), HungryCritic(world)
    workers = replace(workers, critic=critic, step_annotators={**workers.step_annotators, Column.VALUES: critic})
    driver = driver_on(world, tmp_path, columns=ALL, workers=workers)
    with pytest.raises(OutOfMemory, match=r"step 1: out of memory\n"):
        run_virtual(driver.run(0))
    assert not (tmp_path / "failed").exists()


def test_a_critic_failure_is_kept_after_the_policy_stepped(tmp_path):
    workers, critic = (world := FakeWorld()).workers(), DivergingCritic(world)
    workers = replace(workers, critic=critic, step_annotators={**workers.step_annotators, Column.VALUES: critic})
    driver = driver_on(world, tmp_path, columns=ALL, checkpoint_every=1, workers=workers)
    with pytest.raises(TrainingError, match="the critic's loss of step 3 is nan"):
        run_virtual(driver.run(0))
    folder = tmp_path / "failed" / "step_000003"
    failed, kept = read_failed(folder), kept_of(folder)
    assert (failed.version, failed.model, failed.update) == (2, "critic", 0)
    saved = find_latest(tmp_path / "checkpoints")
    assert saved is not None
    assert kept["critic.json"] == kept_of(saved)["critic.json"]
    assert kept["weights.json"] != kept_of(saved)["weights.json"]


ELSEWHERE = {"shard-00002.safetensors": SavedFile.of(b"x" * 100)}
"""File that a second rank wrote to the disk of another machine."""


class ActorElsewhere(FakeActor):
    async def write_state(self, folder: AnyPath, state: str) -> Files:
        return {**await super().write_state(folder, state), **ELSEWHERE}


class CriticElsewhere(FakeCritic):
    async def write_state(self, folder: AnyPath, state: str) -> Files:
        return {**await super().write_state(folder, state), **ELSEWHERE}


class GroupsElsewhere(FakeActor):
    async def save_groups(self, path: AnyPath, groups: Sequence[Group]) -> SavedFile:
        return await super().save_groups(path.parent / "other", groups)


class CutShort(FakeActor):
    async def write_state(self, folder: AnyPath, state: str) -> Files:
        files = await super().write_state(folder, state)
        return {name: replace(file, num_bytes=file.num_bytes + 7) for name, file in files.items()}


@pytest.mark.parametrize(
    ("kind", "unseen"),
    [
        (ActorElsewhere, r"actor/shard-00002\.safetensors is missing"),
        (CriticElsewhere, r"critic/shard-00002\.safetensors is missing"),
        (GroupsElsewhere, r"groups\.jsonl is missing"),
        (CutShort, r"actor/weights\.json has \d+ bytes"),
    ],
)
def test_a_save_without_the_file_of_a_rank_is_refused(tmp_path, kind: type[FakeActor | FakeCritic], unseen: str):
    recorder = EventRecorder()

    def driver(world: FakeWorld, folder: Path) -> Driver:
        model, workers = kind(world), world.workers()
        if isinstance(model, FakeActor):
            workers = replace(workers, actor=model)
        else:
            annotators = {**workers.step_annotators, Column.VALUES: model}
            workers = replace(workers, critic=model, step_annotators=annotators)
        return driver_on(world, folder, columns=ALL, workers=workers, recorder=recorder)

    remedy = r"let run\.folder be a folder that all machines share"
    refused = driver(FakeWorld(), tmp_path)
    with pytest.raises(CheckpointError, match=rf"{unseen}.*{remedy}.*none was saved before"):
        run_virtual(refused.run(0))
    assert not recorder.of(CheckpointSaved)
    assert refused.saver.checkpoints.last_saved is None
    assert list((tmp_path / "checkpoints").iterdir()) == []
    with pytest.raises(TrainingError, match=rf"step 1 is nan\nthe step could not be kept .*{unseen}.*{remedy}"):
        run_virtual(driver(FakeWorld(nan_at=0), tmp_path / "nan").run(0))
    assert not (tmp_path / "nan" / "failed" / "step_000001" / "step.json").exists()


def test_a_step_that_cannot_be_kept_still_raises_its_error(tmp_path):
    driver = driver_on(FakeWorld(nan_at=2, disk_is_full_at="failed"), tmp_path)
    with pytest.raises(TrainingError, match=r"step 3 is nan\nthe step could not be kept .*No space left"):
        run_virtual(driver.run(0))


# ---------------------------------------------------------------------------------- bad input


def test_algorithms_without_comparison_train_groups_of_one(tmp_path):
    world = FakeWorld()
    run_virtual(driver_on(world, tmp_path, algorithm=RewardAsAdvantage(group_size=1)).run(0))
    assert world.consumed.total() == 18


def test_groups_of_one_without_comparison_end_the_run(tmp_path):
    driver = driver_on(FakeWorld(), tmp_path, algorithm=Contrast(group_size=1))
    with pytest.raises(RunAborted, match=r"50 groups one after the other had nothing to learn from"):
        run_virtual(driver.run(0))


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
@pytest.mark.parametrize("algorithm", [RewardAsAdvantage(), Contrast()], ids=lambda a: type(a).__name__)
def test_a_reward_that_is_no_number_fails_only_its_episode(tmp_path, reward, algorithm: Algorithm):
    recorder = EventRecorder()
    world = FakeWorld(reward=lambda group_id, episode: reward if group_id == episode == 1 else float(episode))
    driver = driver_on(world, tmp_path, algorithm=replace(algorithm, group_size=3), recorder=recorder)
    run_virtual(driver.run(0))
    first = recorder.of(StepDone)[0].metrics
    assert first["reward/failed_frac"] == pytest.approx(1 / 9)
    assert first["reward/mean"] == pytest.approx((3 * 3 - 1) / 8)


@pytest.mark.parametrize("reward", [math.nan, -math.inf])
def test_rewards_that_are_never_finite_end_the_run(tmp_path, reward):
    driver = driver_on(FakeWorld(reward=lambda group_id, episode: reward), tmp_path)
    with pytest.raises(RunAborted, match=f"each of the first 16 groups failed.*its reward is {reward}"):
        run_virtual(driver.run(0))
