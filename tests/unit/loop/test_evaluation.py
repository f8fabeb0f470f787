"""Evaluation: the same rollouts and rewards as in training, without a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from rlsys.config.eval_section import EvalSection
from rlsys.config.run_sections import LimitsSection
from rlsys.errors import RlsysError, RunAborted, TaskTooLong, WeightsMismatch, first_of
from rlsys.loop.evaluation import EvalMetrics, Evaluator
from rlsys.loop.failure_policy import FailurePolicy
from rlsys.monitoring.events import CautionRaised, Events, WorkerFailed
from rlsys.testing import EventRecorder, FakeRewards, FakeRollouts, FakeWorld, Fault, run_virtual, tasks
from rlsys.types import Assignment, Group


@dataclass
class Watched:
    """Fake rollouts that know how many groups were open at once, and refuse some tasks."""

    world: FakeWorld
    too_long: frozenset[str] = frozenset()
    most_open: int = 0
    assignments: list[Assignment] = field(default_factory=list)
    _num_open: int = 0

    def __post_init__(self) -> None:
        self.world.relay = 0
        self._rollouts = FakeRollouts(self.world)
        fake = self._rollouts
        self.restart, self.loads = fake.restart, fake.loads
        self.drain, self.placements = fake.drain, fake.placements

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        self.assignments.append(assignment)
        if assignment.task.id in self.too_long:
            raise TaskTooLong("rollout-0", "encoding a prompt", "2000 tokens")
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            return await self._rollouts.run(assignment)
        finally:
            self._num_open -= 1


def evaluator_on(
    rollouts: Watched,
    sets: Mapping[str, int],
    *,
    samples: int = 2,
    recorder: EventRecorder | None = None,
) -> Evaluator:
    """An evaluation of data sets of so many tasks, three of them open at once."""
    return Evaluator(
        rollouts,
        FakeRewards(rollouts.world),
        FailurePolicy(LimitsSection(max_attempts=3, max_zero_advantage_groups=4)),
        Events([recorder] if recorder else []),
        {name: tasks(count) for name, count in sets.items()},
        EvalSection(samples=samples, temperature=1.0),
        seed=0,
        max_open=3,
    )


def measured(
    world: FakeWorld, *too_long: str, num_tasks: int = 4, recorder: EventRecorder | None = None
) -> EvalMetrics:
    return run_virtual(
        evaluator_on(Watched(world, frozenset(too_long)), {"held_out": num_tasks}, recorder=recorder).measure(
            "held_out"
        )
    )


def test_every_task_is_sampled_and_scored():
    result = measured(FakeWorld(reward=lambda group_id, episode: float(group_id < 2 and episode == 0)))
    assert (result.num_tasks, result.samples, result.mean) == (4, 2, 0.25)
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert (result.length_mean, result.truncated_frac, result.failed_frac) == (3, 0, 0)


@pytest.mark.parametrize(("reward", "is_doubted"), [(0.62, True), (0.0, False), (1.0, False), (1 - 1e-12, False)])
def test_a_success_that_no_reward_reaches_is_doubted(reward, is_doubted):
    recorder = EventRecorder()
    result = measured(FakeWorld(reward=lambda group_id, episode: reward), recorder=recorder)
    assert result.pass_at[1] == float(reward > 0.9)
    said = [event.sentence for event in recorder.of(CautionRaised)]
    assert bool(said) == is_doubted
    if is_doubted:
        assert said[0].startswith(
            "eval/held_out/pass@k counts no sample: the greatest reward is 0.62, of 8 of 8 samples"
        )


def test_overlong_prompts_are_counted_and_end_nothing():
    world = FakeWorld(reward=lambda group_id, episode: 1.0)
    rollouts = Watched(world, frozenset({"task-1", "task-3"}))
    result = run_virtual(evaluator_on(rollouts, {"d": 4}).measure("d"))
    assert (result.num_tasks, result.num_too_long, result.mean) == (2, 2, 1.0)


def test_an_evaluation_without_scores_is_an_error_with_the_reason():
    with pytest.raises(RlsysError, match="evaluation on held_out: no sample could be scored: the judge raised"):
        measured(FakeWorld(reward=lambda group_id, episode: None))


@pytest.mark.parametrize("fault", [Fault.DIES, Fault.HANGS])
def test_worker_faults_are_retried_with_the_same_result(fault):
    recorder = EventRecorder()
    world = FakeWorld(rollout_faults={1: fault, 5: fault}, reward_faults={2: fault})
    assert measured(world, num_tasks=6, recorder=recorder) == measured(FakeWorld(), num_tasks=6)
    told = [e.worker for e in recorder.of(WorkerFailed)]
    assert {"rollout-1", "reward-0"} <= set(told)
    assert len(set(told)) == len(told), "each once, however many groups hit it"


def test_lost_payloads_are_rolled_out_again_with_equal_results():
    assert measured(FakeWorld(payload_losses={"score": {0, 3}})) == measured(FakeWorld())


def test_each_rollout_of_a_task_is_another_attempt():
    rollouts = Watched(FakeWorld(rollout_faults={1: Fault.DIES}, payload_losses={"score": {0}}))
    run_virtual(evaluator_on(rollouts, {"d": 3}).measure("d"))
    keys = [assignment.key for assignment in rollouts.assignments]
    assert len(set(keys)) == len(keys) == 5
    assert {key.group_id for key in keys if key.attempt == 1} == {0, 1, 2}


def test_a_payload_that_is_lost_every_time_ends_the_evaluation():
    with pytest.raises(ExceptionGroup) as raised:
        measured(FakeWorld(payload_losses={"score": range(100)}))
    error = first_of(raised.value)
    assert isinstance(error, RunAborted)
    assert "gave up after 3 attempts at one group; the last failure: the bytes of group" in str(error)


def test_repeated_failure_ends_the_evaluation_naming_the_worker():
    with pytest.raises(ExceptionGroup) as raised:
        measured(FakeWorld(rollout_faults=dict.fromkeys(range(100), Fault.DIES)))
    error = first_of(raised.value)
    assert isinstance(error, RunAborted)
    assert "gave up after 3 attempts at one group; the last failure: rollout-" in str(error)


def test_a_group_refused_by_the_check_is_reissued_after_replacement():
    refused: list[str] = []

    async def check(group: Group) -> None:
        if not refused:
            refused.append(group.replica)
            raise WeightsMismatch(group.replica, "rolling out", "tokens of another version")

    recorder, rollouts = EventRecorder(), Watched(FakeWorld())
    sampled = run_virtual(evaluator_on(rollouts, {"d": 4}, recorder=recorder).sample("d", check=check))
    assert [group is not None for group in sampled] == [True] * 4
    assert [e.worker for e in recorder.of(WorkerFailed)] == refused
    assert len(rollouts.assignments) == 5


def timed(evaluator: Evaluator, *sets: str) -> float:
    """Virtual seconds to measure all of these at once."""

    async def measure_all() -> float:
        await asyncio.gather(*(evaluator.measure(name) for name in sets))
        return asyncio.get_running_loop().time()

    return run_virtual(measure_all())


def test_tasks_run_concurrently_up_to_the_limit_with_distinct_seeds():
    rollouts = Watched(FakeWorld(rollout_s=lambda group_id: 1.0 + group_id))
    assert timed(evaluator_on(rollouts, {"a": 6, "b": 6}), "a", "b") < 2 * sum(1.1 + group_id for group_id in range(6))
    assert rollouts.most_open == 3
    assert len({a.seed for a in rollouts.assignments}) == 6
    assert {a.size for a in rollouts.assignments} == {2}


def test_a_data_set_is_measured_alike_alone_and_beside_others():
    def assigned(*sets: str) -> set[tuple[str, int]]:
        rollouts = Watched(FakeWorld())
        timed(evaluator_on(rollouts, {"a": 4, "b": 7}), *sets)
        return {(a.task.id, a.seed) for a in rollouts.assignments}

    assert assigned("a") < assigned("b") == assigned("a", "b")
