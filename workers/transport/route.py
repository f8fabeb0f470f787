"""The way of weights in one run: its relays, its transport, and the deadline of a transfer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.weight_sync.relay import Relay
from workers.ray.cluster import has_other_machines
from workers.ray.remote_proxy import Remote
from workers.transport.object_store import ObjectStoreTransport
from workers.transport.shared_files import FOLDER, SharedMemoryTransport
from workers.transport.transport import TransportName, WeightTransport


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """The transport of one relay tier."""

    name: TransportName
    reason: str = ""
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """In the names of what it leaves outside the memory of processes."""

    @classmethod
    def choose(cls) -> TransportSpec:
        """The transport for the nodes of this cluster."""
        if has_other_machines():
            return cls("object_store", "the cluster has several machines")
        if not FOLDER.is_dir():
            return cls("object_store", f"this machine has no {FOLDER}")
        return cls("shared_memory", "all nodes are on one machine")

    def start(self) -> WeightTransport:
        """Start the transport in this process."""
        return SharedMemoryTransport(self.run) if self.name == "shared_memory" else ObjectStoreTransport()

    def place_on(self, node: str) -> str:
        """`WeightTransport.place` of the processes on a node."""
        return SharedMemoryTransport.place if self.name == "shared_memory" else node


@dataclass(frozen=True, slots=True)
class Route:
    """What a rank needs to publish weights, and a replica to pull them."""

    relays: Sequence[Remote[Relay]]
    transport: TransportSpec
    transfer_s: float
    """Least deadline for a version to reach a relay, and for a pull, see `deadline_s`."""
    num_bytes: int = 0
    """Bytes of a version, as far as they are known before the first one."""
