"""A submitted run on hosts that share no disk: its checkpoints are in an object store."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from subprocess import DEVNULL
from typing import Any

import pytest
import yaml

from examples.sort.prepare import Recipe, prepare
from tests.cluster.lab import JOBS_PORT, NETWORK, Ended, Host, Lab
from tests.cluster.lab_runs import NAME, lab_keys
from tests.object_stores import environment_of, words_of_server
from tests.ray.commands import ENDLESS, ROOT

STORE_PORT = 5000
JOBS = f"http://{NETWORK}.1:{JOBS_PORT}"
DESK = "/mnt/given/desk"
RUNS = Path("/mnt/disk/runs")
SPREAD = {"train.mesh.shard": "2", "resources.actor.cpus": "3", "rollout.replicas": "2",
          "checkpoint.to": "s3://bucket"}  # fmt: skip
"""A rank on each of two hosts, and the replicas elsewhere or beside them."""


@pytest.fixture
def lab(open_lab: Callable[..., Lab]) -> Iterator[Lab]:
    """Three hosts in a cluster, a client outside of it, and an object store on the first host."""
    lab = open_lab(4)
    lab.environment.update(environment_of(f"{NETWORK}.1", STORE_PORT))
    lab.start_ray(num_cpus=(3, 4, 4))
    (lab.given / "desk").mkdir()
    with lab.host(1).start(*words_of_server("0.0.0.0", STORE_PORT), stdout=DEVNULL, stderr=DEVNULL) as server:
        yield lab
        server.kill()


def rlsys(lab: Lab, number: int, *words: str) -> Ended:
    return lab.host(number).run("rlsys", *words, cwd=DESK, RAY_API_SERVER_ADDRESS=JOBS)


def saved_step(lab: Lab) -> int:
    """Step of the newest checkpoint in the store."""
    place = f"any_path('s3://bucket/{NAME}/checkpoints')"
    code = (
        "from rlsys.loop.checkpoint_files import find_latest, step_of; from rlsys.util.any_paths import any_path; "
        f"print(step_of(find_latest({place})))"
    )
    ended = lab.host(3).run(sys.executable, "-c", code)
    assert ended.code == 0, ended.err
    return int(ended.out)


def rows_of(host: Host, kind: str) -> list[Mapping[str, Any]]:
    """Return the events of a kind of the run whose driver is on a host."""
    lines = (host.disk / "runs" / NAME / "events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def published(host: Host) -> dict[int, str]:
    """Hashes of the weights by version."""
    return {row["version"]: row["hash"] for row in rows_of(host, "weights_published")}


def train_on_changing_hosts(lab: Lab, file: str, steps: int | None, *, leave_at: int) -> int:
    """Submit a run, cut the client's power at a step, stop the run, replace a host, and let it go on; return its last
    step: `steps`, or three after the one at which it stopped. Raises `AssertionError`."""
    client = lab.host(4).start(
        "rlsys", "submit", file, f"run.steps={steps or ENDLESS}", "checkpoint.every=0", "--address", JOBS, cwd=DESK
    )
    assert client.stdout is not None and client.stderr is not None
    job = client.stderr.readline().removeprefix("job ").partition(":")[0]
    steps_told = (int(found[1]) for line in client.stdout if (found := re.match(r"step +(\d+)", line)))
    assert any(step >= leave_at for step in steps_told), client.stderr.read()
    lab.host(4).kill()
    client.communicate()
    ended = rlsys(lab, 3, "stop", job)
    assert ended.code == 0, ended.out + ended.err
    stopped_at = saved_step(lab)
    steps = steps or stopped_at + 3
    assert stopped_at < steps
    assert lab.host(2).run("ray", "stop").code == 0
    lab.join(lab.add(5), num_cpus=4)
    ended = rlsys(lab, 3, "submit", "--resume", job, f"run.steps={steps}")
    assert ended.code == 0, ended.out + ended.err
    assert saved_step(lab) == steps
    return steps


def train_alone(host: Host, file: str, steps: int) -> None:
    """Train the same configuration on one machine. Raises `AssertionError`."""
    keys = [file, f"run.steps={steps}", "checkpoint.to=null", "resources.actor.cpus=1"]
    ended = host.run("rlsys", "train", *keys, cwd=DESK, timeout_s=900.0)
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.timeout(600)
def test_a_stopped_job_goes_on_on_other_hosts_and_ends_with_the_weights_of_one_machine(lab: Lab) -> None:
    keys = dict(key.split("=", 1) for key in lab_keys(RUNS) if not key.startswith("ray="))
    (lab.given / "desk" / "run.yaml").write_text(text_of({}, keys | SPREAD | {"reward.fn": "judges.py:digits"}))
    shutil.copy(lab.given / "judges.py", lab.given / "desk")
    steps = train_on_changing_hosts(lab, "run.yaml", None, leave_at=1)
    train_alone(lab.add(6), "run.yaml", steps)
    assert published(lab.host(1))[steps] == published(lab.host(6))[steps]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_sorting_is_learnt_on_changing_hosts_as_on_one_machine(lab: Lab) -> None:
    prepared = lab.given / "sort"
    prepare(prepared, Recipe())
    keys = {"run.folder": str(RUNS), "run.name": NAME, "model.path": "/mnt/given/sort/model",
            "data.path": "/mnt/given/sort/train.jsonl", "eval.data.held_out": "/mnt/given/sort/eval.jsonl",
            "reward.fn": "reward.py:exact_sort",
            "model.dtype": "bfloat16"}  # in float32 nearly all words change, and no delta is smaller  # fmt: skip
    base = yaml.safe_load((ROOT / "examples" / "sort" / "run.yaml").read_text())
    (lab.given / "desk" / "sort.yaml").write_text(text_of(base, keys | SPREAD))
    shutil.copy(ROOT / "examples" / "sort" / "reward.py", lab.given / "desk")
    steps = train_on_changing_hosts(lab, "sort.yaml", 150, leave_at=50)
    rewards = [row["metrics"]["reward/mean"] for row in rows_of(lab.host(1), "step_done")]
    assert fmean(rewards[:10]) < 0.7 and fmean(rewards[-10:]) > 0.9, rewards
    assert any(row["num_sent"] < row["num_bytes"] for row in rows_of(lab.host(1), "weights_published"))
    train_alone(lab.add(6), "sort.yaml", steps)
    assert published(lab.host(1))[steps] == published(lab.host(6))[steps]


def text_of(base: dict[str, Any], keys: Mapping[str, str]) -> str:
    """Return a configuration with these keys over those of `base`, as YAML."""
    for key, value in keys.items():
        *sections, last = key.split(".")
        inner = base
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = yaml.safe_load(value)
    return yaml.safe_dump(base)
