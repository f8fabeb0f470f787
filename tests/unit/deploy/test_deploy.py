"""Deployment files, checked without their platforms."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from rlsys.config import Config
from rlsys.launch.doctor import locked_versions

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SLURM = DEPLOY / "slurm" / "rlsys.sbatch"
BIN = Path(sys.executable).parent
DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def section(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """A mapping with these keys and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


METADATA = section({"name": TEXT})
QUANTITIES = section(
    {"cpu": {"type": "string", "pattern": r"^\d+m?$"}, "memory": {"type": "string", "pattern": r"^\d+Gi$"}}
)
CONTAINER = section(
    {
        "name": TEXT,
        "image": TEXT,
        "resources": section({"limits": QUANTITIES, "requests": QUANTITIES}),
        "volumeMounts": many(section({"name": TEXT, "mountPath": {"type": "string", "pattern": "^/"}})),
        "securityContext": section(
            {
                "allowPrivilegeEscalation": {"const": False},
                "readOnlyRootFilesystem": {"const": True},
                "capabilities": section({"drop": {"const": ["ALL"]}}),
            }
        ),
    }
)
VOLUME = section(
    {"name": TEXT},
    {
        "configMap": section({"name": TEXT}),
        "persistentVolumeClaim": section({"claimName": TEXT}),
        "emptyDir": section({}, {"medium": {"const": "Memory"}, "sizeLimit": TEXT}),
    },
)
USER = section(
    {
        "runAsNonRoot": {"const": True},
        "runAsUser": COUNT,
        "runAsGroup": COUNT,
        "fsGroup": COUNT,
        "seccompProfile": section({"type": {"const": "RuntimeDefault"}}),
    }
)
LABELS = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}
POD_SPEC = section(
    {
        "containers": many(CONTAINER),
        "volumes": many(VOLUME),
        "securityContext": USER,
        "automountServiceAccountToken": {"const": False},
    },
    {"restartPolicy": {"const": "Never"}},
)
POD = section({"metadata": section({"labels": LABELS}), "spec": POD_SPEC})
PARAMS = {"type": "object", "additionalProperties": TEXT}
HEAD = section({"rayStartParams": PARAMS, "template": POD})
WORKERS = section(
    {
        "groupName": TEXT,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "rayStartParams": PARAMS,
        "template": POD,
    }
)
AUTH = section({"mode": {"const": "token"}, "secretName": TEXT})
CLUSTER = section({"rayVersion": TEXT, "authOptions": AUTH, "headGroupSpec": HEAD, "workerGroupSpecs": many(WORKERS)})
RAYJOB = section(
    {
        "entrypoint": {"type": "string", "pattern": "^rlsys train "},
        "backoffLimit": COUNT,
        "shutdownAfterJobFinishes": {"const": True},
        "ttlSecondsAfterFinished": COUNT,
        "submitterPodTemplate": section({"spec": POD_SPEC}),
        "rayClusterSpec": CLUSTER,
    }
)
SELECTOR = section({"matchLabels": LABELS})
PORT = section({"protocol": {"enum": ["TCP", "UDP"]}, "port": COUNT})
PEER = section({"podSelector": SELECTOR}, {"namespaceSelector": section({}, {"matchLabels": LABELS})})
POLICY = section(
    {
        "podSelector": SELECTOR,
        "policyTypes": {"const": ["Ingress", "Egress"]},
        "egress": many(section({"to": many(PEER)}, {"ports": many(PORT)})),
    },
    {"ingress": many(section({"from": many(PEER)}, {"ports": many(PORT)}))},
)
CLAIM = section({"accessModes": many(TEXT), "resources": section({"requests": section({"storage": TEXT})})})


