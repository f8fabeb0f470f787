"""The real driver curates its tasks: on fake workers and a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan
from rlsys.config.curation_section import CurationSection
from rlsys.contracts import GroupScores, Replacement, TrainStats, Workers
from rlsys.errors import RunAborted, WorkerDied
from rlsys.loop.checkpoint_files import find_latest
from rlsys.loop.driver import Driver
from rlsys.monitoring.events import EpisodeReplaced, GroupReissued, StepDone
from rlsys.testing import (
    EventRecorder,
    FakeActor,
    FakeReference,
    FakeRewards,
    FakeWorld,
    RewardAsAdvantage,
    run_virtual,
)
from rlsys.types import Episode, Group, GroupKey, Ref, Score, Task
from tests.groups import num_ok
from tests.simulate.world import CONSTANTS, NUM_TASKS, StopAfter, driver_on, go_on, latencies

SIZE = 4
EASY, HARD = "task-0", "task-1"


@dataclass(frozen=True, kw_only=True)
class Picky(RewardAsAdvantage):
    """Learns nothing from equal rewards."""

    group_size: int = SIZE

    def can_learn_from(self, group: Group) -> bool:
        return len({t.reward for _, t in group.trajectories()}) > 1


class ByTask(FakeRewards):
    """One task always succeeds and one never does; of the others, every second episode."""

    async def score(self, task: Task, group: Group) -> GroupScores:
        scored = await super().score(task, group)
        scores = (Score(self._reward(task, group.group_id, e)) for e in range(len(scored.scores)))
        return replace(scored, scores=tuple(scores))

    def _reward(self, task: Task, group_id: int, episode: int) -> float:
        known = {EASY: 1.0, HARD: 0.0}
        return known.get(task.id, float(episode % 2))


class Remembering(FakeActor):
    """Keeps what it trained."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self.groups: list[Group] = []

    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        self.groups += self.fetched
        return await super().train_step(plan, columns)


def with_rewards(world: FakeWorld, rewards: FakeRewards) -> Workers:
    return replace(world.workers(), rewards=rewards, composer=rewards)


def curated(
    world: FakeWorld, folder: Path, rules: CurationSection, *, look_again: int = 4, **limits: Any
) -> tuple[Driver, Remembering, EventRecorder]:
    """A driver whose rewards are `ByTask`, its actor, and what it says."""
    actor, recorder = Remembering(world), EventRecorder()
    constants = replace(CONSTANTS, min_episodes=SIZE, look_again=look_again)
    workers = limits.pop("workers", None) or with_rewards(world, ByTask(world))
    limits.setdefault("algorithm", RewardAsAdvantage(group_size=SIZE))
    workers = replace(workers, actor=actor)
    driver = driver_on(world, folder, workers=workers, recorder=recorder, curation=rules, constants=constants, **limits)
    return driver, actor, recorder


def counted(recorder: EventRecorder, name: str) -> list[float]:
    return [e.metrics[f"curation/{name}"] for e in recorder.of(StepDone)]


def test_mostly_solved_tasks_get_fewer_episodes_afterwards(tmp_path):
    driver, actor, recorder = curated(FakeWorld(), tmp_path, CurationSection(fewer_above=0.9), steps=14)
    run_virtual(driver.run(0))
    sizes = {task: [len(g.episodes) for g in actor.groups if g.task_id == task] for task in (EASY, HARD)}
    assert sizes == {EASY: [4, 2, 2, 2, 2, 2], HARD: [4] * 6}
    assert counted(recorder, "smaller_groups")[-1] == 5
    assert {len(g.episodes) for g in actor.groups if g.task_id not in (EASY, HARD)} == {4}
    assert "curation/passed_over" not in recorder.of(StepDone)[-1].metrics


def test_solved_and_hopeless_tasks_are_skipped_and_revisited(tmp_path):
    rules = CurationSection(success_within=(0.05, 0.95))
    driver, actor, recorder = curated(FakeWorld(), tmp_path, rules, steps=41, groups_per_step=1, look_again=2)
    run_virtual(driver.run(0))
    trained = [g.task_id for g in actor.groups]
    assert trained.count(EASY) == trained.count(HARD) == 3, "in the 1st, the 4th and the 7th epoch"
    assert min(trained.count(f"task-{i}") for i in range(2, NUM_TASKS)) == 7
    assert counted(recorder, "passed_over")[-1] == 2 * 4


