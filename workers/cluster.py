"""Ray, in one place: joining or starting a cluster, making actors with explicit resources, calling them with a
deadline."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import ray
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.deadlines import timeout
from rlsys.errors import ConfigError, DeadlineExceeded, RlsysError, WorkerDied, WorkerError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
RayActor: TypeAlias = Any
"""A Ray actor handle: has the methods of the actor's class, each with `.remote()`."""
LOOPBACK = "127.0.0.1"
ASYNC_CALLS = 10_000
"""Calls an async actor may have open at once: permits, not this, bound what is in flight."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one actor asks Ray for, and the threads it may use for maths."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    threads: int = 1

    def device(self) -> torch.device:
        """The GPU Ray gave this process, if one was asked for; else the CPU, whatever the machine has."""
        import torch

        return torch.device("cuda" if self.num_gpus else "cpu")


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


def spawn(
    cls: type, resources: Resources, *args: object, node: str | None = None, max_restarts: int = 0, **kwargs: object
) -> RayActor:
    """Start `cls` as a Ray actor.

    Ray restarts it up to `max_restarts` times (-1: always), its state lost; by default never: the failure policy
    decides.

    One with async methods serves many calls at once; any other serves one at a time, since Ray would start a thread for
    each. The actor gets its thread count in the environment before anything is imported, and the driver's import path.
    """
    is_async = any(map(iscoroutinefunction, vars(cls).values()))
    threads = str(resources.threads)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if ray.util.get_node_ip_address() == LOOPBACK:  # of a cluster that `connect` starts: collectives stay there too
        environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    strategy = NodeAffinitySchedulingStrategy(node, soft=False) if node else "DEFAULT"
    remote = ray.remote(cls).options(
        num_cpus=resources.num_cpus,
        num_gpus=resources.num_gpus,
        max_restarts=max_restarts,
        max_concurrency=ASYNC_CALLS if is_async else 1,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": environment},
    )
    return remote.remote(*args, **kwargs)


async def call(ref: Awaitable[T], worker: str, phase: str, deadline_s: float | None = None) -> T:
    """The result of a remote call.

    Raises `DeadlineExceeded`, `WorkerDied`, or the `RlsysError` the worker itself raised; anything else a worker raised
    becomes a `WorkerError` that ends with its traceback.
    """
    try:
        async with timeout(deadline_s):
            return await ref
    except RayTaskError as error:  # comes first: one of a TimeoutError that the worker raised is both
        raise _translated(error, worker, phase) from error
    except TimeoutError as error:
        raise DeadlineExceeded(worker, phase, f"no answer within {deadline_s:g} s") from error
    except RayActorError as error:
        raise WorkerDied(worker, phase, _first_line(error)) from error
    except RayError as error:
        raise WorkerDied(worker, phase, f"{type(error).__name__}: {_first_line(error)}") from error


def _translated(error: RayTaskError, worker: str, phase: str) -> RlsysError:
    cause = error.cause
    if isinstance(cause, RlsysError):
        return cause
    return WorkerError(worker, phase, str(error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
