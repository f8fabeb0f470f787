"""Facts about the machine and its packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

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
    token, auth = (
        ray_token(os.environ, Path("~/.ray/auth_token").expanduser()),
        cluster_auth(address) if address else None,
    )
    return Facts(
        python=sys.version_info[:3],
        num_cpus=len(os.sched_getaffinity(0)),
        cpu_flags=_cpu_flags(Path("/proc/cpuinfo")),
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        free_bytes=shutil.disk_usage(Path.cwd()).free,
        versions={normalised(d.name): d.version for d in metadata.distributions()},
        required=_required(metadata.requires("rlsys") or []),
        locked=locked(LOCK.read_text()) if LOCK.exists() else {},
        origins=origins(),
        cluster_address=address,
        cluster_ray=cluster_ray(address, token if auth == "token" else None) if address else None,
        cluster_auth=auth,
        auth_mode=os.environ.get("RAY_AUTH_MODE"),
        has_token=token is not None,
    )


def origins() -> dict[str, Path | None]:
    """Location from which each of our packages would be imported now."""
    return {name: _origin(name) for name in PACKAGES}


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


def normalised(name: str) -> str:
    """Package name as indexes compare it: `ruamel.yaml` -> `ruamel-yaml`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _required(requirements: list[str]) -> frozenset[str]:
    names = (re.match(r"[\w.-]+", r) for r in requirements if "extra ==" not in r)
    return frozenset(normalised(name[0]) for name in names if name)


def locked(text: str) -> dict[str, str]:
    """Parse the `name==version` lines of a lock file."""
    return {normalised(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def cluster_ray(address: str, token: str | None = None) -> str | None:
    """Ray's version as reported by the dashboard of the head node; None if it does not answer.

    `address`: as for `ray.init` (`auto`, `host:6379`, `ray://host:10001`), or of the dashboard (`http://host:port`).
    """
    return _told(address, "version", "ray_version", token)


def cluster_auth(address: str) -> str | None:
    """Authentication of the cluster, `token` or `disabled`, as its dashboard reports; None if it does not answer."""
    return _told(address, "authentication_mode", "authentication_mode")


def ray_token(environ: Mapping[str, str], default: Path) -> str | None:
    """Token that Ray would find in this environment or in the file `default`."""
    if token := environ.get("RAY_AUTH_TOKEN"):
        return token
    try:
        return Path(environ.get("RAY_AUTH_TOKEN_PATH") or default).read_text().strip() or None
    except (OSError, ValueError):
        return None


def _told(address: str, question: str, key: str, token: str | None = None) -> str | None:
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
