"""The relay tier as others see it: a handle per relay, and the driver's view of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import ray

from rlsys.broadcast import (
    FAILURES,
    RESTART_POLL_S,
    TRIES,
    UNAVAILABLE,
    Announcement,
    Holding,
    Neighbour,
    Peer,
    first_success,
    passing,
    patiently,
)
from rlsys.contracts import Arrival
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.types import PolicyVersion, Ref
from rlsys.weights import Manifest
from workers.cluster import RayActor, Resources, call, node_ids, spawn
from workers.relay import RelayActor

T = TypeVar("T")
NO_MATHS = Resources(num_cpus=0.0)
"""A relay moves bytes and computes nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class RelayHandle:
    """One relay, for the driver, the actor, replicas and other relays. Every method is that of `rlsys.relay.Relay`.

    Ray restarts the process if it dies. The handle stays valid; what the relay held is gone.

    A question is answered within one of `TRIES` parts of `transfer_s`, `accept` and `refill`, which wait many times,
    within all of it; else `DeadlineExceeded` is raised.
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
        ref = self.actor.accept.remote(version, sources)
        await call(ref, self.name, f"taking in version {version}", self.transfer_s)

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

    async def refill(self, neighbours: Sequence[Neighbour], known: Holding) -> None:
        await call(self.actor.refill.remote(neighbours, known), self.name, "being refilled", self.transfer_s)

    async def watch(self) -> WorkerError:
        """Waits until there is something to tell, or the process is gone, or it hangs: it is killed then, so that Ray
        restarts it. One that is starting is given all the time it takes."""
        news = asyncio.ensure_future(call(self.actor.watch.remote(), self.name, "keeping weights"))
        try:
            await call(self.actor.held.remote(), self.name, "starting")
            while not (await asyncio.wait([news], timeout=self.transfer_s / TRIES))[0]:
                await self.held()
            return await news
        except WorkerDied as error:
            return error
        except DeadlineExceeded as error:
            ray.kill(self.actor, no_restart=False)
            return error
        finally:
            news.cancel()

    async def _call(self, ref: Awaitable[T], phase: str) -> T:
        return await call(ref, self.name, phase, self.transfer_s / TRIES)


def relay_name(node: str) -> str:
    """What a node's relay is called in messages."""
    return f"relay-{node[:8]}"


class RayRelays:
    """Implements `Relays`."""

    def __init__(
        self, members: Sequence[RelayHandle], transfer_s: float, nodes: Callable[[], Sequence[str]] = node_ids
    ) -> None:
        """`nodes` tells which nodes are alive."""
        self.members = list(members)
        """Relays of the nodes that are there; the driver's own first."""
        self._transfer_s, self._nodes = transfer_s, nodes
        self._last: Announcement | None = None
        """The newest version that arrived."""
        self._pinned: Announcement | None = None

    @classmethod
    def start(cls, transfer_s: float, kind: type[RelayActor] = RelayActor, *args: object) -> RayRelays:
        """One relay per node. `transfer_s` is the deadline of a transfer; `args` go to `kind` after its own."""
        return cls([_started(node, transfer_s, kind, *args) for node in node_ids()], transfer_s)

    async def arrival(self, version: PolicyVersion) -> Arrival:
        """See `Relays.arrival`. The caller sets the deadline: relays that restart or hang are waited for."""
        arrival, announcement = await patiently(lambda: self._found(version), None, f"taking in version {version}")
        if self._last is None or self._last.manifest.version < version:
            self._last = announcement
        return arrival

    async def pin(self, version: PolicyVersion) -> None:
        """Keep `version` until another is pinned: on every relay that holds it or has it soon, and on those that are
        refilled later. Returns once one relay keeps it and each of the others has answered or had its turn.

        Relays that restart or hang are waited for. Raises `WeightsMismatch` if all let the version go already,
        `DeadlineExceeded` after `transfer_s`.
        """

        async def ask() -> None:
            pins = await asyncio.gather(*(member.pin(version) for member in self.members), return_exceptions=True)
            errors = [pin for pin in pins if isinstance(pin, BaseException)]
            if len(errors) == len(pins):
                raise passing(errors)
            _, self._pinned = await self._found(version)

        await patiently(ask, self._transfer_s, f"pinning version {version}")

    async def _found(self, version: PolicyVersion) -> tuple[Arrival, Announcement]:
        """What the first relay says that holds `version`."""
        asked = [asyncio.create_task(member.arrival(version)) for member in self.members]
        try:
            return await first_success(asked)
        finally:
            for task in asked:
                task.cancel()

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
        while member.node in self._nodes():
            try:
                return await member.refill([other for other in self.members if other is not member], self._known())
            except UNAVAILABLE:
                await asyncio.sleep(RESTART_POLL_S)
        self.members.remove(member)
        return None

    def _known(self) -> Holding:
        """What a tier that lost everything is refilled by."""
        known = tuple(a for a in (self._last, self._pinned) if a is not None)
        return Holding(known, self._pinned.manifest.version if self._pinned else None)


def _started(node: str, transfer_s: float, kind: type[RelayActor], *args: object) -> RelayHandle:
    actor = spawn(kind, NO_MATHS, relay_name(node), transfer_s, *args, node=node, max_restarts=-1)
    return RelayHandle(node, actor, transfer_s)
