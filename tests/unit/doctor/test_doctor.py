"""The doctor: every check on artificial facts, and one run on this machine."""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import rlsys
from rlsys.launch.doctor import (
    CHECKS,
    GIB,
    Facts,
    ask_cluster,
    diagnose,
    ensure_not_shadowed,
    gather,
    locked_versions,
    ray_token,
    shadowing,
)
from rlsys.sandbox import confinement

HOME = Path("/home/me/rlsys")
HEALTHY = Facts(
    python=(3, 11, 7),
    num_cpus=4,
    cpu_flags=frozenset({"avx2", "avx512f"}),
    has_nvidia_driver=False,
    omp_num_threads="1",
    shm_bytes=8 * GIB,
    free_bytes=100 * GIB,
    versions={"torch": "2.13.0+cpu", "ray": "2.60.0", "rich": "15.0.0"},
    required=frozenset({"torch", "ray", "rich"}),
    locked={"torch": "2.13.0+cpu", "ray": "2.60.0"},
    origins={name: HOME / name / "__init__.py" for name in ("rlsys", "workers", "algorithms")},
)
CLUSTERED = replace(
    HEALTHY,
    cluster_address="head:6379",
    cluster_ray="2.60.0",
    cluster_auth="token",
    auth_mode="token",
    has_token=True,
)
CUDA_VISION = {**HEALTHY.versions, "torchvision": "0.28.0"}
SHADOWED = {**HEALTHY.origins, "workers": Path("/elsewhere/workers")}


def test_a_healthy_machine_has_nothing_to_mend():
    assert [f for f in diagnose(HEALTHY) if f.level != "ok"] == []


def test_a_machine_with_gpus_is_told_which_keys_use_them():
    versions = {**HEALTHY.versions, "torch": "2.13.0+cu130"}
    (finding,) = [
        f for f in diagnose(replace(HEALTHY, has_nvidia_driver=True, versions=versions)) if "takes one GPU" in f.what
    ]
    assert finding.level == "ok" and "resources.actor.gpus and resources.rollout.gpus" in finding.what


@pytest.mark.parametrize(
    ("facts", "level", "what", "cure"),
    [
        (
            replace(HEALTHY, sandbox_guards=("landlock", "seccomp"), sandbox_problem="no `bwrap` on the PATH"),
            "warn",
            "have no bubblewrap: no `bwrap` on the PATH",
            "apt install bubblewrap",
        ),
        (
            replace(HEALTHY, sandbox_guards=(), sandbox_problem="seccomp: refused"),
            "warn",
            "have no bubblewrap, landlock, seccomp: seccomp: refused",
            "newer kernel",
        ),
        (replace(HEALTHY, python=(3, 10, 1)), "fail", "Python 3.10.1 is too old", "Python 3.11"),
        (replace(HEALTHY, required=frozenset({"torch", "typer"})), "fail", "not installed: typer", "make setup"),
        (
            replace(HEALTHY, locked={"rich": "14.0.0"}),
            "warn",
            "not as requirements/cpu.lock has it: rich",
            "make setup",
        ),
        (replace(HEALTHY, origins=SHADOWED), "fail", "`workers` is /elsewhere/workers", "PYTHONPATH"),
        (
            replace(HEALTHY, versions=CUDA_VISION),
            "fail",
            "torchvision linked to CUDA beside a CPU torch",
            "uninstall -y torchvision",
        ),
        (
            replace(HEALTHY, has_nvidia_driver=True),
            "warn",
            "is a CPU build, and this machine has an NVIDIA driver",
            "CUDA build",
        ),
        (
            replace(HEALTHY, versions={**HEALTHY.versions, "torch": "2.13.0", "nvidia-cublas": "13.0"}),
            "warn",
            "is a CUDA build, and this machine has no NVIDIA driver",
            "make setup",
        ),
        (
            replace(CLUSTERED, cluster_ray="2.50.0"),
            "fail",
            "ray 2.60.0 here, ray 2.50.0 on the cluster at head:6379",
            "install ray==2.50.0 here",
        ),
        (replace(CLUSTERED, cluster_ray=None), "warn", "did not say which ray it runs", "http://HEAD:8265"),
        (replace(CLUSTERED, cluster_auth=None), "warn", "did not say whether it asks for a token", "http://HEAD:8265"),
        (replace(CLUSTERED, cluster_auth="disabled"), "fail", "asks for no token", "RAY_AUTH_TOKEN"),
        (replace(CLUSTERED, has_token=False), "fail", "none is set here", "RAY_AUTH_TOKEN_PATH"),
        (replace(CLUSTERED, auth_mode=None), "fail", "Ray here does not send", "export RAY_AUTH_MODE=token"),
        (replace(HEALTHY, auth_mode="disabled"), "warn", "RAY_AUTH_MODE=disabled", "unset RAY_AUTH_MODE"),
        (replace(HEALTHY, shm_bytes=64 * 2**20), "fail", "/dev/shm has only 0.1 GiB", "--shm-size"),
        (replace(HEALTHY, shm_bytes=None), "warn", "there is no /dev/shm", ""),
        (replace(HEALTHY, free_bytes=GIB), "warn", "only 1.0 GiB of disk", "checkpoint.keep_last"),
        (replace(HEALTHY, omp_num_threads=None), "warn", "each process starts 4 threads", "OMP_NUM_THREADS=1"),
        (replace(HEALTHY, omp_num_threads="8"), "warn", "OMP_NUM_THREADS=8 on 4 CPUs", "OMP_NUM_THREADS=1"),
        (replace(HEALTHY, cpu_flags=frozenset({"avx2"})), "warn", "no AVX-512", "float32"),
        (replace(HEALTHY, cpu_flags=frozenset({"sse2"})), "warn", "no AVX2", "newer machine"),
    ],
)
def test_each_ailment_is_named_with_its_cure(facts: Facts, level: str, what: str, cure: str):
    (finding,) = [f for f in diagnose(facts) if f.level != "ok"]
    assert finding.level == level
    assert what in finding.what
    assert cure in finding.cure


