"""Evaluation: the same rollouts and rewards as in training, without a learner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rlsys.contracts import RolledOut
from rlsys.errors import RlsysError, TaskTooLong
from rlsys.evaluation import EvalResult, evaluate
from rlsys.testing import FakeRewards, FakeRollouts, FakeWorld, run_virtual, tasks
from rlsys.types import Assignment


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
        self.restart, self.versions = self._rollouts.restart, self._rollouts.versions

    async def run(self, assignment: Assignment) -> RolledOut:
        self.assignments.append(assignment)
        if assignment.task.id in self.too_long:
            raise TaskTooLong("rollout-0", "encoding a prompt", "2000 tokens")
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            return await self._rollouts.run(assignment)
        finally:
            self._num_open -= 1


def judged(
    reward: Callable[[int, int], float | None], num_tasks: int = 4, *, samples: int = 2, too_long: tuple[str, ...] = ()
) -> EvalResult:
    world = FakeWorld(reward=reward)
    rollouts = Watched(world, frozenset(too_long))
    work = evaluate(rollouts, FakeRewards(world), tasks(num_tasks), samples=samples, seed=0, max_open=3)
    return run_virtual(work)


def test_the_mean_is_over_tasks_and_best_over_the_samples_of_each():
    result = judged(lambda serial, episode: float(serial < 2 and episode == 0))
    assert (result.num_tasks, result.samples) == (4, 2)
    assert (result.mean, result.best) == (0.25, 0.5)
    assert result.mean_ci95 == pytest.approx(1.96 * math.sqrt(1 / 12) / 2)
    assert (result.length_mean, result.truncated_frac, result.failed_frac) == (3, 0, 0)


def test_samples_that_could_not_be_judged_count_in_nothing_else():
    result = judged(lambda serial, episode: None if serial == 0 or episode == 1 else 1.0)
    assert (result.num_tasks, result.mean, result.best) == (3, 1.0, 1.0)
    assert result.failed_frac == 1 - 3 / 8


def test_prompts_over_the_limit_are_left_out_and_counted():
    result = judged(lambda serial, episode: 1.0, too_long=("task-1", "task-3"))
    assert (result.num_tasks, result.num_too_long, result.mean) == (2, 2, 1.0)


def test_one_task_has_no_confidence_interval():
    assert judged(lambda serial, episode: 1.0, num_tasks=1).mean_ci95 == math.inf


def test_nothing_to_judge_is_an_error_that_says_why():
    with pytest.raises(RlsysError, match="no sample could be judged: the judge raised"):
        judged(lambda serial, episode: None)
    with pytest.raises(RlsysError, match="no sample could be judged: 2 prompts are too long"):
        judged(lambda serial, episode: 1.0, num_tasks=2, too_long=("task-0", "task-1"))


def test_tasks_are_rolled_out_side_by_side_up_to_the_limit_with_seeds_of_their_own():
    world = FakeWorld(rollout_s=lambda serial: 1.0 + serial)
    rollouts = Watched(world)

    async def timed() -> float:
        await evaluate(rollouts, FakeRewards(world), tasks(6), samples=2, seed=0, max_open=3)
        return asyncio.get_running_loop().time()

    assert run_virtual(timed()) < sum(1.1 + serial for serial in range(6))
    assert rollouts.most_open == 3
    assert len({a.seed for a in rollouts.assignments}) == 6
    assert {a.size for a in rollouts.assignments} == {2}
