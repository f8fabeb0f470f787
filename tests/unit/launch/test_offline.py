"""Commands on runs and models outside training, without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import CheckpointError
from rlsys.launch.offline_commands import exported, made_once
from rlsys.launch.preflight import rooted

NEEDED = ["run.steps=1", "model.path=org/none"]


def test_data_is_found_from_any_folder_and_hub_names_stay(tmp_path: Path):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "set").mkdir()
    here = os.path.relpath(tmp_path)
    sets = f"eval.data={{a: {here}/rows.jsonl, b: org/name:main#test, c: {here}/gone.jsonl}}"
    config = rooted(Config.load([], [*NEEDED, f"data.path={here}/set#train", sets]))
    assert Path(config.data.path).is_absolute()
    assert Path(config.data.path.removesuffix("#train")).samefile(tmp_path / "set")
    assert Path(config.eval.data["a"]).is_absolute()
    assert Path(config.eval.data["a"]).samefile(tmp_path / "rows.jsonl")
    assert (config.eval.data["b"], config.eval.data["c"]) == ("org/name:main#test", f"{here}/gone.jsonl")


def filling(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").touch()


def test_a_folder_is_made_once(tmp_path: Path):
    def never(folder: Path) -> None:
        raise AssertionError(folder)

    assert made_once(tmp_path / "model", filling) == made_once(tmp_path / "model", never) == tmp_path / "model"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["model", "model/weights"]


def test_of_two_concurrent_makers_of_a_folder_the_first_wins(tmp_path: Path):
    def overtaken(folder: Path) -> None:
        filling(tmp_path / "model")
        filling(folder)
        (folder / "later").touch()

    assert made_once(tmp_path / "model", overtaken) == tmp_path / "model"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["model", "model/weights"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        made_once(tmp_path / "gone" / "model", filling)
    with pytest.raises(CheckpointError, match=r"rlsys export .*/run --to FOLDER --step 000001`, and evaluate that"):
        exported(tmp_path / "run" / "checkpoints" / "step_000001")
