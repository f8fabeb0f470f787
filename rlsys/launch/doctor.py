"""`rlsys doctor`: problems of an environment, and their remedies.

`gather` inspects the machine once; every check is a pure function of the result. Neither torch nor ray is loaded:
versions and build variants are read from package metadata.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from rlsys.errors import RlsysError, SandboxError, ToolError
from rlsys.sandbox.python_sandbox import Guard, ProgramLimits, PythonResult, run_python

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 2 * GIB
MIN_FREE_BYTES = 5 * GIB
SETUP = "make setup"
PACKAGES = ("rlsys", "workers", "algorithms")
DASHBOARD_PORT = 8265
LOCK = Path(__file__).parents[2] / "requirements" / "cpu.lock"
"""Present in a checkout, not in an installed wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the machine, gathered once."""

    python: tuple[int, ...]
    num_cpus: int
    """CPUs this process may use."""
    cpu_flags: frozenset[str]
    """Flag names of the kernel, e.g. `avx2`; empty where the kernel lists none."""
    has_nvidia_driver: bool
    omp_num_threads: str | None
    """Value of the environment variable."""
    shm_bytes: int | None
    """Size of /dev/shm; None if it does not exist."""
    free_bytes: int
    """Free space of the disk this process runs on."""
    versions: Mapping[str, str]
    """Installed packages and their versions, with local tags: `torch` -> `2.13.0+cpu`."""
    required: frozenset[str]
    """Packages that rlsys requires."""
    locked: Mapping[str, str]
    """Packages of `requirements/cpu.lock`; empty outside a checkout."""
    origins: Mapping[str, Path | None]
    """File or folder from which `rlsys`, `workers` and `algorithms` are imported."""
    sandbox_guards: tuple[str, ...] = ("bubblewrap", "landlock", "seccomp")
    """Guards of the sandbox that work on this machine."""
    sandbox_problem: str = ""
    """Reason why the others do not."""
    landlock_version: int = 3
    """Version of Landlock, 0 without it."""
    cluster_address: str | None = None
    cluster_ray: str | None = None
    """Ray's version on the cluster at the given address; None if unknown."""
    cluster_auth: str | None = None
    """`token` or `disabled`, as the cluster reports; None if unknown."""
    auth_mode: str | None = None
    """Value of RAY_AUTH_MODE here."""
    has_token: bool = False
    """True if Ray would find a token here."""