@pytest.mark.parametrize("guards", [("bubblewrap", "landlock", "seccomp"), ("landlock", "seccomp")])
def test_an_old_landlock_is_named_with_what_stands_for_it(guards: tuple[str, ...]):
    (finding,) = [
        f for f in diagnose(replace(HEALTHY, sandbox_guards=guards, landlock_version=2)) if "sandbox" in f.what
    ]
    assert "Landlock has version 2: seccomp stops truncation in its place" in finding.what


def test_a_machine_without_torch_and_ray_needs_make_setup():
    bare = replace(HEALTHY, versions={"rich": "15.0.0"})
    assert {f.cure for f in diagnose(bare) if f.level == "fail"} == {"make setup"}


def test_a_cluster_with_the_same_ray_is_fine():
    assert [f for f in diagnose(CLUSTERED) if f.level != "ok"] == []


def test_this_machine_is_inspected_and_its_packages_are_ours():
    facts = gather()
    home = Path(rlsys.__file__).parents[1]
    assert len(diagnose(facts)) == len(CHECKS)
    assert shadowing(facts.origins).level == "ok"
    assert facts.origins["workers"] == home / "workers" / "__init__.py"
    assert facts.python == sys.version_info[:3]
    assert facts.landlock_version == confinement.landlock_version()
    assert "torch" in facts.versions
    assert "ray" in facts.required
    ensure_not_shadowed()


def test_a_lock_is_read_with_normalised_names():
    assert locked_versions("# head\nruamel.yaml==0.19.1\ntorch==2.13.0+cpu ; x\n") == {
        "ruamel-yaml": "0.19.1",
        "torch": "2.13.0+cpu",
    }


def ray_of(address: str, token: str | None = None) -> str | None:
    return ask_cluster(address, "version", "ray_version", token)


def auth_of(address: str) -> str | None:
    return ask_cluster(address, "authentication_mode", "authentication_mode")


class _Dashboard(BaseHTTPRequestHandler):
    token: str | None = None
    """What must be shown to be told the version."""

    def do_GET(self) -> None:
        answers = {
            "/api/version": {"version": "4", "ray_version": "2.60.0"},
            "/api/authentication_mode": {"authentication_mode": "token"},
        }
        is_refused = (
            self.token and self.path == "/api/version" and self.headers["Authorization"] != f"Bearer {self.token}"
        )
        self.send_response(401 if is_refused else 200 if self.path in answers else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answers.get(self.path)).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base's name)
        """Quiet."""


@pytest.fixture
def dashboard() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Dashboard)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_clusters_ray_version_is_read_or_none_if_unreachable(dashboard: str):
    assert ray_of(dashboard) == "2.60.0"
    assert ray_of("http://127.0.0.1:9") is None


def test_a_cluster_tells_whether_it_asks_for_a_token(dashboard: str):
    assert auth_of(dashboard) == "token"
    assert auth_of("http://127.0.0.1:9") is None


def test_reading_the_ray_version_uses_the_cluster_token(dashboard: str):
    _Dashboard.token = "secret"
    try:
        assert ray_of(dashboard) is None
        assert ray_of(dashboard, "secret") == "2.60.0"
    finally:
        _Dashboard.token = None


def test_a_token_is_found_where_ray_looks_for_one(tmp_path: Path):
    default = tmp_path / "auth_token"
    assert ray_token({}, default) is None
    assert ray_token({"RAY_AUTH_TOKEN": "mine"}, default) == "mine"
    default.write_text("secret\n")
    assert ray_token({}, default) == "secret"
    assert ray_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "gone")}, default) is None
