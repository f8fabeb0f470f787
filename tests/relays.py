"""Relays on a virtual clock: links with a bandwidth, processes that die, bytes that are corrupted on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlsys.errors import WorkerDied
from rlsys.types import Ref
from rlsys.weight_sync.links import Link as Speed
from rlsys.weight_sync.manifest import Bucket, TensorSpec, VersionPart
from rlsys.weight_sync.relay import Announcement, ChainMember, Delta, Holding, Origin, Relay, RelayPeer, broadcast

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
TRANSFER_S = 60.0
CHAIN = Speed(1e9, 0.0)
"""A link on which no tree is faster than a chain."""


@dataclass(frozen=True)
class Blob:
    """A reference, and the bytes behind it: `content` is what they hash to."""

    owner: str
    content: str
    num_bytes: int


@dataclass
class Net:
    """What all relays of a test share."""

    bytes_per_s: float = 1e9
    hop_s: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    fetched: list[tuple[str, str, str]] = field(default_factory=list)
    """(by, from, bucket) of every fetch that began, in order."""
    corrupt: Callable[[str, str], bool] = lambda by, source: False
    """Do bytes arrive damaged on the way from `source`?"""
    on_fetched: Callable[[str], None] = lambda by: None
    """Called after each bucket that a relay received."""

    def chain(self, size: int, **options: Any) -> list[Node]:
        return [Node(self, f"relay-{i}", **options) for i in range(size)]

    def is_gone(self, owner: str) -> bool:
        return owner in self.nodes and self.nodes[owner].is_dead


class Link:
    """Implements `Store`: one bucket at a time comes in."""

    def __init__(self, net: Net, name: str, room: Callable[[], bool]) -> None:
        self._net, self._name, self._room = net, name, room
        self._wire = asyncio.Lock()

    async def fetch(self, ref: Ref, source: str) -> Blob:
        assert isinstance(ref, Blob)
        self._net.fetched.append((self._name, source, ref.content))
        async with self._wire:
            await asyncio.sleep(ref.num_bytes / self._net.bytes_per_s + self._net.hop_s)
        if self._net.is_gone(ref.owner):
            raise WorkerDied(source, "sending a bucket", "its owner is gone")
        content = "damaged" if self._net.corrupt(self._name, source) else ref.content
        return Blob(self._name, content, ref.num_bytes)

    async def digest(self, data: object) -> str:
        assert isinstance(data, Blob)
        return data.content

    async def apply_delta(self, base: Ref, delta: object) -> Blob:
        assert isinstance(base, Blob) and isinstance(delta, Blob)
        old, _, new = delta.content.partition(">")
        return Blob(self._name, new if old == base.content else "damaged", base.num_bytes)

    async def own(self, data: object) -> Ref:
        if not self._room():
            raise MemoryError("full")
        self._net.on_fetched(self._name)
        return data

    async def borrow(self, ref: Ref) -> Ref:
        return ref


class Node:
    """A relay in a process that can die: implements `ChainMember`."""

    def __init__(self, net: Net, name: str, keep: int = 2, room: Callable[[], bool] = lambda: True) -> None:
        self.name, self._net, self._keep, self._room = name, net, keep, room
        net.nodes[name] = self
        self._calls: set[asyncio.Future] = set()
        self.restart()

    def restart(self) -> None:
        """A fresh process, which holds nothing."""
        self.is_dead = False
        self.relay = Relay(self.name, self.name, Link(self._net, self.name, self._room), TRANSFER_S, self._keep)

    def die(self) -> None:
        self.is_dead = True
        for call in self._calls:
            call.cancel()

    async def announce(self, announcement: Announcement) -> None:
        await self._call(self.relay.announce(announcement))

    async def accept(self, version: int, rank: int, sources: Sequence[RelayPeer]) -> None:
        await self._call(self.relay.accept(version, rank, sources))

    async def give(self, bucket: str, *, wait: bool) -> Ref:
        return await self._call(self.relay.give(bucket, wait=wait))

    async def ping(self) -> None:
        await self._call(self.relay.ping())

    async def holding(self) -> Holding:
        return await self._call(self.relay.holding())

    async def refill(self, neighbours: Sequence[ChainMember], known: Holding) -> None:
        await self._call(self.relay.refill(neighbours, known))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self.is_dead:
            work.close()
            raise WorkerDied(self.name, "answering", "the process is gone")
        call = asyncio.ensure_future(work)
        self._calls.add(call)
        await asyncio.wait([call])
        self._calls.discard(call)
        if call.cancelled():
            raise WorkerDied(self.name, "answering", "the process is gone")
        return call.result()


def announced(
    version: int,
    buckets: Sequence[str],
    num_bytes: int = 1000,
    place: str = "actor",
    actor: str = "actor-0",
    bases: Sequence[str] = (),
    rank: int = 0,
    num_ranks: int = 1,
) -> Announcement:
    """The part of a rank, by default the only one, whose buckets, of `num_bytes` each, are called so.

    Its bytes lie with `actor` at `place`. With `bases`, buckets also come as deltas to these, of a tenth of the bytes.
    """
    part = VersionPart(version, rank, num_ranks, tuple(Bucket(name, num_bytes, ()) for name in buckets))
    deltas = {new: Delta(old, new, num_bytes // 10) for old, new in zip(bases, buckets, strict=bool(bases))}
    blobs = [Blob(actor, name, num_bytes) for name in buckets]
    blobs += [Blob(actor, delta.name, delta.num_bytes) for delta in deltas.values()]
    origin = Origin(actor, place, {blob.content: blob for blob in blobs})
    return Announcement(part, origin, sum(blob.num_bytes for blob in blobs), 0.0, deltas)


async def sent(relays: Sequence[Node], announcement: Announcement, link: Speed = CHAIN) -> list[BaseException | None]:
    """Broadcast, and what kept each relay from it."""
    tasks = await broadcast(relays, announcement, TRANSFER_S, link)
    await asyncio.wait(tasks)
    return [task.exception() for task in tasks]


def specs_of(weights: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Names, dtypes and shapes of `weights`."""
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in weights.items()]
