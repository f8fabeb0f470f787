"""Weights through Ray's object store: the actor puts buckets that changed, relays pass them on, rollouts map them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

import ray

from rlsys.broadcast import FAILURES, Announcement, Origin, best_chunks, broadcast, first_success
from rlsys.contracts import Published
from rlsys.errors import DeadlineExceeded, WorkerDied, WorkerError
from rlsys.types import PolicyVersion, Ref
from rlsys.weights import Manifest, Probe, TensorSpec, with_deadline
from workers.cluster import call, node_ids
from workers.relays import RESTART_POLL_S, RelayHandle
from workers.transport.tensors import Snapshot, lay_out, padded, unpack

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

BYTES_PER_S = 1e9
"""Assumed of a link between nodes, and of storing what came: 10 Gbit/s Ethernet. Only the size of buckets depends on
it, and only by its square root."""
HOP_S = 5e-3
"""Assumed fixed cost of passing a bucket on: a call to the relay before, a transfer and a put."""
BUCKET_BYTES = (1 << 20, 16 << 20)
"""Least and most bytes of a bucket: a small one is all overhead, a big one hides which tensors did not change."""


def bucket_bytes(num_relays: int, num_bytes: int) -> int:
    """The size of buckets that reaches all relays soonest, within `BUCKET_BYTES`."""
    least, most = BUCKET_BYTES
    return min(max(num_bytes // best_chunks(num_relays, num_bytes, BYTES_PER_S, HOP_S), least), most)


class ObjectStorePublisher:
    """The actor's end. A publish is `begin`, writing the tensors it returns, `publish`; the rest happens behind.

    What goes wrong behind is raised by the next `begin`.
    """

    def __init__(self, relays: Sequence[RelayHandle], transfer_s: float) -> None:
        """`transfer_s` is the deadline for a version to reach the first relay."""
        self._relays, self._transfer_s = relays, transfer_s
        self._snapshot: Snapshot | None = None
        self._refs: dict[str, Ref] = {}
        """Buckets of the newest version, by hash."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handing_over: Future[None] | None = None

    def begin(self, specs: Sequence[TensorSpec], *, pin: bool = False) -> Mapping[str, Tensor]:
        """Host tensors to write the next version into, by name; the same memory every time.

        Waits until the version before is with the relays. Raises what kept it from that: `DeadlineExceeded`,
        `WorkerDied` or `WeightsMismatch` naming the relay and the phase. `pin`: page-locked memory.
        """
        self.wait()
        if self._snapshot is None:
            num_bytes = sum(padded(piece.num_bytes) for pieces in lay_out(specs, 1 << 62) for piece in pieces)
            self._snapshot = Snapshot(specs, bucket_bytes(len(self._relays), num_bytes), pin=pin)
        return self._snapshot.tensors

    def publish(self, version: PolicyVersion, probe: Probe | None, start_s: float) -> Published:
        """Hand over what was written. Returns at once; the stall is counted from `start_s` (monotonic clock).

        `probe` lets replicas show that they compute with these weights.
        """
        assert self._snapshot is not None, "begin comes first"
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="publisher", daemon=True).start()
        ended_s = time.monotonic()
        work = self._hand_over(self._snapshot, version, probe, ended_s)
        self._handing_over = asyncio.run_coroutine_threadsafe(work, self._loop)
        return Published(version, self._snapshot.num_bytes, ended_s - start_s)

    def wait(self) -> None:
        """Return once the version before is with the relays; raises as `begin` does."""
        if self._handing_over is None:
            return
        try:
            self._handing_over.result(2 * self._transfer_s)  # the second half is for hashing and storing
        except TimeoutError as error:
            detail = f"not done within {2 * self._transfer_s:g} s"
            raise DeadlineExceeded("actor-0", "storing the version before", detail) from error
        self._handing_over = None

    async def _hand_over(self, snapshot: Snapshot, version: PolicyVersion, probe: Probe | None, ended_s: float) -> None:
        """Runs in the publisher's thread: store what changed, tell the relays, wait for the first to have it."""
        manifest = snapshot.manifest(version, probe)
        refs: dict[str, Ref] = {}
        num_sent = 0
        for i, bucket in enumerate(manifest.buckets):
            if bucket.hash not in refs:
                num_sent += bucket.num_bytes if bucket.hash not in self._refs else 0
                refs[bucket.hash] = self._refs.get(bucket.hash) or ray.put(snapshot.bucket(i))
        self._refs = refs
        origin = Origin("actor-0", ray.get_runtime_context().get_node_id(), refs)
        announcement = Announcement(manifest, origin, num_sent, time.monotonic() - ended_s)
        await with_deadline(self._reach(announcement), self._transfer_s, "relays", f"taking in version {version}")

    async def _reach(self, announcement: Announcement) -> None:
        """Return once one relay has it; the others go on. Relays that all died are waited for."""
        while True:
            try:
                return await first_success(await broadcast(self._chain(), announcement, self._transfer_s))
            except WorkerDied:
                await asyncio.sleep(RESTART_POLL_S)

    def _chain(self) -> list[RelayHandle]:
        """Relays of the nodes that are there, the actor's own first."""
        here, alive = ray.get_runtime_context().get_node_id(), set(node_ids())
        return sorted((relay for relay in self._relays if relay.node in alive), key=lambda relay: relay.node != here)


class ObjectStorePuller:
    """A replica's end: pulls from the relay of its own node, or from another if that one fails."""

    def __init__(self, relays: Sequence[RelayHandle], transfer_s: float, *, is_pinned: bool = False) -> None:
        """`is_pinned`: pull the version asked for and no newer one, and let the relay keep it for others."""
        node = ray.get_runtime_context().get_node_id()
        self._relays = sorted(relays, key=lambda relay: relay.node != node)
        self._transfer_s, self._is_pinned = transfer_s, is_pinned

    async def pull(self, at_least: PolicyVersion) -> tuple[Manifest, Mapping[str, Tensor]]:
        """The newest version of the relay, no older than `at_least`; tensors are read-only views of shared memory.

        Raises what the last relay failed with; `WeightsMismatch` if a pinned version was let go.
        """
        failures: list[WorkerError] = []
        for relay in self._relays:
            try:
                return await self._pull_from(relay, at_least)
            except FAILURES as error:
                failures.append(error)
        raise failures[-1]

    async def _pull_from(self, relay: RelayHandle, at_least: PolicyVersion) -> tuple[Manifest, Mapping[str, Tensor]]:
        manifest, refs = await (relay.pin(at_least) if self._is_pinned else relay.newest(at_least))
        phase = f"giving the bytes of version {manifest.version}"
        fetched = [call(cast("Awaitable[np.ndarray]", ref), relay.name, phase, self._transfer_s) for ref in refs]
        return manifest, unpack(manifest, await asyncio.gather(*fetched))
