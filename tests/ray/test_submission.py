"""`rlsys submit`, `logs` and `stop` on a cluster that runs already, whose job server asks for a token."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from rlsys.loop.checkpoint_files import find_latest, step_of
from tests.jobs import keys_of
from tests.processes import free_port, is_open
from tests.ray.commands import DEADLINE_S, ENDLESS, RLSYS, SCRIPTS, wait_until

REWARD = "def digits(completion):\n    return sum(c.isdigit() for c in completion) / 8\n"


@dataclass(frozen=True)
class Desk:
    """A folder from which runs are submitted, as a user has one."""

    folder: Path
    environment: dict[str, str]

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([str(RLSYS), *words], cwd=self.folder, env=self.environment, text=True, **pipes)

    def run(self, *words: str) -> tuple[int, str, str]:
        done = self.start(*words)
        out, err = done.communicate(timeout=DEADLINE_S)
        return done.returncode, out, err


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster of one node, and what a client needs to reach it."""
    folder = tmp_path_factory.mktemp("ray")
    ports = [free_port(), free_port(), free_port()]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": str(folder)}
    token["RAY_raylet_start_wait_time_s"] = "240"  # a busy machine needs more than 30 s
    path = {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    mine = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | token | path
    its = {key: value for key, value in mine.items() if key != "PYTHONPATH"}  # it gets the packages with the job
    words = [SCRIPTS / "ray", "start", "--head", "--block", f"--port={ports[0]}", f"--dashboard-port={ports[1]}"]
    words.append(f"--dashboard-agent-listen-port={ports[2]}")  # the default is that of the cluster of other tests
    words += ["--dashboard-host=127.0.0.1", "--num-cpus=8", "--disable-usage-stats", "--object-store-memory=200000000"]
    with subprocess.Popen(words, env=its, stdout=subprocess.DEVNULL) as head:
        try:
            wait_until(lambda: is_open(ports[1]) or head.poll() is not None)
            yield {**mine, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports[1]}"}
        finally:
            for process in [*psutil.Process(head.pid).children(recursive=True), head]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture
def desk(environment: dict[str, str], model_path: Path, data_path: Path, tmp_path: Path) -> Desk:
    folder = tmp_path / "desk"
    folder.mkdir()
    (folder / "tasks.jsonl").write_text(data_path.read_text())
    (folder / "my_reward.py").write_text(REWARD)
    (folder / ".gitignore").write_text("tasks.jsonl\n")  # git is one thing, what the cluster gets another
    keys = dict(key.split("=", 1) for key in keys_of(model_path, data_path, tmp_path / "runs"))
    keys |= {"data.path": "tasks.jsonl", "reward.fn": "my_reward.py:digits", "run.name": "sums"}
    tree: dict[str, dict[str, object]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = yaml.safe_load(value)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return Desk(folder, environment)


def test_a_submitted_run_ends_though_its_client_dies(desk: Desk, tmp_path: Path) -> None:
    with desk.start("submit", str(desk.folder / "run.yaml"), "run.steps=6") as client:
        assert client.stdout is not None and client.stderr is not None
        first = client.stderr.readline()
        job = first.removeprefix("job ").partition(":")[0]
        assert job.startswith("sums-"), first
        for line in client.stdout:
            if line.startswith("step "):
                break
        client.kill()
    code, out, err = desk.run("logs", job)
    assert code == 0, out + err
    assert "finished after step 6" in out
    latest = find_latest(tmp_path / "runs" / "sums" / "checkpoints")
    assert latest is not None and step_of(latest) == 6


@pytest.mark.nightly
def test_a_stopped_job_is_saved_and_another_goes_on_with_it(desk: Desk, tmp_path: Path) -> None:
    checkpoints = tmp_path / "runs" / "sums" / "checkpoints"
    code, job, err = desk.run("submit", "run.yaml", f"run.steps={ENDLESS}", "checkpoint.every=0", "--detach")
    assert code == 0, err
    metrics = tmp_path / "runs" / "sums" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    code, out, err = desk.run("stop", job.strip())
    assert code == 0, err
    latest = find_latest(checkpoints)
    assert latest is not None and "checkpoint of step" in out
    assert desk.run("stop", job.strip())[2].rstrip().endswith("has ended already")
    steps = step_of(latest) + 2
    code, out, err = desk.run("submit", "--resume", job.strip(), f"run.steps={steps}")
    assert code == 0, out + err
    latest = find_latest(checkpoints)
    assert latest is not None and step_of(latest) == steps


@pytest.mark.nightly
def test_a_job_that_fails_ends_with_its_exit_code(desk: Desk) -> None:
    code, out, _ = desk.run("submit", "run.yaml", "model.path=/nowhere/model")
    assert code == 2
    assert "rlsys: " in out and "/nowhere/model" in out and "Traceback" not in out


def test_what_the_cluster_would_not_get_is_named_before_anything_is_sent(desk: Desk) -> None:
    (desk.folder / ".rayignore").write_text("*.jsonl\n")
    code, _, err = desk.run("submit", "run.yaml")
    assert code == 2
    assert err.startswith(f"rlsys: data.path: tasks.jsonl is left out by {desk.folder / '.rayignore'}: ")
    (desk.folder / ".rayignore").unlink()
    (desk.folder.parent / "other.jsonl").write_text((desk.folder / "tasks.jsonl").read_text())
    code, _, err = desk.run("submit", "run.yaml", "data.path=../other.jsonl")
    assert code == 2 and err.startswith(f"rlsys: data.path: ../other.jsonl is not in {desk.folder}, ")
    (desk.folder.parent / "other.yaml").write_text((desk.folder / "run.yaml").read_text())
    code, _, err = desk.run("submit", str(desk.folder.parent / "other.yaml"))
    assert code == 2 and err.startswith(f"rlsys: FILE: {desk.folder.parent / 'other.yaml'} is not in {desk.folder}, ")
    code, _, err = desk.run("submit", "run.yaml", "run.folder=runs")
    assert code == 2 and err.startswith("rlsys: run.folder: runs is relative, and Ray deletes the folder of a job")


def test_a_cluster_that_cannot_be_reached_is_named(desk: Desk) -> None:
    code, _, err = desk.run("submit", "run.yaml", "--address", "http://127.0.0.1:1")
    assert code == 1 and err.startswith("rlsys: the job server at http://127.0.0.1:1: ") and "Traceback" not in err
    stranger = Desk(desk.folder, {**desk.environment, "RAY_AUTH_TOKEN": "0" * 64})
    code, _, err = stranger.run("submit", "run.yaml")
    assert code == 1 and "token" in err and "Traceback" not in err
    nobody = Desk(desk.folder, {k: v for k, v in desk.environment.items() if k != "RAY_API_SERVER_ADDRESS"})
    assert nobody.run("logs", "sums-1")[::2] == (
        2, "rlsys: no cluster is named: give --address http://HEAD:8265, or set RAY_API_SERVER_ADDRESS\n"
    )  # fmt: skip
    code, _, err = desk.run("logs", "sums-none")
    assert code == 1 and "sums-none" in err and "Traceback" not in err
