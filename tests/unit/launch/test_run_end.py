"""What a run writes when it ends."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from rlsys.errors import ClusterLost, Interrupted, NoProgress
from rlsys.launch.run_folder import Start
from rlsys.launch.train_run import TrainingJob
from rlsys.testing.fake_run import fake_config
from rlsys.types import POLICY
from rlsys.util.any_paths import any_path


def end_of(folder: Path, error: BaseException) -> dict[str, object]:
    """The last event of a run that `error` ends."""
    config = fake_config(folder, {})
    job = TrainingJob.of(config, {POLICY: config}, {POLICY: Start(None)}, time.monotonic(), progress=False)
    with pytest.raises(type(error)), job.end_emitted():
        raise error
    return json.loads((folder / "events.jsonl").read_text().splitlines()[-1])


def test_an_error_ends_the_run_with_its_text_and_notes(tmp_path: Path):
    error = NoProgress("nothing moved for 900 s")
    error.add_note("step 7 is saved; go on with run.resume=auto")
    end = end_of(tmp_path / "run", error)
    assert (end["kind"], end["reason"]) == ("run_ended", "failed")
    assert end["detail"] == "NoProgress: nothing moved for 900 s\nstep 7 is saved; go on with run.resume=auto"


def test_a_run_that_stops_early_finishes_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = fake_config(tmp_path / "run", {})
    job = TrainingJob.of(config, {POLICY: config}, {POLICY: Start(None)}, time.monotonic(), progress=True)
    with job.end_emitted():
        job.result.early_stop = "stopped early: eval/hard/mean did not improve"
    end = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (end["kind"], end["reason"], end["detail"]) == ("run_ended", "finished", job.result.early_stop)
    assert f"finished after step 0: {job.result.early_stop}" in capsys.readouterr().err.splitlines()
    assert job.result.as_json()["early_stop"] == job.result.early_stop


def test_a_signal_ends_the_run_as_interrupted(tmp_path: Path):
    end = end_of(tmp_path / "run", Interrupted("interrupted before the first step", signal.SIGHUP))
    assert (end["kind"], end["reason"]) == ("run_ended", "interrupted")


AWAY = "memory://lost/runs"
"""Place of checkpoints that is empty."""


@pytest.mark.parametrize(
    ("begins_with", "kept"),
    [
        (None, "no step is saved; begin anew with run.resume=auto"),
        ("run/checkpoints/step_000006", "step 6 is saved; go on with run.resume=auto"),
        ("other/checkpoints/step_000006", "no step is saved; begin anew with run.resume=auto"),
    ],
)
def test_a_lost_cluster_is_noted_with_the_step_known_to_be_saved(tmp_path: Path, begins_with: str | None, kept: str):
    config = fake_config(tmp_path / "run", {"checkpoint": {"to": AWAY}})
    checkpoint = None if begins_with is None else any_path(f"{AWAY}/{begins_with}")
    job = TrainingJob.of(config, {POLICY: config}, {POLICY: Start(checkpoint)}, time.monotonic(), progress=False)
    job.note_saved(lost := ClusterLost("the Ray cluster is lost"))
    assert lost.__notes__ == [kept]
