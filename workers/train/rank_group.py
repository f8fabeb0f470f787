"""The process group of a back-end's ranks, and its few hand-written collectives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIGTERM, signal
from tempfile import TemporaryDirectory
from typing import TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from pebble import ProcessExpired, ProcessFuture, ProcessPool
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlsys.config.mesh_section import MeshSection
from rlsys.errors import RlsysError, WorkerDied
from workers.ray.node_network import take_listener
from workers.train.plain_objects import read_objects_plainly

T = TypeVar("T")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the interface for collectives."""


class RankGroup:
    """One rank of `num_ranks`. A single rank joins no group, and its collectives are the identity."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, *, address: str = "", timeout_s: float = 600.0) -> None:
        """Join the group at `address` of rank 0, e.g. `tcp://10.0.0.4:29500`. Returns once all ranks have joined.

        A collective with a dead peer raises after `timeout_s`.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self.mesh = MeshSection(shard=num_ranks)
        self.aside: dist.ProcessGroup | None = None
        """The same ranks over CPU, for a thread that communicates while the ranks compute; None for one rank."""
        if num_ranks > 1:
            read_objects_plainly()
            timeout = timedelta(seconds=timeout_s)
            store = _store(address, rank, num_ranks, timeout) if address.startswith("tcp:") else None
            with _naming_network():
                dist.init_process_group(
                    _backend(),
                    init_method=None if store else address,
                    store=store,
                    rank=rank,
                    world_size=num_ranks,
                    timeout=timeout,
                )
                self.aside = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))

    def with_mesh(self, mesh: MeshSection) -> RankGroup:
        """Return the same ranks in another mesh of as many; by default all are on `shard`."""
        assert mesh.num_ranks == self.num_ranks, f"{mesh} needs {mesh.num_ranks} ranks, not {self.num_ranks}"
        arranged = copy(self)
        arranged.mesh = mesh
        return arranged

    @property
    def batch(self) -> int:
        """Number of this rank's batches in the plan of a step; peers have the same."""
        return self.rank // self.mesh.num_peers

    @property
    def is_first_peer(self) -> bool:
        """True for one of the ranks that train the same batches."""
        return self.rank % self.mesh.num_peers == 0

    def device_mesh(self, device: torch.device, **sizes: int) -> DeviceMesh:
        """Return the ranks as a mesh with these dimensions, outermost first. Collective."""
        if not dist.is_initialized():
            dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # else a mesh guesses
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the batches of all ranks, in place. Peers have equal figures, of which one counts."""
        if self.num_ranks > 1 and not self.is_first_peer:
            tensor.zero_()
        return self.sum_over_ranks(tensor)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        if self.num_ranks > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather(self, values_N: Tensor) -> Tensor:
        """Concatenate the entries of all batches, in rank order; ranks may have different numbers of entries."""
        if self.num_ranks == 1:
            return values_N
        if not self.is_first_peer:
            values_N = values_N[:0]
        lengths = [torch.zeros(1, dtype=torch.int64, device=values_N.device) for _ in range(self.num_ranks)]
        dist.all_gather(lengths, torch.tensor([len(values_N)], device=values_N.device))
        sizes = [int(length) for length in lengths]
        padded_N = torch.cat([values_N, values_N.new_zeros(max(sizes) - len(values_N))])
        gathered = [torch.empty_like(padded_N) for _ in sizes]
        dist.all_gather(gathered, padded_N)
        return torch.cat([of_rank_N[:size] for of_rank_N, size in zip(gathered, sizes, strict=True)])

    def all_objects(self, own: T) -> list[T]:
        """Return the object of every rank, in rank order: data, see `plain_objects`."""
        if self.num_ranks == 1:
            return [own]
        found: list[T] = [own] * self.num_ranks
        dist.all_gather_object(found, own, group=self.aside)
        return found

    def close(self) -> None:
        """Leave the group; idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(address: str, rank: int, num_ranks: int, timeout: timedelta) -> TCPStore:
    """The store for rendezvous. Rank 0 listens only on that address; torch would listen on every interface."""
    parts = urlsplit(address)
    host, port = parts.hostname, parts.port
    assert host is not None
    assert port is not None
    if rank > 0:
        return TCPStore(host, port, num_ranks, timeout=timeout)
    fd = take_listener(host, port).detach()
    return TCPStore(host, port, num_ranks, is_master=True, timeout=timeout, master_listen_fd=fd, use_libuv=True)


@contextmanager
def _naming_network() -> Iterator[None]:
    """Add to an error of a collective which network interface this rank was told to use."""
    try:
        yield
    except RuntimeError as error:
        names = " and ".join(f"{name}={os.environ.get(name, 'unset')}" for name in INTERFACES)
        where = f"this rank ran with {names} on {socket.gethostname()}; see train.network"
        raise RuntimeError(f"{error}; {where}") from error


def _backend() -> str:
    return "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"


_LAST_WORDS_S = 1.0
"""Wait for errors of the other ranks: a failing rank makes its peers fail, with less helpful errors."""


def in_processes(count: int, work: Callable[[int, str], T], phase: str) -> T:
    """Run `work(rank, address)` on `count` ranks and return the result of rank 0. Ranks join each other at the address.

    If a rank fails, all others are ended and the most informative error is raised. In order: an `RlsysError`,
    `WorkerDied` for a process that has died (`phase` names its task), any other error.
    """
    # With the default handler: pebble's Python handler never runs while a rank waits in a collective.
    pool = ProcessPool(count, initializer=signal, initargs=(SIGTERM, SIG_DFL), context=get_context("spawn"))
    with TemporaryDirectory() as folder:
        try:
            ranks = [pool.schedule(work, args=(rank, f"file://{Path(folder, 'ranks')}")) for rank in range(count)]
            if errors := _errors(ranks, phase):
                raise min(errors, key=lambda error: (not isinstance(error, RlsysError), isinstance(error, WorkerDied)))
            return ranks[0].result()
        finally:
            pool.stop()
            pool.join()


def _errors(ranks: list[ProcessFuture], phase: str) -> list[BaseException]:
    """Errors of the ranks once all have returned, or one has failed."""
    done, others = wait(ranks, return_when=FIRST_EXCEPTION)
    if others:
        done = done | wait(others, timeout=_LAST_WORDS_S).done
    found: list[BaseException] = []
    for number, rank in enumerate(ranks):
        error = rank.exception() if rank in done else None
        if isinstance(error, ProcessExpired):
            died = WorkerDied(f"rank {number}", phase, "its process ended; was it short of memory?")
            died.__cause__, error = error, died
        if error is not None:
            found.append(error)
    return found
