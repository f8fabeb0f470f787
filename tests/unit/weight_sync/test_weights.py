"""Weight changes: their one order, and refused tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from rlsys.contracts import Arrival, Published
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerError
from rlsys.monitoring.events import Events, WeightsPublished
from rlsys.testing import EventRecorder, FakeWorld, run_virtual
from rlsys.types import Acknowledged, Group
from rlsys.weight_sync.links import deadline_s
from rlsys.weight_sync.manifest import Manifest, VersionPart
from rlsys.weight_sync.sync import WeightSync, change_weights
from tests.groups import group

MANIFEST = Manifest((VersionPart(4, 0, 1, ()),))


@dataclass
class Diary:
    """A replica that writes down what is done to it."""

    name: str = "rollout-0"
    held: str | None = "cafe"
    """Hash of the weights that it computes with; None if it cannot load."""
    lies: bool = False
    """Does it compute otherwise than the trainer, with the same weights?"""
    done: list[str] = field(default_factory=list)

    def close_gate(self) -> None:
        self.done.append("close gate")

    async def pause(self) -> None:
        self.done.append("pause")

    async def resume(self) -> None:
        self.done.append("resume")

    def open_gate(self) -> None:
        self.done.append("open gate")

    async def verify_weights(self, manifest: Manifest) -> str:
        self.done.append("verify")
        if self.held != "cafe":
            raise WeightsMismatch(self.name, f"verifying version {manifest.version}", "other values of w")
        return self.held

    async def verify_probe(self, manifest: Manifest) -> float:
        self.done.append("prove")
        if self.lies:
            raise WeightsMismatch(self.name, f"verifying version {manifest.version}", "its logprobs differ")
        return 0.01

    async def stop(self, why: WorkerError) -> None:
        self.done.append("stop")

    async def load(self) -> None:
        self.done.append("load")
        if self.held is None:
            raise WeightsMismatch(self.name, "loading weights", "missing w")


def changed(replica: Diary) -> Acknowledged:
    return asyncio.run(change_weights(replica, MANIFEST, replica.load))


def test_a_weight_change_has_one_order():
    replica = Diary()
    assert changed(replica) == Acknowledged("rollout-0", 4, "cafe", 0.01)
    assert replica.done == ["close gate", "pause", "load", "resume", "verify", "prove", "open gate"]


def test_weights_that_do_not_load_stop_the_replica_with_its_gate_closed():
    replica = Diary(held=None)
    with pytest.raises(WeightsMismatch, match="missing w"):
        changed(replica)
    assert replica.done == ["close gate", "pause", "load", "resume", "stop"]


def test_other_weights_than_published_stop_the_replica_with_its_gate_closed():
    replica = Diary(held="beef")
    with pytest.raises(WeightsMismatch, match="rollout-0 while verifying version 4: other values of w"):
        changed(replica)
    assert replica.done == ["close gate", "pause", "load", "resume", "verify", "stop"]


def test_a_replica_that_computes_with_other_weights_is_stopped():
    replica = Diary(lies=True)
    with pytest.raises(WeightsMismatch, match="verifying version 4"):
        changed(replica)
    assert replica.done == ["close gate", "pause", "load", "resume", "verify", "prove", "stop"]


def test_a_cancelled_load_resumes_and_stops_too():
    replica = Diary()

    async def main() -> None:
        loading = asyncio.Event()

        async def never() -> None:
            replica.done.append("load")
            loading.set()
            await asyncio.get_running_loop().create_future()

        change = asyncio.create_task(change_weights(replica, MANIFEST, never))
        await loading.wait()
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change

    asyncio.run(main())
    assert replica.done == ["close gate", "pause", "load", "resume", "stop"]


def sync(**published: str) -> WeightSync:
    weights = on(FakeWorld())
    weights.published = {int(v[1:]): h for v, h in published.items()}
    return weights


def on(world: FakeWorld, **options) -> WeightSync:
    workers = world.workers()
    return WeightSync(workers.actor, workers.relays, transfer_s=1.0, max_age=2, **options)


def verified(weights: WeightSync, of: Group) -> None:
    run_virtual(weights.verify(of))


def test_tokens_of_acknowledged_and_published_versions_pass():
    verified(sync(v1="hash-of-1", v2="hash-of-2"), group(0, versions=(1, 2)))


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        (("hash-of-1", "other"), "tokens of version 2, published as hash-of-2, acknowledged as other"),
        (("hash-of-1",), "tokens of version 2, published as hash-of-2, acknowledged as None"),
    ],
)
def test_tokens_of_other_weights_are_refused(hashes, message):
    with pytest.raises(WeightsMismatch, match=f"rollout-0 while rolling out group 7: {message}"):
        verified(sync(v1="hash-of-1", v2="hash-of-2"), group(7, versions=(1, 2), hashes=hashes))


def test_tokens_older_than_their_permit_are_refused_whatever_their_hash():
    late = replace(group(7, versions=(1, 2)), permit_version=2)
    with pytest.raises(WeightsMismatch, match="tokens of version 1, but its permit asks for 2 or newer"):
        verified(sync(v1="hash-of-1", v2="hash-of-2"), late)


def test_tokens_of_a_version_that_was_never_published_are_refused():
    with pytest.raises(WeightsMismatch, match="version 2, published as None"):
        verified(sync(v1="hash-of-1"), group(0, versions=(1, 2)))


def test_publish_returns_early_and_the_hash_follows_on_arrival():
    told = EventRecorder()
    weights = on(FakeWorld(publish_s=0.5, broadcast_s=0.25), events=Events([told]))

    async def main() -> None:
        receipt = await weights.publish(3)
        assert asyncio.get_running_loop().time() == 0.5
        assert (told.of(WeightsPublished), weights.published) == ([], {})
        await weights.wait_for_arrivals()
        assert asyncio.get_running_loop().time() == 0.75
        assert weights.published == {3: "hash-of-3"}
        assert told.of(WeightsPublished) == [WeightsPublished(3, "hash-of-3", 4, 4, receipt.stall_s, 0.25)]

    run_virtual(main())


def test_whoever_needs_a_hash_that_is_arriving_waits_for_it():
    weights = on(FakeWorld(publish_s=0.0, broadcast_s=0.25))

    async def main() -> None:
        await weights.publish(3)
        await weights.verify(group(0, versions=(3,)))
        assert asyncio.get_running_loop().time() == 0.25
        assert await weights.wait_for_arrival(3) == "hash-of-3"
        assert await weights.wait_for_arrival(2) is None

    run_virtual(main())


def test_a_publish_has_a_deadline_that_names_its_phase():
    weights = on(FakeWorld(publish_s=9.0))
    with pytest.raises(DeadlineExceeded, match="actor while publishing version 3: no answer within 1 s"):
        run_virtual(weights.publish(3))
    assert weights.published == {}


@pytest.mark.parametrize("needs_it", ["the next publish", "a verification", "a checkpoint"])
def test_late_weights_fail_whatever_needs_them(needs_it):
    weights = on(FakeWorld(publish_s=0.0, broadcast_s=9.0))

    async def main() -> None:
        await weights.publish(3)
        if needs_it == "the next publish":
            await asyncio.sleep(3)
            await weights.publish(4)
        elif needs_it == "a verification":
            await weights.verify(group(0, versions=(3,)))
        else:
            await weights.wait_for_arrivals()

    with pytest.raises(DeadlineExceeded, match="relays while receiving version 3: no answer within 1 s"):
        run_virtual(main())


def test_deadlines_grow_with_the_bytes_and_with_slow_links():
    """1 GB may take 8 s more than the least at 10 Gbit/s, and ten times as long as it took before."""
    assert deadline_s(1.0, 10**9, 1.25e9) == 9.0
    weights = on(FakeWorld(publish_s=0.0, broadcast_s=8.9, num_bytes=10**9))

    async def main() -> None:
        await weights.publish(3)
        await weights.wait_for_arrivals()
        assert 3 in weights.published
        weights.actor.world.broadcast_s = 80.0  # type: ignore[attr-defined]
        await weights.publish(4)
        await weights.wait_for_arrivals()
        assert 4 in weights.published
        weights.actor.world.broadcast_s = 1.0  # type: ignore[attr-defined]
        await weights.publish(5)
        await weights.wait_for_arrivals()
        weights.actor.world.broadcast_s = 80.0  # type: ignore[attr-defined]
        await weights.publish(6)
        with pytest.raises(DeadlineExceeded):
            await weights.wait_for_arrivals()  # of a link that was fast again

    run_virtual(main())


@dataclass
class Loser:
    """An actor and its relays. The relays lose a version before they tell of it, unless it is announced again."""

    why: WorkerError | None = None
    """What kept the version from the relays."""
    asked: list[int] = field(default_factory=list)

    async def publish(self, version: int) -> Published:
        return Published(version, 4, 0.0)

    async def announce_again(self, version: int) -> None:
        self.asked.append(version)
        if self.why is not None:
            raise self.why

    async def arrival(self, version: int) -> Arrival:
        if version in self.asked:
            return Arrival(version, f"hash-of-{version}", 4, 4, 0.0)
        return await asyncio.get_running_loop().create_future()


def losing(loser: Loser) -> WeightSync:
    return WeightSync(loser, loser, transfer_s=1.0, max_age=2)  # type: ignore[arg-type]


def test_a_version_lost_by_the_relays_is_announced_again():
    loser = Loser()
    weights = losing(loser)

    async def main() -> None:
        await weights.publish(3)
        assert await weights.wait_for_arrival(3) == "hash-of-3"

    run_virtual(main())
    assert loser.asked == [3]


def test_the_error_that_kept_a_version_from_relays_is_raised():
    weights = losing(Loser(WorkerError("actor-0", "storing version 3", "no room in Ray's object store")))

    async def main() -> None:
        await weights.publish(3)
        await weights.wait_for_arrivals()

    with pytest.raises(WorkerError, match="actor-0 while storing version 3: no room"):
        run_virtual(main())


def test_hashes_beyond_the_staleness_bound_are_forgotten_unless_kept():
    weights = on(FakeWorld(publish_s=0.0))
    weights.kept = {1}

    async def main() -> None:
        for version in range(8):
            await weights.publish(version)
            await weights.wait_for_arrivals()

    run_virtual(main())
    assert sorted(weights.published) == [1, 5, 6, 7]
