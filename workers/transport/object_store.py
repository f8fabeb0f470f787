"""Weights through Ray's object store: it copies them to other nodes, and processes of a node share a copy."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from rlsys.errors import WorkerError
from rlsys.types import PolicyVersion, Ref
from workers.ray.worker_process import call


class ObjectStoreTransport:
    """Implements `WeightTransport`: a reference is one of Ray, which keeps the bytes while a process has it."""

    sends = True

    def __init__(self) -> None:
        self._memory: np.ndarray | None = None

    @property
    def place(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def memory(self, version: PolicyVersion, num_bytes: int, *, pin: bool) -> np.ndarray:
        """See `WeightTransport.memory`. It is the same every time, because `share` copies."""
        import torch

        if self._memory is None or len(self._memory) != num_bytes:
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin).numpy()
        return self._memory

    def share(self, memory: np.ndarray, start: int, end: int) -> Ref:
        return self.put(memory[start:end])

    def put(self, data: np.ndarray) -> Ref:
        try:
            return ray.put(data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            detail = (
                f"no room for {data.nbytes} bytes in Ray's object store ({type(error).__name__}): give this node more "
                "memory (ray start --object-store-memory) or disk to spill to"
            )
            raise WorkerError(ray.get_runtime_context().get_node_id()[:8], "storing weights", detail) from error

    def keep_bytes(self, ref: Ref) -> Ref:
        return ref

    async def fetch(self, ref: Ref, source: str, phase: str) -> np.ndarray:
        return await call(cast("Awaitable[np.ndarray]", ref), source, phase)
