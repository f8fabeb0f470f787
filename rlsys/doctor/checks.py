"""Checks of an environment: each a pure function from `Facts` to a `Finding`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rlsys.doctor.facts import Facts, origins
from rlsys.errors import RlsysError

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 2 * GIB
MIN_FREE_BYTES = 5 * GIB
SETUP = "make setup"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: Literal["ok", "warn", "fail"]
    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}" + (f"\n      cure: {self.cure}" if self.cure else "")


Check: TypeAlias = Callable[[Facts], Finding]


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
        return Finding("fail", f"Python {version} is too old", "make the environment anew with Python 3.11 or newer")
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


def shadowed(facts: Facts) -> Finding:
    """Check that `workers` and `algorithms` are ours."""
    return shadowing(facts.origins)


def shadowing(found: Mapping[str, Path | None]) -> Finding:
    """Check that all our packages are imported from the folder of the running `rlsys`."""
    home = (found["rlsys"] or Path(__file__).parents[1]).parent.parent
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
        cure = "to use it, install a CUDA build of torch in an environment of its own"
        return Finding("warn", f"torch {version} is a CPU build, and this machine has an NVIDIA driver", cure)
    if is_cuda_build and not facts.has_nvidia_driver:
        return Finding("warn", f"torch {version} is a CUDA build, and this machine has no NVIDIA driver", SETUP)
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
        what = "RAY_AUTH_MODE=disabled: clusters started here let in whoever reaches their ports, to run code as you"
        return Finding("warn", what, "unset RAY_AUTH_MODE, or set it to token")
    if address is None:
        return Finding("ok", "a cluster that rlsys starts listens on 127.0.0.1 alone, and asks for a token")
    if facts.cluster_auth is None:
        cure = "name its dashboard: rlsys doctor --address http://HEAD:8265"
        return Finding("warn", f"the cluster at {address} did not say whether it asks for a token", cure)
    if facts.cluster_auth != "token":
        what = f"the cluster at {address} asks for no token: whoever reaches its ports runs code on it"
        return Finding(
            "fail", what, "start every node with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN; docs/security.md"
        )
    if not facts.has_token:
        cure = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        return Finding("fail", f"the cluster at {address} asks for a token, and there is none here", cure)
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


CHECKS: tuple[Check, ...] = (
    python_version,
    packages,
    shadowed,
    torch_build,
    torch_companions,
    ray_version,
    cluster_guard,
    shared_memory,
    disk_space,
    threads,
    vector_units,
)


def _is_cpu_build(version: str) -> bool:
    return version.endswith("+cpu")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
