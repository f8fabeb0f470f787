"""Manifests for KubeRay: the base as it is, each overlay as kustomize builds it, against schemas of the keys they use.

The schemas are written by hand. Those of KubeRay follow the types of `ray.io/v1` in `ray-operator/apis/ray/v1` of
`ray-project/kuberay`; that of PodMonitor follows `monitoring.coreos.com_podmonitors.yaml` of prometheus-operator 0.91.
All other objects, and all pods, passed the strict schemas of Kubernetes 1.37 once.
"""

import re
import shutil
import subprocess
import sys
from copy import deepcopy
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.launch.doctor import locked_versions
from tests.closed_schemas import COUNT, TEXT, TEXTS, Schema, many, problems, read_head, read_yaml, section

ROOT = Path(__file__).parents[3]
KUBERAY = ROOT / "deploy" / "kuberay"
OVERLAYS = ["cpu-smoke", "gpus-8", "multi-node"]
GPU = "nvidia.com/gpu"
BIN = Path(sys.executable).parent
KUBECTL = shutil.which("kubectl", path=str(BIN)) or shutil.which("kubectl")

QUANTITIES = section(
    {"cpu": {"type": "string", "pattern": r"^\d+m?$"}, "memory": {"type": "string", "pattern": r"^\d+Gi$"}},
    {GPU: {"type": "string", "pattern": r"^\d+$"}},
)
LIMITS = section({"limits": QUANTITIES, "requests": QUANTITIES})
MOUNTS = many(section({"name": TEXT, "mountPath": {"type": "string", "pattern": "^/"}}))
CONFINED = section(
    {
        "allowPrivilegeEscalation": {"const": False},
        "readOnlyRootFilesystem": {"const": True},
        "capabilities": section({"drop": {"const": ["ALL"]}}),
    }
)
CONTAINER = section(
    {"name": TEXT, "image": TEXT, "resources": LIMITS, "volumeMounts": MOUNTS, "securityContext": CONFINED}
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
TOLERATION = section(
    {"key": TEXT, "operator": {"enum": ["Exists", "Equal"]}, "effect": {"const": "NoSchedule"}}, {"value": TEXT}
)
POD_SPEC = section(
    {
        "containers": many(CONTAINER),
        "volumes": many(VOLUME),
        "securityContext": USER,
        "automountServiceAccountToken": {"type": "boolean"},
    },
    {"restartPolicy": {"const": "Never"}, "nodeSelector": TEXTS, "tolerations": many(TOLERATION)},
)
POD = section({"metadata": section({"labels": TEXTS}), "spec": POD_SPEC})
PARAMS: Schema = {"type": "object", "additionalProperties": TEXT}
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
AUTOSCALER = section(
    {
        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
        "idleTimeoutSeconds": COUNT,
        "resources": LIMITS,
        "securityContext": CONFINED,
        "volumeMounts": MOUNTS,
    }
)
CLUSTER = section(
    {"rayVersion": TEXT, "authOptions": AUTH, "headGroupSpec": HEAD, "workerGroupSpecs": many(WORKERS)},
    {"enableInTreeAutoscaling": {"const": True}, "autoscalerOptions": AUTOSCALER},
)
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
SELECTOR = section({"matchLabels": TEXTS})
PORTS = many(section({"protocol": {"enum": ["TCP", "UDP"]}, "port": COUNT}))
PEER: Schema = {
    "anyOf": [
        section({"podSelector": SELECTOR}, {"namespaceSelector": section({}, {"matchLabels": TEXTS})}),
        section({"namespaceSelector": SELECTOR}),
        section({"ipBlock": section({"cidr": {"type": "string", "pattern": r"^[\d.]+/\d+$"}})}),
    ]
}
POLICY = section(
    {"podSelector": SELECTOR, "policyTypes": many({"enum": ["Ingress", "Egress"]})},
    {
        "egress": many(section({"to": many(PEER)}, {"ports": PORTS})),
        "ingress": many(section({"from": many(PEER)}, {"ports": PORTS})),
    },
)
CLAIM = section({"accessModes": many(TEXT), "resources": section({"requests": section({"storage": TEXT})})})
MONITOR = section(
    {
        "selector": SELECTOR,
        "podMetricsEndpoints": many(section({"port": TEXT, "interval": {"type": "string", "pattern": r"^\d+s$"}})),
    }
)


def manifest_of(api: str, kind: str, body: Schema) -> Schema:
    """An object without a namespace, which it gets from whoever applies it."""
    return section({"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": section({"name": TEXT})} | body)


SCHEMAS = {
    "ConfigMap": manifest_of("v1", "ConfigMap", {"data": section({"job.yaml": TEXT})}),
    "PersistentVolumeClaim": manifest_of("v1", "PersistentVolumeClaim", {"spec": CLAIM}),
    "NetworkPolicy": manifest_of("networking.k8s.io/v1", "NetworkPolicy", {"spec": POLICY}),
    "RayJob": manifest_of("ray.io/v1", "RayJob", {"spec": RAYJOB}),
    "PodMonitor": manifest_of("monitoring.coreos.com/v1", "PodMonitor", {"spec": MONITOR}),
}
KUSTOMIZATION = section(
    {
        "apiVersion": {"enum": ["kustomize.config.k8s.io/v1beta1", "kustomize.config.k8s.io/v1alpha1"]},
        "kind": {"enum": ["Kustomization", "Component"]},
        "resources": many(TEXT),
    },
    {
        "components": many(TEXT),
        "images": many(section({"name": TEXT, "newTag": TEXT})),
        "patches": many(section({"patch": TEXT}, {"target": section({"kind": {"const": "RayJob"}, "name": TEXT})})),
    },
)
POINTER: Schema = {"type": "string", "pattern": "^/spec/"}
OPERATIONS = many(
    {
        "oneOf": [
            section({"op": {"enum": ["add", "replace"]}, "path": POINTER, "value": True}),
            section({"op": {"const": "copy"}, "from": POINTER, "path": POINTER}),
        ]
    }
)

Objects = dict[tuple[str, str], dict[str, Any]]
"""Objects of a manifest, by their kind and name."""


@cache
def objects_of(overlay: str) -> Objects:
    """The base as its file has it, or an overlay as kustomize builds it."""
    if overlay == "base":
        text = (KUBERAY / "base" / "rayjob.yaml").read_text()
    else:
        if KUBECTL is None:
            pytest.skip("no kubectl, which builds the overlays; `make setup-dev` brings one")
        words = [KUBECTL, "kustomize", KUBERAY / overlay]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return {(each["kind"], each["metadata"]["name"]): each for each in read_yaml(text)}


@pytest.fixture(params=["base", *OVERLAYS])
def objects(request: pytest.FixtureRequest) -> Objects:
    return objects_of(request.param)


def spec_of(objects: Objects, kind: str, name: str = "rlsys") -> dict[str, Any]:
    return objects[kind, name]["spec"]


def groups_of(objects: Objects) -> list[dict[str, Any]]:
    """The head's group, and those of workers."""
    cluster = spec_of(objects, "RayJob")["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def node_pods(objects: Objects) -> list[dict[str, Any]]:
    """The pods of the cluster's nodes."""
    return [group["template"]["spec"] for group in groups_of(objects)]


def all_pods(objects: Objects) -> list[dict[str, Any]]:
    return [spec_of(objects, "RayJob")["submitterPodTemplate"]["spec"], *node_pods(objects)]


def size_of(group: dict[str, Any]) -> tuple[int, int]:
    """CPUs and GPUs of one node of a group."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return int(limits["cpu"]), int(limits.get(GPU, 0))


def job_of(objects: Objects, folder: Path) -> Config:
    """The configuration of the job, as the driver would read it."""
    path = folder / "job.yaml"
    path.write_text(objects["ConfigMap", "rlsys-job"]["data"]["job.yaml"])
    return Config.load(path, spec_of(objects, "RayJob")["entrypoint"].split()[3:])


def test_every_object_has_only_keys_that_its_schema_knows(objects: Objects):
    assert [problem for (kind, _), each in objects.items() for problem in problems(SCHEMAS[kind], each)] == []


def test_a_key_that_no_schema_knows_is_an_error():
    job = deepcopy(objects_of("base")["RayJob", "rlsys"])
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["hostNetwork"] = True
    (problem,) = problems(SCHEMAS["RayJob"], job)
    assert "'hostNetwork' was unexpected" in problem


@pytest.mark.parametrize("path", sorted(KUBERAY.glob("*/*.yaml")), ids=lambda path: "/".join(path.parts[-2:]))
def test_manifests_name_what_never_ran(path: Path):
    assert re.search(r"(?i)never (applied|built)", read_head(path).replace("\n#", ""))


@pytest.mark.parametrize("path", sorted(KUBERAY.glob("*/kustomization.yaml")), ids=lambda path: path.parent.name)
def test_kustomizations_refer_to_files_that_there_are_and_patch_fields_of_the_job(path: Path):
    (kustomization,) = read_yaml(path.read_text())
    assert problems(KUSTOMIZATION, kustomization) == []
    for name in (*kustomization["resources"], *kustomization.get("components", [])):
        assert (path.parent / name).exists()
    for patch in kustomization.get("patches", []):
        (content,) = read_yaml(patch["patch"])
        if "target" in patch:
            assert problems(OPERATIONS, content) == []
        else:
            assert problems(SCHEMAS[content["kind"]], content) == []


def test_pods_mount_their_volumes_and_run_the_locked_ray(objects: Objects):
    for pod in all_pods(objects):
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert {m["name"] for c in pod["containers"] for m in c["volumeMounts"]} == volumes.keys()
    for pod in node_pods(objects):
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert ("ConfigMap", volumes["job"]["configMap"]["name"]) in objects
        assert ("PersistentVolumeClaim", volumes["runs"]["persistentVolumeClaim"]["claimName"]) in objects
    version = spec_of(objects, "RayJob")["rayClusterSpec"]["rayVersion"]
    assert version == locked_versions((ROOT / "requirements" / "cpu.lock").read_text())["ray"]


def test_all_pods_of_an_overlay_run_an_image_that_a_dockerfile_builds(objects: Objects):
    (image,) = {container["image"] for pod in all_pods(objects) for container in pod["containers"]}
    tag = image.removeprefix("rlsys:")
    assert f"-t {image} ." in (ROOT / "deploy" / f"Dockerfile.{tag}").read_text()
    assert (tag == "cuda") == any(size_of(group)[1] for group in groups_of(objects))


def test_the_network_policy_exposes_only_the_dashboard_beyond_cluster_nodes(objects: Objects):
    nodes = spec_of(objects, "NetworkPolicy")["podSelector"]
    for group in groups_of(objects):
        assert nodes["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
    among_nodes, to_dashboard = spec_of(objects, "NetworkPolicy")["ingress"]
    assert among_nodes == {"from": [{"podSelector": nodes}]}
    assert [port["port"] for port in to_dashboard["ports"]] == [8265]


def test_the_network_policies_let_nodes_reach_each_other_and_names_alone(objects: Objects):
    policy, submitter = (spec_of(objects, "NetworkPolicy", name) for name in ("rlsys", "rlsys-submitter"))
    nodes = {"podSelector": policy["podSelector"]}
    among_nodes, names = policy["egress"]
    assert among_nodes == {"to": [nodes]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert submitter["podSelector"] == {"matchLabels": {"job-name": objects["RayJob", "rlsys"]["metadata"]["name"]}}
    assert submitter["egress"] == [{"to": [nodes], "ports": [{"protocol": "TCP", "port": 8265}]}, names]
    assert "ingress" not in submitter
    assert policy["policyTypes"] == submitter["policyTypes"] == ["Ingress", "Egress"]


def test_further_network_policies_open_metrics_to_prometheus_and_kubernetes_to_the_autoscaler(objects: Objects):
    names = {name for kind, name in objects if kind == "NetworkPolicy"} - {"rlsys", "rlsys-submitter"}
    is_monitored, is_scaled = ("PodMonitor", "rlsys") in objects, "autoscalerOptions" in str(objects)
    expected = {"rlsys-metrics": is_monitored, "rlsys-autoscaler": is_scaled}
    assert names == {name for name, is_there in expected.items() if is_there}
    if is_monitored:
        policy = spec_of(objects, "NetworkPolicy", "rlsys-metrics")
        assert policy["podSelector"] == spec_of(objects, "PodMonitor")["selector"]
        assert policy["policyTypes"] == ["Ingress"]
        assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == [8080]
    if is_scaled:
        policy = spec_of(objects, "NetworkPolicy", "rlsys-autoscaler")
        assert policy["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
        assert policy["policyTypes"] == ["Egress"]


def test_only_the_autoscaler_has_a_token_of_kubernetes(objects: Objects):
    cluster = spec_of(objects, "RayJob")["rayClusterSpec"]
    tokens = [pod["automountServiceAccountToken"] for pod in all_pods(objects)]
    assert tokens == [False, "autoscalerOptions" in cluster, *[False] * len(cluster["workerGroupSpecs"])]
    assert cluster.get("enableInTreeAutoscaling", False) == ("autoscalerOptions" in cluster)


def test_pods_can_write_only_to_their_volumes_as_the_user_of_the_image(objects: Objects):
    dockerfile = (ROOT / "deploy" / "Dockerfile.cpu").read_text()
    user = re.search(r"useradd --create-home --uid (\d+) (\w+)", dockerfile)
    assert user
    for pod in all_pods(objects):
        assert pod["securityContext"]["runAsUser"] == int(user[1])
    scaler = spec_of(objects, "RayJob")["rayClusterSpec"].get("autoscalerOptions")
    containers = chain.from_iterable(pod["containers"] for pod in all_pods(objects))
    for container in (*containers, *([scaler] if scaler else [])):
        assert {"/tmp", f"/home/{user[2]}"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_job_inside_is_a_valid_configuration(objects: Objects, tmp_path: Path):
    config = job_of(objects, tmp_path)
    assert config.run.resume == "auto"
    mounts = node_pods(objects)[0]["containers"][0]["volumeMounts"]
    assert str(config.run.folder) in {m["mountPath"] for m in mounts}


def test_the_workers_of_the_job_take_all_gpus_of_the_cluster(objects: Objects, tmp_path: Path):
    config = job_of(objects, tmp_path)
    num_ranks, num_replicas = config.train.mesh.num_ranks, config.rollout.replicas
    needed = num_ranks * config.resources["actor"].num_gpus + num_replicas * config.resources["rollout"].num_gpus
    assert not config.has_reference
    assert needed == sum(group["maxReplicas"] * size_of(group)[1] for group in groups_of(objects)[1:])


def test_ranks_fit_only_nodes_that_stay_and_leave_no_gpu_there(tmp_path: Path):
    objects = objects_of("multi-node")
    config = job_of(objects, tmp_path)
    rank, replica = config.resources["actor"], config.resources["rollout"]
    _, actors, rollouts = groups_of(objects)
    node_cpus, node_gpus = size_of(actors)
    assert actors["minReplicas"] == actors["maxReplicas"]
    assert actors["replicas"] * node_gpus == config.train.mesh.num_ranks
    assert rank.cpus * node_gpus <= node_cpus
    assert replica.cpus <= size_of(rollouts)[0] < rank.cpus
    assert rollouts["minReplicas"] < rollouts["maxReplicas"] == config.rollout.replicas
    spot = rollouts["template"]["spec"]["nodeSelector"]
    tolerations = rollouts["template"]["spec"]["tolerations"]
    assert spot.items() <= {each["key"]: each.get("value") for each in tolerations}.items()
    assert actors["template"]["spec"]["nodeSelector"].keys() == spot.keys()
