"""Tensors in memory that processes of one machine share: written by one, mapped by others."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from rlsys.errors import WorkerError
from rlsys.weight_sync.manifest import Rectangle, TensorSpec, padded_size
from workers.engines.engine import available_bytes
from workers.transport.buckets import specs_in

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Address of tensors in the memory of another process, valid while that process keeps it."""

    path: str
    num_bytes: int
    places: tuple[tuple[TensorSpec, int], ...]
    """Each tensor, and where it begins."""

    def tensors_in(self, memory: Tensor) -> dict[str, Tensor]:
        """Views of the tensors, by name, in `memory` as it is mapped here."""
        return {spec.name: _view(memory, spec, begin) for spec, begin in self.places}


class TensorMemory:
    """Memory without a name, which the kernel frees when the last process that has it ends, however it ends.

    It is allocated once and written again for every version. It is no file of `/dev/shm`, so the size of that does not
    limit it.
    """

    def __init__(self, worker: str) -> None:
        """`worker` is the name in errors."""
        self._worker, self._file = worker, os.memfd_create("rlsys-weights")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._writing = threading.Lock()

    def write(self, weights: Mapping[str, Tensor]) -> SharedTensors:
        """Copy tensors into the memory. Raises `WorkerError` if the machine has too little."""
        places, end = [], 0
        for spec in specs_in(weights).values():
            places.append((spec, end))
            end += padded_size(Rectangle.whole(spec).num_bytes)
        with self._writing:  # the thread of a cancelled call may still write
            if end > len(self._memory):
                reserve(self._file, end, self._worker)
                self._memory = map_file(self._file, end)
            for spec, begin in places:
                _view(self._memory, spec, begin).copy_(weights[spec.name])
        return SharedTensors(f"/proc/{os.getpid()}/fd/{self._file}", end, tuple(places))

    def close(self) -> None:
        """Free the memory, once no other process maps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class MappedMemory:
    """The `TensorMemory` of another process, mapped once."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, shared: SharedTensors) -> dict[str, Tensor]:
        """Return the tensors without a copy: their content changes when the other process writes again."""
        if shared.num_bytes > len(self._memory):
            file = os.open(shared.path, os.O_RDWR)
            self._memory = map_file(file, shared.num_bytes)
            os.close(file)
        return shared.tensors_in(self._memory)


def reserve(file: int, num_bytes: int, worker: str) -> None:
    """Allocate all pages of a file in memory, so that no later write to it fails with a signal.

    Raises `WorkerError` if the machine has too little memory.
    """
    free = available_bytes() + os.fstat(file).st_size
    try:
        if num_bytes > free:
            raise OSError("too little memory")
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        detail = (
            f"the shards share {num_bytes / 1e9:.1f} GB of weights in memory, and {free / 1e9:.1f} GB are free "
            f"({error}): lower rollout.slots, or place fewer replicas on this machine"
        )
        raise WorkerError(worker, "staging weights", detail) from error


def map_file(file: int, num_bytes: int) -> Tensor:
    """The bytes of a file in memory, shared with every process that maps it."""
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def _view(memory: Tensor, spec: TensorSpec, begin: int) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    flat = memory[begin : begin + prod(spec.shape) * dtype.itemsize]
    return flat.view(dtype).reshape(spec.shape)
