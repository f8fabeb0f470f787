"""The Ray cluster of a run: joining or starting one, its nodes, and the resources of an actor."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
import ray
from ray._private import auto_init_hook, ray_constants, services
from ray._private import worker as ray_worker
from ray.job_config import JobConfig

from rlsys.errors import ClusterError, ConfigError
from rlsys.util.native_output import STDERR
from rlsys.util.signals import signals_kept
from workers.ray import cluster_keeper
from workers.ray.cluster_watch import ClusterWatch
from workers.ray.forking import LONGEST_FOLDER, ForkServer
from workers.ray.shared_memory import SHM, WEIGHTS, local_store_bytes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Variable that PyTorch reads the settings of its allocator from, when it is imported."""
OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Its former name, which PyTorch and vLLM still read."""
LOGICAL_GPUS = "RLSYS_LOGICAL_GPUS"
"""Variable with the number of GPUs that a local cluster has in name only."""
SEMAPHORES = "rlsys-"
"""Begin of the names of semaphores in a local cluster."""
ANSWER_S = 20.0
"""Seconds for the head of a cluster to answer."""
TOO_SLOW = "timed out during startup"
"""In Ray's error if its processes need more than 30 seconds, as on a busy machine. Ray has no option for it."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Ray resources of one actor, and its number of threads for maths."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    threads: int = 1
    interface: str = ""
    """Network interface for collectives; empty: that of the node's address."""
    ports: tuple[int, int] | None = None
    """First and last port of a meeting place; None: any."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that its node must have."""
    has_growing_segments: bool = False
    """True if PyTorch's memory on a GPU grows in place, so that batches of changing lengths leave no gaps in it. False
    for vLLM, which refuses or undoes it where its memory sleeps or other hosts read it."""

    def allocator_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for PyTorch's allocator in such a process; none if `environment` has settings for it.

        >>> Resources(num_gpus=1.0, has_growing_segments=True).allocator_variables({})
        {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}
        """
        if not (self.num_gpus and self.has_growing_segments) or environment.keys() & {ALLOCATOR, OLD_ALLOCATOR}:
            return {}
        return {ALLOCATOR: "expandable_segments:True"}

    @property
    def has_cuda(self) -> bool:
        """True if its process computes on a GPU."""
        return self.num_gpus > 0 and not num_logical_gpus()

    def claim(self) -> torch.device:
        """Limit the threads of this process and return its device: the GPU from Ray if one was requested, else the
        CPU."""
        import torch

        torch.set_num_threads(self.threads)
        return torch.device("cuda" if self.has_cuda else "cpu")

    def build(self, make: Callable[..., T]) -> T:
        """Call `make` with the `device`, in the process that has these resources."""
        return make(device=self.claim())


def num_logical_gpus() -> int:
    """Number of GPUs that this machine has in name only; 0 where they are real.

    Workers that have one compute on the CPU, and move their memory as if it were that of a GPU: for tests of placement
    and of hand-overs on machines without GPUs.
    """
    return int(os.environ.get(LOGICAL_GPUS, "0"))


NO_MATHS = Resources(num_cpus=0.0)
"""Resources of an actor that moves bytes and computes nothing."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray cluster of this run. `close` shuts down only a cluster that `connect` started."""

    is_ours: bool
    keeper: subprocess.Popen[str] | None = None
    """Process that ends a local cluster with this process."""
    watch: ClusterWatch = field(default_factory=ClusterWatch.of_this_process)
    forks: ForkServer | None = None
    """Starts the workers of a local cluster."""

    def close(self) -> None:
        if self.forks is not None:
            self.forks.close()
        if self.keeper is not None and self.watch.has_lost:
            self.keeper.communicate()  # Ray waits longer for what is left of a cluster
        if self.is_ours:
            ray.shutdown()
        self.watch.end()
        if self.keeper is not None:
            self.keeper.communicate()


@dataclass(frozen=True, slots=True)
class LocalStart:
    """Keeper and fork server of a local cluster, which can start before it."""

    mark: str
    keeper: subprocess.Popen[str]
    forks: ForkServer

    @classmethod
    def of_this_process(cls) -> Self:
        """Start the keeper and the fork server."""
        mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        keeper = _start_keeper(mark)
        with _mark_processes(mark):
            return cls(mark, keeper, ForkServer.start())

    def close(self) -> None:
        """End both, and what is left of the cluster."""
        self.forks.close()
        self.keeper.communicate()