def test_a_run_with_all_tasks_solved_ends_with_the_remedy(tmp_path):
    world = FakeWorld(reward=lambda group_id, episode: 1.0)
    rules = CurationSection(success_within=(0.0, 0.9))
    driver, _, _ = curated(world, tmp_path, rules, workers=world.workers(), steps=14, look_again=0)
    with pytest.raises(
        RunAborted, match=r"every task \(7 of them\) is below 0 or above 0\.9.*curation\.success_within"
    ):
        run_virtual(driver.run(0))


def test_groups_without_advantages_count_in_the_success_history(tmp_path):
    rules = CurationSection(success_within=(0.05, 0.95))
    driver, actor, recorder = curated(FakeWorld(), tmp_path, rules, steps=14, algorithm=Picky(), look_again=0)
    run_virtual(driver.run(0))
    assert {g.task_id for g in actor.groups}.isdisjoint({EASY, HARD})
    tallies = driver.queue.ledger.curation.state().tallies
    assert {task: (tallies[task].num_successes, tallies[task].num_episodes) for task in (EASY, HARD)} == {
        EASY: (SIZE, SIZE),
        HARD: (0, SIZE),
    }
    assert counted(recorder, "zero_advantage")[-1] == driver.queue.dropped["zero_advantage"] >= 2
    assert counted(recorder, "passed_over")[-1] >= 2 * 6


EVERYTHING = CurationSection(fewer_above=0.4, success_within=(0.1, 0.9))
"""All that a synchronous run may have: what is stored is older than the step that trains it."""


@given(seed=st.integers(0, 10**6), stop_at=st.integers(1, 11))
def test_synchronous_curation_does_not_depend_on_timing_or_interruption(seed, stop_at):
    def driver(folder: Path, number: int) -> tuple[Driver, Remembering]:
        world = FakeWorld(
            rollout_s=latencies(seed + number, 9.0),
            reward_s=latencies(seed + number + 1, 4.0),
            train_s=latencies(seed + number + 2, 3.0),
        )
        driver, actor, _ = curated(world, folder, EVERYTHING, look_again=2, steps=12, algorithm=Picky())
        return driver, actor

    with TemporaryDirectory() as folder:
        whole, trained = driver(Path(folder) / "whole", 0)
        run_virtual(whole.run(0))
        cut, _ = driver(Path(folder) / "cut", 100)
        cut.events.attach(StopAfter(cut, stop_at))
        run_virtual(cut.run(0))
        resumed, trained_too = driver(Path(folder) / "cut", 200)
        assert run_virtual(go_on(resumed)) == 12
    assert trained_too.world.weights == trained.world.weights
    assert resumed.queue.ledger.state() == whole.queue.ledger.state()
    assert whole.queue.ledger.curation.num_passed_over > 0


# --------------------------------------------------------------------------------------------------------- replacements


class MostlyFailing(ByTask):
    """Every third group of every task succeeds, in its last episode."""

    def _reward(self, task: Task, group_id: int, episode: int) -> float:
        return float(group_id % 3 == 0 and episode == SIZE - 1)


class Attentive(FakeReference):
    """Its column says which payload it was made of."""

    async def annotate(self, groups: Sequence[Group], column: Column) -> list[Group]:
        annotated = await super().annotate(groups, column)
        return [replace(g, columns={**g.columns, column: g.payload}) for g in annotated]


def composing_workers(world: FakeWorld) -> Workers:
    workers = with_rewards(world, MostlyFailing(world))
    return replace(workers, annotators={Column.REFERENCE_LOGPROBS: Attentive(world)})


def replaced(world: FakeWorld, folder: Path, more: int = 0, **limits: Any) -> tuple[Driver, Remembering, EventRecorder]:
    """A run with stored successes, which may be older than the bound by `more` versions."""
    driver, actor, recorder = curated(
        world,
        folder,
        CurationSection(stored_successes=5, stored_staleness=more),
        workers=composing_workers(world),
        look_again=4,
        **{
            "steps": 20,
            "max_staleness": 8,
            "algorithm": RewardAsAdvantage(group_size=SIZE, needs=frozenset({Column.REFERENCE_LOGPROBS})),
            **limits,
        },
    )
    run_virtual(driver.run(0))
    return driver, actor, recorder