def gather(address: str | None = None) -> Facts:
    """Inspect this machine, and the version and authentication of the Ray cluster at `address` (else RAY_ADDRESS)."""
    address = address or os.environ.get("RAY_ADDRESS")
    token = ray_token(os.environ, Path("~/.ray/auth_token").expanduser())
    auth = ask_cluster(address, "authentication_mode", "authentication_mode") if address else None
    ray = ask_cluster(address, "version", "ray_version", token if auth == "token" else None) if address else None
    sandbox, problem = try_sandbox()
    return Facts(
        python=sys.version_info[:3],
        num_cpus=len(os.sched_getaffinity(0)),
        cpu_flags=_cpu_flags(Path("/proc/cpuinfo")),
        has_nvidia_driver=has_nvidia_driver(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        free_bytes=shutil.disk_usage(Path.cwd()).free,
        versions={normalise_name(d.name): d.version for d in metadata.distributions()},
        required=_required_packages(metadata.requires("rlsys") or []),
        locked=locked_versions(LOCK.read_text()) if LOCK.exists() else {},
        origins=origins(),
        sandbox_guards=sandbox.guards if sandbox else (),
        sandbox_problem=problem,
        landlock_version=sandbox.landlock_version if sandbox else 0,
        cluster_address=address,
        cluster_ray=ray,
        cluster_auth=auth,
        auth_mode=os.environ.get("RAY_AUTH_MODE"),
        has_token=token is not None,
    )


def has_nvidia_driver() -> bool:
    """Return True if this machine has a driver for NVIDIA GPUs."""
    return Path("/proc/driver/nvidia/version").exists()


def origins() -> dict[str, Path | None]:
    """Location from which each of our packages would be imported now."""
    return {name: _origin(name) for name in PACKAGES}


def try_sandbox() -> tuple[PythonResult | None, str]:
    """Run an empty program in the sandbox. Returns its result, if it ran, and the reason why guards are missing."""
    problem = ""
    for requires in (get_args(Guard), ()):
        try:
            return asyncio.run(run_python("", limits=ProgramLimits(requires=requires))), problem
        except (SandboxError, ToolError) as error:
            problem = problem or str(error).partition(";")[0]
    return None, problem


def _origin(name: str) -> Path | None:
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations or ()), "unknown"))  # a folder without __init__.py


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def normalise_name(name: str) -> str:
    """Package name as indexes compare it: `ruamel.yaml` -> `ruamel-yaml`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _required_packages(requirements: list[str]) -> frozenset[str]:
    names = (re.match(r"[\w.-]+", r) for r in requirements if "extra ==" not in r)
    return frozenset(normalise_name(name[0]) for name in names if name)


def locked_versions(text: str) -> dict[str, str]:
    """Parse the `name==version` lines of a lock file."""
    return {normalise_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def ray_token(environ: Mapping[str, str], default: Path) -> str | None:
    """Token that Ray would find in this environment or in the file `default`."""
    if token := environ.get("RAY_AUTH_TOKEN"):
        return token
    try:
        return Path(environ.get("RAY_AUTH_TOKEN_PATH") or default).read_text().strip() or None
    except (OSError, ValueError):
        return None


def ask_cluster(address: str, question: str, key: str, token: str | None = None) -> str | None:
    """Value of `key` in the answer of the head node's dashboard; None if it does not answer.

    `address`: as for `ray.init` (`auto`, `host:6379`), or of the dashboard (`http://host:port`).
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{_dashboard_of(address)}/api/{question}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return str(json.load(answer)[key])
    except (OSError, ValueError, KeyError):
        return None


def _dashboard_of(address: str) -> str:
    if address in ("auto", "local"):
        address = "127.0.0.1"
    is_http = address.startswith("http")
    parts = urlsplit(address if "://" in address else f"//{address}")
    port = parts.port if is_http and parts.port else DASHBOARD_PORT
    return f"{parts.scheme if is_http else 'http'}://{parts.hostname}:{port}"


# ------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: Literal["ok", "warn", "fail"]
    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}" + (f"\n      cure: {self.cure}" if self.cure else "")


def diagnose(facts: Facts) -> list[Finding]:
    """Results of all checks, in the order in which to fix problems."""
    return [check(facts) for check in CHECKS]


def ensure_not_shadowed() -> None:
    """Raise `RlsysError`, with the path, if another package called `workers` or `algorithms` hides ours."""
    finding = shadowing(origins())
    if finding.level == "fail":
        raise RlsysError(f"{finding.what}; {finding.cure}")


def python_version(facts: Facts) -> Finding:
    """Check that Python is new enough."""
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < MIN_PYTHON:
        return Finding("fail", f"Python {version} is too old", "create the environment again with Python 3.11 or newer")
    return Finding("ok", f"Python {version}")


def packages(facts: Facts) -> Finding:
    """Check that required packages are installed, and in a checkout with the CPU build of torch match the lock file."""
    if missing := sorted(facts.required - facts.versions.keys()):
        return Finding("fail", f"not installed: {', '.join(missing)}", SETUP)
    locked = facts.locked if _is_cpu_build(facts.versions.get("torch", "")) else {}
    drift = sorted(name for name, version in locked.items() if facts.versions.get(name) != version)
    if drift:
        return Finding("warn", f"not as requirements/cpu.lock has it: {', '.join(drift)}", SETUP)
    return Finding("ok", f"all {len(facts.required)} packages that rlsys asks for are installed")


