"""Models that are runs, and keys that a resumed session changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlsys.config import Config
from rlsys.errors import ConfigError, ModelError
from rlsys.launch.earlier_runs import changes_since, with_models_of_runs
from rlsys.launch.run_folder import write_run_dir
from rlsys.loop.checkpoint_files import GROUPS, STATE, hash_files, step_of, write_manifest

NEEDED = ["run.steps=10", "data.path=rows.jsonl"]


def run_in(folder: Path, *keys: str) -> Config:
    config = Config.load([], [*NEEDED, f"run.folder={folder}", "model.path=org/none", *keys])
    write_run_dir(config)
    return config


def saved(run: Path, step: int) -> Path:
    """A whole checkpoint of the run, with its model beside it."""
    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    (checkpoint / "model").mkdir(parents=True)
    for name in (STATE, GROUPS):
        (checkpoint / name).write_text("{}")
    write_manifest(checkpoint, hash_files(checkpoint))
    (checkpoint / "model" / "config.json").write_text("{}")
    write_manifest(checkpoint / "model", hash_files(checkpoint / "model"))
    return checkpoint


def model_in(folder: Path, weight: float) -> Path:
    folder.mkdir()
    save_file({"weight": torch.full((2,), weight)}, folder / "model.safetensors")
    return folder


# ----------------------------------------------------------------------------------------------------- model.path: RUN


def test_a_run_as_a_model_is_its_newest_whole_weights(tmp_path: Path) -> None:
    earlier = run_in(tmp_path, "run.name=sft")
    saved(earlier.run_dir, 2)
    newest = saved(earlier.run_dir, 4)
    config = Config.load([], [*NEEDED, f"model.path={earlier.run_dir}", f"reference.path={earlier.run_dir}"])
    found = with_models_of_runs(config)
    assert (found.model.path, found.reference.path) == (str(newest / "model"), str(newest / "model"))
    (newest / STATE).write_text("{ }")  # damaged
    assert with_models_of_runs(config).model.path.endswith("step_000002/model")


def test_every_policy_of_a_run_may_begin_with_another_run(tmp_path: Path) -> None:
    earlier = run_in(tmp_path, "run.name=sft")
    checkpoint = saved(earlier.run_dir, 1)
    policies = f"policies={{a: {{train: {{}}, model: {{path: {earlier.run_dir}}}}}}}"
    found = with_models_of_runs(Config.load([], [*NEEDED, "model.path=org/none", policies]))
    assert (found.policies["a"].own("model")["path"], found.model.path) == (str(checkpoint / "model"), "org/none")


def test_a_resumed_run_keeps_the_weights_that_it_began_with(tmp_path: Path) -> None:
    earlier = run_in(tmp_path, "run.name=sft")
    began = saved(earlier.run_dir, 1) / "model"
    run = run_in(tmp_path, "run.name=grpo", f"model.path={began}")
    saved(earlier.run_dir, 2)
    config = Config.load([], [*NEEDED, f"run.folder={tmp_path}", "run.name=grpo", f"model.path={earlier.run_dir}"])
    assert with_models_of_runs(config).model.path == str(began)
    began.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=rf"^model\.path: {run.run_dir} began with {began}, which is gone"):
        with_models_of_runs(config)


def test_a_run_without_whole_weights_is_no_model(tmp_path: Path) -> None:
    earlier = run_in(tmp_path, "run.name=sft")
    config = Config.load([], [*NEEDED, f"model.path={earlier.run_dir}"])
    with pytest.raises(ModelError, match=r"^model\.path: the run .*sft has no complete checkpoint"):
        with_models_of_runs(config)
    (saved(earlier.run_dir, 2) / STATE).unlink()
    with pytest.raises(ModelError, match=r"^model\.path: every checkpoint in .* is damaged"):
        with_models_of_runs(config)


# -------------------------------------------------------------------------------------------------------- changed keys


def test_a_resumed_session_says_which_keys_it_changes(tmp_path: Path) -> None:
    checkpoint = saved(run_in(tmp_path, "train.lr=1e-4").run_dir, 3)
    (note,) = changes_since(run_in(tmp_path / "now", "train.lr=3e-5", "run.resume=auto"), checkpoint)
    assert note == "going on from step 3 with other keys: train.lr is 3e-05 (was 0.0001)"
    assert changes_since(run_in(tmp_path / "same", "train.lr=1e-4", "run.resume=auto"), checkpoint) == []


def test_a_longer_run_says_that_the_schedule_is_another(tmp_path: Path) -> None:
    keys = ["train.lr=1", "train.final_lr_fraction=.1"]
    checkpoint = saved(run_in(tmp_path, "run.steps=4", *keys).run_dir, 4)
    first, second = changes_since(run_in(tmp_path / "now", "run.steps=8", *keys), checkpoint)
    assert first == "going on from step 4 with other keys: run.steps is 8 (was 4)"
    assert second == "run.steps is 8 (was 4), which train.lr falls over: step 5 has 0.55 and would have had 0.1"


def test_a_longer_run_with_a_constant_learning_rate_has_the_same_schedule(tmp_path: Path) -> None:
    checkpoint = saved(run_in(tmp_path, "run.steps=4").run_dir, 4)
    assert len(changes_since(run_in(tmp_path / "now", "run.steps=8"), checkpoint)) == 1


def test_the_session_that_saved_the_checkpoint_is_compared(tmp_path: Path) -> None:
    first = run_in(tmp_path, "train.lr=1")
    checkpoint = saved(first.run_dir, 3)
    write_run_dir(
        Config.load([], [*NEEDED, f"run.folder={tmp_path}", "model.path=org/none", "train.lr=2"]), step_of(checkpoint)
    )
    (note,) = changes_since(run_in(tmp_path / "now", "train.lr=2"), checkpoint)
    assert note.endswith("train.lr is 2.0 (was 1.0)")


def test_a_run_does_not_go_on_with_another_model(tmp_path: Path) -> None:
    first, copy, other = model_in(tmp_path / "a", 1), model_in(tmp_path / "b", 1), model_in(tmp_path / "c", 2)
    checkpoint = saved(run_in(tmp_path, f"model.path={first}").run_dir, 3)
    with pytest.raises(ConfigError, match=rf"^model\.path: .* began with {first}, and {other} has other weights"):
        changes_since(run_in(tmp_path / "now", f"model.path={other}"), checkpoint)
    (note,) = changes_since(run_in(tmp_path / "copied", f"model.path={copy}"), checkpoint)
    assert note.endswith(f"model.path is {copy} (was {first})")
