"""The replicas of one process, one for each policy, as other processes call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from math import inf

from rlsys.errors import WorkerError
from rlsys.routing.requests import Hold, Request, Scored, WeightsWanted
from rlsys.types import EngineStats, ReplicaLoad
from rlsys.util.deadlines import remote
from workers.engines.engine import EngineChoice
from workers.rollout.chunk_stream import ChunkStream, Message
from workers.rollout.replica import EngineReplica


class ReplicaWorker:
    """Replicas by policy name, for session workers in other processes, each called an owner here."""

    def __init__(self, name: str, replicas: Mapping[str, EngineReplica]) -> None:
        self.name, self.replicas = name, replicas
        self._streams: dict[tuple[str, str], ChunkStream] = {}
        """By policy and owner."""
        self._gone: set[str] = set()
        """Owners that have died."""
        self._loss: asyncio.Future[None] | None = None
        self._first_loss: WorkerError | None = None
        for replica in replicas.values():
            replica.on_loss = self._lose

    # --------------------------------------------------------------------------------------------- for session workers

    @remote("accepting requests")
    async def submit(self, policy: str, owner: str, requests: Sequence[Request]) -> None:
        """Sample requests of an owner; their chunks come in its `chunks`."""
        self._stream(policy, owner).submit(requests)

    async def chunks(self, policy: str, owner: str) -> AsyncIterator[Message]:
        """Yield the chunks of all requests of an owner, until `forget`."""
        async for message in self._stream(policy, owner).messages():
            yield message

    @remote("cancelling requests")
    async def cancel(self, policy: str, owner: str, request_ids: Collection[str]) -> None:
        """Sample no further for these requests."""
        self._stream(policy, owner).cancel(request_ids)

    @remote("scoring tokens", patience=inf)
    async def score(self, policy: str, token_ids: tuple[int, ...]) -> Scored:
        """See `Replica.score`."""
        return await self.replicas[policy].score(token_ids)

    @remote("holding weights", patience=inf)
    async def hold(self, policy: str, owner: str, wanted: WeightsWanted, *, waits: bool) -> Hold | None:
        """See `Replica.hold`."""
        hold = await self.replicas[policy].hold(wanted, waits=waits, owner=owner)
        if hold is not None and owner in self._gone:
            await self.replicas[policy].release(hold)
            return None
        return hold

    @remote("releasing weights")
    async def release(self, policy: str, hold: Hold) -> None:
        """See `Replica.release`."""
        await self.replicas[policy].release(hold)

    # -------------------------------------------------------------------------------------------------- for the driver

    @remote("draining its requests", patience=3)
    async def drain(self, policy: str) -> None:
        """Abort all running requests, with their tokens; return once they have ended."""
        await self.replicas[policy].drain()

    @remote("giving its device away", patience=inf)
    async def sleep(self) -> None:
        """See `EngineReplica.sleep`."""
        await asyncio.gather(*(replica.sleep() for replica in self.replicas.values()))

    @remote("taking its device back", patience=inf)
    async def wake(self) -> None:
        """See `EngineReplica.wake`."""
        await asyncio.gather(*(replica.wake() for replica in self.replicas.values()))

    @remote("forgetting {owner}")
    async def forget(self, owner: str) -> None:
        """End the requests and holds of a session worker that has died."""
        self._gone.add(owner)
        for key in [key for key in self._streams if key[1] == owner]:
            self._streams.pop(key).close()
        for replica in self.replicas.values():
            replica.forget(owner)

    @remote("reporting its engines")
    def choices(self) -> dict[str, EngineChoice]:
        """By policy: the engine, and the reason for it."""
        return {name: replica.choice for name, replica in self.replicas.items() if replica.choice}

    @remote("reporting its load")
    def load(self, policy: str) -> ReplicaLoad:
        """The load of one policy."""
        return self.replicas[policy].load()

    @remote("reporting its statistics")
    def stats(self) -> EngineStats:
        """Statistics of all engines together."""
        stats = [replica.stats() for replica in self.replicas.values()]
        return EngineStats(
            num_running=sum(s.num_running for s in stats),
            num_waiting=sum(s.num_waiting for s in stats),
            kv_used=max(s.kv_used for s in stats),
            num_tokens=sum(s.num_tokens for s in stats),
            num_cached_tokens=sum(s.num_cached_tokens for s in stats),
            step_age_s=max(s.step_age_s for s in stats),
        )

    @remote("sampling requests", patience=inf)
    async def watch(self) -> None:
        """Return never. Raises the first failure after which a replica is of no use."""
        if self._first_loss is not None:
            raise self._first_loss
        if self._loss is None:
            self._loss = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._loss)

    async def close(self) -> None:
        """End all requests, and free the engines."""
        for stream in self._streams.values():
            stream.close()
        for replica in self.replicas.values():
            await replica.close()

    def _stream(self, policy: str, owner: str) -> ChunkStream:
        key = (policy, owner)
        if key not in self._streams:
            self._streams[key] = ChunkStream(self.replicas[policy], lambda: len(self._streams))
        return self._streams[key]

    def _lose(self, failure: WorkerError) -> None:
        self._first_loss = self._first_loss or failure
        if self._loss is not None and not self._loss.done():
            self._loss.set_exception(failure)
            self._loss.exception()  # `watch` may have no caller any more
