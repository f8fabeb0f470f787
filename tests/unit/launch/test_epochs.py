"""The length of a run in passes over its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import ConfigError, DataError
from rlsys.launch.preflight import with_steps


def config_with(model: Path, folder: Path, tasks: int, *overrides: str) -> Config:
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{i}>"}) + "\n" for i in range(tasks)))
    data = [] if any(each.startswith("data") for each in overrides) else [f"data.path={folder / 'a.jsonl'}"]
    keys = [f"model.path={model}", "reward.fn=zero", f"run.folder={folder}", "train.groups_per_step=8", *data]
    return Config.load([], [*keys, *overrides])


def test_epochs_become_steps_once_the_tasks_are_known(model_path: Path, tmp_path: Path):
    config = with_steps(config_with(model_path, tmp_path, 100, "run.epochs=3"))
    assert (config.run.steps, config.run.epochs) == (38, 0.0), "300 tasks, 8 a step"
    assert with_steps(config_with(model_path, tmp_path, 800, "run.epochs=0.3")).run.steps == 30
    (tmp_path / "saved.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "saved.yaml") == config, "a resume from the saved file has the same end"


def test_epochs_count_the_tasks_of_every_source(model_path: Path, tmp_path: Path):
    both = f"data=[{{path: {tmp_path / 'a.jsonl'}}}, {{path: {tmp_path / 'b.jsonl'}, weight: 0.2}}]"
    assert with_steps(config_with(model_path, tmp_path, 100, "run.epochs=1", both)).run.steps == 25


def test_a_number_of_steps_needs_no_data(model_path: Path, tmp_path: Path):
    config = config_with(model_path, tmp_path, 100, "run.steps=3", "data.path=none", "stabilizer=null")
    assert with_steps(config) is config


def test_an_epoch_of_too_few_steps_is_refused(model_path: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"run\.epochs: 1 of 16 tasks, 8 a step: stabilizer: .*run\.steps is 2"):
        with_steps(config_with(model_path, tmp_path, 16, "run.epochs=1", "stabilizer={type: gac, calibrate_steps: 20}"))


def test_epochs_of_data_that_cannot_be_read_are_refused(model_path: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"data\.path: cannot read"):
        with_steps(config_with(model_path, tmp_path, 16, "run.epochs=1", f"data.path={tmp_path / 'gone.jsonl'}"))


def test_steps_and_epochs_exclude_each_other(model_path: Path, tmp_path: Path):
    for keys in ((), ("run.steps=3", "run.epochs=1")):
        with pytest.raises(ConfigError, match=r"run\.steps: give the number of steps here, or .*and not both"):
            config_with(model_path, tmp_path, 16, *keys)
