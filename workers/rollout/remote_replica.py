"""A replica in another process, as a session worker calls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlsys.errors import DeadlineExceeded, RlsysError, WorkerDied
from rlsys.routing.requests import LOSSES, Chunk, Hold, Request, Scored, WeightsWanted
from workers.ray.call_stream import values_of
from workers.ray.worker_process import Remote
from workers.rollout.replica_worker import ReplicaWorker


class RemoteReplica:
    """Implements `rlsys.routing.requests.Replica`: requests made in one turn of the event loop travel together, and one
    stream brings the chunks of all of them."""

    is_near = False

    def __init__(self, worker: Remote[ReplicaWorker], policy: str, owner: str) -> None:
        """`owner` is the name of the session worker."""
        self._worker, self._policy, self._owner = worker, policy, owner
        self._open: dict[str, asyncio.Queue[Chunk | RlsysError]] = {}
        """Chunks that have arrived, by request id."""
        self._unsent: list[Request] = []
        self._reading: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def name(self) -> str:
        return self._worker.name

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """See `Replica.generate`. Waits for chunks; unblocked by the stream, which ends with an error if the replica
        dies."""
        chunks = self._open[request.id] = asyncio.Queue[Chunk | RlsysError]()
        self._submit(request)
        is_over = False
        try:
            while not is_over:
                part = await chunks.get()
                is_over = not isinstance(part, Chunk) or part.more.finish is not None
                if not isinstance(part, Chunk):
                    raise part
                yield part
        finally:
            del self._open[request.id]
            if not is_over:
                self._spawn(self._cancel(request.id))

    async def score(self, token_ids: Sequence[int]) -> Scored:
        return await self._worker.call(ReplicaWorker.score, self._policy, tuple(token_ids))

    async def hold(self, wanted: WeightsWanted, *, waits: bool = True) -> Hold | None:
        call = self._worker.call(ReplicaWorker.hold, self._policy, self._owner, wanted, waits=waits)
        asked = asyncio.ensure_future(call)
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._spawn(self._release_unused(asked))
            raise

    async def release(self, hold: Hold) -> None:
        with suppress(*LOSSES):
            await self._worker.call(ReplicaWorker.release, self._policy, hold)

    async def _release_unused(self, asked: asyncio.Future[Hold | None]) -> None:
        """Release a hold that nobody waits for any more, once it is granted."""
        with suppress(*LOSSES):
            if (hold := await asked) is not None:
                await self.release(hold)

    def close(self) -> None:
        """End all calls: the replica has left, and requests in progress go on elsewhere."""
        self._fail(list(self._open), WorkerDied(self.name, "sampling requests", "it left the pool"))
        for task in (*self._background, *([self._reading] if self._reading else [])):
            task.cancel()

    def give_up(self) -> None:
        """Let requests in progress go on elsewhere: the replica is cut off. It ends them once it can be told."""
        self._fail(list(self._open), DeadlineExceeded(self.name, "sampling requests", "its node is cut off"))

    def _submit(self, request: Request) -> None:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(request)

    def _send(self) -> None:
        requests, self._unsent = self._unsent, []
        self._spawn(self._send_requests(requests))

    async def _send_requests(self, requests: Sequence[Request]) -> None:
        try:
            await self._worker.call(ReplicaWorker.submit, self._policy, self._owner, requests)
        except RlsysError as error:
            self._fail([request.id for request in requests], error)

    async def _cancel(self, request_id: str) -> None:
        with suppress(*LOSSES):  # a replica that is gone samples no further either
            await self._worker.call(ReplicaWorker.cancel, self._policy, self._owner, (request_id,))

    async def _read(self) -> None:
        """Give every chunk to its request.

        Consumes messages of the replica, for as long as this session worker lives. Waits for one; unblocked by it, or
        by the death of the replica, which every open request raises.
        """
        stream = self._worker.stream(ReplicaWorker.chunks, self._policy, self._owner)
        try:
            async for message in values_of(stream, self.name, "sampling requests"):
                for request_id, part in message:
                    if (chunks := self._open.get(request_id)) is not None:
                        chunks.put_nowait(_on_this_clock(part))
        except RlsysError as error:
            self._fail(list(self._open), error)
        else:
            self._fail(list(self._open), WorkerDied(self.name, "sampling requests", "it ended the stream of chunks"))

    def _fail(self, request_ids: Sequence[str], error: RlsysError) -> None:
        for request_id in request_ids:
            if (chunks := self._open.get(request_id)) is not None:
                chunks.put_nowait(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _on_this_clock(part: Chunk | RlsysError) -> Chunk | RlsysError:
    """Move the times of a chunk to the monotonic clock of this machine; its way here counts as no time."""
    if not isinstance(part, Chunk) or not part.pulls:
        return part
    ahead_s = time.monotonic() - part.told_s
    moved = (replace(p, start_s=p.start_s + ahead_s, end_s=p.end_s + ahead_s) for p in part.pulls)
    return replace(part, pulls=tuple(moved))