def shadowing(found: Mapping[str, Path | None]) -> Finding:
    """Check that all our packages are imported from the folder of the running `rlsys`."""
    home = (found["rlsys"] or Path(__file__).parent).parent.parent
    foreign = [f"`{n}` is {p or 'not found'}" for n, p in found.items() if p != home / n / "__init__.py"]
    if foreign:
        cure = f"rename that package or take it off the path, or put {home} first on PYTHONPATH"
        return Finding("fail", f"another package hides one of rlsys in {home}: {'; '.join(foreign)}", cure)
    return Finding("ok", f"rlsys, workers and algorithms all come from {home}")


def torch_build(facts: Facts) -> Finding:
    """Check that torch is installed, with a build that suits this machine."""
    version = facts.versions.get("torch")
    if version is None:
        return Finding("fail", "torch is not installed", SETUP)
    is_cuda_build = "+cu" in version or any(name.startswith("nvidia-cu") for name in facts.versions)
    if facts.has_nvidia_driver and _is_cpu_build(version):
        cure = "to use it, install a CUDA build of torch in a separate environment"
        return Finding("warn", f"torch {version} is a CPU build, and this machine has an NVIDIA driver", cure)
    if is_cuda_build and not facts.has_nvidia_driver:
        return Finding("warn", f"torch {version} is a CUDA build, and this machine has no NVIDIA driver", SETUP)
    if facts.has_nvidia_driver:
        keys = "resources.actor.gpus and resources.rollout.gpus"
        use = f"a run that starts its own cluster takes one GPU for each worker if there are enough; else set {keys}"
        return Finding("ok", f"torch {version}; {use}")
    return Finding("ok", f"torch {version}")


def torch_companions(facts: Facts) -> Finding:
    """Check for a CUDA build of torchvision or the like with a CPU torch: importing transformers' models then fails."""
    companions = [n for n in ("torchvision", "torchaudio", "torchcodec") if n in facts.versions]
    wrong = [n for n in companions if not _is_cpu_build(facts.versions[n])]
    if wrong and _is_cpu_build(facts.versions.get("torch", "")):
        cure = f"{sys.executable} -m pip uninstall -y {' '.join(wrong)}"
        return Finding("fail", f"{', '.join(wrong)} linked to CUDA beside a CPU torch: transformers breaks", cure)
    return Finding("ok", "no package beside torch contradicts its build")


def ray_version(facts: Facts) -> Finding:
    """Check that Ray has the same version here and on the cluster."""
    ours, theirs, address = facts.versions.get("ray"), facts.cluster_ray, facts.cluster_address
    if ours is None:
        return Finding("fail", "ray is not installed", SETUP)
    if address is None:
        return Finding("ok", f"ray {ours}; no cluster was named to compare with")
    if theirs is None:
        cure = "is the head up? name its dashboard: rlsys doctor --address http://HEAD:8265"
        return Finding("warn", f"the cluster at {address} did not say which ray it runs", cure)
    if theirs != ours:
        cure = f"install ray=={theirs} here, or ray=={ours} on every node"
        return Finding("fail", f"ray {ours} here, ray {theirs} on the cluster at {address}", cure)
    return Finding("ok", f"ray {ours}, as on the cluster at {address}")


def cluster_guard(facts: Facts) -> Finding:
    """Check that Ray clusters require a token. Without it, anyone who reaches their ports can run code as the user."""
    address, mode = facts.cluster_address, (facts.auth_mode or "").lower()
    if mode == "disabled" and facts.cluster_auth != "token":
        what = "RAY_AUTH_MODE=disabled: anyone who reaches the ports of a cluster started here can run code as you"
        return Finding("warn", what, "unset RAY_AUTH_MODE, or set it to token")
    if address is None:
        return Finding("ok", "a cluster that rlsys starts listens on 127.0.0.1 alone, and asks for a token")
    if facts.cluster_auth is None:
        cure = "name its dashboard: rlsys doctor --address http://HEAD:8265"
        return Finding("warn", f"the cluster at {address} did not say whether it asks for a token", cure)
    if facts.cluster_auth != "token":
        what = f"the cluster at {address} asks for no token: anyone who reaches its ports can run code on it"
        return Finding(
            "fail", what, "start every node with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN; docs/security.md"
        )
    if not facts.has_token:
        cure = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        return Finding("fail", f"the cluster at {address} asks for a token, and none is set here", cure)
    if mode != "token":
        cure = "export RAY_AUTH_MODE=token"
        return Finding("fail", f"the cluster at {address} asks for a token, which Ray here does not send", cure)
    return Finding("ok", f"the cluster at {address} asks for a token, and there is one here")


