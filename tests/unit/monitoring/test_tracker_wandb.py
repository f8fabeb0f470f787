"""The tracker `wandb`: its offline files, and the data that `wandb sync` sends from them to a test server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from rlsys.monitoring.events import AlertRaised, EvalDone, RolloutsWritten, RunEnded, RunStarted, StepDone
from rlsys.monitoring.tracker import RunFacts
from rlsys.monitoring.trackers.tracker_thread import InThread
from rlsys.monitoring.trackers.wandb import WandB
from tests.offline_wandb import config, history, read
from tests.rollouts import rollouts
from tests.wandb_server import serving

CONFIG = {"run": {"name": "sums", "steps": 20}, "train": {"lr": 1e-5}}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was killed after step 11, and went on after step 10."""
    run = tmp_path_factory.mktemp("runs") / "sums"
    table = rollouts(run / "rollouts" / "step_10.parquet", [0.0, 1.0, 0.5, None])
    plugin = WandB(project="arithmetic", mode="offline", rollouts_every=10, max_rollouts=3, names="verl")

    def sink() -> InThread:
        return InThread(plugin, RunFacts(run, "sums", "", CONFIG), patience_s=60)

    killed = sink()
    for event in (
        RunStarted("", 0, 20),
        StepDone(10, {"reward/mean": 0.5, "time/step": 2.0}),
        RolloutsWritten(10, str(table)),
        AlertRaised("idle_side", 10, 0.9, 0.5, "The trainer waits 90 % of the time: add replicas."),
        StepDone(11, {"reward/mean": 0.75}),
    ):
        killed.handle(event, 0.0)
    killed.close()
    resumed = sink()
    late = EvalDone(10, "hard", "ab", 1.0, {"eval/hard/mean": 0.25, "eval/hard/samples": 4.0})
    for event in (RunStarted("", 10, 20), StepDone(11, {"reward/mean": 1.0}), late, RunEnded(11, "finished")):
        resumed.handle(event, 0.0)
    resumed.close()
    wandb.teardown()  # waits until its process has written the files
    return run / "tracking"


def test_a_resumed_run_goes_on_under_the_same_id(folder: Path):
    identity = json.loads((folder / "wandb.json").read_text())["id"]
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    for file in files:
        (run,) = (record.run for record in read(file) if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.project, run.display_name) == (identity, "arithmetic", "sums")


def test_name_group_tags_and_notes_are_those_of_the_configuration(tmp_path: Path):
    plugin = WandB(mode="offline", name="lr 1e-5", group="sweep", tags=("sums", "grpo"), notes="second try")
    (tmp_path / "sums").mkdir()
    sink = InThread(plugin, RunFacts(tmp_path / "sums", "sums", "", CONFIG), patience_s=60)
    for event in (RunStarted("", 0, 20), StepDone(1, {"reward/mean": 0.5}), RunEnded(1, "finished")):
        sink.handle(event, 0.0)
    sink.close()
    wandb.teardown()  # waits until its process has written the file
    (file,) = (tmp_path / "sums" / "tracking").glob("wandb/offline-run-*/*.wandb")
    (run,) = (record.run for record in read(file) if record.WhichOneof("record_type") == "run")
    assert (run.display_name, run.run_group, list(run.tags), run.notes) == (
        "lr 1e-5", "sweep", ["sums", "grpo"], "second try",
    )  # fmt: skip


def test_configuration_and_rows_are_logged_with_the_step_axis(folder: Path):
    before, after = (read(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")))
    told = config(before)
    assert {key: told[key] for key in CONFIG} == CONFIG
    first, table, last = history(before)
    assert first == {"training/global_step": 10, "critic/score/mean": 0.5, "timing_s/step": 2.0}
    assert table["training/global_step"] == 10
    assert last == {"training/global_step": 11, "critic/score/mean": 0.75}
    assert history(after) == [
        {"training/global_step": 11, "critic/score/mean": 1.0},
        {"training/global_step": 10, "val-core/hard/reward/mean@4": 0.25, "eval/hard/samples": 4.0},
    ]
    axes = {record.metric.step_metric for record in before if record.WhichOneof("record_type") == "metric"}
    assert "training/global_step" in axes


def test_sampled_rollouts_are_a_table_and_alerts_are_told(folder: Path):
    (file, _) = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    records = read(file)
    (row,) = (row for row in history(records) if any(key.startswith("rollouts") for key in row))
    (path,) = (file.parent / "files").rglob("*.table.json")
    assert path.name in json.dumps(row)
    table = json.loads(path.read_text())
    rewards = [line[table["columns"].index("reward")] for line in table["data"]]
    assert rewards == [None, 0.5, 1.0]
    (alert,) = (record.alert for record in records if record.WhichOneof("record_type") == "alert")
    assert (alert.title, alert.text) == ("idle_side", "Step 10: The trainer waits 90 % of the time: add replicas.")


def test_parts_of_a_resumed_run_sync_into_one_run(folder: Path):
    identity = json.loads((folder / "wandb.json").read_text())["id"]
    own = {"WANDB_API_KEY": "k" * 40, "WANDB_ERROR_REPORTING": "false", "HOME": str(folder), "WANDB_DIR": str(folder)}
    with serving() as server:
        environment = {**os.environ, **own, "WANDB_BASE_URL": server.url}
        command = [Path(sys.executable).with_name("wandb"), "sync", "--yes", *folder.glob("wandb/offline-run-*")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [*server.runs] == [identity]
    steps = [row["training/global_step"] for row in server.history(identity)]
    assert steps == [10, 10, 11, 11, 10], done.stderr
    assert [row.get("critic/score/mean") for row in server.history(identity)] == [0.5, None, 0.75, 1.0, None]
    assert [name for name in server.uploads if name.startswith("media/table/rollouts")]