def starts_local(address: str | None) -> bool:
    """Return True if `connect` will start a local cluster at this address."""
    named = address or os.environ.get("RAY_ADDRESS")
    return not ray.is_initialized() and named in (None, "", "local")


def begin(address: str | None) -> LocalStart | None:
    """Start the keeper and the fork server, if `connect` will start a local cluster at this address."""
    return LocalStart.of_this_process() if starts_local(address) else None


def connect(address: str | None, num_cpus: int | None, begun: LocalStart | None = None) -> Cluster:
    """Join a cluster, or start a local one; `begun` is the result of `begin` for that one.

    In order: the cluster that this process has joined; `address`; the one of the Ray job or RAY_ADDRESS; a new local
    one. Only processes on this machine that have its token can reach a new cluster.

    Raises `ConfigError` if the cluster at `address` cannot be joined, or its head does not answer within `ANSWER_S`;
    `ClusterError` if no local one starts in two tries, or /dev/shm is full. From then on,
    a call of Ray in this process raises an error while it is connected to no cluster; by default, Ray would join any
    cluster that it finds.
    """
    if ray.is_initialized():
        return Cluster(is_ours=False)
    auto_init_hook.enable_auto_connect = False
    source, address = ("ray", address) if address else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray_worker.print_to_stdstream = _print_native
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "job_config": _JobOnOwnPath()}
    if address and address != "local":
        if address.startswith("ray://"):
            raise ConfigError(f"{source}={address}: a driver must run inside the cluster: unset it, see the key ray")
        try:
            _check_head(address)
            with signals_kept():
                ray.init(address=address, **quiet)
        except Exception as error:  # Ray raises plain `Exception` too
            raise ConfigError(
                f"{source}: cannot join {address!r}: {error}; this machine must be a node of that cluster, and have "
                "its token and its versions of Ray and Python"
            ) from error
        return Cluster(is_ours=True)
    _ensure_token()
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # else the head keeps 100,000 tasks in memory
    num_cpus = num_cpus or max(len(os.sched_getaffinity(0)), 2)
    store, folder = local_store_bytes(), private_folder()
    begun = begun or LocalStart.of_this_process()
    for is_last in (False, True):
        try:
            with _on_loopback(), _mark_processes(begun.mark), signals_kept():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_logical_gpus() or None,
                    object_store_memory=store,
                    include_dashboard=False,
                    _temp_dir=str(folder / "ray"),
                    **quiet,
                )
            break
        except Exception as error:  # Ray raises plain `Exception` too
            begun.close()
            if is_last or TOO_SLOW not in str(error):
                raise ClusterError(
                    f"a local Ray cluster did not start: {error}; see its logs in {folder}/ray/session_latest/logs; if "
                    "the machine is overloaded, run `ray start --head` first, and set ray=auto"
                ) from error
            begun = LocalStart.of_this_process()
    keeper, mark = begun.keeper, begun.mark
    assert keeper.stdin is not None
    spilled, weights = f"{log_folder().parent}/ray_spilled_objects", f"{SHM}/{WEIGHTS}{mark}-"
    left = (str(begun.forks.folder), spilled, _semaphores(mark), weights)
    keeper.stdin.write("".join(f"{path}*\n" for path in left))
    keeper.stdin.flush()
    return Cluster(is_ours=True, keeper=keeper, forks=begun.forks)


def _check_head(address: str) -> None:
    """Raise `ConnectionError` unless a server of gRPC answers where Ray would look for the head of a cluster. Ray
    itself asks for minutes."""
    head = services.canonicalize_bootstrap_address_or_die(address)
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    with grpc.insecure_channel(head, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"no head of a cluster answers at {head} within {ANSWER_S:g} s") from None


