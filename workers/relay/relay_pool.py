"""The relay tier: a relay per node, and the driver's view of all relays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import numpy as np

from rlsys.contracts import Arrival
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.types import PolicyVersion, Ref
from rlsys.weight_sync.links import BYTES_PER_S, deadline_s
from rlsys.weight_sync.relay import (
    FAILURES,
    RESTART_POLL_S,
    TRIES,
    UNAVAILABLE,
    Announcement,
    Holding,
    Relay,
    first_answers,
    first_success,
    passing,
    patiently,
)
from workers.ray.cluster import NO_MATHS, node_ids
from workers.ray.worker_process import Remote, start
from workers.transport.buckets import bucket_hash
from workers.transport.deltas import apply_delta
from workers.transport.route import Route, TransportSpec
from workers.transport.transport import WeightTransport


class RelayStore:
    """Implements `rlsys.weight_sync.relay.Store` with a transport."""

    def __init__(self, transport: WeightTransport) -> None:
        self._transport = transport

    async def fetch(self, ref: Ref, source: str) -> object:
        return await self._transport.fetch(ref, source, "sending a bucket")

    async def digest(self, data: object) -> str:
        assert isinstance(data, np.ndarray)
        return await asyncio.to_thread(bucket_hash, data)

    async def apply_delta(self, base: Ref, delta: object) -> object:
        assert isinstance(delta, np.ndarray)
        old = await self._transport.fetch(base, "this relay", "reading the previous version")
        return await asyncio.to_thread(apply_delta, old, delta)

    async def own(self, data: object) -> Ref:
        assert isinstance(data, np.ndarray)
        try:
            return await asyncio.to_thread(self._transport.put, data)
        except WorkerError as error:
            raise MemoryError(str(error)) from error

    async def borrow(self, ref: Ref) -> Ref:
        return self._transport.keep_bytes(ref)


class RayRelays:
    """Implements `Relays`."""

    def __init__(
        self,
        members: Sequence[Remote[Relay]],
        transfer_s: float,
        transport: TransportSpec,
        nodes: Callable[[], Sequence[str]] = node_ids,
        num_bytes: int = 0,
    ) -> None:
        """`nodes` returns the nodes that are alive. `num_bytes`: see `Route`."""
        self.members = list(members)
        """Relays of the live nodes; the driver's node first."""
        self.transport = transport
        self._transfer_s, self._nodes = transfer_s, nodes
        self._last: tuple[Announcement, ...] = ()
        """Parts of the newest version that arrived."""
        self._pinned: tuple[Announcement, ...] = ()
        self._num_bytes = num_bytes

    @classmethod
    def start(
        cls,
        transfer_s: float,
        kind: type[Relay] = Relay,
        *args: object,
        transport: TransportSpec | None = None,
        num_bytes: int = 0,
    ) -> RayRelays:
        """Start one relay per node. `transfer_s` is the least deadline of a transfer; `args` are further arguments of
        `kind`. By default, the transport is chosen for the cluster's nodes. `num_bytes`: see `Route`.

        A relay answers within `transfer_s / TRIES`. Ray restarts its process after a death: the member stays valid, but
        the relay's weights are lost.
        """
        transport = transport or TransportSpec.choose(num_bytes)
        members = []
        for node in node_ids():
            name, place = f"relay-{node[:8]}", transport.place_on(node)
            build = partial(_build_relay, kind, name, place, transport, transfer_s, *args)
            members.append(start(kind, name, build, NO_MATHS, transfer_s / TRIES, place=node, restarts=True))
        return cls(members, transfer_s, transport, num_bytes=num_bytes)

    @property
    def route(self) -> Route:
        """The way to these relays, for ranks and replicas."""
        return Route(self.members, self.transport, self._transfer_s, self._num_bytes)

    async def arrival(self, version: PolicyVersion) -> Arrival:
        """See `Relays.arrival`. Waits for relays that restart or hang; the caller sets the deadline."""
        arrival, parts = await patiently(
            lambda: self._find_announcements(version), None, f"receiving version {version}"
        )
        if not self._last or self._last[0].version < version:
            self._last = parts
        return arrival

    async def pin(self, version: PolicyVersion) -> None:
        """Keep `version` until another is pinned, on every relay that has it or gets it soon, and on relays refilled
        later.

        Returns once one relay keeps it, and the others have answered, failed or been silent for `LOOK_S`. Waits for
        relays that restart or hang if none answers.
        Raises `WeightsMismatch` if all relays have evicted the version, `DeadlineExceeded` after `deadline_s`.
        """

        async def ask() -> None:
            pins = [asyncio.ensure_future(member.proxy.pin(version)) for member in self.members]
            if not any(await first_answers(pins)):
                raise passing(list(filter(None, (pin.exception() for pin in pins))))
            _, self._pinned = await self._find_announcements(version)

        num_bytes = sum(announcement.part.num_bytes for announcement in self._last)
        seconds = deadline_s(self._transfer_s, num_bytes, BYTES_PER_S)
        await patiently(ask, seconds, f"pinning version {version}")

    async def _find_announcements(self, version: PolicyVersion) -> tuple[Arrival, tuple[Announcement, ...]]:
        """Arrival and announcements of `version`, from the first relay that has it."""
        asked = [asyncio.create_task(member.proxy.arrival(version)) for member in self.members]
        try:
            return await first_success(asked)
        finally:
            for task in asked:
                task.cancel()

    async def supervise(
        self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        """See `Relays.supervise`. The relay of a dead node is dropped."""
        async with asyncio.TaskGroup() as watches:
            for member in self.members:
                watches.create_task(self._watch(member, on_failure, on_recovery))

    def close(self) -> None:
        for member in self.members:
            member.kill()
        self.transport.remove_leftovers()

    async def _watch(
        self,
        member: Remote[Relay],
        on_failure: Callable[[WorkerError], None],
        on_recovery: Callable[[str, float], None],
    ) -> None:
        """Watch one relay. Waits for a failure; unblocked by Ray reporting its death, or by the relay's own report."""
        loop = asyncio.get_running_loop()
        while member in self.members:
            error = await self._trouble(member)
            on_failure(error)
            if isinstance(error, FAILURES):
                began = loop.time()
                try:
                    await self._restore(member)
                except WeightsMismatch as mismatch:
                    on_failure(mismatch)  # the next version may succeed
                else:
                    if member in self.members:
                        on_recovery(member.name, loop.time() - began)

    async def _trouble(self, member: Remote[Relay]) -> WorkerError:
        """Return the relay's next error, or that of its dead or hanging process. A hanging relay is killed, and Ray
        restarts it. A starting relay has no deadline."""
        relay, answer_s = member.proxy, self._transfer_s / TRIES
        news = asyncio.ensure_future(relay.watch())
        try:
            await member.within(inf).proxy.holding()
            while not (await asyncio.wait([news], timeout=answer_s))[0]:
                await relay.holding()
            return await news
        except WorkerDied as error:
            return error
        except DeadlineExceeded as error:
            member.kill(restart=True)
            return error
        finally:
            news.cancel()

    async def _restore(self, member: Remote[Relay]) -> None:
        """Refill a relay as soon as its process is back; remove it if its node has died."""
        while member.place in self._nodes():
            neighbours = [other.proxy for other in self.members if other is not member]
            try:
                return await member.proxy.refill(neighbours, self._refill_holding())
            except UNAVAILABLE:
                await asyncio.sleep(RESTART_POLL_S)
        self.members.remove(member)
        return None

    def _refill_holding(self) -> Holding:
        """Announcements that can refill a tier that has lost everything."""
        return Holding((*self._last, *self._pinned), self._pinned[0].version if self._pinned else None)


def _build_relay(
    kind: type[Relay], name: str, place: str, transport: TransportSpec, transfer_s: float, *args: object
) -> Relay:
    """Build a relay in its process."""
    return kind(name, place, RelayStore(transport.start()), transfer_s, *args)  # pyrefly: ignore[bad-argument-type]
