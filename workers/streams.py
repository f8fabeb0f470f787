"""Many small calls to one actor, in few Ray messages.

A Ray call costs more than judging a short group. Calls made in one turn of the event loop travel as one streaming
call, and answers come back in chunks, each as soon as it is ready: nobody waits for a slower neighbour.

A chunk is two objects: the answers, which the caller reads, and their payloads, of which it keeps the reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray
from ray import ObjectRef
from ray._private.object_ref_generator import ObjectRefGenerator

from rlsys.errors import RlsysError, WorkerDied, WorkerError
from workers.cluster import call

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Payload = TypeVar("Payload")


@dataclass(frozen=True)
class PayloadRef:
    """Where a payload lies: entry `index` of the tuple behind `chunk`. The caller owns the chunk, not its maker."""

    chunk: ObjectRef
    index: int


@dataclass(frozen=True)
class Places:
    """Which entries of some chunks are meant: (chunk, index) for each payload."""

    of: tuple[tuple[int, int], ...]

    def pick(self, chunks: Sequence[Sequence[Payload]]) -> list[Payload]:
        """The payloads, in order."""
        return [chunks[chunk][index] for chunk, index in self.of]


def placed(refs: Sequence[object]) -> tuple[Places, list[ObjectRef]]:
    """Every chunk once, to pass as arguments (Ray then fetches them), and where in them the payloads lie."""
    chunks: dict[ObjectRef, int] = {}
    places = []
    for ref in refs:
        assert isinstance(ref, PayloadRef)
        places.append((chunks.setdefault(ref.chunk, len(chunks)), ref.index))
    return Places(tuple(places)), list(chunks)


async def answer_in_chunks(
    requests: Sequence[Request], work: Callable[[Request], Awaitable[tuple[Answer, Payload]]]
) -> AsyncIterator[object]:
    """The actor's side: yields answers, then payloads, of whatever is ready; again until all are.

    Answers are (index of the request, answer or the `RlsysError` it raised); anything else raised ends the stream.
    """
    indices = {asyncio.ensure_future(work(request)): i for i, request in enumerate(requests)}
    waiting = set(indices)
    try:
        while waiting:
            ready, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            outcomes = [(indices[task], *_outcome(task)) for task in ready]
            yield [(index, answer) for index, answer, _ in outcomes]
            yield tuple(payload for _, _, payload in outcomes)
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

    def __init__(self, worker: str, phase: str, start: Callable[[list[Request]], ObjectRefGenerator]) -> None:
        """`start(requests)` makes the remote call; `worker` and `phase` name it in errors."""
        self._worker, self._phase, self._start = worker, phase, start
        self._unsent: list[tuple[Request, asyncio.Future[tuple[Answer, PayloadRef]]]] = []
        self._reading: set[asyncio.Task[None]] = set()

    async def call(self, request: Request) -> tuple[Answer, PayloadRef]:
        """The answer to one request, and where its payload lies.

        Waits for the actor; unblocked by the chunk that holds the answer, or by the stream ending without it. Raises
        the
        `RlsysError` the actor answered with, or `WorkerDied`.
        """
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append((request, answer))
        return await answer

    def _send(self) -> None:
        batch, self._unsent = self._unsent, []
        try:
            chunks = self._start([request for request, _ in batch])
        except Exception as error:  # noqa: BLE001  (whatever cannot be sent is answered here, not waited for)
            failure = WorkerError(self._worker, self._phase, f"cannot be sent: {type(error).__name__}: {error}")
            for _, answer in batch:
                _resolve(answer, failure, None)
            return
        reading = asyncio.create_task(self._read(chunks, [answer for _, answer in batch]))  # noqa: RUF006  (kept below)
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    async def _read(self, chunks: ObjectRefGenerator, answers: Sequence[asyncio.Future]) -> None:
        """Hand every answer of one call to whoever waits for it; the call's failure to all that are left."""
        try:
            async for ref in chunks:
                ready = await call(ref, self._worker, self._phase)
                payloads = await self._payload_ref(chunks)
                for place, (index, answer) in enumerate(ready):
                    _resolve(answers[index], answer, PayloadRef(payloads, place))
            failure = WorkerDied(self._worker, self._phase, "it ended without an answer")
        except RlsysError as error:
            failure = error
        except StopAsyncIteration:
            failure = WorkerDied(self._worker, self._phase, "it ended in the middle of an answer")
        for answer in answers:
            _resolve(answer, failure, None)

    async def _payload_ref(self, chunks: ObjectRefGenerator) -> ObjectRef:
        """The reference to a chunk's payloads, never their bytes: Ray fetches the next object to await it, so wait
        first.

        Raises what ended the stream, if that came instead.
        """
        if not chunks.next_ready():
            await asyncio.to_thread(ray.wait, [chunks], fetch_local=False)
        payloads = await anext(chunks)
        if payloads == chunks.completed():
            await call(payloads, self._worker, self._phase)
        return payloads


def _resolve(waiting: asyncio.Future, answer: object, payload: PayloadRef | None) -> None:
    """Answer one caller, unless it has its answer or gave up waiting."""
    if waiting.done():
        return
    if isinstance(answer, RlsysError):
        waiting.set_exception(answer)
    else:
        waiting.set_result((answer, payload))