def private_folder() -> Path:
    """Folder of this user alone for the sessions of local clusters, under RAY_TMPDIR, TMPDIR or /tmp.

    Ray lets everybody write its own, which is in it, sockets among them. Under /tmp if TMPDIR is too long for the name
    of a socket; RAY_TMPDIR itself if it is private. Who has made a folder of this name before us gets no session: then
    it is a new one.
    """
    chosen = os.environ.get("RAY_TMPDIR")
    parent = Path(chosen or tempfile.gettempdir())
    if chosen and _is_private(parent):
        return parent
    folder = parent / f"rlsys-{os.getuid()}"
    if not chosen and len(str(folder)) > LONGEST_FOLDER:
        folder = Path("/tmp", folder.name)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not _is_private(folder):
            return Path(tempfile.mkdtemp(prefix="rlsys-", dir=folder.parent))
    except OSError as error:
        raise ClusterError(f"a local Ray cluster has no place: {error}; set RAY_TMPDIR to a folder") from error
    return folder


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class _JobOnOwnPath(JobConfig):
    """Job whose workers search modules as this process does, see `worker_process.start`. Without it, Ray puts the
    current folder before all others, unless the job has a folder of its own."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def _start_keeper(mark: str) -> subprocess.Popen[str]:
    """Start what ends the processes with this mark once this process ends, or closes the standard input of it."""
    words = [sys.executable, "-I", "-S", cluster_keeper.__file__, mark]
    # A session of its own: Ctrl-C and the end of the terminal are not for it.
    return subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True)


@contextmanager
def _mark_processes(mark: str) -> Iterator[None]:
    """Give the processes that start in this block, and all that they start, a mark in their environment."""
    # Ray's agents overwrite their environment with their title unless SPT_NOENV is set.
    added = {cluster_keeper.MARK: mark, "SPT_NOENV": "1"}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _semaphores(mark: str) -> str:
    return f"/dev/shm/sem.{SEMAPHORES}{mark}"


def mark_semaphores() -> None:
    """Put the mark of this process's cluster into the names of its semaphores, so that the keeper finds their files.

    They stay behind where a process is killed together with its resource tracker.
    """
    if mark := os.environ.get(cluster_keeper.MARK):
        multiprocessing.current_process()._config["semprefix"] = f"/{SEMAPHORES}{mark}"  # pyrefly: ignore


def _print_native(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Print Ray's reports on the cluster, such as the end of the raylet's log, where native code writes, instead of on
    stdout."""
    os.write(STDERR, "".join(f"{line}\n" for line in data["lines"]).encode(errors="replace"))


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


def caution_about_idle_gpus(reserved: float, have: Mapping[str, float]) -> str:
    """Return a caution for a run that reserves no GPU of a cluster with `have`; empty if none stands idle for that."""
    if reserved or not have.get("GPU"):
        return ""
    return (
        f"the cluster has {have['GPU']:g} GPUs, and no worker of this run takes one: set resources.actor.gpus and "
        "resources.rollout.gpus, to parts such as 0.5 if they share one"
    )


def lacking(needed: Resources) -> str:
    """Name what a process needs and the cluster has not free; empty if it has."""
    free, have = ray.available_resources(), totals()
    needs = (("CPU", needed.num_cpus), ("GPU", needed.num_gpus))
    return ", ".join(
        f"it needs {count:g} {name}s, and {free.get(name, 0.0):g} of the cluster's {have.get(name, 0.0):g} are free"
        for name, count in needs
        if free.get(name, 0.0) < count
    )


def totals() -> Mapping[str, float]:
    """Resources of all live nodes together, for example `{"CPU": 8.0}`."""
    return ray.cluster_resources()


def short_of(needs: Iterable[Resources], have: Mapping[str, float]) -> set[str]:
    """Return the resources, CPU or GPU, of which a cluster with `have` has too little for all of `needs` together."""
    return {name for name, count in _sum_needs(needs).items() if count > have.get(name, 0.0)}


def is_used_by_others(needs: Iterable[Resources]) -> bool:
    """True if more of the cluster is taken than what `needs` are together: not all of it is theirs."""
    free, have, own = ray.available_resources(), totals(), _sum_needs(needs)
    return any(have.get(name, 0.0) - free.get(name, 0.0) > own[name] for name in ("CPU", "GPU"))


def _sum_needs(needs: Iterable[Resources]) -> Counter[str]:
    needed = Counter[str]()
    for need in needs:
        needed.update({"CPU": need.num_cpus, "GPU": need.num_gpus})
    return needed


def node_ids() -> list[str]:
    """Live nodes; the driver's node first."""
    here = ray.get_runtime_context().get_node_id()
    alive = [n["NodeID"] for n in ray.nodes() if n["Alive"]]
    return sorted(alive, key=lambda n: (n != here, n))


def has_other_machines() -> bool:
    """True if the cluster has a live node with another address than this one's."""
    return len({n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}) > 1
