"""Contract of a transport: where the bytes of published weights are, and how other processes get at them.

One contract suite (`tests/contract/test_transports.py`) runs against every transport. The relays decide what is sent to
whom; see `rlsys.weight_sync.relay`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from rlsys.types import PolicyVersion, Ref

if TYPE_CHECKING:
    import numpy as np

TransportName: TypeAlias = Literal["object_store", "shared_memory"]


class WeightTransport(Protocol):
    """Bytes that other processes can read by a reference. Each process has an object of its own."""

    @property
    def place(self) -> str:
        """Name of the node or machine whose processes read a reference of this one without a copy."""

    @property
    def sends(self) -> bool:
        """True if bytes are copied to other nodes; False if all processes are at one place."""

    def memory(self, version: PolicyVersion, num_bytes: int, *, pin: bool) -> np.ndarray:
        """Return writable bytes for what a rank publishes of `version`: those of an older version, if no process reads
        them any more. `pin`: page-locked, so that a GPU copies into them faster.

        Raises `WorkerError` that names the memory if there is no room.
        """

    def share(self, memory: np.ndarray, start: int, end: int) -> Ref:
        """Return a reference to the bytes `start` to `end` of `memory`, which are not written again while a process
        has the reference. Raises `WorkerError` if there is no room."""

    def put(self, data: np.ndarray) -> Ref:
        """Return a reference to a copy of `data`. Raises `WorkerError` if there is no room."""

    def keep_bytes(self, ref: Ref) -> Ref:
        """Return a reference whose bytes stay as long as this process keeps it.

        Raises `WorkerDied` if they are gone.
        """

    async def fetch(self, ref: Ref, source: str, phase: str) -> np.ndarray:
        """Return the bytes, read-only, from the process `source`. Raises `WorkerDied` if they are gone."""
