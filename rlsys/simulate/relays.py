"""The relay tier of a simulation: real `rlsys.relay.Relay`s whose links take the time a profile says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlsys.broadcast import Announcement, Origin, best_chunks, broadcast
from rlsys.contracts import Arrival
from rlsys.errors import WorkerError
from rlsys.relay import Relay
from rlsys.simulate.profile import Profile
from rlsys.types import PolicyVersion, Ref
from rlsys.weights import Bucket, Manifest

MAX_BUCKETS = 32
"""Buckets of a version, at most: each is an event at every relay."""
TRANSFER_S = 4 * 3600.0
"""Deadline of a transfer; nothing hangs here."""
ACTOR_NODE = "actor"


class SimRelays:
    """One relay on the actor's node, then one for each node with rollouts. Implements `rlsys.contracts.Relays`."""

    def __init__(self, profile: Profile) -> None:
        weights = profile.weights
        ideal = best_chunks(profile.num_relays + 1, weights.num_bytes, weights.link_bytes_per_s, weights.link_latency_s)
        self.num_buckets = min(ideal, MAX_BUCKETS)
        self._num_bytes = weights.num_bytes
        places = [ACTOR_NODE, *(f"node-{i}" for i in range(profile.num_relays))]
        self.relays = [Relay(f"relay-{p}", p, _Link(profile), TRANSFER_S) for p in places]
        self.arrived_s: dict[PolicyVersion, float] = {}
        """Seconds from a publish until every relay held the version."""
        self._sending: set[asyncio.Task[None]] = set()

    def publish(self, version: PolicyVersion) -> None:
        """Start to send a version, which has left the actor, down the chain."""
        loop = asyncio.get_running_loop()
        self._sending.add(task := loop.create_task(self._send(version)))
        task.add_done_callback(self._sending.discard)

    async def pull(self, node: int, at_least: PolicyVersion) -> tuple[PolicyVersion, str]:
        """The newest version that the relay of a node holds, no older than `at_least`, and its hash."""
        manifest, _ = await self.relays[node + 1].newest(at_least)
        return manifest.version, manifest.hash

    async def arrival(self, version: PolicyVersion) -> Arrival:
        arrival, _ = await self.relays[0].arrival(version)
        return arrival

    async def supervise(
        self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        """Relays do not die here."""
        await asyncio.Event().wait()

    async def _send(self, version: PolicyVersion) -> None:
        began = asyncio.get_running_loop().time()
        size, rest = divmod(self._num_bytes, self.num_buckets)
        names = [f"{version}/{i}" for i in range(self.num_buckets)]
        buckets = tuple(Bucket(name, size + (i < rest), ()) for i, name in enumerate(names))
        manifest = Manifest(version, f"hash-of-{version}", buckets)
        origin = Origin("actor", ACTOR_NODE, {bucket.hash: bucket for bucket in buckets})
        announcement = Announcement(manifest, origin, self._num_bytes, 0.0)
        await asyncio.gather(*await broadcast(self.relays, announcement, TRANSFER_S))
        self.arrived_s[version] = asyncio.get_running_loop().time() - began


class _Link:
    """The way into one relay, which carries one bucket at a time. A `Store` whose bytes are descriptions of buckets."""

    def __init__(self, profile: Profile) -> None:
        self._weights = profile.weights
        self._free_s = 0.0
        """When the last bucket on the wire will be through."""

    async def fetch(self, ref: Ref, source: str) -> object:
        assert isinstance(ref, Bucket)
        now = asyncio.get_running_loop().time()
        self._free_s = max(now, self._free_s) + ref.num_bytes / self._weights.link_bytes_per_s
        await asyncio.sleep(self._free_s + self._weights.link_latency_s - now)
        return ref

    async def digest(self, data: object) -> str:
        assert isinstance(data, Bucket)
        return data.hash

    async def own(self, data: object) -> Ref:
        return data
