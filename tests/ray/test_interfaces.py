"""The ways in: the command line with its interruptions, and a Ray job."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient
from transformers import AutoModelForCausalLM

from tests.planted_modules import plant, planted_that_ran
from tests.processes import free_port
from tests.ray.commands import ENDLESS, RLSYS, ROOT, SCRIPTS, Command, Ended, Job, job_in, rlsys, wait_until
from tests.ray_workers import kill_worker, workers_of

pytestmark = pytest.mark.timeout(400)


@dataclass
class History:
    """One run in three sessions: Ctrl-C, resumed and terminated, resumed to its end."""

    job: Job
    by_ctrl_c: Ended
    saved_by_ctrl_c: int
    terminated: Ended
    saved_by_termination: int
    finished: Ended


@pytest.fixture(scope="module")
def history(model_path: Path, data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    job = job_in(tmp_path_factory.mktemp("runs"), model_path, data_path)
    by_ctrl_c = job.interrupted(Command.interrupt)
    first = job.saved
    terminated = job.interrupted(Command.terminate, "run.resume=must")
    second = job.saved
    with job.train(second + 2, "run.resume=must", "--json") as command:
        finished = command.end()
    return History(job, by_ctrl_c, first, terminated, second, finished)


def test_ctrl_c_saves_the_step_and_exits_with_130(history: History):
    ended = history.by_ctrl_c
    assert ended.code == 130
    assert "stopping; the current step is finished and saved; press again to exit at once" in ended.stderr
    last_line = ended.stderr.strip().splitlines()[-1]
    assert last_line == (
        f"rlsys: interrupted after step {history.saved_by_ctrl_c}, which is saved; go on with run.resume=auto"
    )
    assert "Traceback" not in ended.stderr


def test_a_termination_saves_too_and_exits_with_143(history: History):
    assert history.terminated.code == 143
    assert history.saved_by_termination > history.saved_by_ctrl_c
    assert f"interrupted after step {history.saved_by_termination}" in history.terminated.stderr


def test_an_interrupted_run_resumes_and_takes_every_step_once(history: History):
    assert history.finished.code == 0, history.finished.stderr
    total = history.saved_by_termination + 2
    assert history.job.steps == list(range(1, total + 1))
    assert history.job.saved == total
    events = [json.loads(line) for line in (history.job.run_dir / "events.jsonl").read_text().splitlines()]
    assert [e["reason"] for e in events if e["kind"] == "run_ended"] == ["interrupted", "interrupted", "finished"]


def test_the_last_line_is_one_json_object(history: History):
    (line,) = history.finished.stdout.splitlines()
    result = json.loads(line)
    assert result["run_dir"] == str(history.job.run_dir)
    assert result["steps"] == history.saved_by_termination + 2
    assert {"start_up", "step", "rollout", "train"} <= result["seconds"].keys()
    assert 0 < result["reward_last"] < 1


def test_a_run_is_exported_by_a_command(history: History, tmp_path: Path):
    ended = rlsys("export", history.job.run_dir, "--to", tmp_path / "model", "--step", str(history.saved_by_ctrl_c))
    assert (ended.code, ended.stdout.strip()) == (0, str(tmp_path / "model"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 10_000


@pytest.mark.nightly
def test_commands_with_a_model_import_nothing_from_the_run_folder(history: History, data_path: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(history.job.run_dir, run, symlinks=True)
    plant(run)
    commands: list[tuple[str, ...]] = [
        ("eval", ".", "--data", str(data_path), "reward.fn=exact"),
        ("replay", ".", "--step", "1"),
        ("export", ".", "--to", str(tmp_path / "model")),
    ]
    assert [planted_that_ran(run, command, tmp_path / "rlsys") for command in commands] == ["", "", ""]


def samples_of(run: Path, dataset: str) -> list[dict[str, Any]]:
    asked = rlsys("query", run, f"select step, reason from samples where dataset = '{dataset}'", "--json")
    assert asked.code == 0, asked.stderr
    return json.loads(asked.stdout)["rows"]


def test_a_run_is_evaluated_by_a_command(history: History, data_path: Path):
    sets = ["--data", str(data_path), "--data", f"other={data_path}"]
    ended = rlsys("eval", history.job.run_dir, *sets, "--limit", "6", "--n", "2", "--temperature", "1", "--json")
    assert ended.code == 0, ended.stderr
    results = json.loads(ended.stdout)
    assert list(results) == [data_path.stem, "other"]
    assert results["other"] == results[data_path.stem]
    result = results["other"]
    assert (result["num_tasks"], result["samples"], result["failed_frac"]) == (6, 2, 0)
    assert 0 <= result["mean"] <= 1
    assert 0 <= result["pass@1"] <= result["pass@2"] <= 1
    run, step = history.job.run_dir, history.job.saved
    assert json.loads((run / f"evaluations/other@1/step_{step:06d}.json").read_text())["mean"] == result["mean"]
    rows = samples_of(run, "other@1")
    assert len(rows) == 12 and {row["step"] for row in rows} == {step}
    assert {"eval-driver", "eval-recorder", "eval-eval-0"} <= {path.stem for path in (run / "machine").iterdir()}
    assert {"eval-recorder", "eval-eval-0"} <= {path.stem for path in (run / "logs").iterdir()}


@pytest.mark.nightly
def test_an_evaluation_whose_judge_fails_keeps_the_reasons(history: History, data_path: Path):
    run = history.job.run_dir
    broken = rlsys("eval", run, "reward.fn=tests.ray.judges:raises", "--data", f"judged={data_path}", "--limit", "1")
    assert broken.code != 0 and "this judge is broken" in broken.stderr
    assert {"this judge is broken" in row["reason"] for row in samples_of(run, "judged@1")} == {True}


@pytest.mark.nightly
def test_ctrl_c_twice_exits_at_once_and_leaves_no_process(model_path: Path, data_path: Path, tmp_path: Path):
    job = job_in(tmp_path, model_path, data_path)
    with job.train(ENDLESS, "train.groups_per_step=64", "rollout.max_new_tokens=48") as command:
        command.wait_until(lambda: bool(job.steps))
        command.interrupt()
        command.interrupt()
        assert command.end().code == 130
        wait_until(lambda: not command.processes())


@pytest.mark.nightly
def test_a_worker_that_dies_at_the_start_is_started_again(model_path: Path, data_path: Path, tmp_path: Path):
    job = job_in(tmp_path, model_path, data_path)
    with job.train(2) as command:
        command.wait_until(lambda: bool(workers_of("ActorRank")))
        kill_worker("ActorRank")
        assert command.end().code == 0
    events = [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
    assert [e["worker"] for e in events if e["kind"] == "worker_failed"] == ["actor-0"]
    assert job.steps == [1, 2]


@pytest.mark.nightly
def test_ctrl_c_while_a_rank_is_frozen_ends_in_time(model_path: Path, data_path: Path, tmp_path: Path):
    job = job_in(tmp_path, model_path, data_path)
    with job.train(ENDLESS, "train.mesh.shard=2", "checkpoint.every=2", "limits.silence_s=6") as command:
        command.wait_until(lambda: len(job.steps) > 4)
        workers_of("ActorRank")[-1].suspend()
        began = time.monotonic()
        command.interrupt()
        ended = command.end()
        assert time.monotonic() - began < 90, "30 s for the step, 40 s until the silence is noticed"
        wait_until(lambda: not command.processes())
    assert ended.code == 130, ended.stderr
    assert f"step {job.saved} is saved; go on with run.resume=auto" in ended.stderr
    with job.train(job.saved + 1, "run.resume=must") as command:
        assert command.end().code == 0


@pytest.mark.nightly
def test_a_closed_terminal_saves_although_rollouts_hang(model_path: Path, data_path: Path, tmp_path: Path):
    job, gate = job_in(tmp_path, model_path, data_path), tmp_path / "gate"
    hanging = f"rollout.workflow={{type: 'tests.ray.judges:Hangs', gate: {gate}}}"
    with job.train(ENDLESS, "checkpoint.every=0", hanging) as command:
        command.wait_until(lambda: bool(job.steps))
        gate.touch()
        command.wait_until(gate.with_suffix(".hung").exists)
        began = time.monotonic()
        command.hang_up()
        ended = command.end()
    assert time.monotonic() - began < 30
    assert ended.code == 129, ended.stderr
    assert job.saved == job.steps[-1]
    assert f"interrupted after step {job.saved}, which is saved" in ended.stderr


@pytest.mark.nightly
def test_a_termination_at_start_up_ends_in_order(model_path: Path, data_path: Path, tmp_path: Path):
    job = job_in(tmp_path, model_path, data_path)
    events = job.run_dir / "events.jsonl"
    with job.train(ENDLESS) as command:
        command.wait_until(lambda: events.exists() and "load_data" in events.read_text())
        command.terminate()
        ended = command.end()
    assert ended.code == 143, ended.stderr
    assert ended.stderr.strip().endswith("rlsys: interrupted before the first step")
    last = json.loads(events.read_text().splitlines()[-1])
    assert (last["kind"], last["reason"]) == ("run_ended", "interrupted")


# ------------------------------------------------------------------------------------------------------- a Ray job


@pytest.fixture
def head() -> Iterator[str]:
    """A cluster of its own with the job server; yields the server's address.

    Every port that Ray fixes is chosen anew: others on this machine may run a cluster too.
    """
    port = free_port()
    fixed = ("ray-client-server-port", "dashboard-agent-listen-port")
    ports = ["--port=0", f"--dashboard-port={port}", *(f"--{name}={free_port()}" for name in fixed)]
    options = [*ports, "--include-dashboard=true", "--num-cpus=8", "--block"]
    with TemporaryDirectory(prefix="rlsys-") as folder:
        with Command(SCRIPTS / "ray", "start", "--head", f"--temp-dir={folder}", *options) as cluster:
            address = f"http://127.0.0.1:{port}"
            cluster.wait_until(lambda: answers(address))
            yield address
        wait_until(lambda: not cluster.processes())


def answers(address: str) -> bool:
    try:
        JobSubmissionClient(address)
    except (ConnectionError, RuntimeError):
        return False
    return True


def accepted(client: JobSubmissionClient, command: str) -> str:
    """Submit `command`; the agent that takes jobs comes up after the server that answers."""
    ids: list[str] = []

    def is_accepted() -> bool:
        with suppress(RuntimeError):
            ids.append(client.submit_job(entrypoint=command))
        return bool(ids)

    wait_until(is_accepted)
    return ids[0]


def test_a_submitted_job_trains_on_its_cluster(head: str, model_path: Path, data_path: Path, tmp_path: Path):
    job = job_in(tmp_path, model_path, data_path)
    client = JobSubmissionClient(head)
    command = " ".join(map(str, [RLSYS, "train", job.file, *job.keys, "run.steps=2", "--json"]))
    submitted = accepted(client, f"cd {ROOT} && {command}")
    ends = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}
    wait_until(lambda: client.get_job_status(submitted) in ends)
    assert client.get_job_status(submitted) is JobStatus.SUCCEEDED, client.get_job_logs(submitted)
    assert json.loads(client.get_job_logs(submitted).splitlines()[-1])["steps"] == 2
    assert job.steps == [1, 2]
    assert job.saved == 2
