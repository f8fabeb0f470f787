"""Ray's head or the raylet ends under a run, or the run is killed: the end is named, and nothing stays behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.processes import is_gone
from tests.ray.commands import ENDLESS, Command, job_in, wait_until
from workers.ray.cluster_keeper import MARK

pytestmark = pytest.mark.timeout(400)


BLOCKED = """
import asyncio, os, signal, time
from workers.ray.cluster import connect

async def main():
    cluster = connect(None, 2)
    async with cluster.watch.during(on_stuck=lambda lost: print("stuck", flush=True)):
        os.kill(cluster.watch.raylet, signal.SIGKILL)
        time.sleep(100)

asyncio.run(main())
"""


def process_of(command: Command, name: str) -> psutil.Process:
    """The process with this name that the command started."""
    (found,) = (p for p in map(psutil.Process, command.processes()) if p.name() == name)
    return found


def of_cluster(run: int) -> list[int]:
    """Processes with the mark of the cluster that the process `run` started."""
    wanted, found = f"{MARK}={run}-".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def left_of(run: int) -> list[object]:
    """Processes and shared memory of the cluster that the process `run` started."""
    return [*of_cluster(run), *Path("/dev/shm").glob(f"sem.rlsys-{run}-*")]


@pytest.mark.parametrize(
    ("name", "strike", "says", "within_s"),
    [
        pytest.param("gcs_server", psutil.Process.kill, "Ray's head (gcs_server at ", 15, marks=pytest.mark.nightly),
        ("raylet", psutil.Process.kill, "the raylet of this node (process ", 15),
        pytest.param(
            "raylet", psutil.Process.suspend, "Ray has declared this node dead", 120, marks=pytest.mark.nightly
        ),
    ],
    ids=["head", "raylet", "stopped raylet"],
)
def test_a_lost_cluster_is_named_and_the_run_resumes(
    name: str, strike: Callable[[psutil.Process], None], says: str, within_s: float, model_path, data_path, tmp_path
):
    job = job_in(tmp_path, model_path, data_path)
    with job.train(ENDLESS) as command:
        command.wait_until(lambda: len(job.steps) > 1)
        began = time.time()
        strike(process_of(command, name))
        ended = command.end()
        wait_until(lambda: not left_of(command.pid))
    assert (ended.code, ended.stdout) == (1, ""), ended.stderr
    assert "[state-dump]" not in ended.stderr
    messages = [line for line in ended.stderr.splitlines() if line.startswith("rlsys: ")]
    assert len(messages) == 1, ended.stderr
    assert messages[0].startswith(f"rlsys: the Ray cluster is lost: {says}")
    assert ended.stderr.splitlines()[-1] == f"step {job.saved} is saved; go on with run.resume=auto"
    rows = [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
    (failed,) = (row for row in rows if row["kind"] == "worker_failed" and row["worker"] == "the cluster")
    assert failed["time_s"] - began < within_s
    assert rows[-1]["kind"] == "run_ended"
    assert rows[-1]["detail"].startswith(f"ClusterLost: the Ray cluster is lost: {says}")
    with job.train(job.saved + 1, "run.resume=must") as command:
        assert command.end().code == 0


@pytest.mark.nightly
def test_a_loss_under_a_blocked_call_ends_the_process():
    with Command(sys.executable, "-c", BLOCKED) as command:
        ended = command.end()
        wait_until(lambda: not left_of(command.pid))
    assert (ended.code, ended.stdout) == (1, "stuck\n")
    assert ended.stderr.splitlines()[-1].startswith("rlsys: the Ray cluster is lost: the raylet of this node")


def test_a_killed_run_leaves_nothing_behind(model_path: Path, data_path: Path, tmp_path: Path):
    job = job_in(tmp_path, model_path, data_path)
    with job.train(ENDLESS) as command:
        command.wait_until(lambda: bool(job.steps))
        assert len(left_of(command.pid)) > 5
        (frozen,) = (p for p in map(psutil.Process, command.processes()) if p.name().startswith("ray::Rollout"))
        frozen.suspend()  # it cannot notice anything
        psutil.Process(command.pid).kill()
        wait_until(lambda: not left_of(command.pid))
        assert is_gone(frozen.pid)
        wait_until(lambda: not command.processes())
