"""The driver's view of the relays, on a virtual clock: state that survives the death of all relays."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rlsys.contracts import Arrival
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerError
from rlsys.testing.virtual_clock import run_virtual
from rlsys.types import Ref
from rlsys.weight_sync.manifest import Manifest
from rlsys.weight_sync.relay import Announcement, Relay
from tests.relays import TRANSFER_S, Net, Node, announced, sent
from workers.ray.worker_process import Remote
from workers.relay.relay_pool import RayRelays
from workers.transport.route import TransportSpec


class Member(Node):
    """What `Remote[Relay]` is in a run."""

    @property
    def place(self) -> str:
        return self.name

    @property
    def proxy(self) -> Member:
        return self

    def within(self, deadline_s: float) -> Member:
        return self

    async def arrival(self, version: int) -> tuple[Arrival, tuple[Announcement, ...]]:
        return await self._call(self.relay.arrival(version))

    async def pin(self, version: int) -> tuple[Manifest, list[Ref]]:
        return await self._call(self.relay.pin(version))

    async def watch(self) -> WorkerError:
        return await self._call(self.relay.watch())


class Tier:
    def __init__(self, num_relays: int) -> None:
        net = Net()
        self.members = [Member(net, f"relay-{i}") for i in range(num_relays)]
        handles = cast("list[Remote[Relay]]", self.members)
        self.relays = RayRelays(
            handles, TRANSFER_S, TransportSpec("object_store"), nodes=lambda: [member.name for member in self.members]
        )
        self.recovered: list[str] = []

    async def publish(self, version: int) -> None:
        await sent(self.members, announced(version, [f"w-{version}"]))
        assert (await self.relays.arrival(version)).version == version

    def die(self) -> None:
        for member in self.members:
            member.die()

    def restart(self) -> None:
        for member in self.members:
            member.restart()

    async def supervised(self, scenario: Any) -> None:
        supervision = asyncio.create_task(
            self.relays.supervise(lambda error: None, lambda name, _: self.recovered.append(name))
        )
        await scenario
        supervision.cancel()


@pytest.mark.parametrize("num_relays", [1, 3])
def test_newest_and_pinned_versions_survive_the_death_of_every_relay(num_relays):
    tier = Tier(num_relays)

    async def scenario() -> None:
        await tier.publish(0)
        await tier.relays.pin(0)
        for version in (1, 2, 3):
            await tier.publish(version)
        tier.die()
        await asyncio.sleep(1)
        tier.restart()
        await asyncio.sleep(1)
        assert sorted(tier.recovered) == [member.name for member in tier.members]
        for member in tier.members:
            assert (await member.pin(0))[0].version == 0
            assert {a.version for a in (await member.holding()).announcements} == {0, 3}
        await tier.publish(4)
        await tier.publish(5)
        assert (await tier.members[0].holding()).pinned == 0

    run_virtual(tier.supervised(scenario()))


def test_a_pin_waits_for_restarting_relays_until_its_deadline():
    tier = Tier(2)

    async def scenario() -> None:
        await tier.publish(0)
        tier.die()
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match=r"relays while pinning version 0: .*the process is gone"):
            await tier.relays.pin(0)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(TRANSFER_S, rel=0.01)
        pin = asyncio.create_task(tier.relays.pin(0))
        await asyncio.sleep(5)
        assert not pin.done()
        tier.restart()
        await pin
        assert asyncio.get_running_loop().time() - began_s < TRANSFER_S + 10

    run_virtual(tier.supervised(scenario()))


def test_a_version_that_every_relay_let_go_cannot_be_pinned():
    tier = Tier(2)

    async def scenario() -> None:
        for version in range(4):
            await tier.publish(version)
        with pytest.raises(WeightsMismatch, match="version 0: it holds 2, 3 by this time"):
            await tier.relays.pin(0)

    run_virtual(tier.supervised(scenario()))
