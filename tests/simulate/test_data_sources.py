"""A run on several sources of data that is cut goes on at the exact row of each, and says what has changed."""

from __future__ import annotations

from pathlib import Path

from rlsys.data.task_mixture import TaskMixture
from rlsys.data.task_source import TaskSource
from rlsys.monitoring.events import DataChanged
from rlsys.testing import FakeRun, run_virtual
from rlsys.testing.fake_run import go_on
from rlsys.types import Task
from tests.simulate.world import StopAfter


def run_on(folder: Path, **weights: float) -> FakeRun:
    """Six steps of four groups, on sources of nine rows each."""
    sources = {
        name: TaskSource([Task(id=f"{name}/{i}", prompt=f"{i}", source=name) for i in range(9)], seed=3)
        for name in weights
    }
    keys = {"run": {"steps": 6}, "train": {"groups_per_step": 4}, "checkpoint": {"every": 1}}
    return FakeRun(folder, tasks=TaskMixture(sources, {0: weights}), **keys)


def trained(run: FakeRun) -> list[str]:
    return [group.task_id for _, group in run.world.trained]


def test_each_source_goes_on_at_its_exact_row(tmp_path: Path):
    whole = run_on(tmp_path / "whole", a=0.75, b=0.25)
    whole.train()
    cut = run_on(tmp_path / "cut", a=0.75, b=0.25)
    cut.driver.events.attach(StopAfter(cut.driver, 3))
    cut.train()
    resumed = run_on(tmp_path / "cut", a=0.75, b=0.25)
    run_virtual(go_on(resumed.driver))
    assert len(trained(cut)) == 12 and trained(cut) + trained(resumed) == trained(whole)
    assert sum(task.startswith("a") for task in trained(whole)) == 18
    assert not resumed.recorder.of(DataChanged)


def test_a_step_tells_the_reward_of_each_source(tmp_path: Path):
    run = run_on(tmp_path / "run", a=0.75, b=0.25)
    run.train()
    assert {"reward/source/a", "reward/source/b"} <= run.metrics[-1].keys()


def test_a_source_that_is_added_at_a_resume_is_said_and_begins_at_its_beginning(tmp_path: Path):
    cut = run_on(tmp_path / "run", a=1.0, b=1.0)
    cut.driver.events.attach(StopAfter(cut.driver, 3))
    cut.train()
    resumed = run_on(tmp_path / "run", a=1.0, b=1.0, c=2.0)
    run_virtual(go_on(resumed.driver))
    said = [event.detail for event in resumed.recorder.of(DataChanged)]
    assert said[0] == "the source c is new, and starts at its beginning (9 tasks)"
    own = [task for task in trained(resumed) if task.startswith("c")]
    fresh = run_on(tmp_path / "alone", c=1.0)
    fresh.train()
    assert own and own == trained(fresh)[: len(own)]
