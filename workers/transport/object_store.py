"""Weights through Ray's object store: the actor puts buckets and deltas, relays pass them on, rollouts map them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, cast

import ray
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError

from rlsys.contracts import Published
from rlsys.errors import DeadlineExceeded, WorkerError
from rlsys.types import PolicyVersion, Ref
from rlsys.weight_sync.relay import (
    FAILURES,
    TRIES,
    Announcement,
    Delta,
    Holding,
    Origin,
    Relay,
    best_chunks,
    broadcast,
    first_success,
    passing,
    patiently,
)
from rlsys.weight_sync.sync import Manifest, Probe, TensorSpec
from workers.ray.cluster import has_other_machines, node_ids
from workers.ray.remote_proxy import Remote, call
from workers.transport.buckets import Snapshot, lay_out, padded, unpack
from workers.transport.deltas import delta_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

BYTES_PER_S = 1e9
"""Assumed speed of a link between nodes and of storing a bucket: 10 Gbit/s Ethernet. Affects only the size of a bucket,
by its square root, and which ones are sent as deltas."""
HOP_S = 5e-3
"""Assumed fixed cost of passing a bucket on: a call to the previous relay, a transfer and a put."""
NUM_STORED = 3
"""Versions that the publisher keeps: as many as a relay, two complete and one in transfer."""
BUCKET_BYTES = (1 << 20, 16 << 20)
"""Bounds of a bucket's size: a small one is mostly overhead, a large one is resent for a few changed tensors."""


