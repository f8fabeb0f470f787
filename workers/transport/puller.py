"""A replica's end of a transfer: it pulls from its node's relay, or from another if that one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import ray

from rlsys.errors import WeightsMismatch, WorkerError
from rlsys.types import PolicyVersion, Ref
from rlsys.util.event_loops import all_or_none
from rlsys.weight_sync.links import BYTES_PER_S, deadline_s
from rlsys.weight_sync.manifest import Bucket, Manifest
from rlsys.weight_sync.relay import FAILURES, Relay, passing, patiently
from rlsys.weight_sync.sync import with_deadline
from workers.ray.worker_process import Remote
from workers.transport.buckets import ReceivedWeights, bucket_hash
from workers.transport.route import Route

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class WeightPuller:
    """Pulls versions for one replica."""

    def __init__(self, route: Route, *, is_pinned: bool = False) -> None:
        """`is_pinned`: pull exactly the requested version, and pin it at the relay."""
        node = ray.get_runtime_context().get_node_id()
        self._relays = sorted(route.relays, key=lambda relay: relay.place != node)
        self._transport, self._transfer_s, self._is_pinned = route.transport.start(), route.transfer_s, is_pinned
        self._num_bytes = route.num_bytes
        """Bytes of the last version."""

    async def pull(self, at_least: PolicyVersion) -> tuple[Manifest, Mapping[str, Tensor]]:
        """Pull the relay's newest version, no older than `at_least`. Tensors are read-only views of shared memory. The
        bytes are those that their hashes tell.

        While relays restart or hang, tries the others in turn, repeatedly. Raises `WeightsMismatch` if all have evicted
        a pinned version, `DeadlineExceeded` after `deadline_s`.
        """
        phase = f"serving version {at_least}{'' if self._is_pinned else ' or newer'}"
        return await patiently(lambda: self._pull_from_any(at_least), self._deadline_s, phase)

    @property
    def _deadline_s(self) -> float:
        return deadline_s(self._transfer_s, self._num_bytes, BYTES_PER_S)

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
        phase = f"sending the bytes of version {manifest.version}"
        buckets = zip(manifest.buckets, refs, strict=True)
        fetched = all_or_none(self._fetch(bucket, ref, relay, phase) for bucket, ref in buckets)
        self._num_bytes = manifest.num_bytes
        received = await with_deadline(fetched, self._deadline_s / 2, relay.name, phase)
        return manifest, ReceivedWeights(manifest, received, relay.name)

    async def _fetch(self, bucket: Bucket, ref: Ref, relay: Remote[Relay], phase: str) -> np.ndarray:
        """Return a bucket that is intact. One that arrives damaged is fetched again, from the same relay once it has
        looked at its own copy, and then from others. Raises `WeightsMismatch` if none has it intact."""
        data = await self._transport.fetch(ref, relay.name, phase)
        if await self._is_intact(data, bucket):
            return data
        for source in sorted(self._relays, key=lambda other: other is not relay):
            others = [other.proxy for other in self._relays if other is not source]
            try:
                await source.proxy.repair(bucket.hash, others)
                data = await self._transport.fetch(await source.proxy.give(bucket.hash, wait=False), source.name, phase)
            except FAILURES:
                continue
            if await self._is_intact(data, bucket):
                return data
        raise WeightsMismatch(relay.name, phase, f"bucket {bucket.hash} is damaged at every relay")

    @staticmethod
    async def _is_intact(data: np.ndarray, bucket: Bucket) -> bool:
        return await asyncio.to_thread(bucket_hash, data) == bucket.hash
