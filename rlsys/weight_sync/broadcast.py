"""Sending a version down the chain of relays: what it costs, what the relays are told, who leads it.

The relays form a chain. Each pulls from the one before it as buckets arrive there; a source that fails is left out for
the rest of that version, and the last source is the actor itself. So skipping a dead relay costs nobody else anything.
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
"""What may be over once a relay has restarted."""
FAILURES = (*UNAVAILABLE, WeightsMismatch)
"""What makes a relay, or a reader, turn to the next source."""
TRIES = 4
"""Waits for one relay that fit into the deadline of a transfer: a relay that hangs uses up one, then others have turns.
"""
RESTART_POLL_S = 0.2
"""Between two questions whether a relay is back: Ray tells nobody when it has restarted a process."""


def broadcast_s(num_relays: int, num_bytes: float, num_chunks: int, bytes_per_s: float, hop_s: float) -> float:
    """Seconds until the last of `num_relays` in a chain holds `num_bytes`, sent in equal chunks.

    T(k) = (n + k - 1) (M / (k B) + a). A chunk takes M / (k B) + a per hop, `hop_s` being the fixed cost a. The last
    chunk leaves the actor after k such times and has n - 1 hops left. This is the usual model of a pipelined chain;
    Laminar's appendix D (arXiv:2510.12633) analyses the latency of such a chain.
    """
    return (num_relays + num_chunks - 1) * (num_bytes / (num_chunks * bytes_per_s) + hop_s)


def best_chunks(num_relays: int, num_bytes: float, bytes_per_s: float, hop_s: float) -> int:
    """The number of chunks for which `broadcast_s` is least: sqrt((n - 1) M / (a B)), where its derivative is 0.

    The time is then about (sqrt(M / B) + sqrt((n - 1) a))^2, nearly the same for any number of relays.
    """
    ideal = math.sqrt((num_relays - 1) * num_bytes / (hop_s * bytes_per_s))
    near = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
    return min(sorted(near), key=lambda k: broadcast_s(num_relays, num_bytes, k, bytes_per_s, hop_s))


class RelayPeer(Protocol):
    """Another relay, as a relay sees it. Its methods are those of `Relay`; they also raise `WorkerDied`."""

    @property
    def name(self) -> str: ...

    async def give(self, bucket: str, *, wait: bool) -> Ref: ...


class Neighbour(RelayPeer, Protocol):
    """A relay that one which lost everything is filled from."""

    async def held(self) -> Holding: ...


class ChainMember(RelayPeer, Protocol):
    """A relay, as `broadcast` sees it."""

    async def announce(self, announcement: Announcement) -> None: ...

    async def accept(self, version: PolicyVersion, sources: Sequence[RelayPeer]) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """The actor's own copy of a version: the last source of every relay."""

    name: str
    place: str
    """The node it lies on. The relay of that node keeps these references instead of a second copy."""
    refs: Mapping[str, Ref]
    """By the hash of the bucket."""

    async def give(self, bucket: str, *, wait: bool) -> Ref:
        """See `Relay.give`."""
        return self.refs[bucket]


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the relays are told of a version before any of it travels."""

    manifest: Manifest
    origin: Origin
    num_sent: int
    """Bytes of the buckets that the version before did not have."""
    seconds: float
    """From the end of the publish to this announcement."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a relay holds: its complete versions, newest first, then those on their way."""

    announcements: tuple[Announcement, ...]
    pinned: PolicyVersion | None


async def broadcast(
    relays: Sequence[ChainMember], announcement: Announcement, transfer_s: float
) -> list[asyncio.Task[None]]:
    """Start sending a version down the chain `relays`, the first of which is the actor's own.

    Returns a task for each relay at once; it ends when that relay holds the version or was overtaken by newer ones (see
    `Relay.accept`), or with what kept it from that. A relay that cannot be told within one of `TRIES` parts of
    `transfer_s` is no source for those behind it; the next one waits for that, and no other.
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
            await asyncio.wait([told[i - 1]])  # so that it is not asked for what it has not heard of
        failed = [future.done() and future.exception() is not None for future in told]
        await relays[i].accept(version, [relays[j] for j in range(i - 1, -1, -1) if not failed[j]])

    tasks = [asyncio.create_task(led(i)) for i in range(len(relays))]
    for task in tasks:  # relays tell by `watch` what went wrong: nobody has to ask here
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return tasks


async def first_success(tasks: Sequence[asyncio.Task[T]]) -> T:
    """What the first task to succeed returned; the others go on. If none does, raises what one failed with: if any
    failed for good, such a one."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task.result()
    errors = [error for task in tasks if (error := task.exception()) is not None]
    raise next((error for error in errors if not isinstance(error, UNAVAILABLE)), errors[0])


def passing(errors: Sequence[BaseException]) -> BaseException:
    """One of `errors` that may be over soon, so that asking again is worth it; if there is none, the last."""
    return next((error for error in errors if isinstance(error, UNAVAILABLE)), errors[-1])


async def patiently(ask: Callable[[], Awaitable[T]], seconds: float | None, phase: str) -> T:
    """What `ask` returns. It is asked again while the relays it needs are restarting or do not answer.

    Raises `DeadlineExceeded` with the last failure in its text after `seconds` (None: never), and at once what else
    `ask` raises.
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
