"""A replica in another process, as a session worker calls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from rlsys.errors import DeadlineExceeded, RlsysError, WorkerDied, WorkerError
from rlsys.routing.requests import LOSSES, Chunk, Hold, Request, Scored, WeightsWanted
from rlsys.util import deadlines
from workers.ray.call_stream import values_of
from workers.ray.worker_process import Remote, may_live
from workers.rollout.replica_worker import ReplicaWorker

T = TypeVar("T")


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
        self._loss: asyncio.Future[WorkerError] | None = None
        """Gets the error that pending calls raise, once the replica is given up; None if no call has waited since."""
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
        return await deadlines.unless(self._call(ReplicaWorker.score, tuple(token_ids)), self._given_up())

    async def hold(self, wanted: WeightsWanted, *, waits: bool = True) -> Hold | None:
        asked = asyncio.create_task(self._call(ReplicaWorker.hold, self._owner, wanted, waits=waits))
        try:
            return await deadlines.unless(_answer_of(asked), self._given_up())
        except (asyncio.CancelledError, WorkerError):
            self._spawn(self._release_unused(asked))
            raise

    async def release(self, hold: Hold) -> None:
        with suppress(*LOSSES):
            await self._worker.call(ReplicaWorker.release, self._policy, hold)

    async def _release_unused(self, asked: asyncio.Future[Hold | None]) -> None:
        """Release a hold that nobody waits for any more, once it is granted."""
        with suppress(WorkerError):
            if (hold := await asked) is not None:
                await self.release(hold)

    def close(self) -> None:
        """End all calls: the replica has left, and requests in progress go on elsewhere."""
        self._end_calls(WorkerDied(self.name, "sampling requests", "it left the pool"))
        for task in (*self._background, *([self._reading] if self._reading else [])):
            task.cancel()

    def give_up(self) -> None:
        """Let requests in progress go on elsewhere: the replica is cut off. It ends them once it can be told."""
        self._end_calls(DeadlineExceeded(self.name, "sampling requests", "its node is cut off"))

    def _end_calls(self, error: WorkerError) -> None:
        self._fail(list(self._open), error)
        if self._loss is not None:
            self._loss.set_result(error)
            self._loss = None

    async def _given_up(self) -> None:
        """Raise the reason once the replica is given up."""
        if self._loss is None:
            self._loss = asyncio.get_running_loop().create_future()
        raise await asyncio.shield(self._loss)

    async def _call(self, method: Callable[..., Any], *arguments: object, **options: object) -> Any:  # noqa: ANN401
        """Call a method of the replica for this policy. Raises `DeadlineExceeded` if Ray cannot reach the replica, and
        does not know it to be dead: it may come back."""
        try:
            return await self._worker.call(method, self._policy, *arguments, **options)
        except WorkerDied as death:
            raise _as_silence(death) from death.__cause__

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
            await self._call(ReplicaWorker.submit, self._owner, requests)
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
            self._fail(list(self._open), _as_silence(error))
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


def _as_silence(error: RlsysError) -> RlsysError:
    """Return `DeadlineExceeded` in place of the error of a worker that may live."""
    if isinstance(error, WorkerDied) and may_live(error):
        return DeadlineExceeded(error.worker, error.phase, error.detail)
    return error


async def _answer_of(asked: asyncio.Task[T]) -> T:
    """Return the result of a task, which goes on if the caller is cancelled."""
    return await asyncio.shield(asked)


def _on_this_clock(part: Chunk | RlsysError) -> Chunk | RlsysError:
    """Move the times of a chunk to the monotonic clock of this machine; its way here counts as no time."""
    if not isinstance(part, Chunk) or not part.pulls:
        return part
    ahead_s = time.monotonic() - part.told_s
    moved = (replace(p, start_s=p.start_s + ahead_s, end_s=p.end_s + ahead_s) for p in part.pulls)
    return replace(part, pulls=tuple(moved))
