"""A submitted run on hosts that share no disk: its checkpoints are in an object store."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL

import pytest
import yaml

from tests.cluster.lab import JOBS_PORT, NETWORK, Ended, Lab
from tests.cluster.lab_runs import NAME, lab_keys
from tests.object_stores import environment_of, words_of_server
from tests.ray.commands import ENDLESS

STORE_PORT = 5000
JOBS = f"http://{NETWORK}.1:{JOBS_PORT}"
DESK = "/mnt/given/desk"
RUNS = Path("/mnt/disk/runs")
SPREAD = {"train.mesh.shard": "2", "resources.actor.cpus": "3", "rollout.replicas": "2"}
"""A rank on each of two hosts, and the replicas elsewhere or beside them."""


@pytest.fixture(scope="module")
def lab(open_lab: Callable[..., Lab]) -> Iterator[Lab]:
    """Three hosts in a cluster, a client outside of it, and an object store on the first host."""
    lab = open_lab(4)
    lab.environment.update(environment_of(f"{NETWORK}.1", STORE_PORT))
    lab.start_ray(num_cpus=(3, 4, 4))
    keys = dict(key.split("=", 1) for key in lab_keys(RUNS) if not key.startswith("ray="))
    keys |= SPREAD | {"checkpoint.to": "s3://bucket", "reward.fn": "judges.py:digits"}
    tree: dict[str, object] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        inner: dict[str, object] = tree
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[name] = yaml.safe_load(value)
    desk = lab.given / "desk"
    desk.mkdir()
    (desk / "run.yaml").write_text(yaml.safe_dump(tree))
    (desk / "judges.py").write_text((lab.given / "judges.py").read_text())
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


def published(run: Path) -> dict[int, str]:
    """Hashes of the weights by version."""
    rows = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {row["version"]: row["hash"] for row in rows if row["kind"] == "weights_published"}


@pytest.mark.timeout(600)
def test_a_stopped_job_goes_on_on_other_hosts_and_ends_with_the_weights_of_one_machine(lab: Lab) -> None:
    client = lab.host(4).start(
        "rlsys", "submit", "run.yaml", f"run.steps={ENDLESS}", "checkpoint.every=0", "--address", JOBS, cwd=DESK
    )
    assert client.stdout is not None and client.stderr is not None
    job = client.stderr.readline().removeprefix("job ").partition(":")[0]
    assert any(line.startswith("step ") for line in client.stdout), client.stderr.read()
    lab.host(4).kill()
    client.communicate()
    ended = rlsys(lab, 3, "stop", job)
    assert ended.code == 0, ended.out + ended.err
    steps = saved_step(lab) + 3
    assert lab.host(2).run("ray", "stop").code == 0
    lab.join(lab.add(5), num_cpus=4)
    ended = rlsys(lab, 3, "submit", "--resume", job, f"run.steps={steps}")
    assert ended.code == 0, ended.out + ended.err
    assert saved_step(lab) == steps
    run = lab.host(1).disk / "runs" / NAME
    one = lab_alone(lab, steps)
    assert published(run)[steps] == one[steps]


def lab_alone(lab: Lab, steps: int) -> dict[int, str]:
    """Hashes of a run of the same configuration on one machine, which is host 6."""
    keys = ["run.yaml", f"run.steps={steps}", "checkpoint.to=null", "resources.actor.cpus=1"]
    ended = lab.add(6).run("rlsys", "train", *keys, cwd=DESK)
    assert ended.code == 0, ended.out + ended.err
    return published(lab.host(6).disk / "runs" / NAME)