UNEVEN: dict[str, Any] = {"rollout_s": lambda group_id: 2.0 + 7.0 * (group_id % 5)}


def versions_in(episodes: tuple[Episode, ...]) -> Iterator[int]:
    return (s.version for e in episodes for t in e.trajectories for turn in t.turns for s in turn.versions)


def payload_of(group: Group) -> tuple[Episode, ...]:
    assert isinstance(group.payload, tuple)
    return group.payload


@pytest.mark.parametrize("annotate_s", [0.0, 0.01, 5.0], ids=["before it is scored", "while", "after"])
def test_a_failed_group_is_trained_with_a_stored_success(tmp_path, annotate_s):
    driver, actor, recorder = replaced(FakeWorld(**UNEVEN, annotate_s=lambda group_id: annotate_s), tmp_path)
    events = recorder.of(EpisodeReplaced)
    by_group_id = {group.group_id: group for group in actor.groups}
    assert events and len(by_group_id) == len(actor.groups) == 60
    for told in events:
        group, donor = by_group_id[told.group_id], by_group_id[told.donor]
        assert payload_of(group)[told.episode] == payload_of(donor)[SIZE - 1], "its tokens, logprobs and versions"
        stored = replace(donor.episodes[SIZE - 1].without_order(), origin="stored")
        assert group.episodes[told.episode] == stored, "its reward"
        assert (group.task_id, num_ok(group)) == (donor.task_id, SIZE)
        acknowledged = {a.version: a.hash for a in group.weights}
        assert acknowledged == {span.version: f"hash-of-{span.version}" for span in group.versions}
    own = [e for g in actor.groups for e, m in zip(payload_of(g), g.episodes, strict=True) if m.origin == "own"]
    sampled = [turn for e in own for t in e.trajectories for turn in t.turns]
    assert sum(s.num_tokens for g in actor.groups for s in g.versions) == sum(len(turn.output_ids) for turn in sampled)
    assert all(group.columns == {Column.REFERENCE_LOGPROBS: group.payload} for group in actor.groups)
    assert counted(recorder, "replaced")[-1] == len(events)
    assert max(actor.world.staleness) <= 8
    assert (driver.queue.dropped, driver.queue.num_reissued, driver.queue.ledger.open) == ({}, 0, {})


def test_successes_older_than_the_bound_are_used_where_the_loss_corrects_for_them(tmp_path):
    def run(folder: Path, more: int) -> tuple[int, float, int]:
        world = FakeWorld(**UNEVEN)
        _, actor, recorder = replaced(world, folder, more=more, max_staleness=1, steps=40)
        own = max(version - group.oldest_version for version, group in world.trained)
        assert own <= 1, "what is sampled for a step keeps the bound"
        assert len(actor.groups) == 120
        ages = [version - age for version, group in world.trained for age in versions_in(payload_of(group))]
        return len(recorder.of(EpisodeReplaced)), counted(recorder, "too_old")[-1], max(ages)

    few, num_too_old, oldest = run(tmp_path / "within", 0)
    many, num_left, much_older = run(tmp_path / "beyond", 8)
    assert num_too_old > num_left and many > 2 * few
    assert oldest <= 1 < much_older <= 9


@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.sampled_from([1, 2, 4, 8]),
    window=st.sampled_from([1, 1, 3, 6]),
    losses=st.sets(st.integers(0, 6), max_size=3),
    num_replicas=st.integers(1, 8),
)
def test_stored_successes_stay_within_the_staleness_bound(seed, max_staleness, window, losses, num_replicas):
    world = FakeWorld(
        num_replicas=num_replicas,
        rollout_s=latencies(seed, 30.0),
        reward_s=latencies(seed + 1, 5.0),
        train_s=latencies(seed + 2, 4.0),
        weight_change="inflight" if seed % 2 else "between",
        payload_losses={"replace": losses},
    )
    with TemporaryDirectory() as folder:
        driver, _, _ = replaced(world, Path(folder), max_staleness=max_staleness, window=window, max_attempts=9)
    assert max(world.staleness) <= driver.queue.bound.versions
    assert driver.queue.dropped == {}
    assert world.consumed.total() == 60
    assert sorted(world.trained_group_ids) == list(range(60))


