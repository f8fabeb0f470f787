"""Runs as trials of Ray Tune: its schedulers copy their checkpoints and end them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.tune import of_trial, trainable
from tests.jobs import config_of


def rows_of(run: Path) -> dict[int, dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "reward/mean" in row}


def hash_of(run: Path, version: int) -> str:
    """The content hash of a version that a run published."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return next(e["hash"] for e in events if e["kind"] == "weights_published" and e["version"] == version)


def searched(config: Config, folder: Path, rates: list[float], **settings) -> tune.ResultGrid:
    """The results of trials that are compared by their learning rates."""
    return tune.Tuner(
        trainable(config),
        param_space={"train.lr": tune.grid_search(rates)},
        tune_config=tune.TuneConfig(metric="optim/lr", mode="max", **settings),
        run_config=tune.RunConfig(name="search", storage_path=str(folder), verbose=0),
    ).fit()


@pytest.mark.usefixtures("cluster")
@pytest.mark.nightly
def test_the_worse_of_two_trials_goes_on_from_the_weights_of_the_better(model_path, data_path, tmp_path):
    config = config_of(model_path, data_path, tmp_path, ["run.steps=4", "checkpoint.every=2"])
    scheduler = PopulationBasedTraining(
        time_attr="step",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"train.lr": tune.loguniform(1e-5, 1e-2)},
        resample_probability=0.0,
        synch=True,
    )
    worse, better = map(Path, (result.path for result in searched(config, tmp_path, [1e-5, 1e-3], scheduler=scheduler)))
    before, after = rows_of(worse / "run0"), rows_of(worse / "run1")
    assert before[1]["optim/lr"] == pytest.approx(1e-5)
    assert list(after) == [3, 4]
    assert after[3]["optim/lr"] in (pytest.approx(8e-4), pytest.approx(1.2e-3))
    assert hash_of(worse / "run1", 2) == hash_of(better / "run0", 2) != hash_of(worse / "run0", 2)
    assert max(row["sampler/probe_diff"] for row in after.values()) < 1e-3


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_a_trial_that_is_not_among_the_best_ends_early_and_frees_its_workers(model_path, data_path, tmp_path):
    config = config_of(model_path, data_path, tmp_path, ["run.steps=6", "checkpoint.every=0"])
    scheduler = ASHAScheduler(time_attr="step", max_t=6, grace_period=2, reduction_factor=2)
    results = searched(config, tmp_path, [1e-3, 1e-5], scheduler=scheduler, max_concurrent_trials=1)
    assert results.num_errors == 0
    steps = [result.metrics["step"] for result in results if result.metrics is not None]
    assert steps == [6, 2]
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_the_run_of_a_trial_has_its_values_and_a_folder_of_its_own(tmp_path):
    config = Config.load([], ["model.path=m", "data.path=d.jsonl", "run.steps=4", "reward.fn=exact"])
    first = of_trial(config, {"train.lr": 1e-4, "algorithm.clip_high": 0.3}, tmp_path)
    assert first.train.lr == 1e-4 and vars(first.algorithm)["clip_high"] == 0.3
    first.run_dir.mkdir()
    assert of_trial(config, {}, tmp_path).run_dir == tmp_path / "run1"


def test_an_unknown_key_is_named(tmp_path):
    config = Config.load([], ["model.path=m", "data.path=d.jsonl", "run.steps=4", "reward.fn=exact"])
    with pytest.raises(ConfigError, match=r"train\.lrr.*train\.lr"):
        of_trial(config, {"train.lrr": 1e-4}, tmp_path)
