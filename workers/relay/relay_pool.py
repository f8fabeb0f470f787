"""The relay tier: a relay per node over Ray's object store, and the driver's view of all relays.

Buckets are immutable objects there: readers on a relay's node map its copy, and share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import cast

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from rlsys.contracts import Arrival
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.types import PolicyVersion, Ref
from rlsys.weight_sync.relay import (
    FAILURES,
    RESTART_POLL_S,
    TRIES,
    UNAVAILABLE,
    Announcement,
    Holding,
    Relay,
    first_success,
    passing,
    patiently,
)
from workers.ray.cluster import NO_MATHS, node_ids
from workers.ray.remote_proxy import Remote, call, start
from workers.transport.buckets import bucket_hash
from workers.transport.deltas import patched


class ObjectStore:
    """Implements `rlsys.weight_sync.relay.Store`: references are Ray's."""

    async def fetch(self, ref: Ref, source: str) -> object:
        return await call(cast("Awaitable[np.ndarray]", ref), source, "sending a bucket")

    async def digest(self, data: object) -> str:
        assert isinstance(data, np.ndarray)
        return await asyncio.to_thread(bucket_hash, data)

    async def patched(self, base: Ref, delta: object) -> object:
        assert isinstance(delta, np.ndarray)
        old = await cast("Awaitable[np.ndarray]", base)
        return await asyncio.to_thread(patched, old, delta)

    async def own(self, data: object) -> Ref:
        try:
            return await asyncio.to_thread(ray.put, data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise MemoryError(f"Ray's object store is full: {type(error).__name__}") from error


class RayRelays:
    """Implements `Relays`."""

    def __init__(
        self, members: Sequence[Remote[Relay]], transfer_s: float, nodes: Callable[[], Sequence[str]] = node_ids
    ) -> None:
        """`nodes` returns the nodes that are alive."""
        self.members = list(members)
        """Relays of the live nodes; the driver's node first."""
        self._transfer_s, self._nodes = transfer_s, nodes
        self._last: Announcement | None = None
        """The newest version that arrived."""
        self._pinned: Announcement | None = None

    @classmethod
    def start(cls, transfer_s: float, kind: type[Relay] = Relay, *args: object) -> RayRelays:
        """Start one relay per node. `transfer_s` is the deadline of a transfer; `args` are further arguments of `kind`.

        A relay answers within `transfer_s / TRIES`. Ray restarts its process after a death: the member stays valid, but
        the relay's weights are lost.
        """
        members = []
        for node in node_ids():
            name = f"relay-{node[:8]}"
            build = partial(kind, name, node, ObjectStore(), transfer_s, *args)  # pyrefly: ignore[bad-argument-type]
            members.append(start(kind, name, build, NO_MATHS, transfer_s / TRIES, place=node, restarts=True))
        return cls(members, transfer_s)

    async def arrival(self, version: PolicyVersion) -> Arrival:
        """See `Relays.arrival`. Waits for relays that restart or hang; the caller sets the deadline."""
        arrival, announcement = await patiently(lambda: self._found(version), None, f"taking in version {version}")
        if self._last is None or self._last.manifest.version < version:
            self._last = announcement
        return arrival

    async def pin(self, version: PolicyVersion) -> None:
        """Keep `version` until another is pinned, on every relay that has it or gets it soon, and on relays refilled
        later.

        Returns once one relay keeps it and the others have answered or failed. Waits for relays that restart or hang.
        Raises `WeightsMismatch` if all relays have evicted the version, `DeadlineExceeded` after `transfer_s`.
        """

        async def ask() -> None:
            pins = await asyncio.gather(*(member.proxy.pin(version) for member in self.members), return_exceptions=True)
            errors = [pin for pin in pins if isinstance(pin, BaseException)]
            if len(errors) == len(pins):
                raise passing(errors)
            _, self._pinned = await self._found(version)

        await patiently(ask, self._transfer_s, f"pinning version {version}")

    async def _found(self, version: PolicyVersion) -> tuple[Arrival, Announcement]:
        """Arrival and announcement of `version`, from the first relay that has it."""
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
            await member.within(inf).proxy.held()
            while not (await asyncio.wait([news], timeout=answer_s))[0]:
                await relay.held()
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
                return await member.proxy.refill(neighbours, self._known())
            except UNAVAILABLE:
                await asyncio.sleep(RESTART_POLL_S)
        self.members.remove(member)
        return None

    def _known(self) -> Holding:
        """Announcements that can refill a tier that has lost everything."""
        known = tuple(a for a in (self._last, self._pinned) if a is not None)
        return Holding(known, self._pinned.manifest.version if self._pinned else None)