def bucket_bytes(num_relays: int, num_bytes: int) -> int:
    """Bucket size that reaches all relays soonest, within `BUCKET_BYTES`."""
    least, most = BUCKET_BYTES
    return min(max(num_bytes // best_chunks(num_relays, num_bytes, BYTES_PER_S, HOP_S), least), most)


class ObjectStorePublisher:
    """The actor's end. To publish, call `begin`, write its tensors, call `publish`; a thread transfers them.

    Errors of the transfer are raised by the next call and by every later one. `DeadlineExceeded`: no relay had the
    version in time. `WeightsMismatch`: it was published before with other bytes, or damaged on every path. Another
    `WorkerError`: there is no memory for it.
    """

    def __init__(
        self,
        relays: Sequence[Remote[Relay]],
        transfer_s: float,
        deltas: Literal["sooner", "always"] = "sooner",
    ) -> None:
        """`transfer_s` is the deadline for a version to reach the first relay, and for a publish to end.

        `deltas` are sent if that is `sooner`: to other machines, and where encoding and decoding takes less time than
        the bytes saved, at `BYTES_PER_S`. `always` is for tests, whose nodes share a machine.
        """
        self._relays, self._transfer_s, self._deltas = relays, transfer_s, deltas
        self._snapshot: Snapshot | None = None
        self._stored: dict[PolicyVersion, Announcement] = {}
        """Versions whose buckets are kept here. Ray counts a forwarded reference only while its sender lives, and the
        relays may all die."""
        self._pinned: PolicyVersion | None = None
        """Pinned version in the relays' last reports."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handing_over: Future[None] | None = None

    def begin(self, specs: Sequence[TensorSpec], *, pin: bool = False) -> Mapping[str, Tensor]:
        """Host tensors for the next version, by name; the same memory every time.

        Waits until the previous version is with the relays, for less than `transfer_s`, to leave time to copy. `pin`:
        page-locked memory.
        """
        self._wait()
        if self._snapshot is None:
            num_bytes = sum(padded(piece.num_bytes) for pieces in lay_out(specs, 1 << 62) for piece in pieces)
            self._snapshot = Snapshot(specs, bucket_bytes(len(self._relays), num_bytes), pin=pin)
        return self._snapshot.tensors

    def publish(
        self, version: PolicyVersion, probe: Probe | None, start_s: float, base: str | None = None
    ) -> Published:
        """Start the transfer of the written tensors and return. The stall is counted from `start_s` (monotonic clock).

        With `probe`, replicas can check that they compute with these weights. `base`: see `Manifest.base`.
        """
        assert self._snapshot is not None, "begin comes first"
        ended_s = time.monotonic()
        self._start(self._hand_over(self._snapshot, version, probe, base, ended_s))
        return Published(version, self._snapshot.num_bytes, ended_s - start_s)

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
        seconds = self._transfer_s * (1 - 1 / TRIES)
        try:
            self._handing_over.result(seconds)
        except TimeoutError as error:
            detail = f"not done after {seconds:g} s more"
            raise DeadlineExceeded("actor-0", "handing the version before to the relays", detail) from error

    async def _hand_over(
        self, snapshot: Snapshot, version: PolicyVersion, probe: Probe | None, base: str | None, ended_s: float
    ) -> None:
        """Store changed buckets and their deltas, announce the version, and wait for the first relay to have it."""
        manifest = snapshot.manifest(version, probe, base)
        previous = self._stored[max(self._stored)] if self._stored else None
        before = previous.origin.refs if previous else {}
        refs: dict[str, Ref] = {}
        deltas: dict[str, Delta] = {}
        num_sent, tries_deltas = 0, self._deltas == "always" or has_other_machines()
        for i, bucket in enumerate(manifest.buckets):
            if bucket.hash in refs:
                continue
            if bucket.hash in before:
                refs[bucket.hash] = before[bucket.hash]
                continue
            refs[bucket.hash] = _stored(snapshot.bucket(i), version)
            num_sent += bucket.num_bytes
            if previous and tries_deltas:
                old = previous.manifest.buckets[i].hash
                data = self._delta(before[old], snapshot.bucket(i))
                if data is not None:
                    deltas[bucket.hash] = delta = Delta(old, bucket.hash, len(data))
                    refs[delta.name] = _stored(data, version)
                    num_sent += delta.num_bytes - bucket.num_bytes
                else:  # the other buckets of this version change alike
                    tries_deltas = self._deltas == "always"
        origin = Origin("actor-0", ray.get_runtime_context().get_node_id(), refs)
        self._stored[version] = Announcement(manifest, origin, num_sent, time.monotonic() - ended_s, deltas)
        await self._reach(self._stored[version])
        await self._evict()

    def _delta(self, old: Ref, new: np.ndarray) -> np.ndarray | None:
        """Return the delta from a stored bucket to its successor; None if the whole is sooner, or the old one lost."""
        began_s = time.perf_counter()
        try:
            data = delta_of(cast("np.ndarray", ray.get(cast("ray.ObjectRef", old))), new)
        except ObjectLostError:
            return None
        took_s = time.perf_counter() - began_s
        if data is None or self._deltas == "always":
            return data
        both_s = 1.5 * took_s  # decoding takes less than half the time of encoding
        return data if both_s < (len(new) - len(data)) / BYTES_PER_S else None

    async def _evict(self) -> None:
        """Evict all but the newest `NUM_STORED` versions and the pinned one; none if no relay reports its pin."""
        answers = await asyncio.gather(*(relay.held() for relay in self._chain()), return_exceptions=True)
        holdings = [answer for answer in answers if isinstance(answer, Holding)]
        self._pinned = max((h.pinned for h in holdings if h.pinned is not None), default=self._pinned)
        for version in sorted(self._stored)[:-NUM_STORED] if holdings else []:
            if version != self._pinned:
                del self._stored[version]

    async def _reach(self, announcement: Announcement) -> None:
        """Return once one relay has the version; the others continue. Waits for relays that restart or hang."""

        async def ask() -> None:
            await first_success(await broadcast(self._chain(), announcement, self._transfer_s))

        await patiently(ask, self._transfer_s, f"taking in version {announcement.manifest.version}")

    def _chain(self) -> list[Relay]:
        """Relays of the live nodes; the actor's node first."""
        here, alive = ray.get_runtime_context().get_node_id(), set(node_ids())
        there = [relay.proxy for relay in self._relays if relay.place in alive]
        return sorted(there, key=lambda relay: relay.place != here)


class ObjectStorePuller:
    """A replica's end of a transfer: pulls from its node's relay, or from another if that one fails."""

    def __init__(self, relays: Sequence[Remote[Relay]], transfer_s: float, *, is_pinned: bool = False) -> None:
        """`is_pinned`: pull exactly the requested version, and pin it at the relay."""
        node = ray.get_runtime_context().get_node_id()
        self._relays = sorted(relays, key=lambda relay: relay.place != node)
        self._transfer_s, self._is_pinned = transfer_s, is_pinned

    async def pull(self, at_least: PolicyVersion) -> tuple[Manifest, Mapping[str, Tensor]]:
        """Pull the relay's newest version, no older than `at_least`. Tensors are read-only views of shared memory.

        While relays restart or hang, tries the others in turn, repeatedly. Raises `WeightsMismatch` if all have evicted
        a pinned version, `DeadlineExceeded` after `transfer_s`.
        """
        phase = f"giving version {at_least}{'' if self._is_pinned else ' or newer'}"
        return await patiently(lambda: self._pull_from_any(at_least), self._transfer_s, phase)

    async def _pull_from_any(self, at_least: PolicyVersion) -> tuple[Manifest, Mapping[str, Tensor]]:
        failures: list[WorkerError] = []
        for relay in self._relays:
            try:
                return await self._pull_from(relay, at_least)
            except FAILURES as error:
                failures.append(error)
        raise passing(failures)

    async def _pull_from(self, relay: Remote[Relay], at_least: PolicyVersion) -> tuple[Manifest, Mapping[str, Tensor]]:
        give = relay.proxy.pin if self._is_pinned else relay.proxy.newest
        manifest, refs = await give(at_least)
        phase = f"giving the bytes of version {manifest.version}"
        fetched = [call(cast("Awaitable[np.ndarray]", ref), relay.name, phase, self._transfer_s / 2) for ref in refs]
        return manifest, unpack(manifest, await asyncio.gather(*fetched))


def _stored(data: np.ndarray, version: PolicyVersion) -> Ref:
    try:
        return ray.put(data)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        detail = (
            f"no room for {data.nbytes} bytes in Ray's object store ({type(error).__name__}): give the actor's node "
            "more memory (ray start --object-store-memory) or disk to spill to"
        )
        raise WorkerError("actor-0", f"storing version {version}", detail) from error
