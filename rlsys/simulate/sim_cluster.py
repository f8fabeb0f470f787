"""Cluster of a profile: its latencies, and real relays on links with simulated bandwidth."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

from rlsys.simulate.profile import TRANSFER_S, Profile
from rlsys.testing.fake_pools import now
from rlsys.testing.fake_world import FakeWorld
from rlsys.types import Group, PolicyVersion, Ref
from rlsys.weight_sync.links import slowest
from rlsys.weight_sync.manifest import BUCKET_BYTES, Bucket, VersionPart
from rlsys.weight_sync.relay import Announcement, Origin, Relay, broadcast

MAX_BUCKETS = 32
"""Most buckets of a version: each bucket is an event at every relay."""
ACTOR_NODE = "actor"


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
        )
        self.profile = profile
        self.num_buckets = min(-(-weights.num_bytes // BUCKET_BYTES), MAX_BUCKETS)
        places = [ACTOR_NODE, *(f"node-{i}" for i in range(profile.num_relays))]
        self.relays = [Relay(f"relay-{p}", p, _Link(profile, is_local=p == ACTOR_NODE), TRANSFER_S) for p in places]
        self.arrived_s: dict[PolicyVersion, float] = {}
        """Seconds from a publish to the version's arrival at every relay."""
        self._sending: set[asyncio.Task[None]] = set()

    def step_s(self, version: PolicyVersion, groups: Sequence[Group]) -> float:
        """Return the seconds of training, plus the switch of colocated GPUs."""
        return self.profile.train_s(groups) + (self.profile.switch_s if self.profile.colocated else 0.0)

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
        link = slowest([(await relay.holding()).link for relay in self.relays])
        await asyncio.gather(*await broadcast(self.relays, announcement, TRANSFER_S, link))
        self.arrived_s[version] = now() - began_s


class _Link:
    """Link into one relay, which transfers one bucket at a time. A `Store` whose data are `Bucket` objects.

    That of the actor's node finds them in the host's memory, where a publish has left them.
    """

    def __init__(self, profile: Profile, *, is_local: bool) -> None:
        weights = profile.weights
        self._bytes_per_s = inf if is_local else weights.link_bytes_per_s
        self._latency_s = 0.0 if is_local else weights.link_latency_s
        self._free_s = 0.0
        """Time at which the last bucket of the link arrives."""

    async def fetch(self, ref: Ref, source: str) -> object:
        assert isinstance(ref, Bucket)
        self._free_s = max(now(), self._free_s) + ref.num_bytes / self._bytes_per_s
        await asyncio.sleep(self._free_s + self._latency_s - now())
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