def document(api: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return section({"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": METADATA} | body)


MANIFEST = {
    "type": "array",
    "prefixItems": [
        document("v1", "ConfigMap", {"data": section({"job.yaml": TEXT})}),
        document("v1", "PersistentVolumeClaim", {"spec": CLAIM}),
        document("networking.k8s.io/v1", "NetworkPolicy", {"spec": POLICY}),
        document("networking.k8s.io/v1", "NetworkPolicy", {"spec": POLICY}),
        document("ray.io/v1", "RayJob", {"spec": RAYJOB}),
    ],
    "items": False,
    "minItems": 5,
}


@pytest.fixture(scope="module")
def manifest() -> list[dict[str, Any]]:
    return list(YAML(typ="safe", pure=True).load_all((DEPLOY / "kuberay" / "rayjob.yaml").read_text()))


def node_pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of the cluster's nodes."""
    cluster = job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_rayjob_manifest_matches_its_schema(manifest: list[dict[str, Any]]):
    assert [e.message for e in Draft202012Validator(MANIFEST).iter_errors(manifest)] == []


def test_the_rayjob_mounts_its_volumes_and_runs_the_locked_ray(manifest: list[dict[str, Any]]):
    config_map, claim, *_, job = manifest
    cluster = job["spec"]["rayClusterSpec"]
    for pod in (job["spec"]["submitterPodTemplate"]["spec"], *node_pods(job)):
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert {m["name"] for c in pod["containers"] for m in c["volumeMounts"]} == volumes.keys()
    for pod in node_pods(job):
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert volumes["job"]["configMap"]["name"] == config_map["metadata"]["name"]
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert cluster["rayVersion"] == locked_versions((ROOT / "requirements" / "cpu.lock").read_text())["ray"]


def test_the_network_policy_exposes_only_the_dashboard_beyond_cluster_nodes(
    manifest: list[dict[str, Any]],
):
    *_, policy, _, job = manifest
    nodes = policy["spec"]["podSelector"]
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert nodes["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
    among_nodes, to_dashboard = policy["spec"]["ingress"]
    assert among_nodes == {"from": [{"podSelector": nodes}]}
    assert [port["port"] for port in to_dashboard["ports"]] == [8265]


def test_the_network_policies_let_nodes_reach_each_other_and_names_alone(manifest: list[dict[str, Any]]):
    *_, policy, submitter, job = manifest
    nodes = {"podSelector": policy["spec"]["podSelector"]}
    among_nodes, names = policy["spec"]["egress"]
    assert among_nodes == {"to": [nodes]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert submitter["spec"]["podSelector"] == {"matchLabels": {"job-name": job["metadata"]["name"]}}
    assert submitter["spec"]["egress"] == [{"to": [nodes], "ports": [{"protocol": "TCP", "port": 8265}]}, names]
    assert "ingress" not in submitter["spec"]


def test_pods_can_write_only_to_their_volumes_as_the_user_of_the_image(manifest: list[dict[str, Any]]):
    dockerfile = (DEPLOY / "Dockerfile.cpu").read_text()
    user = re.search(r"useradd --create-home --uid (\d+) (\w+)", dockerfile)
    assert user
    job = manifest[-1]
    for pod in (job["spec"]["submitterPodTemplate"]["spec"], *node_pods(job)):
        assert pod["securityContext"]["runAsUser"] == int(user[1])
        for container in pod["containers"]:
            assert {"/tmp", f"/home/{user[2]}"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_job_inside_the_rayjob_is_a_valid_configuration(manifest: list[dict[str, Any]], tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(manifest[0]["data"]["job.yaml"])
    overrides = manifest[-1]["spec"]["entrypoint"].split()[3:]
    config = Config.load(path, overrides)
    assert config.run.resume == "auto"
    mounts = node_pods(manifest[-1])[0]["containers"][0]["volumeMounts"]
    assert str(config.run.folder) in {m["mountPath"] for m in mounts}


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda", "kuberay/rayjob.yaml", "slurm/rlsys.sbatch"])
def test_deployment_files_name_untested_parts_and_run_rlsys_train(name: str):
    text = (DEPLOY / name).read_text()
    head = "\n".join(text.splitlines()[:5])
    assert re.search(r"never (built|applied|run)", head)
    assert re.search(r"rlsys( |:cpu |:cuda )train", text)


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


@pytest.mark.parametrize("script", [SLURM, ROOT / ".ci" / "run"], ids=["slurm", "ci"])
def test_shellcheck_finds_nothing_in_the_scripts(script: Path):
    done = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# -------------------------------------------------------------------------------------- the Slurm script on stand-ins

STAND_INS = {
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    "srun": 'echo "srun $*" >> "$LOG"; while case $1 in -*) true ;; *) false ;; esac; do shift; done; exec "$@"',
    "ray": 'echo "token $RAY_AUTH_TOKEN\nray $*" >> "$LOG"; case "$*" in *--block*) exec sleep 60 ;; esac',
}


def submit(folder: Path, rlsys: str, *arguments: str) -> subprocess.Popen[str]:
    """The script as Slurm would start it on three nodes, with `rlsys` replaced by a line of shell."""
    for name, body in {**STAND_INS, "rlsys": rlsys}.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LOG": str(folder / "log"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CPUS_PER_TASK": "4",
    }
    return subprocess.Popen(["bash", SLURM, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def test_slurm_starts_one_ray_per_node_and_the_driver(tmp_path: Path):
    job = submit(
        tmp_path, 'echo "$RAY_ADDRESS $*"; until grep -q "ray start --address" "$LOG"; do :; done', "job.yaml", "a.b=c"
    )
    out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (0, "n1:20007 train job.yaml a.b=c\n")
    shared = "--ntasks-per-node=1 --cpus-per-task=4 --overlap --export=ALL"
    head = "ray start --head --block --port=20007 --num-cpus=4 --dashboard-host=127.0.0.1 --disable-usage-stats"
    others = "ray start --address=n1:20007 --block --num-cpus=4"
    assert {line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("srun")} == {
        f"srun --nodes=1 --ntasks=1 {shared} --nodelist=n1 {head}",
        f"srun --nodes=2 --ntasks=2 {shared} --exclude=n1 {others}",
    }


def test_slurm_gives_each_job_a_secret_token_for_ray(tmp_path: Path):
    tokens = []
    for name in ("one", "other"):
        (folder := tmp_path / name).mkdir()
        job = submit(
            folder, 'echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN"; until grep -q "ray start --address" "$LOG"; do :; done', "f"
        )
        mode, token = job.communicate(timeout=30)[0].split()
        log = (folder / "log").read_text()
        assert (mode, len(token)) == ("token", 64)
        assert {line.split()[1] for line in log.splitlines() if line.startswith("token ")} == {token}
        assert not any(token in line for line in log.splitlines() if not line.startswith("token "))
        tokens.append(token)
    assert tokens[0] != tokens[1]


def test_slurm_ends_with_the_exit_code_of_the_driver(tmp_path: Path):
    job = submit(tmp_path, "exit 3", "job.yaml")
    job.communicate(timeout=30)
    assert job.returncode == 3


def test_slurm_forwards_the_termination_warning_to_the_driver(tmp_path: Path):
    job = submit(tmp_path, 'trap "echo saved; exit 130" TERM; echo started; while :; do sleep 0.05; done', "job.yaml")
    assert job.stdout
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (130, "saved\n")


def test_slurm_without_a_job_file_exits_with_2(tmp_path: Path):
    job = submit(tmp_path, "exit 0")
    job.communicate(timeout=30)
    assert job.returncode == 2
