"""Three nodes and their relays: broadcast, delta, and the deaths of relays, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlsys.contracts import Arrival
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.weight_sync.manifest import Manifest, Rectangle
from rlsys.weight_sync.relay import Relay
from tests.relays import specs_of
from workers.ray.cluster import NO_MATHS, node_ids
from workers.ray.worker_process import Remote, start
from workers.relay.relay_pool import RayRelays
from workers.transport.checksums import hash_of
from workers.transport.publisher import WeightPublisher
from workers.transport.puller import WeightPuller
from workers.transport.route import Route, TransportSpec
from workers.transport.transport import TransportName

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
    """A rank's process without a model: all of `head` and a little of `body` change from version to version."""

    def __init__(self, route: Route) -> None:
        self._publisher = WeightPublisher(route, deltas="always")

    def lie(self, version: int) -> None:
        """Publish other bytes as `version`."""
        self.publish(version, weights_of(version + 1000))

    def publish(
        self, version: int, weights: Mapping[str, Tensor] | None = None, rank: int = 0, num_ranks: int = 1
    ) -> None:
        weights = weights_of(version) if weights is None else weights
        wholes = {spec.name: Rectangle.whole(spec) for spec in specs_of(weights)}
        shards = {name: (wholes[name], tensor) for name, tensor in weights.items()}
        own = [whole.split(num_ranks)[rank] for whole in wholes.values()]
        self._publisher.publish(version, shards, own, rank=rank, num_ranks=num_ranks)
        self._publisher.wait_copied()

    def announce_again(self, version: int) -> None:
        self._publisher.announce_again(version)


