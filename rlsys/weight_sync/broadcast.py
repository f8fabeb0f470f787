"""Broadcast of a version down the chain of relays: its cost, its announcement and its sources.

Each relay pulls buckets from the previous relay as they arrive there. A source that fails is skipped for the rest of
that version; the last source is the actor. So skipping a dead relay does not delay the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied
from rlsys.types import PolicyVersion, Ref
from rlsys.util.deadlines import timeout
from rlsys.weight_sync.sync import Manifest, with_deadline

T = TypeVar("T")
UNAVAILABLE = (WorkerDied, DeadlineExceeded)
"""Errors that may end once a relay has restarted."""
FAILURES = (*UNAVAILABLE, WeightsMismatch)
"""Errors on which a relay, or a reader, tries the next source."""
TRIES = 4
"""Attempts within the deadline of a transfer: a relay that hangs uses up one, and other sources can follow."""
RESTART_POLL_S = 0.2
"""Seconds between two checks of a restarting relay: Ray does not notify about a restarted process."""


def broadcast_s(num_relays: int, num_bytes: float, num_chunks: int, bytes_per_s: float, hop_s: float) -> float:
    """Seconds until the last of `num_relays` in a chain has `num_bytes`, sent in equal chunks.

    T(k) = (n + k - 1) (M / (k B) + a). A chunk takes M / (k B) + a per hop, `hop_s` being the fixed cost a. The last
    chunk leaves the actor after k such times and has n - 1 hops left. This is the usual model of a pipelined chain;
    Laminar's appendix D (arXiv:2510.12633) analyses the latency of such a chain.
    """
    return (num_relays + num_chunks - 1) * (num_bytes / (num_chunks * bytes_per_s) + hop_s)


def best_chunks(num_relays: int, num_bytes: float, bytes_per_s: float, hop_s: float) -> int:
    """Number of chunks that minimises `broadcast_s`: sqrt((n - 1) M / (a B)), where its derivative is 0.

    The time is then about (sqrt(M / B) + sqrt((n - 1) a))^2, nearly the same for any number of relays.
    """
    ideal = math.sqrt((num_relays - 1) * num_bytes / (hop_s * bytes_per_s))
    near = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
    return min(sorted(near), key=lambda k: broadcast_s(num_relays, num_bytes, k, bytes_per_s, hop_s))


class RelayPeer(Protocol):
    """Interface of a relay for other relays. Its methods are those of `Relay`; they also raise `WorkerDied`."""

    @property
    def name(self) -> str: ...

    async def give(self, bucket: str, *, wait: bool) -> Ref: ...


class Neighbour(RelayPeer, Protocol):
    """A relay that refills another one after a restart."""

    async def held(self) -> Holding: ...


class ChainMember(RelayPeer, Protocol):
    """Interface of a relay for `broadcast`."""

    async def announce(self, announcement: Announcement) -> None: ...

    async def accept(self, version: PolicyVersion, sources: Sequence[RelayPeer]) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """The actor's copy of a version: the last source of every relay."""

    name: str
    place: str
    """Node of the copy. The relay of that node keeps these references instead of a second copy."""
    refs: Mapping[str, Ref]
    """References by hash of the bucket."""

    async def give(self, bucket: str, *, wait: bool) -> Ref:
        """See `Relay.give`."""
        return self.refs[bucket]


@dataclass(frozen=True, slots=True)
class Announcement:
    """Announcement of a version to the relays, before its bytes are sent."""

    manifest: Manifest
    origin: Origin
    num_sent: int
    """Bytes of the buckets that the previous version did not have."""
    seconds: float
    """Seconds from the end of the publish to this announcement."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Versions of a relay: complete ones, newest first, then those being received."""

    announcements: tuple[Announcement, ...]
    pinned: PolicyVersion | None


async def broadcast(
    relays: Sequence[ChainMember], announcement: Announcement, transfer_s: float
) -> list[asyncio.Task[None]]:
    """Start sending a version down the chain `relays`, the first of which is on the actor's node.

    Returns a task for each relay at once. It ends when that relay has the version, or newer versions overtook it (see
    `Relay.accept`), or with the relay's error. A relay that does not answer within one of `TRIES` parts of `transfer_s`
    is no source for later relays. Only the next relay waits for that answer.
    """
    version = announcement.manifest.version
    phase = f"hearing of version {version}"
    told = [
        asyncio.ensure_future(with_deadline(relay.announce(announcement), transfer_s / TRIES, relay.name, phase))
        for relay in relays
    ]

    async def led(i: int) -> None:
        await told[i]
        if i:
            await asyncio.wait([told[i - 1]])  # so that it is asked only after its announcement
        failed = [future.done() and future.exception() is not None for future in told]
        await relays[i].accept(version, [relays[j] for j in range(i - 1, -1, -1) if not failed[j]])

    tasks = [asyncio.create_task(led(i)) for i in range(len(relays))]
    for task in tasks:  # relays report errors by `watch`: no caller has to await these
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return tasks


async def first_success(tasks: Sequence[asyncio.Task[T]]) -> T:
    """Return the result of the first task to succeed; the others go on. If none succeeds, raises an error, preferably
    one that is not in `UNAVAILABLE`."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task.result()
    errors = [error for task in tasks if (error := task.exception()) is not None]
    raise next((error for error in errors if not isinstance(error, UNAVAILABLE)), errors[0])


def passing(errors: Sequence[BaseException]) -> BaseException:
    """Return an error in `UNAVAILABLE`, after which a new attempt may succeed; if there is none, the last error."""
    return next((error for error in errors if isinstance(error, UNAVAILABLE)), errors[-1])


async def patiently(ask: Callable[[], Awaitable[T]], seconds: float | None, phase: str) -> T:
    """Return the result of `ask`, repeated while the relays it needs are restarting or do not answer.

    Raises `DeadlineExceeded` with the last failure in its text after `seconds` (None: never). Other errors of `ask` are
    raised at once.
    """
    last = "none of them answered"
    try:
        async with timeout(seconds):
            while True:
                try:
                    return await ask()
                except UNAVAILABLE as error:
                    last = str(error)
                await asyncio.sleep(RESTART_POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded("relays", phase, f"no answer within {seconds:g} s; at last: {last}") from error
