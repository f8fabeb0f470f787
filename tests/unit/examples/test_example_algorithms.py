"""The comparison of algorithms on the tiny task: its table of finished runs, and the file of recorded answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from examples.kto_offline.prepare import label
from examples.sort.algorithms import Result, Trial, result_of, table_of
from examples.sort.prepare import Recipe, prepare
from examples.study import append, finished
from rlsys.config import Config
from rlsys.data.task_file import load_tasks

TRIAL = Trial("kto", 0, 1, 40)


def rows(*, is_critic: bool = False) -> list[dict[str, float]]:
    """Rewards of 0 for 20 steps, of 1 for 20 more; a critic that gets better."""
    return [
        {"step": n, "reward/mean": float(n > 20), **({"critic/explained_variance": n / 40} if is_critic else {})}
        for n in range(1, 41)
    ]


def test_figures_are_of_the_last_tenth_and_of_the_first_step_whose_running_mean_is_the_goal():
    result = result_of(rows(is_critic=True), cpu_s=7.0)
    assert (result.reward_last, result.steps_to_goal, result.cpu_s) == (1.0, 29, 7.0)  # 9 of ten steps are 1
    assert result.explained_variance == pytest.approx((37 + 38 + 39 + 40) / 160)
    assert result_of(rows()[:20], cpu_s=7.0) == Result(0.0, None, 7.0, None)


def test_finished_runs_are_read_again_and_so_not_run_again(tmp_path: Path):
    path = tmp_path / "deep" / "runs.jsonl"
    results = {TRIAL: Result(0.9, 30, 60.0, None), replace(TRIAL, seed=2): Result(1, None, 1, 0.5)}
    assert finished(path, results, Result) == {}
    for trial, result in results.items():
        append(path, trial, result)
    assert finished(path, results, Result) == results
    assert finished(path, [replace(TRIAL, steps=41)], Result) == {}


def test_the_table_has_seeds_side_by_side():
    runs = {
        Trial("ppo", 0, 1, 9): Result(0.95, 41, 70.4, 0.25),
        Trial("ppo", 0, 0, 9): Result(0.91, 40, 69.6, 0.5),
        Trial("kto", 4, 0, 9): Result(0.5, None, 60, None),
    }
    _, _, *body = table_of(runs).splitlines()
    assert body == [
        "| kto | 4 | 0 | 0.500 | never | 60 | no critic |",
        "| ppo | 0 | 0 / 1 | 0.910 / 0.950 | 40 / 41 | 70 / 70 | 0.50 / 0.25 |",
    ]


def test_recorded_answers_are_rows_that_the_offline_example_trains_on(tmp_path: Path):
    prepare(tmp_path, Recipe(seed=3, steps=40, batch_size=64, num_train=64, num_eval=4))
    path = label(tmp_path)
    config = Config.load("examples/kto_offline/run.yaml", [f"data.path={path}"])
    tasks = load_tasks(path)
    config.rollout.workflow.check(tasks, group_size=config.algorithm.group_size, temperature=config.rollout.temperature)
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, (tmp_path / "train.jsonl").open())}
    assert 0 < len(tasks) <= 64
    for task in tasks:
        assert task.info["label"] == (task.info["completion"] == answers[str(task.prompt)])
