"""Deployment files, checked without their platforms."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler
from ray.autoscaler._private import util as launcher

from rlsys.config import Config
from tests.closed_schemas import COUNT, TEXT, TEXTS, Schema, many, problems, read_head, read_yaml, section

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]


WAYS = [*DOCKERFILES, "compose.yaml", "ray-cluster/on-premises.yaml", "skypilot/rlsys.yaml"]

HEALTH: Schema = {
    "oneOf": [
        section({"test": many(TEXT), "interval": TEXT, "timeout": TEXT, "retries": COUNT}),
        section({"disable": {"const": True}}),
    ]
}
SERVICE = section(
    {
        "image": TEXT,
        "entrypoint": many(TEXT),
        "command": many(TEXT),
        "environment": section({"RAY_AUTH_MODE": {"const": "token"}, "RAY_AUTH_TOKEN": TEXT}),
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
        "healthcheck": HEALTH,
        "shm_size": TEXT,
        "read_only": {"const": True},
        "cap_drop": {"const": ["ALL"]},
        "security_opt": {"const": ["no-new-privileges:true"]},
        "tmpfs": many(TEXT),
        "volumes": many({"type": "string", "pattern": r"^[a-z]+:/"}),
    },
    {
        "depends_on": {
            "type": "object",
            "additionalProperties": section({"condition": {"const": "service_healthy"}}),
        }
    },
)
COMPOSE = section(
    {
        "name": TEXT,
        "services": section({"head": SERVICE, "worker": SERVICE}),
        "volumes": {"type": "object", "additionalProperties": section({})},
    }
)
"""Keys of the Compose Specification, whose schema of 2021 accepted the file but for the newer `name`."""
SKYPILOT = section(
    {
        "name": TEXT,
        "resources": section(
            {
                "accelerators": {"type": "string", "pattern": r"^[\w-]+:\d+$"},
                "use_spot": {"type": "boolean"},
                "disk_size": COUNT,
            }
        ),
        "workdir": TEXT,
        "file_mounts": {
            "type": "object",
            "additionalProperties": section({"name": TEXT, "mode": {"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}}),
        },
        "envs": TEXTS,
        "setup": TEXT,
        "run": TEXT,
    }
)
"""Keys of a task, from `sky/utils/schemas.py` of SkyPilot 0.14.1."""


def yaml_of(name: str) -> Any:
    (document,) = read_yaml((DEPLOY / name).read_text())
    return document


@pytest.mark.parametrize("name", WAYS, ids=[name.partition("/")[2] or name for name in WAYS])
def test_deployment_files_name_what_never_ran_and_the_command_that_runs_rlsys(name: str):
    assert re.search(r"never (built|launched|run)", read_head(DEPLOY / name))
    assert re.search(r"rlsys( |:cpu |:cuda )(train|submit) ", (DEPLOY / name).read_text())


# ------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_dockerfile_names_images_only_by_digest(name: str):
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", (DEPLOY / name).read_text(), re.MULTILINE)
    images = {image for image, _ in stages} - {name for _, name in stages}
    assert images
    assert [image for image in images if not re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", image)] == []


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_user_without_privileges_and_gets_what_the_other_gets(name: str):
    lines = (DEPLOY / name).read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
    ignored = [(DEPLOY / f"{each}.dockerignore").read_text() for each in DOCKERFILES]
    assert ignored[0] == ignored[1]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing_in_the_dockerfile(name: str):
    done = subprocess.run([BIN / "hadolint", DEPLOY / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# ------------------------------------------------------------------------------------ Compose, Ray's launcher, SkyPilot


def test_the_compose_file_has_only_keys_that_its_schema_knows():
    assert problems(COMPOSE, yaml_of("compose.yaml")) == []


def test_containers_of_compose_share_volumes_a_token_and_one_port_of_this_machine():
    compose = yaml_of("compose.yaml")
    head, worker = compose["services"]["head"], compose["services"]["worker"]
    assert head["environment"] == worker["environment"]
    assert head["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
    assert {each.partition(":")[0] for each in head["volumes"]} == compose["volumes"].keys()
    assert (head["ports"], worker["ports"]) == (["127.0.0.1:8265:8265"], [])
    assert worker["depends_on"].keys() == {"head"}
    assert "--port=6379" in head["command"]
    assert "--address=head:6379" in worker["command"]


def test_images_have_the_folder_of_the_volumes_for_their_user():
    for mount in yaml_of("compose.yaml")["services"]["head"]["volumes"]:
        folder = mount.partition(":")[2]
        for name in DOCKERFILES:
            text = (DEPLOY / name).read_text()
            assert f"install --directory --owner=rlsys {folder}\n" in text or folder == "/home/rlsys"


def test_ray_accepts_the_configuration_of_its_cluster_launcher():
    given = yaml_of("ray-cluster/on-premises.yaml")
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    assert problems(schema, given) == []
    config = launcher.prepare_config(given)
    launcher.validate_config(config)
    assert config["max_workers"] == len(given["provider"]["worker_ips"])


def test_every_ray_of_the_cluster_launcher_asks_for_the_token():
    given = yaml_of("ray-cluster/on-premises.yaml")
    starts = [
        command
        for role in ("head", "worker")
        for command in given[f"{role}_start_ray_commands"]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_the_task_of_skypilot_has_only_keys_that_its_schema_knows():
    assert problems(SKYPILOT, yaml_of("skypilot/rlsys.yaml")) == []


@pytest.mark.parametrize("key", ["setup", "run"])
def test_shellcheck_finds_nothing_in_the_scripts_of_skypilot(key: str):
    script = yaml_of("skypilot/rlsys.yaml")[key]
    words = [BIN / "shellcheck", "--shell=bash", "-"]
    done = subprocess.run(words, input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_run_of_skypilot_goes_on_from_the_bucket(tmp_path: Path):
    task = yaml_of("skypilot/rlsys.yaml")
    words = shlex.split(task["run"].splitlines()[-1].replace("$HOME", str(tmp_path)))
    assert words[1:3] == ["train", "$JOB"]
    job = tmp_path / task["envs"]["JOB"]
    job.write_text("run: {steps: 1}\nmodel: {path: m}\ndata: {path: d.jsonl}\n")
    config = Config.load(job, words[3:])
    assert config.run.resume == "auto"
    assert config.checkpoint.to == "file://" + next(iter(task["file_mounts"]))


def test_skypilot_installs_the_lock_as_the_image_does():
    setup = yaml_of("skypilot/rlsys.yaml")["setup"]
    installs = [line for line in setup.splitlines() if " -r " in line]
    assert [line.split()[-1] for line in installs] == ["requirements/installer.lock", "requirements/cuda.lock"]
    assert all("--require-hashes" in line for line in installs)
