"""The relay tier as others see it: a handle per relay, and the driver's view of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import ray

from rlsys.broadcast import FAILURES, Announcement, Holding, Neighbour, Peer, first_success
from rlsys.contracts import Arrival
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.types import PolicyVersion, Ref
from rlsys.weights import Manifest
from workers.cluster import RayActor, Resources, call, node_ids, spawn
from workers.relay import RelayActor

T = TypeVar("T")
NO_MATHS = Resources(num_cpus=0.0)
"""A relay moves bytes and computes nothing."""
RESTART_POLL_S = 0.2
"""Between two questions whether a process is back: Ray tells nobody when it has restarted one."""


@dataclass(frozen=True, slots=True, eq=False)
class RelayHandle:
    """One relay, for the driver, the actor, replicas and other relays. Every method is that of `rlsys.relay.Relay`.

    Ray restarts the process if it dies. The handle stays valid; what the relay held is gone.
    """

    node: str
    actor: RayActor
    transfer_s: float

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return relay_name(self.node)

    async def announce(self, announcement: Announcement) -> None:
        phase = f"hearing of version {announcement.manifest.version}"
        await self._call(self.actor.announce.remote(announcement), phase)

    async def accept(self, version: PolicyVersion, sources: Sequence[Peer]) -> None:
        # Its own waits have deadlines, and it may have to try several sources.
        await call(self.actor.accept.remote(version, sources), self.name, f"taking in version {version}")

    async def give(self, bucket: str, *, wait: bool) -> Ref:
        return await self._call(self.actor.give.remote(bucket, wait), f"giving bucket {bucket}")

    async def newest(self, at_least: PolicyVersion) -> tuple[Manifest, list[Ref]]:
        return await self._call(self.actor.newest.remote(at_least), f"giving version {at_least} or newer")

    async def pin(self, version: PolicyVersion) -> tuple[Manifest, list[Ref]]:
        return await self._call(self.actor.pin.remote(version), f"pinning version {version}")

    async def arrival(self, version: PolicyVersion) -> tuple[Arrival, Announcement]:
        return await self._call(self.actor.arrival.remote(version), f"taking in version {version}")

    async def held(self) -> Holding:
        return await self._call(self.actor.held.remote(), "telling what it has")

    async def refill(self, neighbours: Sequence[Neighbour], last: Announcement | None) -> None:
        # Its own waits have deadlines.
        await call(self.actor.refill.remote(neighbours, last), self.name, "being refilled")

    async def watch(self) -> WorkerError:
        """Waits until there is something to tell, or the process is gone."""
        try:
            return await call(self.actor.watch.remote(), self.name, "keeping weights")
        except WorkerDied as error:
            return error

    async def _call(self, ref: Awaitable[T], phase: str) -> T:
        return await call(ref, self.name, phase, self.transfer_s)


def relay_name(node: str) -> str:
    """What a node's relay is called in messages."""
    return f"relay-{node[:8]}"


class RayRelays:
    """Implements `Relays`."""

    def __init__(self, members: Sequence[RelayHandle]) -> None:
        self.members = list(members)
        """Relays of the nodes that are there; the driver's own first."""
        self._last: Announcement | None = None
        """The newest version that arrived: what a tier that lost everything is refilled by."""

    @classmethod
    def start(cls, transfer_s: float, kind: type[RelayActor] = RelayActor, *args: object) -> RayRelays:
        """One relay per node. `transfer_s` is the deadline of every wait; `args` go to `kind` after its own."""
        return cls([_started(node, transfer_s, kind, *args) for node in node_ids()])

    async def arrival(self, version: PolicyVersion) -> Arrival:
        """See `Relays.arrival`. The caller sets the deadline: relays that all died are waited for."""
        while True:
            asked = [asyncio.create_task(member.arrival(version)) for member in self.members]
            try:
                arrival, announcement = await first_success(asked)
            except WorkerDied:
                await asyncio.sleep(RESTART_POLL_S)
            else:
                if self._last is None or self._last.manifest.version < version:
                    self._last = announcement
                return arrival
            finally:
                for task in asked:
                    task.cancel()

    async def pin(self, version: PolicyVersion) -> None:
        """Keep `version` until another is pinned, on every relay that is alive, and on those refilled later.

        Raises what the relays raised if none of them can, `WeightsMismatch` if all let it go already.
        """
        pins = [asyncio.create_task(member.pin(version)) for member in self.members]
        await asyncio.wait(pins)
        await first_success(pins)

    async def supervise(
        self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        """See `Relays.supervise`. The relay of a node that is gone drops out."""
        async with asyncio.TaskGroup() as watches:
            for member in self.members:
                watches.create_task(self._watch(member, on_failure, on_recovery))

    def close(self) -> None:
        """End every relay."""
        for member in self.members:
            ray.kill(member.actor)

    async def _watch(
        self, member: RelayHandle, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        """One relay: waits for trouble; unblocked by Ray's news of its death, or by what it tells itself."""
        loop = asyncio.get_running_loop()
        while member in self.members:
            error = await member.watch()
            on_failure(error)
            if isinstance(error, FAILURES):
                began = loop.time()
                try:
                    await self._restore(member)
                except WeightsMismatch as mismatch:
                    on_failure(mismatch)  # the next version may fare better
                else:
                    if member in self.members:
                        on_recovery(member.name, loop.time() - began)

    async def _restore(self, member: RelayHandle) -> None:
        """Fill a relay again as soon as its process is back; forget it if its node is gone."""
        while member.node in node_ids():
            try:
                return await member.refill([other for other in self.members if other is not member], self._last)
            except (WorkerDied, DeadlineExceeded):
                await asyncio.sleep(RESTART_POLL_S)
        self.members.remove(member)
        return None


def _started(node: str, transfer_s: float, kind: type[RelayActor], *args: object) -> RelayHandle:
    actor = spawn(kind, NO_MATHS, relay_name(node), transfer_s, *args, node=node, max_restarts=-1)
    return RelayHandle(node, actor, transfer_s)
