"""Files of a run when another session starts in its folder: they change once nothing refuses the start any more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import CheckpointError
from rlsys.launch.run_folder import Start
from rlsys.launch.train_run import TrainingJob
from rlsys.monitoring.events import PhaseDone
from rlsys.types import POLICY

SEVERAL = "policies={first: {}, second: {train: {lr: 1e-4}}}"


def runs_of(folder: Path, *keys: str) -> tuple[Config, Mapping[str, Config]]:
    """The configuration of a run, and those of its trained policies."""
    needed = ["model.path=m", "data.path=d", "run.steps=9", f"run.folder={folder}"]
    config = Config.load([], [*needed, *keys])
    return config, config.trained_policies if config.policies else {POLICY: config}


def start(folder: Path, *keys: str) -> TrainingJob:
    """Start a session from the newest checkpoint of each policy, which is of step 6."""
    config, owns = runs_of(folder, *keys)
    starts = {name: Start(own.run_dir / "checkpoints" / "step_000006") for name, own in owns.items()}
    return TrainingJob.of(config, owns, starts, time.monotonic(), progress=False)


def train(folder: Path, *keys: str) -> None:
    """Leave the files of a session that took steps."""
    job = start(folder, *keys)
    with job.end_emitted():
        job.events.emit(PhaseDone("start_up", 1.0))
    for run in job.runs.values():
        (run.config.run_dir / "metrics.jsonl").write_text('{"step":6}\n')


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("policies", [[], [SEVERAL]], ids=["one policy", "several"])
def test_a_refused_start_changes_no_file_of_a_run(tmp_path: Path, policies: list[str]) -> None:
    train(tmp_path, *policies)
    before = contents_of(tmp_path)
    job = start(tmp_path, *policies, "model.path=other")
    job.events.emit(PhaseDone("start_workers", 1.0))
    with pytest.raises(CheckpointError), job.end_emitted():
        raise CheckpointError("cannot read training state: size mismatch")
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize("policies", [[], [SEVERAL]], ids=["one policy", "several"])
def test_a_start_that_is_not_refused_writes_all_in_order(tmp_path: Path, policies: list[str]) -> None:
    train(tmp_path, *policies)
    before = (tmp_path / "run" / "events.jsonl").read_text()
    job = start(tmp_path, *policies, "model.path=other")
    with job.end_emitted():
        job.events.emit(PhaseDone("start_workers", 1.0))
        for files in job.files:
            files.begin(6)
        job.events.emit(PhaseDone("first_step", 1.0))
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.startswith(before)
    added = events.removeprefix(before)
    assert added.index("start_workers") < added.index("first_step") < added.index("run_ended")
    assert Config.load(tmp_path / "run" / "config.resolved.yaml").model.path == "other"
    for run in job.runs.values():
        assert Config.load(run.config.run_dir / "config.resolved.yaml").model.path == "other"
        assert Config.load(run.config.run_dir / "configs" / "until_step_000006.yaml").model.path == "m"
