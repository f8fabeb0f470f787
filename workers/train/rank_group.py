"""The group of ranks a back-end trains in: joining it, and the few collectives written by hand."""

from __future__ import annotations

import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class RankGroup:
    """One process's place among `num_ranks`. A rank that is alone joins nothing; its collectives are the identity."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, *, address: str = "", timeout_s: float = 600.0) -> None:
        """`address` is where rank 0 listens, e.g. `tcp://10.0.0.4:29500`; returns once all ranks are there.

        A collective that a dead peer keeps waiting raises after `timeout_s`.
        """
        self.rank, self.num_ranks = rank, num_ranks
        if num_ranks > 1:
            timeout = timedelta(seconds=timeout_s)
            store = _store(address, rank, num_ranks, timeout) if address.startswith("tcp:") else None
            dist.init_process_group(
                _backend(),
                init_method=None if store else address,
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timeout,
            )

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks as a one-dimensional mesh to shard over."""
        if not dist.is_initialized():
            dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
        return init_device_mesh(device.type, (self.num_ranks,))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather(self, values_N: Tensor) -> Tensor:
        """The entries of all ranks in one tensor, in rank order; ranks may have different numbers of them."""
        if self.num_ranks == 1:
            return values_N
        lengths = [torch.zeros(1, dtype=torch.int64, device=values_N.device) for _ in range(self.num_ranks)]
        dist.all_gather(lengths, torch.tensor([len(values_N)], device=values_N.device))
        sizes = [int(length) for length in lengths]
        padded_N = torch.cat([values_N, values_N.new_zeros(max(sizes) - len(values_N))])
        gathered = [torch.empty_like(padded_N) for _ in sizes]
        dist.all_gather(gathered, padded_N)
        return torch.cat([of_rank_N[:size] for of_rank_N, size in zip(gathered, sizes, strict=True)])

    def close(self) -> None:
        """Leave the group; idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(address: str, rank: int, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Where ranks find each other: rank 0 listens on that address alone, where torch would take every interface."""
    parts = urlsplit(address)
    host, port = parts.hostname, parts.port
    assert host is not None
    assert port is not None
    if rank > 0:
        return TCPStore(host, port, num_ranks, timeout=timeout)
    listener = socket.create_server((host, port))
    return TCPStore(
        host, port, num_ranks, is_master=True, timeout=timeout, master_listen_fd=listener.detach(), use_libuv=True
    )


def _backend() -> str:
    return "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
