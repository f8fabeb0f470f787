"""A run on several sources of data that is cut goes on at the exact row of each, and says what has changed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.contracts import GroupScores
from rlsys.data.proposed_tasks import ProposedTasks
from rlsys.data.task_mixture import TaskMixture
from rlsys.data.task_source import TaskSource
from rlsys.monitoring.events import DataChanged, GroupIssued
from rlsys.testing import FakeRewards, FakeRun, FakeWorld, RewardAsAdvantage, run_virtual
from rlsys.testing.fake_run import go_on
from rlsys.types import Group, Score, Task
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


def test_a_step_tells_the_rewards_the_successes_and_the_share_of_each_source(tmp_path: Path):
    run = run_on(tmp_path / "run", a=0.75, b=0.25)
    run.train()
    for row in run.metrics:
        sources = [name.removeprefix("group/share/") for name in row if name.startswith("group/share/")]
        assert sum(row[f"group/share/{name}"] for name in sources) == 1
        solved = sum(row[f"group/share/{name}"] * row[f"group/solved_by/{name}"] for name in sources)
        assert solved == pytest.approx(row["group/solved_frac"])
        assert {f"reward/source/{name}" for name in sources} <= row.keys()
    assert {name for row in run.metrics for name in row if name.startswith("group/share/")} == {
        "group/share/a",
        "group/share/b",
    }


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


def hard(task: str, reply: str) -> float:
    """Reward of a solver: tasks with an even number are beyond it."""
    return float(int(task) % 2)


def proposing(folder: Path, steps: int = 8) -> FakeRun:
    """Self-play that proposes the number of its own task; those that solvers fail become tasks of the run."""

    def reply(prompt: str) -> str:
        found = re.search(r"ask (\d+)", prompt)
        return f"<task>{found[1]}</task>" if found else "an answer"

    asks = TaskSource([Task(id=f"ask{i}", prompt=f"ask {i}", source="asks") for i in range(12)], seed=3)
    return FakeRun(
        folder,
        reply=reply,
        tasks=TaskMixture({"asks": asks, "made": ProposedTasks("made")}, {0: {"asks": 1.0, "made": 1.0}}),
        run={"steps": steps},
        train={"groups_per_step": 4},
        rollout={
            "workflow": {
                "type": "self_play",
                "judge": f"{__name__}:hard",
                "propose_within": [0.0, 0.5],
                "proposer_reward": "failure",
                "attempts": 2,
            }
        },
        algorithm=RewardAsAdvantage(group_size=2),
        checkpoint={"every": 1},
    )


def test_tasks_that_solvers_fail_become_tasks_of_the_run(tmp_path: Path):
    run = proposing(tmp_path)
    run.train()
    tasks = [group for _, group in run.world.trained]
    made = [group for group in tasks if group.source == "made"]
    assert made and {group.source for group in tasks[:4]} == {"asks"}
    assert all(len(episode.trajectories) == 1 for group in made for episode in group.episodes), "only the solver plays"
    assert {e.trajectories[0].agent for group in made for e in group.episodes} == {"solver"}
    proposed = {row["prompt"] for group in tasks for episode in group.episodes for row in episode.proposals}
    assert proposed and all(int(str(number)) % 2 == 0 for number in proposed)
    assert run.metrics[-1]["curation/proposed"] == len(proposed)
    rewards = {e.trajectories[0].reward for g in tasks if g.source == "asks" for e in g.episodes}
    assert rewards == {0.0, 1.0}, "the proposer is rewarded for what solvers fail"


def test_proposed_tasks_survive_a_resume(tmp_path: Path):
    whole = proposing(tmp_path / "whole")
    whole.train()
    cut = proposing(tmp_path / "cut")
    cut.driver.events.attach(StopAfter(cut.driver, 4))
    cut.train()
    resumed = proposing(tmp_path / "cut")
    run_virtual(go_on(resumed.driver))
    assert trained(cut) + trained(resumed) == trained(whole)
    assert any(task.startswith("made/") for task in trained(resumed))


class BySource(FakeRewards):
    """Of `solved` every episode succeeds, of `hopeless` none, of `mixed` half of them."""

    async def score(self, task: Task, group: Group) -> GroupScores:
        scored = await super().score(task, group)
        known = {"solved": 1.0, "hopeless": 0.0}
        rewards = (known.get(task.source, float(episode % 2)) for episode in range(len(scored.scores)))
        return replace(scored, scores=tuple(Score(reward) for reward in rewards))


def following(folder: Path) -> FakeRun:
    names = ("solved", "hopeless", "mixed")
    sources = {
        name: TaskSource([Task(id=f"{name}/{i}", prompt=f"{i}", source=name) for i in range(9)], seed=3)
        for name in names
    }
    world = FakeWorld()
    return FakeRun(
        folder,
        world,
        tasks=TaskMixture(sources, {0: dict.fromkeys(names, 1.0)}),
        workers=replace(world.workers(), rewards=BySource(world)),
        run={"steps": 12},
        train={"groups_per_step": 4},
        checkpoint={"every": 1},
        curation={"source_weights": "reward_std"},
        data={"path": [{"path": f"{name}.jsonl"} for name in names]},
    )


def test_weights_follow_what_a_source_teaches_and_lose_sight_of_none(tmp_path: Path):
    run = following(tmp_path)
    run.train()
    last = run.metrics[-1]
    shares = {name: last[f"curation/share/{name}"] for name in ("mixed", "solved", "hopeless")}
    assert shares == pytest.approx({"mixed": 10 / 12, "solved": 1 / 12, "hopeless": 1 / 12})
    assert run.metrics[0]["curation/share/mixed"] == 1 / 3
    issued = [event.task_id.partition("/")[0] for event in run.recorder.of(GroupIssued)]
    assert {"solved", "hopeless"} <= set(issued[-16:]) and issued[-16:].count("mixed") >= 12


def test_weights_that_follow_go_on_after_a_cut(tmp_path: Path):
    whole, cut = following(tmp_path / "whole"), following(tmp_path / "cut")
    whole.train()
    cut.driver.events.attach(StopAfter(cut.driver, 5))
    cut.train()
    resumed = following(tmp_path / "cut")
    run_virtual(go_on(resumed.driver))
    assert trained(cut) + trained(resumed) == trained(whole)
    assert resumed.metrics[-1]["curation/share/mixed"] == whole.metrics[-1]["curation/share/mixed"]
