"""The way of weights in one run: its relays, its transport, and the deadline of a transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlsys.weight_sync.relay import Relay
from workers.ray.cluster import has_other_machines
from workers.ray.remote_proxy import Remote
from workers.transport.object_store import ObjectStoreTransport
from workers.transport.shared_memory import FOLDER, SharedMemoryTransport
from workers.transport.transport import TransportName, WeightTransport

TRANSPORTS: Mapping[TransportName, Callable[[], WeightTransport]] = {
    "object_store": ObjectStoreTransport,
    "shared_memory": SharedMemoryTransport,
}


@dataclass(frozen=True, slots=True)
class Route:
    """What a rank needs to publish weights, and a replica to pull them."""

    relays: Sequence[Remote[Relay]]
    transport: TransportName
    transfer_s: float
    """Deadline for a version to reach a relay, and for a pull."""

    def start_transport(self) -> WeightTransport:
        """The transport of this process."""
        return TRANSPORTS[self.transport]()


def choose_transport() -> tuple[TransportName, str]:
    """The transport for the nodes of this cluster, and the reason."""
    if has_other_machines():
        return "object_store", "the cluster has several machines"
    if not FOLDER.is_dir():
        return "object_store", f"this machine has no {FOLDER}"
    return "shared_memory", "all nodes are on one machine"


def place_on(node: str, transport: TransportName) -> str:
    """`WeightTransport.place` of the processes on a node."""
    return SharedMemoryTransport.place if transport == "shared_memory" else node
