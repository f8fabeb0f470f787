"""Cluster of a profile: its latencies, and real relays on links with simulated bandwidth."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from rlsys.simulate.profile import TRANSFER_S, Profile
from rlsys.testing.fake_pools import now
from rlsys.testing.fake_world import FakeWorld
from rlsys.types import Group, PolicyVersion, Ref
from rlsys.weight_sync.links import Link
from rlsys.weight_sync.manifest import BUCKET_BYTES, Bucket, VersionPart
from rlsys.weight_sync.relay import Announcement, Origin, Relay, broadcast

MAX_BUCKETS = 32
"""Most buckets of a version: each bucket is an event at every relay, and stands for several of a run."""
ACTOR_NODE = "actor"
MOVES = 4
"""Moves of memory in a hand-over and back: both roles sleep and wake."""


class SimCluster(FakeWorld):
    """One relay on the actor's node, one on each node with rollouts, and an actor with the profile's latencies."""

    def __init__(self, profile: Profile) -> None:
        weights = profile.weights
        super().__init__(
            num_replicas=profile.num_replicas,
            reward_s=lambda group_id: profile.reward_s,
            num_bytes=weights.num_bytes,
            publish_s=weights.num_bytes / weights.push_bytes_per_s,
            restart_s=profile.restart_s,
            together=profile.together,
            move_s=profile.switch_s / MOVES,
        )
        self.profile = profile
        self.num_chunks = -(-weights.num_bytes // BUCKET_BYTES)
        """Buckets of a version in a run."""
        self.num_buckets = min(self.num_chunks, MAX_BUCKETS)
        places = [ACTOR_NODE, *(f"node-{i}" for i in range(profile.num_relays))]
        wires = _Wires(weights.num_bytes / self.num_chunks / weights.link_bytes_per_s)
        links = {p: _Link(f"relay-{p}", profile, wires, is_local=p == ACTOR_NODE) for p in places}
        self.relays = [Relay(f"relay-{p}", p, link, TRANSFER_S) for p, link in links.items()]
        self.arrived_s: dict[PolicyVersion, float] = {}
        """Seconds from a publish to the version's arrival at every relay."""
        self._sending: set[asyncio.Task[None]] = set()

    def step_s(self, version: PolicyVersion, groups: Sequence[Group]) -> float:
        """Return the seconds of training."""
        return self.profile.train_s(groups)

    def send(self, version: PolicyVersion) -> None:
        """Send a version down the relays."""
        self._sending.add(task := asyncio.get_running_loop().create_task(self._send(version)))
        task.add_done_callback(self._sending.discard)

    async def wait_for_version(self, at_least: PolicyVersion) -> PolicyVersion:
        """Return the newest version on the actor's node, once it is no older than `at_least`."""
        return await self.pull(-1, at_least)

    async def pull(self, node: int, at_least: PolicyVersion) -> PolicyVersion:
        """Return the newest version of a node's relay, once it is no older than `at_least`."""
        manifest, _ = await self.relays[node + 1].newest(at_least)
        return manifest.version

    async def _send(self, version: PolicyVersion) -> None:
        began_s = now()
        size, rest = divmod(self.num_bytes, self.num_buckets)
        names = [f"{version}/{i}" for i in range(self.num_buckets)]
        buckets = tuple(Bucket(name, size + (i < rest), ()) for i, name in enumerate(names))
        origin = Origin("actor", ACTOR_NODE, {bucket.hash: bucket for bucket in buckets})
        announcement = Announcement(VersionPart(version, 0, 1, buckets), origin, self.num_bytes, 0.0)
        link = Link(self.profile.weights.link_bytes_per_s)  # as relays measure it
        await asyncio.gather(*await broadcast(self.relays, announcement, TRANSFER_S, link, self.num_chunks))
        self.arrived_s[version] = now() - began_s


@dataclass
class _Wires:
    """Times of all links of a cluster."""

    chunk_s: float
    """Seconds that one bucket of a run is under way: so much later than a relay, the next one may begin to receive."""
    sending_until_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time at which each source has sent all that it was asked for."""
    begun_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """Time at which each relay began to receive each bucket."""


class _Link:
    """Link into one relay. A node sends one bucket at a time, and receives one at a time, beside that. A `Store` whose
    data are `Bucket` objects.

    That of the actor's node finds them in the host's memory, where a publish has left them. A bucket that stands for
    several is passed on while it comes in.
    """

    def __init__(self, name: str, profile: Profile, wires: _Wires, *, is_local: bool) -> None:
        """`name` is that of the relay."""
        weights = profile.weights
        self._name, self._wires = name, wires
        self._bytes_per_s = inf if is_local else weights.link_bytes_per_s
        self._latency_s = 0.0 if is_local else weights.link_latency_s
        self._free_s = 0.0
        """Time at which the last bucket of the link is here, but for the latency."""

    async def fetch(self, ref: Ref, source: str) -> object:
        assert isinstance(ref, Bucket)
        wires, took_s = self._wires, ref.num_bytes / self._bytes_per_s
        there_s = wires.begun_s.get((source, ref.hash), inf) + min(took_s, wires.chunk_s) + self._latency_s
        begins_s = max(min(now(), there_s), self._free_s, wires.sending_until_s[source])
        wires.begun_s[self._name, ref.hash] = begins_s
        self._free_s = wires.sending_until_s[source] = begins_s + took_s
        await asyncio.sleep(max(0.0, self._free_s + self._latency_s - now()))
        return ref

    async def digest(self, data: object) -> str:
        assert isinstance(data, Bucket)
        return data.hash

    async def apply_delta(self, base: Ref, delta: object) -> object:
        raise NotImplementedError("simulated versions have no deltas")

    async def own(self, data: object) -> Ref:
        return data

    async def borrow(self, ref: Ref) -> Ref:
        return ref
