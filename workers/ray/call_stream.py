"""Calls that travel together, and references to the payloads of their answers.

A Ray call costs more than scoring a short group. Calls made in one turn of the event loop can travel as one streaming
call, a `CallStream`. Answers come back in chunks as soon as they are ready, so no call waits for a slower one. A chunk
is two objects: the payloads, of which the caller keeps the reference, and their answers, which it reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import ObjectRefStreamEndOfStreamError, RayError

from rlsys.errors import PayloadLost, RlsysError, WorkerDied, WorkerError
from rlsys.util.deadlines import timeout
from workers.ray.worker_process import Chunks, call

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Payload = TypeVar("Payload")

FETCH_S = 60.0
"""Maximum time for a chunk to come from another node; after that, it counts as lost."""
GATHER_S = 0.003
"""Time for which a chunk of answers waits for one more."""
MAX_GATHER_S = 0.02
"""Time for which it waits in all."""


@dataclass(frozen=True)
class PayloadRef:
    """Reference to a payload: entry `index` of the tuple behind `chunk`. The caller owns the chunk, not its maker."""

    chunk: ObjectRef
    index: int


@dataclass(frozen=True)
class Parcel:
    """Payloads of groups for an actor. The actor fetches them itself, so it can report which are lost."""

    chunks: tuple[ObjectRef, ...]
    """Every chunk once. Ray passes references inside an argument without their bytes."""
    entries: tuple[tuple[int, int, int], ...]
    """(group id, chunk, index) for each payload."""

    @classmethod
    def of(cls, payloads: Iterable[tuple[int, object]]) -> Parcel:
        """Build a parcel from (group id, `PayloadRef`) pairs."""
        chunks: dict[ObjectRef, int] = {}
        entries = []
        for group_id, ref in payloads:
            assert isinstance(ref, PayloadRef)
            entries.append((group_id, chunks.setdefault(ref.chunk, len(chunks)), ref.index))
        return cls(tuple(chunks), tuple(entries))

    def open(self) -> list[Any]:
        """The payloads, in order. Raises `PayloadLost` naming all groups with a lost payload."""
        try:
            chunks: list[Any] = ray.get(list(self.chunks), timeout=FETCH_S)
        except RayError:
            chunks = [_get_chunk(ref) for ref in self.chunks]  # one by one, to find the lost ones
        if lost := dict.fromkeys(group_id for group_id, chunk, _ in self.entries if chunks[chunk] is None):
            raise PayloadLost(tuple(lost))
        return [chunks[chunk][index] for _, chunk, index in self.entries]

    async def each(self) -> list[Any]:
        """The payloads, in order, with `PayloadLost` in place of each lost one. Does not block the event loop."""
        chunks = await asyncio.gather(*(_await_chunk(ref) for ref in self.chunks))
        return [
            PayloadLost((group_id,)) if (found := chunks[chunk]) is None else found[index]
            for group_id, chunk, index in self.entries
        ]


def _get_chunk(ref: ObjectRef) -> Sequence[Any] | None:
    try:
        return ray.get(ref, timeout=FETCH_S)
    except RayError:
        return None


async def _await_chunk(ref: ObjectRef) -> Sequence[Any] | None:
    try:
        async with timeout(FETCH_S):
            return await ref
    except (RayError, TimeoutError):
        return None


async def values_of(chunks: Chunks, worker: str, phase: str) -> AsyncIterator[Any]:
    """Yield the values of a streaming call as they come. Raises `WorkerDied` if the worker dies, or its error."""
    while True:
        (value,) = chunks._get_next_ref_n(1)
        try:
            found = await call(value, worker, phase)
        except WorkerDied as end:
            if isinstance(end.__cause__, ObjectRefStreamEndOfStreamError):
                return
            raise
        chunks._consume_next_ref_n(1)
        yield found


async def answer_in_chunks(
    requests: Sequence[Request], work: Callable[[Request], Awaitable[tuple[Answer, Payload]]]
) -> AsyncIterator[object]:
    """The actor's side: yields payloads, then answers, of the finished requests, until all are done.

    Requests that end one shortly after the other are one chunk, because each chunk costs both sides a message; the last
    chunk waits for nothing. Answers are (index of the request, answer or its `RlsysError`). Any other error ends the
    stream.
    """
    indices = {asyncio.ensure_future(work(request)): i for i, request in enumerate(requests)}
    waiting = set(indices)
    try:
        while waiting:
            ready, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            until_s, others = time.monotonic() + MAX_GATHER_S, ready
            while waiting and others and time.monotonic() < until_s:
                others, waiting = await asyncio.wait(waiting, timeout=GATHER_S)
                ready |= others
            ended = sorted(ready, key=indices.__getitem__)
            broken = [task for task in ended if not isinstance(task.exception(), RlsysError | None)]
            if outcomes := [(indices[task], *_outcome(task)) for task in ended if task not in broken]:
                yield tuple(payload for _, _, payload in outcomes)
                yield [(index, answer) for index, answer, _ in outcomes]
            for task in broken:
                task.result()
    finally:
        for task in waiting:
            task.cancel()


def _outcome(task: asyncio.Future[tuple[Answer, Payload]]) -> tuple[Answer | RlsysError, Payload | None]:
    error = task.exception()
    if isinstance(error, RlsysError):
        return error, None
    return task.result()


class CallStream(Generic[Request, Answer]):
    """The caller's side: calls to one actor's streaming method."""

    def __init__(self, worker: str, phase: str, start: Callable[[list[Request]], Chunks]) -> None:
        """`start(requests)` makes the remote call; `worker` and `phase` name it in errors."""
        self._worker, self._phase, self._start = worker, phase, start
        self._unsent: list[tuple[Request, asyncio.Future[tuple[Answer, PayloadRef]]]] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Future[tuple[Answer, PayloadRef]]] = set()

    def fail(self, failure: RlsysError) -> None:
        """Raise `failure` in every call that waits for its answer."""
        self._fail(self._waiting, failure)

    async def call(self, request: Request) -> tuple[Answer, PayloadRef]:
        """The answer to one request, and the reference to its payload.

        Waits for the actor; unblocked by the chunk with the answer, or by the stream ending without it. Raises the
        `RlsysError` in the answer, or `WorkerDied`.
        """
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append((request, answer))
        self._waiting.add(answer)
        answer.add_done_callback(self._waiting.discard)
        return await answer

    def _send(self) -> None:
        batch, self._unsent = self._unsent, []
        try:
            chunks = self._start([request for request, _ in batch])
        except Exception as error:  # noqa: BLE001  (every error goes to the callers, who would wait forever)
            failure = WorkerError(self._worker, self._phase, f"cannot be sent: {type(error).__name__}: {error}")
            self._fail((answer for _, answer in batch), failure)
            return
        reading = asyncio.create_task(self._read(chunks, [answer for _, answer in batch]))  # noqa: RUF006  (kept below)
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    async def _read(self, chunks: Chunks, answers: Sequence[asyncio.Future]) -> None:
        """Resolve every answer of one remote call; if the call fails, resolve the rest with its error."""
        num_left = len(answers)
        try:
            while num_left:
                ready, payloads = await self._next_chunk(chunks)
                for place, (index, answer) in enumerate(ready):
                    _resolve(answers[index], answer, PayloadRef(payloads, place))
                num_left -= len(ready)
        except RlsysError as failure:
            self._fail(answers, failure)
        except Exception as error:  # noqa: BLE001  (the callers get every error)
            self._fail(answers, WorkerError(self._worker, self._phase, f"{type(error).__name__}: {error}"))

    def _fail(self, answers: Iterable[asyncio.Future], failure: RlsysError) -> None:
        for answer in answers:
            _resolve(answer, failure, None)

    async def _next_chunk(self, chunks: Chunks) -> tuple[list[tuple[int, Answer | RlsysError]], ObjectRef]:
        """Answers, and the reference to their payloads. To await payloads would fetch them, so the answers are awaited.

        Answers come last in a chunk. If the stream ended instead, raises its error.
        """
        payloads, answers = chunks._get_next_ref_n(2)
        try:
            ready = await call(answers, self._worker, self._phase)
        except RlsysError:
            await call(payloads, self._worker, self._phase)  # an error of the actor is in the first of the two
            raise
        chunks._consume_next_ref_n(2)
        return ready, payloads


def _resolve(waiting: asyncio.Future, answer: object, payload: PayloadRef | None) -> None:
    """Resolve one call, unless it is done or cancelled."""
    if waiting.done():
        return
    if isinstance(answer, RlsysError):
        waiting.set_exception(answer)
    else:
        waiting.set_result((answer, payload))
