"""Three nodes and their relays: broadcast, delta, and the deaths of relays, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlsys.contracts import Arrival, Published
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.weight_sync.relay import Relay
from rlsys.weight_sync.sync import Manifest
from tests.relays import specs_of
from workers.ray.cluster import NO_MATHS, node_ids
from workers.ray.remote_proxy import Remote, start
from workers.relay.relay_pool import RayRelays
from workers.transport.buckets import content_hash
from workers.transport.object_store import ObjectStorePublisher, ObjectStorePuller

TRANSFER_S = 20.0
CALL_S = 60.0
VERSIONS = 100
"""Versions that a test may publish. The first has nothing in common with those of the test before."""


class KillableRelay(Relay):
    async def pid(self) -> int:
        return os.getpid()

    async def hang(self) -> None:
        time.sleep(3600)  # noqa: ASYNC251


class Trainer:
    """An actor's process without a model: all of `head` and a little of `body` change from version to version."""

    def __init__(self, relays: list[Remote[Relay]]) -> None:
        self._publisher = ObjectStorePublisher(relays, TRANSFER_S, deltas="always")

    def lie(self, version: int) -> Published:
        """Publish other bytes as `version`."""
        return self.publish(version, weights_of(version + 1000))

    def publish(self, version: int, weights: Mapping[str, Tensor] | None = None) -> Published:
        weights = weights_of(version) if weights is None else weights
        start_s = time.monotonic()
        into = self._publisher.begin(specs_of(weights))
        for name, tensor in weights.items():
            into[name].copy_(tensor)
        return self._publisher.publish(version, None, start_s)

    def announce_again(self, version: int) -> None:
        self._publisher.announce_again(version)


class Reader:
    """Pulls versions in a process of its own, and keeps all that it pulled."""

    def __init__(self, relays: list[Remote[Relay]]) -> None:
        self._relays = relays
        self._kept: dict[int, Mapping[str, Tensor]] = {}

    async def pull(self, at_least: int, is_pinned: bool = False) -> tuple[int, str, str]:
        """The version, the hash it was published with, and that of the bytes that came."""
        manifest, weights = await self._pull(at_least, is_pinned)
        self._kept[manifest.version] = weights
        return manifest.version, manifest.hash, content_hash(weights)

    async def held(self, since: int) -> dict[int, str]:
        """What the bytes of all versions pulled from `since` on hash to at this moment."""
        return {version: content_hash(weights) for version, weights in self._kept.items() if version >= since}

    async def _pull(self, at_least: int, is_pinned: bool) -> tuple[Manifest, Mapping[str, Tensor]]:
        return await ObjectStorePuller(self._relays, TRANSFER_S, is_pinned=is_pinned).pull(at_least)


def weights_of(version: int) -> dict[str, Tensor]:
    frozen = torch.arange(4 << 20, dtype=torch.float32) + version // VERSIONS
    body = torch.zeros(1 << 20)
    body[::512] = version
    return {"body": body, "frozen": frozen, "head": torch.full((1000,), -version / 2)}


def trainer_of(members: list[Remote[Relay]]) -> Remote[Trainer]:
    return start(Trainer, "trainer", partial(Trainer, members), NO_MATHS, CALL_S, place=members[0].place)


class Tier:
    """The relays, a trainer on the first node and a reader on each. All tests share their processes."""

    def __init__(self) -> None:
        self.relays = RayRelays.start(TRANSFER_S, KillableRelay)
        members = self.relays.members
        self.trainer = trainer_of(members)
        read = partial(Reader, members)
        self.readers = [start(Reader, "reader", read, NO_MATHS, CALL_S, place=member.place) for member in members]
        self.first = -VERSIONS
        """The first version of this test."""

    def begin(self) -> None:
        """Begin a test."""
        self.first += VERSIONS
        self.failures: list[WorkerError] = []
        self.recovered: asyncio.Queue[str] = asyncio.Queue()

    async def publish(self, version: int) -> Arrival:
        await self.trainer.call(Trainer.publish, version)
        return await asyncio.wait_for(self.relays.arrival(version), 200)

    async def read(self, i: int, at_least: int, *, is_pinned: bool = False) -> int:
        """The version that the reader on node i gets; its bytes are those published."""
        version, published, came = await self.readers[i].call(Reader.pull, at_least, is_pinned)
        assert came == published == content_hash(weights_of(version))
        return version

    async def kill(self, i: int) -> None:
        relay = cast("Remote[KillableRelay]", self.relays.members[i])
        pid = await relay.call(KillableRelay.pid)
        os.kill(pid, signal.SIGKILL)
        with suppress(WorkerDied):
            while await relay.within(10.0).call(KillableRelay.pid) == pid:
                pass

    async def supervised(self, scenario: Any) -> None:
        supervision = asyncio.create_task(
            self.relays.supervise(self.failures.append, lambda name, _: self.recovered.put_nowait(name))
        )
        try:
            await scenario
        finally:
            supervision.cancel()

    def close(self) -> None:
        self.relays.close()
        for process in [self.trainer, *self.readers]:
            process.kill()


