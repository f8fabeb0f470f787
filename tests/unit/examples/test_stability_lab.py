"""Analysis of runs by the stability lab; its `--quick` mode covers the training itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from algorithms.gac import GAC
from examples.stability.lab import EDITION, Outcome, Run
from examples.stability.report import collapse_version, final_reward, learning_curve, table
from examples.stability.studies import Row, confirmed, corrections, search, steadied
from examples.study import append, finished

STALE = Run(staleness=3, steps=10)
KEPT: dict[str, list[float | None]] = {name: [0.0] * 10 for name in ("gac/cosine", "gac/regime", "gac/update_cosine")}


def outcome(final: float = 0.9, cosines: list[float] | None = None) -> Outcome:
    metrics = dict(KEPT)
    if cosines:
        metrics["gac/cosine"] = [*cosines]
    return Outcome(rewards=[0.1 * step for step in range(10)], metrics=metrics, final_reward=final)


def test_sampling_lags_by_the_staleness_after_the_synchronous_start() -> None:
    assert [STALE.sampled_from(version) for version in range(6)] == [0, 0, 0, 0, 1, 2]
    calibrated = Run(staleness=3, gac=GAC(calibrate_steps=10))
    assert [calibrated.sampled_from(version) for version in (0, 9, 10, 13, 14)] == [0, 9, 10, 10, 11]


def test_a_learning_curve_is_of_the_versions_that_sampled() -> None:
    versions, rewards = learning_curve(STALE, outcome().rewards)
    assert versions == [0, 1, 2, 3, 4, 5, 6]
    assert rewards == pytest.approx([0.15, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])  # the first of four steps


def test_a_collapse_is_dated_by_the_first_version_showing_it() -> None:
    fallen = replace(outcome(), rewards=[1.0] * 20 + [0.0] * 20)
    assert collapse_version(Run(steps=40), fallen) == 25  # fewer than five of the last ten are 1
    assert collapse_version(Run(steps=40), replace(fallen, rewards=[1.0] * 40)) is None


def test_the_early_cosine_leaves_the_synchronous_steps_out() -> None:
    run = Run(steps=50, gac=GAC(calibrate_steps=10))
    assert "| 0.25 |" in table([Row("off", run, [0])], {run: outcome(cosines=[0.9] * 10 + [0.25] * 40)})


def test_results_of_another_edition_do_not_count(tmp_path: Path) -> None:
    append(tmp_path / "results.jsonl", STALE, outcome())
    append(tmp_path / "results.jsonl", replace(STALE, edition=EDITION - 1), outcome(0.1))
    assert finished(tmp_path / "results.jsonl", [STALE], Outcome) == {STALE: outcome()}


def test_a_search_confirms_the_best_settings_on_other_seeds() -> None:
    searched = search([0])
    best = [row for row in searched if row.label == "wide, .2 and .6"]
    done = {row.run: outcome(0.8 if row in best else 0.7) for row in searched}
    chosen = confirmed(searched, lambda row: final_reward(row, done), [1, 2])
    assert [row.label for row in chosen if row.run.gac.enabled] == ["wide, .2 and .6"] * 4
    assert all([run.seed for run in row.runs] == [1, 2] for row in chosen)
    assert {row.label for row in chosen if not row.run.gac.enabled} == {"off", "off, synchronous start"}


def test_every_algorithm_is_run_at_every_staleness() -> None:
    rows = corrections([0, 1, 2])
    assert len({(row.run.algorithm, row.run.staleness) for row in rows}) == len(rows) == 27


def test_every_remedy_is_compared_for_every_loss_at_every_staleness() -> None:
    rows = steadied([3, 4])
    cases = {(row.run.algorithm, row.run.updates, row.run.staleness, row.label) for row in rows}
    assert len(cases) == len(rows) == 4 * (1 + 2 * 5)
    assert {row.run.lr_staleness for row in rows if row.label == "lr / (1 + s)"} == {"linear"}
