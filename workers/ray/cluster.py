"""The Ray cluster of a run: joining or starting one, its nodes, and the resources of an actor."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray._private import ray_constants

from rlsys.errors import ClusterError, ConfigError
from rlsys.util.signals import signals_kept

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Resources:
    """Ray resources of one actor, and its number of threads for maths."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    threads: int = 1

    def claim(self) -> torch.device:
        """Limit the threads of this process and return its device: the GPU from Ray if one was requested, else the
        CPU."""
        import torch

        torch.set_num_threads(self.threads)
        return torch.device("cuda" if self.num_gpus else "cpu")

    def build(self, make: Callable[..., T]) -> T:
        """Call `make` with the `device`, in the process that has these resources."""
        return make(device=self.claim())


NO_MATHS = Resources(num_cpus=0.0)
"""Resources of an actor that moves bytes and computes nothing."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray cluster of this run. `close` shuts down only a cluster that `connect` started."""

    is_ours: bool

    def close(self) -> None:
        if self.is_ours:
            ray.shutdown()


def connect(address: str | None, num_cpus: int | None) -> Cluster:
    """Join a cluster, or start a local one.

    In order: the cluster that this process has joined; `address`; the one of the Ray job or RAY_ADDRESS; a new local
    one. Only processes on this machine that have its token can reach a new cluster.

    Raises `ConfigError` if the cluster at `address` cannot be joined, `ClusterError` if no local one starts in time.
    """
    if ray.is_initialized():
        return Cluster(is_ours=False)
    address = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address and address != "local":
        if address.startswith("ray://"):
            raise ConfigError(f"RAY_ADDRESS={address}: a driver must run inside the cluster: unset it, see ray.address")
        try:
            with signals_kept():
                ray.init(address=address, **quiet)
        except Exception as error:  # Ray raises plain `Exception` too
            raise ConfigError(
                f"ray.address: cannot join {address!r}: {error}; this machine must be a node of that cluster, and have "
                "its token and its versions of Ray and Python"
            ) from error
        return Cluster(is_ours=True)
    _ensure_token()
    num_cpus = num_cpus or max(len(os.sched_getaffinity(0)), 2)
    try:
        with _on_loopback(), signals_kept():
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises plain `Exception` too
        raise ClusterError(
            f"a local Ray cluster did not start: {error}; see its logs in ray/session_latest/logs under RAY_TMPDIR, "
            "TMPDIR or /tmp; if the machine is overloaded, run `ray start --head` first, and set ray.address=auto"
        ) from error
    return Cluster(is_ours=True)


def _ensure_token() -> None:
    """Set a token for the clusters that this process starts, unless the user has one.

    Ray requires one by default (RAY_AUTH_MODE). Every process of the cluster inherits it from the environment, where
    only this user and root can read it. Ray reads it once: the token stays for the life of this process.
    """
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not named and not Path("~/.ray/auth_token").expanduser().exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray's servers listen only on 127.0.0.1, in a cluster that starts in this block.

    The servers use the node's address. Ray accepts loopback there only if it assumes a single node; on Linux it
    replaces an explicit loopback address.
    """
    was = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was


def log_folder() -> Path:
    """Folder for the output of the workers on this node."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def check_capacity(needed_cpus: float, needed_gpus: float) -> None:
    """Raise `ConfigError` if the cluster can never place the run, instead of waiting forever."""
    have = ray.cluster_resources()
    for name, needed in (("CPU", needed_cpus), ("GPU", needed_gpus)):
        if needed > have.get(name, 0.0):
            raise ConfigError(
                f"the run needs {needed:g} {name}s and the cluster has {have.get(name, 0.0):g}: "
                f"lower num_{name.lower()}s, replicas, ranks or workers, or raise ray.num_cpus on a machine of your own"
            )


def node_ids() -> list[str]:
    """Live nodes; the driver's node first."""
    here = ray.get_runtime_context().get_node_id()
    alive = [n["NodeID"] for n in ray.nodes() if n["Alive"]]
    return sorted(alive, key=lambda n: (n != here, n))


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
