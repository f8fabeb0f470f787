"""Commands on a run of several policies."""

import os
from contextlib import chdir
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.launch import TrainResult, evaluate, train
from rlsys.launch.preflight import check_is_kept, with_absolute_paths
from rlsys.launch.run_folder import checkpoint_of


def test_the_result_of_several_policies_holds_that_of_each():
    result = TrainResult("runs/two", 3, policies={"solver": TrainResult("runs/two/policies/solver", 3)})
    assert result.as_json()["policies"] == {"solver": TrainResult("runs/two/policies/solver", 3).as_json()}
    assert "policies" not in TrainResult("runs/one").as_json()


def test_commands_for_one_model_ask_for_a_policy_folder(tmp_path: Path):
    (tmp_path / "policies" / "solver").mkdir(parents=True)
    (tmp_path / "config.resolved.yaml").write_text("run: {}\n")
    with pytest.raises(ConfigError, match=r"is a run of several policies: name the folder of one, .*/policies/NAME"):
        checkpoint_of(tmp_path, "latest")


def one(folder: Path, *overrides: str) -> Config:
    keys = ["run.steps=1", "run.name=run", f"run.folder={folder}", "model.path=org/base", "data.path=rows.jsonl"]
    return Config.load([], [*keys, *overrides])


def several(folder: Path, *overrides: str) -> Config:
    return one(folder, "policies={plain: {}, own: {train: {lr: 1e-4}}}", *overrides)


def test_a_relative_folder_in_the_package_of_a_job_is_refused(tmp_path: Path):
    package = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    package.mkdir(parents=True)
    needed = ["model.path=org/model", "run.steps=1", "data.path=/tasks.jsonl", "reward.fn=exact"]
    with chdir(package):
        with pytest.raises(
            ConfigError, match=r"^run\.folder: runs lies in the folder .* absolute path that every node"
        ):
            train(Config.load([], needed))
        check_is_kept(Path("/shared/runs"))


def test_model_paths_become_absolute_and_hub_names_stay(tmp_path: Path):
    for name in ("model", "critic"):
        (tmp_path / name).mkdir()
    here = os.path.relpath(tmp_path)
    config = several(
        tmp_path,
        f"policies.own={{model: {{path: {here}/model}}, critic: {{path: {here}/critic}}}}",
        "policies.judge={train: null, model: {path: org/name}}",
    )
    found = with_absolute_paths(config)
    own = found.of("own")
    assert own.critic.path is not None
    assert Path(own.model.path).is_absolute() and Path(own.model.path).samefile(tmp_path / "model")
    assert Path(own.critic.path).is_absolute() and Path(own.critic.path).samefile(tmp_path / "critic")
    assert (found.of("judge").model.path, found.of("plain").model.path) == ("org/name", "org/base")
    assert found.policies["plain"] == config.policies["plain"]


def test_single_and_multi_policy_runs_never_overwrite_each_other(tmp_path: Path):
    (tmp_path / "run" / "policies" / "own").mkdir(parents=True)
    with pytest.raises(ConfigError, match="contains a run of several policies, and this run has one"):
        train(one(tmp_path), progress=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="contains a run of one policy, and this run has several"):
        train(several(tmp_path, "run.name=other", "run.resume=auto"), progress=False)


def test_one_policy_of_several_is_neither_trained_nor_measured_alone(tmp_path: Path):
    part = tmp_path / "run" / "policies" / "own"
    part.mkdir(parents=True)
    for folder in (tmp_path / "run", part):
        (folder / "config.resolved.yaml").write_text("run: {}\n")
    with pytest.raises(ConfigError, match=f"one policy of the run {tmp_path / 'run'}.*: train {tmp_path / 'run'}"):
        train(one(tmp_path / "run" / "policies", "run.name=own"), progress=False)
    with pytest.raises(ConfigError, match=rf"write its model with `rlsys export {part} --to FOLDER`"):
        evaluate(str(part))
    with pytest.raises(ConfigError, match=rf"rlsys export {part.parent}/NAME --to FOLDER`"):
        evaluate(str(tmp_path / "run"))
