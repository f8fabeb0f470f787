"""The way of weights in one run: its relays, its transport, and the deadline of a transfer."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.weight_sync.relay import Relay
from workers.ray.cluster import has_other_machines, totals
from workers.ray.worker_process import Remote
from workers.transport.object_store import ObjectStoreTransport
from workers.transport.shared_files import FOLDER, SharedMemoryTransport, remove_segments
from workers.transport.transport import TransportName, WeightTransport

NUM_VERSIONS = 5
"""Versions that a machine has room for: two complete, one pinned, one on its way, one that is written."""
UNKNOWN_BYTES = 1 << 30
"""Room that is asked for where the bytes of a version are not known."""


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """The transport of one relay tier."""

    name: TransportName
    reason: str = ""
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """In the names of what it leaves outside the memory of processes."""

    @classmethod
    def choose(cls, num_bytes: int) -> TransportSpec:
        """The transport for versions of `num_bytes` between the nodes of this cluster; 0 if the bytes are not known."""
        free = shutil.disk_usage(FOLDER).free if FOLDER.is_dir() else 0
        of_ray = int(totals().get("object_store_memory", 0))
        return cls.for_room(num_bytes, free - of_ray, is_one_machine=not has_other_machines())

    @classmethod
    def for_room(cls, num_bytes: int, room: int, *, is_one_machine: bool) -> TransportSpec:
        """The transport where /dev/shm has `room` beside Ray's objects."""
        if not is_one_machine:
            return cls("object_store", "the cluster has several machines")
        needed = NUM_VERSIONS * num_bytes or UNKNOWN_BYTES
        if room < needed:
            return cls("object_store", f"{FOLDER} has no room for {needed / 1e9:.1f} GB beside Ray's objects")
        return cls("shared_memory", "all nodes are on one machine")

    def start(self) -> WeightTransport:
        """Start the transport in this process."""
        return SharedMemoryTransport(self.run) if self.name == "shared_memory" else ObjectStoreTransport()

    def remove_leftovers(self) -> None:
        """Remove what the processes of this relay tier leave on this machine when they end."""
        if self.name == "shared_memory":
            remove_segments(self.run)

    def place_on(self, node: str) -> str:
        """`WeightTransport.place` of the processes on a node."""
        return SharedMemoryTransport.place if self.name == "shared_memory" else node


@dataclass(frozen=True, slots=True)
class Route:
    """Relays, transport and deadline by which a rank publishes weights, and a replica pulls them."""

    relays: Sequence[Remote[Relay]]
    transport: TransportSpec
    transfer_s: float
    """Least deadline for a version to reach a relay, and for a pull, see `deadline_s`."""
    num_bytes: int = 0
    """Bytes of a version, as far as they are known before the first one."""