def test_a_tight_bound_leaves_successes_unused_and_counts_them(tmp_path):
    _, actor, recorder = replaced(FakeWorld(**UNEVEN), tmp_path, max_staleness=1)
    assert counted(recorder, "too_old")[-1] > 0
    assert max(actor.world.staleness) <= 1


def test_a_lost_stored_success_leaves_the_group_as_it_is(tmp_path):
    world = FakeWorld(**UNEVEN, payload_losses={"replace": {1}})
    driver, _, recorder = replaced(world, tmp_path)
    assert recorder.of(EpisodeReplaced)
    assert not recorder.of(GroupReissued)
    assert (driver.queue.num_reissued, world.consumed.total()) == (0, 60)


class DiesAtAReplacement(MostlyFailing):
    """Dies at its first replacement, and counts what it judges."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self.scored: Counter[int] = Counter()
        self.num_replacements = 0

    async def score(self, task: Task, group: Group) -> GroupScores:
        self.scored[group.group_id] += 1
        return await super().score(task, group)

    async def replace_episode(self, replacement: Replacement) -> Group:
        self.num_replacements += 1
        if self.num_replacements == 1:
            raise WorkerDied("reward-0", "replacing", "the process is gone")
        return await super().replace_episode(replacement)


def test_a_failed_replacement_is_retried_without_scoring_the_group_again(tmp_path):
    world = FakeWorld(**UNEVEN)
    rewards = DiesAtAReplacement(world)
    workers = with_rewards(world, rewards)
    driver, _, recorder = curated(
        world, tmp_path, CurationSection(stored_successes=5), workers=workers, steps=20, max_staleness=8
    )
    run_virtual(driver.run(0))
    events = recorder.of(EpisodeReplaced)
    assert set(rewards.scored.values()) == {1}
    assert len(events) == rewards.num_replacements - 1 == counted(recorder, "replaced")[-1]
    assert rewards.restarted == ["reward-0"]


def test_a_resume_keeps_replaced_groups_and_clears_stored_successes(tmp_path):
    def driver() -> tuple[Driver, Remembering, EventRecorder]:
        world = FakeWorld(**UNEVEN)
        workers = with_rewards(world, MostlyFailing(world))
        return curated(world, tmp_path, CurationSection(stored_successes=5), workers=workers, steps=20, max_staleness=8)

    cut, _, told = driver()
    cut.events.attach(StopAfter(cut, 4))
    assert run_virtual(cut.run(0)) == 4
    replaced = {event.group_id for event in told.of(EpisodeReplaced)}
    finished = [replace(row.group, key=GroupKey(row.group_id, 0)) for row in cut.queue.finished_groups]
    waiting = {group.group_id: group for group in finished if group.group_id in replaced}
    resumed, actor, _ = driver()

    async def restored() -> int:
        checkpoint = find_latest(tmp_path / "checkpoints")
        assert checkpoint is not None
        version = await resumed.restore(checkpoint)
        assert resumed.queue.ledger.curation.metrics()["curation/stored"] == 0
        return await resumed.run(version)

    assert run_virtual(restored()) == 20
    assert waiting
    assert {group.group_id: group for group in actor.groups if group.group_id in waiting} == waiting


def test_history_after_a_resume_covers_everything_that_was_trained(tmp_path):
    rules = CurationSection(fewer_above=0.9, stored_successes=2)
    parts = [curated(FakeWorld(**UNEVEN), tmp_path, rules, steps=14, max_staleness=3) for _ in range(2)]
    (cut, first, _), (resumed, second, _) = parts
    cut.events.attach(StopAfter(cut, 6))
    assert run_virtual(cut.run(0)) == 6
    assert cut.queue.ledger.state().curation.scored, "groups were scored and not trained"
    assert run_virtual(go_on(resumed)) == 14
    trained = [*first.groups, *second.groups]
    episodes = {task: sum(len(g.episodes) for g in trained if g.task_id == task) for task in (EASY, HARD)}
    tallies = resumed.queue.ledger.curation.state().tallies
    assert {task: tallies[task].num_episodes for task in (EASY, HARD)} == episodes
    assert {task: tallies[task].rate for task in (EASY, HARD)} == {EASY: 1.0, HARD: 0.0}
    assert any(len(g.episodes) == SIZE // 2 for g in second.groups if g.task_id == EASY)
