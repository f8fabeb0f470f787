"""The Ray cluster of a run: joining or starting one, its nodes, and what an actor asks it for."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from rlsys.errors import ConfigError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one actor asks Ray for, and the threads it may use for maths."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    threads: int = 1

    def claim(self) -> torch.device:
        """Bound the threads of this process, and return its device: the GPU Ray gave it, if one was asked for, else the
        CPU, whatever the machine has."""
        import torch

        torch.set_num_threads(self.threads)
        return torch.device("cuda" if self.num_gpus else "cpu")

    def build(self, make: Callable[..., T]) -> T:
        """Call `make`, in the process that has these resources, with its `device`."""
        return make(device=self.claim())


NO_MATHS = Resources(num_cpus=0.0)
"""Of an actor that moves bytes and computes nothing."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray cluster of this run. `close` shuts down only what `connect` started."""

    is_ours: bool

    def close(self) -> None:
        if self.is_ours:
            ray.shutdown()


def connect(address: str | None, num_cpus: int | None) -> Cluster:
    """Join a cluster, or start a local one.

    In order: the one this process already joined; `address`; the one a Ray job or RAY_ADDRESS names; a new local one,
    which only this machine reaches, and there only who has its token.

    Raises `ConfigError` if `address` does not answer.
    """
    if ray.is_initialized():
        return Cluster(is_ours=False)
    address = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address and address != "local":
            ray.init(address=address, **quiet)
        else:
            _ensure_token()
            with _on_loopback():
                ray.init(address="local", num_cpus=num_cpus or max(_cores(), 2), include_dashboard=False, **quiet)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray.address: cannot join {address or 'a local cluster'!r}: {error}") from error
    return Cluster(is_ours=True)


def _ensure_token() -> None:
    """Give this process a token for the clusters it starts, unless the user has one.

    Ray asks for it by default (RAY_AUTH_MODE). The environment passes it on to every process of the cluster, and only
    this user and root can read it there. Ray reads it once: the token stays for the life of this process.
    """
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not named and not Path("~/.ray/auth_token").expanduser().exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray's servers listen on 127.0.0.1 alone, in a cluster that starts in this block.

    They follow the address of the node. As that, Ray takes loopback only where it believes that there can be no other
    nodes; on Linux it replaces a loopback address that it is given.
    """
    was = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def log_folder() -> Path:
    """Where the workers of this node write what they print."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def check_capacity(needed_cpus: float, needed_gpus: float) -> None:
    """Raise `ConfigError` if the cluster can never place what the run needs, instead of waiting for ever."""
    have = ray.cluster_resources()
    for name, needed in (("CPU", needed_cpus), ("GPU", needed_gpus)):
        if needed > have.get(name, 0.0):
            raise ConfigError(
                f"the run needs {needed:g} {name}s and the cluster has {have.get(name, 0.0):g}: "
                f"lower num_{name.lower()}s, replicas, ranks or workers, or raise ray.num_cpus on a machine of your own"
            )


def node_ids() -> list[str]:
    """Nodes that are alive, the driver's own first."""
    here = ray.get_runtime_context().get_node_id()
    alive = [n["NodeID"] for n in ray.nodes() if n["Alive"]]
    return sorted(alive, key=lambda n: (n != here, n))


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