class Reader:
    """Pulls versions in a process of its own, and keeps all that it pulled."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._kept: dict[int, Mapping[str, Tensor]] = {}

    async def pull(self, at_least: int, is_pinned: bool = False) -> tuple[int, str, str]:
        """The version, the hash it was published with, and that of the bytes that came."""
        manifest, weights = await self._pull(at_least, is_pinned)
        self._kept[manifest.version] = weights
        return manifest.version, manifest.hash, hash_of(weights)

    async def holding(self, since: int) -> dict[int, str]:
        """What the bytes of all versions pulled from `since` on hash to at this moment."""
        return {version: hash_of(weights) for version, weights in self._kept.items() if version >= since}

    async def _pull(self, at_least: int, is_pinned: bool) -> tuple[Manifest, Mapping[str, Tensor]]:
        return await WeightPuller(self._route, is_pinned=is_pinned).pull(at_least)


def weights_of(version: int) -> dict[str, Tensor]:
    frozen = torch.arange(4 << 20, dtype=torch.float32) + version // VERSIONS
    body = torch.zeros(1 << 20)
    body[::512] = version
    return {"body": body, "frozen": frozen, "head": torch.full((1000,), -version / 2)}


def trainer_of(route: Route) -> Remote[Trainer]:
    return start(Trainer, "trainer", partial(Trainer, route), NO_MATHS, CALL_S, place=route.relays[0].place)


class Tier:
    """The relays, a trainer on the first node and a reader on each. All tests share their processes."""

    def __init__(self, transport: TransportName) -> None:
        self.relays = RayRelays.start(TRANSFER_S, KillableRelay, transport=TransportSpec(transport))
        self.trainer = trainer_of(self.relays.route)
        read, nodes = partial(Reader, self.relays.route), [member.place for member in self.relays.members]
        self.readers = [start(Reader, "reader", read, NO_MATHS, CALL_S, place=node) for node in nodes]
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
        assert came == published == hash_of(weights_of(version))
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


@pytest.fixture(scope="module", params=["object_store", pytest.param("shared_memory", marks=pytest.mark.nightly)])
def processes(request: pytest.FixtureRequest, three_nodes) -> Iterator[Tier]:
    made = Tier(request.param)
    yield made
    made.close()


@pytest.fixture
def tier(processes) -> Tier:
    processes.begin()
    return processes


def test_readers_get_exact_bytes_and_changes_are_sent_as_deltas(tier):
    v = tier.first

    async def main() -> None:
        assert len(node_ids()) == 3
        first = await tier.publish(v)
        sends = tier.relays.transport.name == "object_store"
        assert first.num_sent == (first.num_bytes if sends else 0) and first.hash == hash_of(weights_of(v))
        assert await asyncio.gather(*(tier.read(i, v) for i in range(3))) == [v, v, v]
        second = await tier.publish(v + 1)
        assert sends == (0 < second.num_sent < 1 << 16), "deltas, or nothing"
        assert await tier.read(1, v + 1) == v + 1
        for version in range(v + 2, v + 5):
            await tier.publish(version)
        assert await tier.read(2, v + 4) == v + 4
        kept = [await reader.call(Reader.holding, v) for reader in tier.readers]
        assert kept == [
            {version: hash_of(weights_of(version)) for version in versions}
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
        held = await tier.relays.members[0].proxy.holding()
        assert v + 1 in {known.version for known in held.announcements} and held.pinned == v
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


@pytest.mark.nightly
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
        assert v + 1 in {known.version for known in (await master.proxy.holding()).announcements}
        assert master.name in {failure.worker for failure in tier.failures}
        with pytest.raises((DeadlineExceeded, WorkerDied)):
            await hanging

    asyncio.run(tier.supervised(scenario()))


@pytest.mark.nightly
def test_a_version_that_died_with_its_relays_is_announced_again(tier):
    v = tier.first

    async def main() -> None:
        patient = trainer_of(replace(tier.relays.route, transfer_s=CALL_S))  # three processes start in that time
        await patient.call(Trainer.publish, v)
        await asyncio.wait_for(tier.relays.arrival(v), 200)
        await asyncio.gather(*(tier.kill(i) for i in range(3)))
        await patient.call(Trainer.announce_again, v)
        assert (await asyncio.wait_for(tier.relays.arrival(v), 200)).version == v
        assert await tier.read(1, v) == v
        patient.kill()

    asyncio.run(main())


@pytest.mark.nightly
def test_republishing_a_version_with_other_bytes_is_refused(tier):
    v = tier.first

    async def main() -> None:
        await tier.publish(v)
        other = trainer_of(tier.relays.route)
        await other.call(Trainer.publish, v)  # the same bytes: ignored
        await other.call(Trainer.publish, v + 1)
        await tier.relays.arrival(v + 1)
        await other.call(Trainer.lie, v + 1)
        for ask in (other.call(Trainer.announce_again, v + 1), other.call(Trainer.publish, v + 2)):
            with pytest.raises(
                WeightsMismatch, match=f"receiving the announcement of version {v + 1}: actor-0 published it with"
            ):
                await ask
        other.kill()

    asyncio.run(main())


def test_ranks_publish_parts_and_one_that_dies_leaves_its_version_out(tier):
    v = tier.first

    async def publish(ranks: list[Remote[Trainer]], version: int) -> None:
        calls = (rank.call(Trainer.publish, version, None, i, 2) for i, rank in enumerate(ranks))
        await asyncio.gather(*calls)

    async def main() -> None:
        ranks = [trainer_of(tier.relays.route) for _ in range(2)]
        await publish(ranks, v)
        arrival = await asyncio.wait_for(tier.relays.arrival(v), 200)
        assert arrival.hash == hash_of(weights_of(v)), "that of any number of ranks"
        assert await asyncio.gather(*(tier.read(i, v) for i in range(3))) == [v] * 3
        await ranks[0].call(Trainer.publish, v + 1, None, 0, 2)
        ranks[1].kill()
        assert await tier.read(0, v) == v, "the newest that is whole"
        ranks[0].kill()
        successors = [trainer_of(tier.relays.route) for _ in range(2)]
        for version in (v + 2, v + 3):
            await publish(successors, version)
            await asyncio.wait_for(tier.relays.arrival(version), 200)
        assert await asyncio.gather(*(tier.read(i, v + 3) for i in range(3))) == [v + 3] * 3
        for successor in successors:
            successor.kill()

    asyncio.run(main())
