"""Evaluation beside training, on fake workers and a virtual clock: pinned versions, faults, stop, resume."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.eval_section import EvalSection
from rlsys.contracts import GroupScores, Workers
from rlsys.errors import NoProgress, RunAborted
from rlsys.loop.checkpoint_files import find_latest, step_of
from rlsys.loop.checkpoint_scores import BestCheckpoints
from rlsys.loop.driver import Driver
from rlsys.loop.evaluation import EvaluationLane, Evaluator
from rlsys.monitoring.events import EvalDone, Event, FileSkipped, StepDone, WorkerRestarted
from rlsys.replay.rollout_parquet import read_records
from rlsys.testing import (
    EventRecorder,
    FakePinnedRollouts,
    FakeRewards,
    FakeRollouts,
    FakeWorld,
    Fault,
    run_virtual,
    tasks,
)
from rlsys.types import Acknowledged, Assignment, Group, Score, Task, VersionSpan
from tests.simulate.world import driver_on, go_on, latencies

NUM_TASKS = {"held_out": 5, "hard": 3}
RULES = EvalSection(samples=2, temperature=1.0)


class TellingRewards(FakeRewards):
    """Every reward tells the version it was sampled from, and differs from sample to sample."""

    async def score(self, task: Task, group: Group) -> GroupScores:
        scored = await super().score(task, group)
        version = group.versions[-1].version
        return replace(scored, scores=tuple(Score(version + 0.1 * e) for e in range(len(group.episodes))))


class TellingWorld(FakeWorld):
    def workers(self) -> Workers:
        return replace(super().workers(), rewards=TellingRewards(self))


def evaluated(
    world: FakeWorld,
    folder: Path,
    recorder: EventRecorder,
    *,
    every: int = 2,
    steps: int = 6,
    max_staleness: int = 0,
    max_attempts: int = 3,
    no_progress_s: float = 10_000.0,
) -> Driver:
    """A run of `steps` steps, evaluated on two data sets."""
    driver = driver_on(
        world,
        folder,
        steps=steps,
        max_staleness=max_staleness,
        max_attempts=max_attempts,
        no_progress_s=no_progress_s,
        recorder=recorder,
    )
    rollouts = driver.workers.evaluation
    assert rollouts is not None
    sets = {name: tasks(count) for name, count in NUM_TASKS.items()}
    rules = RULES.model_copy(update={"every": every})
    failures = driver.dropped_groups.failures
    evaluator = Evaluator(rollouts, driver.workers.rewards, failures, driver.events, sets, rules, 0, 4)
    driver.evaluation = EvaluationLane(evaluator, rollouts, driver.weights, steps, folder / "evaluations")
    return driver


def steps_of(recorder: EventRecorder, dataset: str = "held_out") -> list[int]:
    """Steps evaluated on a data set, in the order in which they ended."""
    return [e.step for e in recorder.of(EvalDone) if e.dataset == dataset]


@dataclass
class At:
    """A sink that acts once, after the first event that is wanted."""

    wanted: Callable[[Event], bool]
    act: Callable[[], object]
    is_over: bool = False

    def handle(self, event: Event, time_s: float) -> None:
        if not self.is_over and self.wanted(event):
            self.is_over = True
            self.act()

    def close(self) -> None:
        pass


def is_step(number: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, StepDone) and event.step == number


# ------------------------------------------------------------------------------------------------- what is measured


@given(
    seed=st.integers(0, 10**6),
    every=st.integers(1, 4),
    max_staleness=st.sampled_from([0, 1, 4]),
    inflight=st.booleans(),
    broadcast_s=st.sampled_from([0.0, 0.7, 5.0]),
    replicas=st.integers(1, 3),
)
def test_exactly_the_due_versions_are_measured_under_any_latencies(
    seed, every, max_staleness, inflight, broadcast_s, replicas
):
    world = TellingWorld(
        rollout_s=latencies(seed, 9.0),
        train_s=latencies(seed + 1, 3.0),
        eval_s=latencies(seed + 2, 30.0),
        broadcast_s=broadcast_s,
        num_eval_replicas=replicas,
        weight_change="inflight" if inflight else "between",
    )
    recorder = EventRecorder()
    with TemporaryDirectory() as folder:
        driver = evaluated(world, Path(folder), recorder, every=every, steps=7, max_staleness=max_staleness)
        assert run_virtual(driver.run(0)) == 7
    for dataset in NUM_TASKS:
        assert steps_of(recorder, dataset) == sorted({*range(0, 8, every), 7})
    for done in recorder.of(EvalDone):
        assert done.metrics[f"eval/{done.dataset}/mean"] == pytest.approx(done.step + 0.05)
        assert done.hash == world.hash(done.step)


def test_it_equals_an_evaluation_of_that_version_without_training(tmp_path):
    recorder = EventRecorder()
    run_virtual(evaluated(TellingWorld(), tmp_path, recorder).run(0))
    for done in recorder.of(EvalDone):
        world = FakeWorld()
        world.relay = done.step
        driver = driver_on(world, tmp_path)
        sets = {done.dataset: tasks(NUM_TASKS[done.dataset])}
        failures = driver.dropped_groups.failures
        alone = Evaluator(FakeRollouts(world), TellingRewards(world), failures, driver.events, sets, RULES, 0, 4)
        assert run_virtual(alone.measure(done.dataset)).as_metrics(done.dataset) == done.metrics


def test_every_evaluation_file_has_its_measures_and_weight_hash(tmp_path):
    recorder = EventRecorder()
    run_virtual(evaluated(FakeWorld(), tmp_path, recorder, every=4).run(0))
    files = sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "evaluations").rglob("*") if p.is_file())
    names = [f"{dataset}/step_00000{step}.json" for dataset in ("hard", "held_out") for step in (0, 4, 6)]
    assert files == [f"evaluations/{name}" for name in names]
    row = json.loads((tmp_path / "evaluations/hard/step_000004.json").read_text())
    assert (row["step"], row["dataset"], row["hash"]) == (4, "hard", "hash-of-4")
    assert (row["num_tasks"], row["samples"]) == (3, 2)


# ------------------------------------------------------------------------------------------- training and waiting


def test_the_samples_of_every_evaluation_are_kept_with_their_failures(tmp_path):
    """Also those without a score, with the reason."""
    world = FakeWorld(reward=lambda group_id, episode: None if episode else 1.0)
    driver = evaluated(world, tmp_path, recorder := EventRecorder(), every=3, steps=3)
    assert driver.evaluation is not None
    driver.evaluation.record = driver.workers.actor.record_evaluated
    run_virtual(driver.run(0))
    for done in recorder.of(EvalDone):
        records = read_records(tmp_path / "evaluations" / done.dataset / f"step_{done.step:06d}.parquet")
        assert [record.task.id for record in records] == [f"task-{i}" for i in range(NUM_TASKS[done.dataset])]
        outcomes = [e.trajectories[0].outcome for record in records for e in record.episodes]
        assert sum(outcome.is_failed for outcome in outcomes) / len(outcomes) == 0.5
        assert done.metrics[f"eval/{done.dataset}/failed_frac"] == 0.5
        assert done.failures == {outcomes[1].reason: NUM_TASKS[done.dataset]}
    assert len(recorder.of(EvalDone)) == 4


def test_samples_that_cannot_be_written_cost_only_their_file(tmp_path):
    async def broken(path: Path, version: int, evaluated: object) -> None:
        raise OSError("No space left on device")

    driver = evaluated(FakeWorld(), tmp_path, recorder := EventRecorder(), every=3, steps=3)
    assert driver.evaluation is not None
    driver.evaluation.record = broken
    run_virtual(driver.run(0))
    assert steps_of(recorder) == [0, 3]
    assert {e.problem for e in recorder.of(FileSkipped)} == {"No space left on device"}


def test_training_goes_on_while_a_version_is_measured(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(eval_s=lambda group_id: 3.0)
    run_virtual(evaluated(world, tmp_path, recorder, every=6).run(0))
    kinds = [(type(e).__name__, e.step) for e in recorder.events if isinstance(e, StepDone | EvalDone)]
    assert kinds.index(("StepDone", 2)) < kinds.index(("EvalDone", 0)) < kinds.index(("StepDone", 6))
    assert [e.metrics["time/eval_wait"] for e in recorder.of(StepDone)] == [0.0] * 6


def test_an_evaluation_changes_nothing_of_what_is_trained(tmp_path):
    def trained(every: int | None) -> FakeWorld:
        world = FakeWorld(train_s=latencies(1, 3.0), rollout_s=latencies(2, 9.0), eval_s=latencies(3, 40.0))
        folder = tmp_path / str(every)
        driver = evaluated(world, folder, EventRecorder(), every=every) if every else driver_on(world, folder)
        run_virtual(driver.run(0))
        return world

    assert trained(1).weights == trained(3).weights == trained(None).weights


def test_training_waits_for_an_evaluation_only_when_another_is_due(tmp_path):
    recorder = EventRecorder()
    run_virtual(evaluated(FakeWorld(eval_s=lambda group_id: 20.0), tmp_path, recorder, every=2).run(0))
    assert [e.metrics["time/eval_wait"] > 0 for e in recorder.of(StepDone)] == [False, False, True, False, True, False]
    assert steps_of(recorder) == [0, 2, 4, 6]


def test_the_learner_waits_until_the_version_is_pinned(tmp_path):
    recorder = EventRecorder()
    run_virtual(evaluated(FakeWorld(broadcast_s=5.0), tmp_path, recorder, every=3).run(0))
    waited = [e.metrics["time/eval_wait"] for e in recorder.of(StepDone)]
    assert waited == pytest.approx([5.0, 0, 0, 5.0, 0, 0])


def test_the_run_waits_for_its_last_evaluation(tmp_path):
    recorder = EventRecorder()
    world = FakeWorld(eval_s=lambda group_id: 90.0)
    run_virtual(evaluated(world, tmp_path, recorder, every=100, steps=3, no_progress_s=100.0).run(0))
    assert steps_of(recorder) == [0, 3]
    assert isinstance(recorder.events[-1], EvalDone)


@pytest.mark.parametrize("version", [2, 6], ids=["that the learner waits for", "at the end of the run"])
def test_a_stuck_evaluation_ends_the_run_and_is_named(tmp_path, version):
    answered = sum(NUM_TASKS.values()) * {2: 1, 6: 3}[version]
    hanging = dict.fromkeys(range(answered, 1000), Fault.HANGS)
    world = FakeWorld(eval_faults=hanging, group_s=1e6)
    with pytest.raises(NoProgress, match=rf"nothing moved for 500 s(.|\n)*evaluation of version {version}"):
        run_virtual(evaluated(world, tmp_path, EventRecorder(), no_progress_s=500.0).run(0))


# --------------------------------------------------------------------------------------------------------- faults


@given(
    eval_faults=st.dictionaries(
        st.integers(0, 40), st.sampled_from([Fault.DIES, Fault.HANGS, Fault.WRONG_WEIGHTS]), max_size=4
    ),
    reward_faults=st.dictionaries(st.integers(0, 60), st.sampled_from([Fault.DIES, Fault.HANGS]), max_size=3),
    replicas=st.integers(1, 2),
)
def test_worker_faults_change_neither_evaluation_nor_training(eval_faults, reward_faults, replicas):
    def run(**faults) -> tuple[dict, int]:
        recorder, world = EventRecorder(), TellingWorld(num_eval_replicas=replicas, **faults)
        with TemporaryDirectory() as folder:
            run_virtual(evaluated(world, Path(folder), recorder, max_attempts=10).run(0))
        return {(e.step, e.dataset): e.metrics for e in recorder.of(EvalDone)}, world.weights

    assert run(eval_faults=eval_faults, reward_faults=reward_faults) == run()


class Straying(FakePinnedRollouts):
    """Samples once from the newest version, which was published and is acknowledged, while an older one is pinned."""

    has_strayed = False

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        (group,) = await super().run(assignment)
        newest = self.world.relay
        if self.has_strayed or newest == assignment.version:
            return (group,)
        self.has_strayed = True
        spans = tuple(VersionSpan(newest, s.num_tokens) for s in group.versions)
        weights = (Acknowledged(group.replica, newest, self.world.hash(newest)),)
        return (replace(group, versions=spans, weights=weights),)


class StrayingWorld(TellingWorld):
    def workers(self) -> Workers:
        return replace(super().workers(), evaluation=Straying(self))


@pytest.mark.parametrize(
    "world",
    [StrayingWorld(eval_s=lambda group_id: 5.0), TellingWorld(eval_faults={3: Fault.WRONG_WEIGHTS})],
    ids=["another version", "another hash"],
)
def test_an_evaluation_replica_with_other_weights_is_replaced(tmp_path, world):
    recorder = EventRecorder()
    run_virtual(evaluated(world, tmp_path, recorder).run(0))
    assert [e.worker for e in recorder.of(WorkerRestarted)] == ["eval-0"]
    means = [e.metrics["eval/held_out/mean"] for e in recorder.of(EvalDone) if e.dataset == "held_out"]
    assert means == pytest.approx([0.05, 2.05, 4.05, 6.05])


def test_repeated_evaluation_failure_ends_the_run_naming_the_worker(tmp_path):
    world = FakeWorld(eval_faults=dict.fromkeys(range(1000), Fault.DIES))
    with pytest.raises(RunAborted, match=r"gave up after 3 attempts.*eval-0.*the process is gone"):
        run_virtual(evaluated(world, tmp_path, EventRecorder()).run(0))


def test_a_failed_last_evaluation_ends_the_run_after_saving(tmp_path):
    world = FakeWorld(eval_faults=dict.fromkeys(range(8, 1000), Fault.DIES))
    with pytest.raises(RunAborted, match=r"eval-0"):
        run_virtual(evaluated(world, tmp_path, EventRecorder(), every=100).run(0))
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000006"


def test_results_that_cannot_be_written_are_still_reported(tmp_path):
    (tmp_path / "evaluations").write_text("a file where a folder should be")
    recorder = EventRecorder()
    assert run_virtual(evaluated(FakeWorld(), tmp_path, recorder).run(0)) == 6
    assert len(recorder.of(FileSkipped)) == len(recorder.of(EvalDone)) == 8


# ------------------------------------------------------------------------------------------------- stop and resume


async def seconds(work) -> float:
    await work
    return asyncio.get_running_loop().time()


def test_a_stop_abandons_the_running_evaluation_and_saves(tmp_path):
    recorder = EventRecorder()
    driver = evaluated(FakeWorld(eval_s=lambda group_id: 500.0), tmp_path, recorder, every=2)
    driver.events.attach(At(is_step(1), driver.stop))
    assert run_virtual(seconds(driver.run(0))) < 10
    assert recorder.of(EvalDone) == []
    assert driver.evaluation is not None and driver.evaluation.was_given_up
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000001"


@pytest.mark.parametrize("stop_s", [5.0, 50.0], ids=["while training", "while the learner waits"])
def test_a_stop_at_any_time_leaves_the_last_step_saved(tmp_path, stop_s):
    driver = evaluated(FakeWorld(eval_s=lambda group_id: 500.0), tmp_path, EventRecorder(), every=3)

    async def stopped() -> int:
        asyncio.get_running_loop().call_later(stop_s, driver.stop)
        reached = await driver.run(0)
        assert asyncio.get_running_loop().time() < 60
        return reached

    reached = run_virtual(stopped())
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / f"step_{reached:06d}"


def test_a_stop_while_a_version_is_pinned_begins_no_evaluation(tmp_path):
    recorder = EventRecorder()
    driver = evaluated(FakeWorld(broadcast_s=50.0, eval_s=lambda group_id: 500.0), tmp_path, recorder)

    async def stopped() -> int:
        asyncio.get_running_loop().call_later(10.0, driver.stop)
        return await driver.run(0)

    assert run_virtual(seconds(stopped())) < 60
    assert recorder.of(StepDone) == recorder.of(EvalDone) == []
    assert driver.evaluation is not None and driver.evaluation.was_given_up


def test_a_stop_during_the_last_evaluation_says_so(tmp_path):
    recorder = EventRecorder()
    driver = evaluated(FakeWorld(), tmp_path, recorder, every=100)
    driver.events.attach(At(is_step(6), lambda: asyncio.get_running_loop().call_later(0.5, driver.stop)))
    assert run_virtual(driver.run(0)) == 6
    assert driver.evaluation is not None and driver.evaluation.was_given_up
    assert steps_of(recorder) == [0]


def test_a_stop_without_an_evaluation_under_way_gives_nothing_up(tmp_path):
    driver = evaluated(FakeWorld(train_s=lambda version: 50.0), tmp_path, EventRecorder(), every=4)
    driver.events.attach(At(is_step(3), driver.stop))
    assert run_virtual(driver.run(0)) == 3
    assert driver.evaluation is not None and not driver.evaluation.was_given_up


def resumed(world: FakeWorld, folder: Path) -> list[tuple[int, str]]:
    """What a run evaluates that goes on from the latest checkpoint in `folder`, in order."""
    recorder = EventRecorder()
    driver = evaluated(world, folder, recorder)
    run_virtual(go_on(driver))
    return [(e.step, e.dataset) for e in recorder.of(EvalDone)]


def cut_after(step: int, folder: Path, world: FakeWorld) -> None:
    """A run that is stopped as soon as it has saved that step, whatever it was doing."""
    driver = evaluated(world, folder, EventRecorder())
    driver.events.attach(At(is_step(step), driver.stop))
    assert run_virtual(driver.run(0)) == step


LATER = [(4, "hard"), (4, "held_out"), (6, "hard"), (6, "held_out")]


def test_a_resume_measures_only_what_was_abandoned(tmp_path):
    cut_after(2, tmp_path, FakeWorld())
    assert sorted(resumed(FakeWorld(), tmp_path)) == [(2, "hard"), (2, "held_out"), *LATER]
    assert resumed(FakeWorld(), tmp_path) == []


def test_a_partly_done_evaluation_is_completed_after_a_resume(tmp_path):
    cut_after(2, tmp_path, FakeWorld())
    run_virtual(evaluated(FakeWorld(), tmp_path / "whole", EventRecorder()).run(0))
    (tmp_path / "evaluations/hard").mkdir(exist_ok=True)
    done = "evaluations/hard/step_000002.json"
    (tmp_path / "whole" / done).rename(tmp_path / done)
    assert sorted(resumed(FakeWorld(), tmp_path)) == [(2, "held_out"), *LATER]


def test_other_weights_of_the_same_step_are_measured_again(tmp_path):
    class OtherWorld(FakeWorld):
        def hash(self, version: int) -> str:
            return f"other-hash-of-{version}" if version > 4 else super().hash(version)

    run_virtual(evaluated(FakeWorld(), tmp_path / "whole", EventRecorder()).run(0))
    run_virtual(evaluated(FakeWorld(), tmp_path, EventRecorder(), steps=4).run(0))
    stale = "evaluations/hard/step_000006.json"
    (tmp_path / "whole" / stale).rename(tmp_path / stale)
    assert sorted(resumed(OtherWorld(), tmp_path)) == [(6, "hard"), (6, "held_out")]


def due(folder: Path, num_hard: int = NUM_TASKS["hard"], max_open: int = 4, **rules: float) -> list[tuple[int, str]]:
    """What is measured where a run goes on from its last checkpoint with these rules and tasks."""
    recorder = EventRecorder()
    driver = evaluated(FakeWorld(), folder, recorder)
    lane = driver.evaluation
    assert isinstance(lane, EvaluationLane)
    lane.evaluator.rules = lane.evaluator.rules.model_copy(update=rules)
    lane.evaluator.max_open = max_open
    lane.evaluator.sets = {**lane.evaluator.sets, "hard": tasks(num_hard)}
    run_virtual(go_on(driver))
    return sorted((e.step, e.dataset) for e in recorder.of(EvalDone))


def test_changed_rules_or_tasks_measure_the_same_weights_again(tmp_path):
    run_virtual(evaluated(FakeWorld(), tmp_path, EventRecorder()).run(0))
    assert due(tmp_path) == []
    assert due(tmp_path, num_hard=2) == [(6, "hard")]
    both = [(6, "hard"), (6, "held_out")]
    assert due(tmp_path, samples=3) == both
    assert due(tmp_path, temperature=0.5) == both
    row = json.loads((tmp_path / "evaluations/hard/step_000006.json").read_text())
    assert (row["samples"], row["temperature"], row["seed"], row["pass_reward"]) == (2, 0.5, 0, 1.0)
    assert due(tmp_path, temperature=0.5, max_open=2) == []


def test_the_best_checkpoint_is_kept_across_a_resume(tmp_path):
    """The mean of a version depends on its weights; a second session must know the results of the first."""
    recorder = EventRecorder()

    def train(steps: int) -> BestCheckpoints:
        driver = evaluated(TellingWorld(), tmp_path, recorder, every=1, steps=steps)
        assert driver.evaluation is not None
        best = BestCheckpoints(1, "eval/held_out/mean", every=1)
        driver.saver.checkpoints.best, driver.evaluation.best, driver.saver.checkpoints.keep_last = best, best, 1
        run_virtual(driver.run(0) if not find_latest(tmp_path / "checkpoints") else go_on(driver))
        return best

    train(5)
    assert train(10).scores.keys() == set(range(11))
    means = {e.step: e.metrics["eval/held_out/mean"] for e in recorder.of(EvalDone) if e.dataset == "held_out"}
    best = max(range(1, 10), key=lambda step: (means[step], step))
    kept = {step_of(path) for path in (tmp_path / "checkpoints").glob("step_*")}
    assert {best, 10} <= kept <= {best, 9, 10}


def impatient(world: FakeWorld, folder: Path, recorder: EventRecorder, *, patience: int = 2, lowest: bool = True):
    """A run whose lowest mean is that of version 0, or whose highest is always the newest."""
    driver = evaluated(world, folder, recorder, steps=20)
    assert driver.evaluation is not None
    best = BestCheckpoints(1, "eval/held_out/mean", not lowest, every=2, patience=patience)
    driver.saver.checkpoints.best = driver.evaluation.best = best
    return driver


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_a_run_ends_after_evaluations_without_improvement(tmp_path, patience):
    recorder = EventRecorder()
    driver = impatient(TellingWorld(eval_s=lambda group_id: 3.0), tmp_path, recorder, patience=patience)
    reached = run_virtual(driver.run(0))
    assert steps_of(recorder)[: patience + 1] == [*range(0, 2 * patience + 1, 2)]
    assert 2 * patience <= reached <= 2 * (patience + 1)
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / f"step_{reached:06d}"
    assert driver.early_stop == (
        f"stopped early: eval/held_out/mean did not improve in {len(steps_of(recorder)) - 1} evaluations; "
        "the best value is 0.05, first reached at step 0"
    )


def test_a_run_that_improves_is_not_stopped(tmp_path):
    driver = impatient(TellingWorld(), tmp_path, EventRecorder(), patience=1, lowest=False)
    assert (run_virtual(driver.run(0)), driver.early_stop) == (20, "")


def test_a_resumed_run_remembers_evaluations_without_improvement(tmp_path):
    recorder = EventRecorder()
    driver = impatient(TellingWorld(), tmp_path, recorder, patience=4)
    driver.events.attach(At(lambda e: isinstance(e, EvalDone) and (e.step, e.dataset) == (4, "held_out"), driver.stop))
    assert run_virtual(driver.run(0)) < 8
    assert not driver.early_stop
    assert run_virtual(go_on(impatient(TellingWorld(), tmp_path, recorder, patience=4))) in (8, 9, 10)
    assert steps_of(recorder)[:5] == [0, 2, 4, 6, 8]


def test_a_stopped_run_goes_on_only_with_more_patience(tmp_path):
    reached = run_virtual(impatient(TellingWorld(), tmp_path, EventRecorder()).run(0))
    recorder = EventRecorder()
    again = impatient(TellingWorld(), tmp_path, recorder)
    assert (run_virtual(go_on(again)), recorder.of(StepDone)) == (reached, [])
    assert again.early_stop
    assert run_virtual(go_on(impatient(TellingWorld(), tmp_path, recorder, patience=4))) > reached
