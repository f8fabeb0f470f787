"""The comparison of algorithms on the tiny task: its table of finished runs, and the file of recorded answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from examples.kto_offline.prepare import label
from examples.sort.algorithms import COMPARISON, figures_of
from examples.sort.prepare import Recipe, prepare
from examples.study import Result, Trial, append, finished
from rlsys.config import Config
from rlsys.data.task_file import load_tasks

TRIAL = Trial("sort", ("algorithm.type=kto",), 1, 40)


def rows(*, is_critic: bool = False) -> list[dict[str, float]]:
    """Rewards of 0 for 20 steps, of 1 for 20 more; a critic that gets better."""
    return [
        {"step": n, "reward/mean": float(n > 20), **({"critic/explained_variance": n / 40} if is_critic else {})}
        for n in range(1, 41)
    ]


def result(reward: float, steps: int | None, cpu_s: float, explained: float | None) -> Result:
    return Result({"reward_last": reward, "steps_to_goal": steps, "explained_variance": explained, "cpu_s": cpu_s})


def test_results_cover_the_last_tenth_and_the_steps_to_goal():
    figures = figures_of(rows(is_critic=True))
    assert (figures["reward_last"], figures["steps_to_goal"]) == (1.0, 29)  # 9 of ten steps are 1
    assert figures["explained_variance"] == pytest.approx((37 + 38 + 39 + 40) / 160)
    assert figures_of(rows()[:20]) == {"reward_last": 0.0, "steps_to_goal": None, "explained_variance": None}


def test_finished_runs_are_read_again_and_so_not_run_again(tmp_path: Path):
    path = tmp_path / "deep" / "runs.jsonl"
    results = {TRIAL: result(0.9, 30, 60.0, None), replace(TRIAL, seed=2): result(1, None, 1, 0.5)}
    assert finished(path, results, Result) == {}
    for trial, found in results.items():
        append(path, trial, found)
    assert finished(path, results, Result) == results
    assert finished(path, [replace(TRIAL, steps=41)], Result) == {}


def test_the_table_has_seeds_side_by_side():
    runs: dict[tuple[str, ...], dict[int, Result]] = {
        ("kto", "4"): {0: result(0.5, None, 60, None)},
        ("ppo", "0"): {0: result(0.91, 40, 69.6, 0.5), 1: result(0.95, 41, 70.4, 0.25)},
    }
    _, _, *body = COMPARISON.table(runs).splitlines()
    assert body == [
        "| kto | 4 | 0 | 0.500 | never | 60 | no critic |",
        "| ppo | 0 | 0 / 1 | 0.910 / 0.950 | 40 / 41 | 70 / 70 | 0.50 / 0.25 |",
    ]


@pytest.mark.slow
def test_recorded_answers_are_rows_that_the_offline_example_trains_on(tmp_path: Path):
    prepare(tmp_path, Recipe(seed=3, steps=40, batch_size=64, num_train=64, num_eval=4))
    path = label(tmp_path)
    config = Config.load("examples/kto_offline/run.yaml", [f"data.path={path}"])
    tasks = load_tasks(path)
    config.rollout.workflow.check(
        tasks, group_size=config.algorithm.group_size, distribution=config.rollout.distribution
    )
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, (tmp_path / "train.jsonl").open())}
    assert 0 < len(tasks) <= 64
    for task in tasks:
        assert task.info["label"] == (task.info["completion"] == answers[str(task.prompt)])
