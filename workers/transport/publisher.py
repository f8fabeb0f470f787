"""A rank's end of a publish: it copies its rectangles beside the next step, and hands them to the relays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import numpy as np
from ray.exceptions import ObjectLostError

from rlsys.errors import DeadlineExceeded, WorkerDied
from rlsys.types import PolicyVersion, Ref
from rlsys.weight_sync.links import Link, deadline_s
from rlsys.weight_sync.manifest import Probe, Rectangle, VersionPart
from rlsys.weight_sync.relay import (
    TRIES,
    Announcement,
    Delta,
    Origin,
    Relay,
    broadcast,
    first_answers,
    first_success,
    patiently,
)
from workers.ray.cluster import has_other_machines, node_ids
from workers.transport.buckets import PartLayout
from workers.transport.deltas import delta_of
from workers.transport.route import Route

if TYPE_CHECKING:
    from torch import Tensor

NUM_STORED = 3
"""Versions that the publisher keeps: as many as a relay, two complete and one in transfer."""


class WeightPublisher:
    """A thread that copies, hashes and announces the part of one rank.

    `publish` returns at once. The rank must not change its weights before `wait_copied` returns. Errors of the transfer
    are raised by the next call and by every later one. `DeadlineExceeded`: no relay had the part in time.
    `WeightsMismatch`: it was published before with other bytes, or damaged on every path. Another `WorkerError`: there
    is no memory for it.
    """

    def __init__(self, route: Route, deltas: Literal["sooner", "always"] = "sooner") -> None:
        """`deltas` are sent if that is `sooner`: to other machines, and where encoding and decoding takes less time
        than the bytes saved, at the measured speed of the links. `always` is for tests, whose nodes share a machine."""
        self._route, self._deltas = route, deltas
        self._transport = route.transport.start()
        self.name = "actor-0"
        self._stored: dict[PolicyVersion, Announcement] = {}
        """Parts whose bytes are kept here. Ray counts a forwarded reference only while its sender lives, and the relays
        may all die."""
        self._pinned: PolicyVersion | None = None
        """Pinned version in the relays' last reports."""
        self._link = Link()
        """The slowest link in the relays' last reports."""
        self._silent: set[str] = set()
        """Relays that gave none."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._layout: PartLayout | None = None
        self._copied: Future[None] | None = None
        self._waited_s = 0.0
        self._handing_over: Future[None] | None = None

    def publish(
        self,
        version: PolicyVersion,
        shards: Mapping[str, tuple[Rectangle, Tensor]],
        rectangles: Sequence[Rectangle],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        probe: Probe | None = None,
        base: str | None = None,
        pin: bool = False,
    ) -> int:
        """Begin to copy `rectangles` of this rank's `shards`, which are by tensor name, as its part of `version`.

        Returns the bytes of the part. Waits until the previous part is with the relays, for less than its deadline.
        With `probe`, replicas can check that they compute with these weights. `base`: see `Manifest.base`. `pin`: copy
        into page-locked memory.
        """
        self._wait()
        if self._layout is None:
            self._layout, self.name = PartLayout(rectangles), f"actor-{rank}"
        empty = VersionPart(version, rank, num_ranks, (), {}, probe, base)
        self._copied = Future()
        self._start(self._hand_over(self._layout, shards, empty, self._copied, pin=pin))
        return self._layout.num_bytes

    def wait_copied(self) -> None:
        """Return once the weights of the last publish are copied: then they may change."""
        if self._copied is not None and not self._copied.done():
            began_s = time.monotonic()
            self._copied.result()
            self._waited_s += time.monotonic() - began_s

    def take_waited_s(self) -> float:
        """Seconds for which `wait_copied` has waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def announce_again(self, version: PolicyVersion) -> None:
        """Announce `version` again, if it is the newest: all relays that had it may have died since."""
        self._wait()
        if version == max(self._stored, default=None):
            self._start(self._reach(self._stored[version]))
            self._wait()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` in the publisher's thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="publisher", daemon=True).start()
        self._handing_over = asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self) -> None:
        """Return once the last transfer has reached a relay, or raise its error."""
        if self._handing_over is None:
            return
        seconds = self._deadline_s * (1 - 1 / TRIES)
        try:
            self._handing_over.result(seconds)
        except TimeoutError as error:
            detail = f"not done after {seconds:g} s more"
            raise DeadlineExceeded(self.name, "handing the previous version to the relays", detail) from error

    async def _hand_over(
        self,
        layout: PartLayout,
        shards: Mapping[str, tuple[Rectangle, Tensor]],
        empty: VersionPart,
        copied: Future[None],
        *,
        pin: bool,
    ) -> None:
        """Copy and store the part, announce it, and wait for the first relay to have it."""
        began_s = time.monotonic()
        try:
            memory = self._transport.memory(empty.version, layout.num_bytes, pin=pin)
            layout.write(memory, shards)
        finally:
            copied.set_result(None)
        announcement = await self._announcement(layout, memory, layout.part(memory, empty), began_s)
        self._stored[empty.version] = announcement
        await self._reach(announcement)
        await self._evict()

    async def _announcement(
        self, layout: PartLayout, memory: np.ndarray, part: VersionPart, began_s: float
    ) -> Announcement:
        """Store the buckets and their deltas."""
        previous = self._stored[max(self._stored)] if self._stored else None
        refs: dict[str, Ref] = {}
        deltas: dict[str, Delta] = {}
        num_sent = part.num_bytes if self._transport.sends else 0
        tries_deltas = self._transport.sends and (self._deltas == "always" or has_other_machines())
        for i, bucket in enumerate(part.buckets):
            start, end = layout.bounds[i : i + 2]
            refs[bucket.hash] = self._transport.share(memory, start, end)
            if previous and tries_deltas:
                old = previous.part.buckets[i].hash
                data = await self._delta(previous.origin.refs[old], memory[start:end])
                if data is not None:
                    deltas[bucket.hash] = delta = Delta(old, bucket.hash, len(data))
                    refs[delta.name] = self._transport.put(data)
                    num_sent += delta.num_bytes - bucket.num_bytes
                else:  # the other buckets of this version change alike
                    tries_deltas = self._deltas == "always"
        origin = Origin(self.name, self._transport.place, refs)
        return Announcement(part, origin, num_sent, time.monotonic() - began_s, deltas)

    async def _delta(self, old: Ref, new: np.ndarray) -> np.ndarray | None:
        """Return the delta from a stored bucket to its successor; None if the whole is sooner, or the old one lost."""
        began_s = time.perf_counter()
        try:
            data = delta_of(await self._transport.fetch(old, self.name, "reading the previous version"), new)
        except (WorkerDied, ObjectLostError):
            return None
        took_s = time.perf_counter() - began_s
        if data is None or self._deltas == "always":
            return data
        both_s = 1.5 * took_s  # decoding takes less than half the time of encoding
        return data if both_s < (len(new) - len(data)) / self._link.bytes_per_s else None

    async def _evict(self) -> None:
        """Evict all but the newest `NUM_STORED` versions and the pinned one; none if no relay reports its pin. A relay
        that is silent meanwhile comes last in the next chain, where none pulls from it."""
        chain = self._chain()
        answers = await first_answers([asyncio.ensure_future(relay.holding()) for relay in chain])
        holdings = [holding for holding in answers if holding is not None]
        self._silent = {relay.name for relay, answer in zip(chain, answers, strict=True) if answer is None}
        self._pinned = max((h.pinned for h in holdings if h.pinned is not None), default=self._pinned)
        measured = [holding.link for holding in holdings if holding.link.is_measured]
        self._link = min(measured, key=lambda link: link.bytes_per_s, default=Link())
        for version in sorted(self._stored)[:-NUM_STORED] if holdings else []:
            if version != self._pinned:
                del self._stored[version]

    async def _reach(self, announcement: Announcement) -> None:
        """Return once one relay has the part; the others continue. Waits for relays that restart or hang."""

        async def ask() -> None:
            await first_success(await broadcast(self._chain(), announcement, self._route.transfer_s, self._link))

        await patiently(ask, self._deadline_s, f"receiving version {announcement.version}")

    @property
    def _deadline_s(self) -> float:
        num_bytes = self._layout.num_bytes if self._layout else 0
        return deadline_s(self._route.transfer_s, num_bytes, self._link.bytes_per_s)

    def _chain(self) -> list[Relay]:
        """Relays of the live nodes, from that of this node on: so each rank begins with another. The silent come
        last."""
        import ray

        if len(self._route.relays) == 1:
            return [self._route.relays[0].proxy]
        here, alive = ray.get_runtime_context().get_node_id(), set(node_ids())  # which asks Ray's head
        there = [relay for relay in self._route.relays if relay.place in alive]
        first = next((i for i, relay in enumerate(there) if relay.place == here), 0)
        turned = (*there[first:], *there[:first])
        return [relay.proxy for relay in sorted(turned, key=lambda relay: relay.name in self._silent)]
