"""A relay's process, one per node: `rlsys.relay.Relay` over Ray's object store.

Buckets are immutable objects there: readers on a relay's node map its copy, and share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import cast

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from rlsys.broadcast import Announcement, Holding, Neighbour, Peer
from rlsys.contracts import Arrival
from rlsys.errors import WorkerError
from rlsys.relay import Relay
from rlsys.types import PolicyVersion, Ref
from rlsys.weights import Manifest
from workers.cluster import call
from workers.transport.hashing import bucket_hash


class ObjectStore:
    """Implements `rlsys.relay.Store`: references are Ray's."""

    async def fetch(self, ref: Ref, source: str) -> object:
        return await call(cast("Awaitable[np.ndarray]", ref), source, "sending a bucket")

    async def digest(self, data: object) -> str:
        assert isinstance(data, np.ndarray)
        return await asyncio.to_thread(bucket_hash, data)

    async def own(self, data: object) -> Ref:
        try:
            return await asyncio.to_thread(ray.put, data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise MemoryError(f"Ray's object store is full: {type(error).__name__}") from error


class RelayActor:
    """What Ray runs. Every method is that of `Relay`."""

    def __init__(self, name: str, transfer_s: float, keep: int = 2) -> None:
        self._relay = Relay(name, ray.get_runtime_context().get_node_id(), ObjectStore(), transfer_s, keep)

    async def announce(self, announcement: Announcement) -> None:
        await self._relay.announce(announcement)

    async def accept(self, version: PolicyVersion, sources: Sequence[Peer]) -> None:
        await self._relay.accept(version, sources)

    async def give(self, bucket: str, wait: bool) -> Ref:
        return await self._relay.give(bucket, wait=wait)

    async def newest(self, at_least: PolicyVersion) -> tuple[Manifest, list[Ref]]:
        return await self._relay.newest(at_least)

    async def pin(self, version: PolicyVersion) -> tuple[Manifest, list[Ref]]:
        return await self._relay.pin(version)

    async def arrival(self, version: PolicyVersion) -> tuple[Arrival, Announcement]:
        return await self._relay.arrival(version)

    async def held(self) -> Holding:
        return await self._relay.held()

    async def refill(self, neighbours: Sequence[Neighbour], known: Holding) -> None:
        await self._relay.refill(neighbours, known)

    async def watch(self) -> WorkerError:
        return await self._relay.watch()