def shared_memory(facts: Facts) -> Finding:
    """Check that /dev/shm has room for Ray's object store, which otherwise uses the disk."""
    if facts.shm_bytes is None:
        return Finding("warn", "there is no /dev/shm: Ray's object store goes to the disk")
    if facts.shm_bytes < MIN_SHM_BYTES:
        cure = "docker run --shm-size=8g; in Kubernetes, mount an emptyDir with `medium: Memory` at /dev/shm"
        return Finding("fail", f"/dev/shm has only {_gib(facts.shm_bytes)}", cure)
    return Finding("ok", f"/dev/shm has {_gib(facts.shm_bytes)}")


def disk_space(facts: Facts) -> Finding:
    """Check that there is room for checkpoints."""
    if facts.free_bytes < MIN_FREE_BYTES:
        cure = "free some, put run.folder on another disk, or lower checkpoint.keep_last"
        return Finding("warn", f"only {_gib(facts.free_bytes)} of disk are free", cure)
    return Finding("ok", f"{_gib(facts.free_bytes)} of disk are free")


def threads(facts: Facts) -> Finding:
    """Check that processes do not compete for cores: spinning OpenMP threads can cost seven times the wall time."""
    value, cure = facts.omp_num_threads, "export OMP_NUM_THREADS=1; workers take theirs from the configuration"
    if value is None:
        return Finding("warn", f"OMP_NUM_THREADS is not set: each process starts {facts.num_cpus} threads", cure)
    if not value.isdigit() or int(value) > facts.num_cpus:
        return Finding("warn", f"OMP_NUM_THREADS={value} on {facts.num_cpus} CPUs: threads will contend", cure)
    return Finding("ok", f"OMP_NUM_THREADS={value} on {facts.num_cpus} CPUs")


def vector_units(facts: Facts) -> Finding:
    """Check that the CPU has the vector instructions that make torch's kernels fast."""
    if not facts.cpu_flags:
        return Finding("ok", "the kernel lists no CPU flags to check")
    if "avx2" not in facts.cpu_flags:
        return Finding("warn", "the CPU has no AVX2: generation and training will be very slow", "use a newer machine")
    if "avx512f" not in facts.cpu_flags:
        return Finding("warn", "the CPU has no AVX-512: slower, above all in bfloat16", "keep model.dtype=float32")
    return Finding("ok", "the CPU has AVX-512")


def sandbox(facts: Facts) -> Finding:
    """Check which guards a program of the sandbox has."""
    missing = [guard for guard in get_args(Guard) if guard not in facts.sandbox_guards]
    version = facts.landlock_version
    older = f". Landlock has version {version}: seccomp stops truncation in its place" if 0 < version < 3 else ""
    if not missing:
        return Finding("ok", f"programs in the sandbox have {', '.join(facts.sandbox_guards)}{older}")
    what = f"programs in the sandbox have no {', '.join(missing)}: {facts.sandbox_problem}"
    if missing == ["bubblewrap"]:
        cure = "apt install bubblewrap (0.7 or newer), and allow user namespaces; docs/security.md"
        return Finding("warn", f"{what}. They see names, sizes and times of all files{older}", cure)
    return Finding("warn", what, "tools that run code fail here: use a newer kernel, or a container that allows them")


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    python_version,
    packages,
    lambda facts: shadowing(facts.origins),
    torch_build,
    torch_companions,
    ray_version,
    cluster_guard,
    shared_memory,
    disk_space,
    threads,
    vector_units,
    sandbox,
)


def _is_cpu_build(version: str) -> bool:
    return version.endswith("+cpu")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