@pytest.fixture(scope="module")
def processes(three_nodes) -> Iterator[Tier]:
    made = Tier()
    yield made
    made.close()


@pytest.fixture
def tier(processes) -> Tier:
    processes.begin()
    return processes


def test_readers_get_exact_bytes_and_only_changed_buckets_are_sent(tier):
    v = tier.first

    async def main() -> None:
        assert len(node_ids()) == 3
        first = await tier.publish(v)
        assert first.num_sent == first.num_bytes and first.hash == content_hash(weights_of(v))
        assert await asyncio.gather(*(tier.read(i, v) for i in range(3))) == [v, v, v]
        second = await tier.publish(v + 1)
        assert 0 < second.num_sent < 1 << 16, "the delta of body, all of head, nothing of frozen"
        assert await tier.read(1, v + 1) == v + 1
        for version in range(v + 2, v + 5):
            await tier.publish(version)
        assert await tier.read(2, v + 4) == v + 4
        kept = [await reader.call(Reader.held, v) for reader in tier.readers]
        assert kept == [
            {version: content_hash(weights_of(version)) for version in versions}
            for versions in ([v], [v, v + 1], [v, v + 4])
        ], "each keeps what it pulled, long after its relay let go of it"

    asyncio.run(main())


def test_a_dead_master_is_bypassed_and_refilled(tier):
    v = tier.first

    async def scenario() -> None:
        await tier.publish(v)
        await tier.relays.pin(v)
        await tier.kill(0)
        await tier.publish(v + 1)
        assert await asyncio.gather(*(tier.read(i, v + 1) for i in range(3))) == [v + 1] * 3
        assert await asyncio.wait_for(tier.recovered.get(), 100) == tier.relays.members[0].name
        held = await tier.relays.members[0].proxy.held()
        assert v + 1 in {known.manifest.version for known in held.announcements} and held.pinned == v
        assert await tier.read(0, v, is_pinned=True) == v
        assert [(e.worker, e.phase) for e in tier.failures] == [(tier.relays.members[0].name, "keeping weights")]

    asyncio.run(tier.supervised(scenario()))


def test_pins_and_pulls_wait_while_all_relays_are_restored(tier):
    v = tier.first

    async def scenario() -> None:
        await tier.publish(v)
        await tier.relays.pin(v)
        for version in (v + 1, v + 2, v + 3):
            await tier.publish(version)
        await asyncio.gather(*(tier.kill(i) for i in range(3)))
        pinned, newest = tier.read(0, v, is_pinned=True), [tier.read(i, v + 3) for i in range(3)]
        assert await asyncio.gather(tier.relays.pin(v), pinned, *newest) == [None, v, v + 3, v + 3, v + 3]
        recovered = {await asyncio.wait_for(tier.recovered.get(), 200) for _ in range(3)}
        assert recovered == {member.name for member in tier.relays.members}

    asyncio.run(tier.supervised(scenario()))


def test_a_hanging_relay_is_bypassed_killed_and_refilled(tier):
    v = tier.first

    async def scenario() -> None:
        await tier.publish(v)
        master = tier.relays.members[0]
        hanging = asyncio.ensure_future(cast("Remote[KillableRelay]", master).call(KillableRelay.hang))
        await tier.publish(v + 1)
        assert await asyncio.gather(*(tier.read(i, v + 1) for i in range(3))) == [v + 1] * 3
        while await asyncio.wait_for(tier.recovered.get(), 200) != master.name:
            pass
        assert v + 1 in {known.manifest.version for known in (await master.proxy.held()).announcements}
        assert master.name in {failure.worker for failure in tier.failures}
        with pytest.raises((DeadlineExceeded, WorkerDied)):
            await hanging

    asyncio.run(tier.supervised(scenario()))


def test_a_version_that_died_with_its_relays_is_announced_again(tier):
    v = tier.first

    async def main() -> None:
        await tier.publish(v)
        await asyncio.gather(*(tier.kill(i) for i in range(3)))
        await tier.trainer.call(Trainer.announce_again, v)
        assert (await asyncio.wait_for(tier.relays.arrival(v), 200)).version == v
        assert await tier.read(1, v) == v

    asyncio.run(main())


def test_republishing_a_version_with_other_bytes_is_refused(tier):
    v = tier.first

    async def main() -> None:
        await tier.publish(v)
        other = trainer_of(tier.relays.members)
        await other.call(Trainer.publish, v)  # the same bytes: ignored
        await other.call(Trainer.publish, v + 1)
        await tier.relays.arrival(v + 1)
        await other.call(Trainer.lie, v + 1)
        for ask in (other.call(Trainer.announce_again, v + 1), other.call(Trainer.publish, v + 2)):
            with pytest.raises(WeightsMismatch, match=f"hearing of version {v + 1}: it was published as"):
                await ask
        other.kill()

    asyncio.run(main())
