"""Chunks of all requests of one session worker at one replica, in messages between processes.

    consumes: requests, their tokens and ends     produces: messages of (request id, chunk or error)
    waits for: the end of a request, or the period once a request is old        unblocked by: `submit`, `finish`

Ends within `GATHER_S` share a message. A request that ends within `YOUNG_S` sends only its end, unless somebody reads
along. No token takes a call of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from rlsys.errors import RlsysError, WorkerError
from rlsys.routing.requests import Chunk, Request
from workers.rollout.replica import EngineReplica

PERIOD_S = 0.05
"""Seconds between two messages with tokens of running requests, for up to `STREAMS_AT_ONCE` streams of a replica."""
STREAMS_AT_ONCE = 4
GATHER_S = 0.003
"""Time for which an end waits for one more."""
MAX_GATHER_S = 0.02
"""Time for which it waits in all."""
YOUNG_S = 1.0
"""Age of a request from which its tokens are sent before its end."""
Message: TypeAlias = list[tuple[str, Chunk | RlsysError]]
"""By request id: a chunk, or the error that ended the request."""


@dataclass(eq=False, slots=True)
class _Open:
    """A request whose end was not sent yet."""

    request: Request
    num_sent: int
    """Tokens that were sent, those before this replica included."""
    since_s: float
    work: asyncio.Task[None] | None = None
    end: Chunk | RlsysError | None = None


class ChunkStream:
    """The replica's side of a stream."""

    def __init__(self, replica: EngineReplica, num_streams: Callable[[], int] = lambda: 1) -> None:
        """`num_streams` counts the streams of the replica: with more of them, each sends more rarely."""
        self._replica, self._num_streams = replica, num_streams
        self._open: dict[str, _Open] = {}
        self._news = asyncio.Event()
        self._is_closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Sample these requests; their chunks come in `messages`. One that is still open is sampled anew: its caller
        has given up the earlier call."""
        self.cancel([request.id for request in requests])
        for request in requests:
            entry = self._open[request.id] = _Open(request, request.num_begun, _now())
            entry.work = asyncio.create_task(self._finish(entry))
        self._news.set()

    def cancel(self, request_ids: Collection[str]) -> None:
        """Sample no further for these requests, and send nothing more of them. Unknown ids are ignored."""
        for request_id in request_ids:
            if (entry := self._open.pop(request_id, None)) is not None and entry.work is not None:
                entry.work.cancel()

    def close(self) -> None:
        """Cancel all requests, and end `messages`."""
        self.cancel(list(self._open))
        self._is_closed = True
        self._news.set()

    async def messages(self) -> AsyncIterator[Message]:
        """Yield messages until `close`; see the table of the module."""
        while not self._is_closed:
            await self._wait()
            if message := await self._message():
                yield message

    async def _finish(self, entry: _Open) -> None:
        name = self._replica.name
        try:
            entry.end = await self._replica.finish(entry.request)
        except RlsysError as error:
            entry.end = error
        except Exception as error:  # noqa: BLE001  (the caller gets every error)
            entry.end = WorkerError(name, f"sampling request {entry.request.id}", f"{type(error).__name__}: {error}")
        self._news.set()

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s()):
                await self._news.wait()
        until_s = _now() + MAX_GATHER_S
        while self._news.is_set() and _now() < until_s and any(e.end is None for e in self._open.values()):
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._news.wait()
        self._news.clear()

    def _pause_s(self) -> float | None:
        """Seconds until tokens of a running request are due; None if there is no request."""
        if not self._open:
            return None
        if any(entry.end is not None for entry in self._open.values()):
            return 0.0
        now_s = _now()
        young_s = min(0.0 if e.request.is_read else YOUNG_S - (now_s - e.since_s) for e in self._open.values())
        return max(young_s, PERIOD_S * max(1.0, self._num_streams() / STREAMS_AT_ONCE))

    async def _message(self) -> Message:
        now_s, message = _now(), Message()
        due = [e for e in self._open.values() if e.request.is_read or now_s - e.since_s >= YOUNG_S]
        with suppress(WorkerError):  # the requests themselves raise it
            known = {entry.request.id: entry.num_sent for entry in due if entry.end is None}
            for request_id, chunk in (await self._replica.progress(known)).items():
                if (entry := self._open.get(request_id)) is not None:
                    entry.num_sent += len(chunk.more.output_ids)
                    message.append((request_id, chunk))
        for request_id, entry in [(name, e) for name, e in self._open.items() if e.end is not None]:
            del self._open[request_id]
            end = entry.end
            if isinstance(end, Chunk):
                end = replace(end, more=end.more.since(entry.num_sent - entry.request.num_begun))
            assert end is not None
            message.append((request_id, end))
        return message


def _now() -> float:
    return asyncio.get_running_loop().time()
