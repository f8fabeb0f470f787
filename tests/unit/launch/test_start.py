"""Where a run starts: damaged checkpoints are passed over, a folder has one run, logs are linked if possible."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import CheckpointError, ConfigError
from rlsys.launch.run_folder import Start, checkpoint_of, start_of
from rlsys.launch.run_lock import LOCK, lock_run
from rlsys.launch.session_files import SessionFiles
from rlsys.launch.train_run import PolicyRun, link_logs
from rlsys.loop.checkpoint import Checkpoints
from rlsys.monitoring.events import Events, FileSkipped
from rlsys.testing import EventRecorder
from tests.unit.loop.test_checkpoint import save

KEYS = ["model.path=m", "data.path=d", "run.name=other"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 2 and 4."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", every=2, keep_last=2)
    for step in (2, 4):
        save(checkpoints, step)
    return tmp_path / "run"


def config_of(run: Path, resume: str) -> Config:
    keys = [*KEYS, f"run.folder={run.parent}", f"run.name={run.name}", "run.steps=9"]
    return Config.load([], [*keys, f"run.resume={resume}"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_cut_file_passes_the_checkpoint_over(run: Path, resume: str) -> None:
    weights = run / "checkpoints" / "step_000004" / "actor" / "weights.bin"
    cut(weights)
    start = start_of(config_of(run, resume))
    assert start.checkpoint == run / "checkpoints" / "step_000002"
    assert list(start.passed_over) == [f"{weights} has 99 bytes, and was saved with 100"]


@pytest.mark.parametrize("resume", ["auto", "must", "other"])
def test_a_run_with_damaged_checkpoints_alone_never_restarts(run: Path, resume: str) -> None:
    for step in (2, 4):
        cut(run / "checkpoints" / f"step_{step:06d}" / "groups.jsonl")
    config = config_of(run.parent / "new", str(run)) if resume == "other" else config_of(run, resume)
    with pytest.raises(CheckpointError) as raised:
        start_of(config)
    assert str(raised.value).count("groups.jsonl has 12 bytes") == 2
    assert "restore these files" in str(raised.value)


def test_going_on_from_a_run_that_did_all_steps_is_refused(run: Path) -> None:
    for steps, is_refused in ((3, True), (4, True), (5, False)):
        config = Config.load([], [*KEYS, f"run.folder={run.parent}", f"run.resume={run}", f"run.steps={steps}"])
        if is_refused:
            with pytest.raises(ConfigError, match=rf"{run} has done 4 steps.* is {steps}: no step is left"):
                start_of(config)
        else:
            assert start_of(config).checkpoint == run / "checkpoints" / "step_000004"


def test_a_damaged_checkpoint_is_never_exported(run: Path) -> None:
    (run / "config.resolved.yaml").touch()
    flip(run / "checkpoints" / "step_000004" / "actor" / "weights.bin")
    assert checkpoint_of(run, "2").name == "step_000002"
    for step in ("4", "latest"):
        with pytest.raises(CheckpointError, match=r"weights\.bin has other contents"):
            checkpoint_of(run, step)


def test_a_second_run_in_a_folder_is_refused_with_its_owner(run: Path) -> None:
    with (
        lock_run(run),
        pytest.raises(ConfigError, match=f"another run writes to .*: process {os.getpid()} on"),
        lock_run(run),
    ):
        pass
    with lock_run(run):
        assert json.loads((run / LOCK).read_text())["pid"] == os.getpid()


def test_the_lock_of_a_killed_run_is_free(run: Path) -> None:
    program = f"""
from pathlib import Path
from rlsys.launch.run_lock import lock_run
with lock_run(Path({str(run)!r})):
    print("locked", flush=True)
    input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on"), lock_run(run):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with lock_run(run):
        pass


def test_logs_that_cannot_be_linked_end_nothing(tmp_path: Path):
    (tmp_path / "logs").write_text("a file where a folder should be")
    recorder = EventRecorder()
    link_logs(tmp_path, tmp_path / "session", Events([recorder]))
    (skipped,) = recorder.of(FileSkipped)
    assert skipped.path == str(tmp_path / "logs" / "ray")


def test_a_caution_on_staleness_is_the_first_event(tmp_path: Path):
    keys = [f"run.folder={tmp_path}", "run.name=sums", "run.steps=9", "model.path=m", "data.path=d"]
    config = Config.load([], [*keys, "algorithm.correction=tis", "asynchrony.max_staleness=4"])
    files = SessionFiles(config, Start(None), is_new=True)
    PolicyRun.of(files, 0.0, progress=False).events.close()
    (event,) = map(json.loads, (tmp_path / "sums" / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["sentence"]) == ("caution_raised", config.staleness_caution)
