"""Relay tier on a virtual clock: the chain and its cost model, deltas, deaths, and guarantees for readers."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied
from rlsys.testing.virtual_clock import run_virtual
from rlsys.weight_sync.links import Link as Speed
from rlsys.weight_sync.links import chain_s, parents, tree_s
from rlsys.weight_sync.relay import (
    LOOK_S,
    TRIES,
    Announcement,
    Holding,
    RelayPeer,
    broadcast,
    first_success,
    patiently,
)
from tests.relays import CHAIN, TRANSFER_S, Blob, Link, Net, Node, announced, sent

GIGABYTE = 10**9
WAIT_S = TRANSFER_S / TRIES
NOTHING = Holding((), None)


def best_chunks(num_relays: int, num_bytes: float, link: Speed) -> int:
    """Number of chunks that minimises `chain_s`: sqrt((n - 1) M / (a B)), where its derivative is 0.

    The time is then about (sqrt(M / B) + sqrt((n - 1) a))^2, nearly the same for any number of relays.
    """
    ideal = math.sqrt((num_relays - 1) * num_bytes / (link.hop_s * link.bytes_per_s))
    near = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
    return min(sorted(near), key=lambda k: chain_s(num_relays, num_bytes, k, link))


def contents(refs: list) -> list[str]:
    return [ref.content for ref in refs]


def now() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------------------------------------ the chain


@pytest.mark.parametrize("num_relays", [1, 2, 4, 8, 32])
def test_a_broadcast_takes_as_long_as_the_cost_model_says(num_relays):
    link = Speed(1e9, 1e-3)
    chunks = best_chunks(num_relays, GIGABYTE, link)

    async def main() -> float:
        net = Net(link.bytes_per_s, link.hop_s)
        announcement = announced(0, [f"b{i}" for i in range(chunks)], GIGABYTE // chunks)
        assert await sent(net.chain(num_relays), announcement, link) == [None] * num_relays
        return now()

    measured = run_virtual(main())
    assert measured == pytest.approx(chain_s(num_relays, GIGABYTE, chunks, link), rel=0.1)
    assert measured < 1.5 * chain_s(1, GIGABYTE, 1, link), "nearly flat in the number of relays"


@given(
    st.integers(1, 64), st.integers(1000, 10**11), st.floats(1e6, 1e11), st.floats(1e-6, 1.0), st.integers(1, 10_000)
)
def test_no_number_of_chunks_beats_the_best(num_relays, num_bytes, bytes_per_s, hop_s, other):
    link = Speed(bytes_per_s, hop_s)
    least = chain_s(num_relays, num_bytes, best_chunks(num_relays, num_bytes, link), link)
    assert least <= chain_s(num_relays, num_bytes, other, link) * (1 + 1e-9)


def test_the_cost_model_by_hand():
    """Two relays, four chunks of a quarter second and a hop of 50 ms: five times 0.3 s."""
    assert chain_s(2, 1e9, 4, Speed(1e9, 0.05)) == pytest.approx(1.5)
    assert tree_s(3, 1e9, 4, Speed(1e9, 0.05)) == pytest.approx(5 * 0.55)
    assert best_chunks(2, 1e9, Speed(1e9, 0.0625)) == 4


def test_many_bytes_go_down_a_chain_and_few_on_many_nodes_down_a_tree():
    assert parents(5, GIGABYTE, 60, Speed()) == [0, 0, 1, 2, 3]
    assert parents(7, 1000, 1, Speed()) == [0, 0, 0, 1, 1, 2, 2]


def test_a_tree_is_as_fast_as_its_cost_model_says():
    link = Speed(1e9, 5e-3)

    async def main(num_relays: int) -> float:
        net = Net(link.bytes_per_s, link.hop_s)
        assert await sent(net.chain(num_relays), announced(0, ["a"], 1000), link) == [None] * num_relays
        return now()

    assert run_virtual(main(63)) == pytest.approx(tree_s(63, 1000, 1, link), rel=0.01)
    assert run_virtual(main(63)) < chain_s(63, 1000, 1, link) / 5


def test_relays_measure_the_links_over_which_they_receive():
    async def main() -> None:
        chain = Net(bytes_per_s=2000.0).chain(2)
        await sent(chain, announced(0, list("abcdef"), 1000))
        for node in chain:
            link = (await node.holding()).link
            assert link.is_measured and link.bytes_per_s == pytest.approx(2000), "buckets wait for each other"

    run_virtual(main())


def test_buckets_that_share_a_link_and_arrive_together_count_as_one():
    link = Speed()
    for _ in range(9):
        for seconds in (3.0, 0.0, 0.0):
            link = link.after(1000, seconds)
    assert link.bytes_per_s == pytest.approx(1000, rel=0.3)


# ------------------------------------------------------------------------------------------------------------ the ranks


def test_a_version_is_complete_once_the_parts_of_all_ranks_are_here():
    async def main() -> None:
        (node,) = Net().chain(1)
        reader = asyncio.create_task(node.relay.newest(0))
        await sent([node], announced(0, ["b"], rank=1, num_ranks=2))
        await asyncio.sleep(1)
        assert not reader.done()
        await sent([node], announced(0, ["a"], rank=0, num_ranks=2))
        manifest, refs = await reader
        assert contents(refs) == ["a", "b"], "in the order of the ranks"
        assert [part.rank for part in manifest.parts] == [0, 1]
        assert (await node.relay.arrival(0))[0].num_bytes == 2000

    run_virtual(main())


def test_ranks_on_different_nodes_are_pulled_from_at_the_same_time():
    """Each chain begins at the node of its rank: two links are busy, and no relay waits in a circle."""

    async def main(num_ranks: int) -> float:
        net = Net(bytes_per_s=1000.0)
        first, second = net.chain(2)
        size = 6000 // num_ranks // 3
        parts = [
            announced(0, [f"{r}{c}" for c in "abc"], size, rank=r, num_ranks=num_ranks, place=f"relay-{r}")
            for r in range(num_ranks)
        ]
        chains = [[first, second], [second, first]]
        await asyncio.gather(*(sent(chains[part.part.rank], part) for part in parts))
        for node in (first, second):
            assert (await node.relay.newest(0))[0].num_bytes == 6000
        return now()

    assert run_virtual(main(2)) == pytest.approx(run_virtual(main(1)) / 2)


def test_a_part_that_never_comes_hides_the_version_until_newer_ones_replace_it():
    async def main() -> None:
        (node,) = Net().chain(1)
        await sent([node], announced(0, ["a"]))
        await sent([node], announced(1, ["b"], rank=0, num_ranks=2))
        assert (await node.relay.newest(0))[0].version == 0
        for version in (2, 3):
            await sent([node], announced(version, [f"w-{version}"]))
        assert sorted(node.relay._buckets) == ["w-2", "w-3"]
        with pytest.raises(WeightsMismatch, match="receiving version 1: it holds 2, 3 by this time"):
            await node.relay.arrival(1)

    run_virtual(main())


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_every_relay_gets_every_part_in_any_order(data, num_ranks, num_relays):
    async def main() -> None:
        net = Net(bytes_per_s=1000.0)
        relays = net.chain(num_relays)

        async def one(version: int, rank: int) -> None:
            await asyncio.sleep(data.draw(st.floats(0, 3)))
            first = rank % num_relays
            part = announced(version, [f"{version}/{rank}"], rank=rank, num_ranks=num_ranks, place=f"relay-{first}")
            assert await sent(relays[first:] + relays[:first], part) == [None] * num_relays

        for version in range(2):
            await asyncio.gather(*(one(version, rank) for rank in range(num_ranks)))
        for node in relays:
            manifest, refs = await node.relay.newest(1)
            assert contents(refs) == [f"1/{rank}" for rank in range(num_ranks)]
            assert manifest.version == 1
        assert now() < TRANSFER_S, "nobody waits for a deadline"

    run_virtual(main())


# ----------------------------------------------------------------------------------------------------------- the chain


def test_first_relay_latency_does_not_depend_on_relays_or_readers():
    async def main(num_relays: int, num_readers: int) -> float:
        chain = Net(hop_s=1e-3).chain(num_relays)
        readers = [asyncio.create_task(node.relay.newest(3)) for node in chain for _ in range(num_readers)]
        tasks = await broadcast(chain, announced(3, list("abcdefgh"), GIGABYTE // 8), TRANSFER_S, CHAIN)
        await first_success(tasks)
        first = now()
        assert {manifest.version for manifest, _ in await asyncio.gather(*readers)} <= {3}
        return first

    times = [run_virtual(main(*size)) for size in [(1, 0), (1, 50), (8, 0), (32, 10)]]
    assert max(times) == pytest.approx(min(times))


def test_each_relay_pulls_from_the_previous_one_in_the_chain():
    async def main() -> None:
        net = Net()
        chain = net.chain(3)
        await sent(chain, announced(0, ["a", "b"]))
        assert {(by, source) for by, source, _ in net.fetched} == {
            ("relay-0", "actor-0"),
            ("relay-1", "relay-0"),
            ("relay-2", "relay-1"),
        }
        assert len(net.fetched) == 6

    run_virtual(main())


def test_the_relay_on_the_actors_node_keeps_the_actors_bytes():
    async def main() -> None:
        net = Net()
        chain = net.chain(2)
        await sent(chain, announced(0, ["a"], place="relay-0"))
        assert net.fetched == [("relay-1", "relay-0", "a")]
        assert (await chain[0].relay.newest(0))[1] == [Blob("actor-0", "a", 1000)]
        assert (await chain[1].relay.newest(0))[1] == [Blob("relay-1", "a", 1000)]

    run_virtual(main())


@pytest.mark.parametrize("place", ["relay-0", "relay-1"])
def test_the_bytes_of_a_replaced_actor_are_not_kept(place):
    async def main() -> None:
        net = Net()
        chain = net.chain(2)
        old = announced(0, ["a", "b"], place="relay-0")
        await sent(chain, old)
        actor_first = sorted(chain, key=lambda node: node.name != place)
        await sent(actor_first, announced(1, ["b"], place=place, actor="actor-0.1"))
        owner = "actor-0.1" if place == "relay-0" else "relay-0"
        assert (await chain[0].relay.newest(1))[1] == [Blob(owner, "b", 1000)]
        assert (await chain[1].relay.newest(1))[1] == [Blob("relay-1", "b", 1000)]
        await chain[0].relay.refill([], Holding((old,), None))
        assert (await chain[0].relay.newest(1))[1] == (await chain[0].relay.newest(0))[1], (
            "an older version changes nothing"
        )

    run_virtual(main())


def test_an_arrival_tells_how_much_travelled_and_for_how_long():
    async def main() -> None:
        chain = Net(bytes_per_s=1000.0).chain(2)
        await sent(chain, announced(0, ["a", "b"]))
        arrival, announcements = await chain[1].relay.arrival(0)
        assert (arrival.version, arrival.num_bytes, arrival.num_sent) == (0, 2000, 2000)
        assert arrival.hash == (await chain[1].relay.newest(0))[0].hash
        assert arrival.seconds == pytest.approx(3.0)
        assert announcements == (announced(0, ["a", "b"]),)

    run_virtual(main())


# --------------------------------------------------------------------------------------------------------------- deltas


def test_relays_fetch_only_the_buckets_they_lack():
    async def main() -> None:
        net = Net()
        chain = net.chain(3)
        await sent(chain, announced(0, ["frozen", "head-0", "more"]))
        net.fetched.clear()
        await sent(chain[:2], announced(1, ["frozen", "head-1", "more"]))
        assert [bucket for _, _, bucket in net.fetched] == ["head-1"] * 2
        net.fetched.clear()
        await sent(chain, announced(2, ["frozen", "head-1", "more-2"]))
        assert sorted((by, bucket) for by, _, bucket in net.fetched) == [
            ("relay-0", "more-2"), ("relay-1", "more-2"), ("relay-2", "head-1"), ("relay-2", "more-2"),
        ]  # fmt: skip
        for node in chain:
            assert contents((await node.relay.newest(2))[1]) == ["frozen", "head-1", "more-2"]

    run_virtual(main())


def test_a_changed_bucket_travels_as_its_delta_along_the_chain():
    async def main() -> None:
        net = Net()
        chain = net.chain(3)
        await sent(chain, announced(0, ["a0", "b0", "c0"]))
        net.fetched.clear()
        assert await sent(chain, announced(1, ["a1", "b1", "c1"], bases=["a0", "b0", "c0"])) == [None] * 3
        deltas = ["a0>a1", "b0>b1", "c0>c1"]
        for i, source in enumerate(["actor-0", "relay-0", "relay-1"]):
            assert [(s, b) for by, s, b in net.fetched if by == f"relay-{i}"] == [(source, delta) for delta in deltas]
        for node in chain:
            assert contents((await node.relay.newest(1))[1]) == ["a1", "b1", "c1"]

    run_virtual(main())


def test_a_relay_without_the_older_bucket_gets_the_whole_and_those_after_it_too():
    """The relay that restarted has no delta to pass on, so the last one, which could use it, takes the whole."""

    async def main() -> None:
        net = Net()
        chain = net.chain(3)
        await sent(chain, announced(0, ["a0", "b0"]))
        chain[1].die()
        chain[1].restart()
        net.fetched.clear()
        assert await sent(chain, announced(1, ["a1", "b1"], bases=["a0", "b0"])) == [None] * 3
        assert {b for by, _, b in net.fetched if by == "relay-0"} == {"a0>a1", "b0>b1"}
        for place in (1, 2):
            came = [(source, b) for by, source, b in net.fetched if by == f"relay-{place}"]
            assert came == [(f"relay-{place - 1}", "a1"), (f"relay-{place - 1}", "b1")]

    run_virtual(main())


@pytest.mark.parametrize("trouble", ["damaged", "no memory", "missed a version"])
def test_what_cannot_be_patched_is_sent_whole(trouble: str):
    async def main() -> None:
        is_full = [False]
        net = Net()
        node = Node(net, "relay-0", room=lambda: not is_full[0])
        await sent([node], announced(0, ["a0"]))
        if trouble == "damaged":
            left = [True, False]  # the delta, then the whole
            net.corrupt = lambda by, source: left.pop(0)
        elif trouble == "no memory":
            is_full[0] = True
        bases = ["a0"] if trouble != "missed a version" else ["a1"]
        net.fetched.clear()
        assert await sent([node], announced(2, ["a2"], bases=bases)) == [None]
        assert [b for _, _, b in net.fetched][-1] == "a2"
        assert contents((await node.relay.newest(2))[1]) == ["a2"]

    run_virtual(main())


def test_a_relay_whose_source_dies_between_two_deltas_goes_on_with_the_actor():
    async def main() -> None:
        net = Net(bytes_per_s=1000)
        chain = net.chain(2)
        await sent(chain, announced(0, ["a0", "b0", "c0"]))
        count = [0]

        def die_after_the_first(by: str) -> None:
            count[0] += by == "relay-1"
            if count[0] == 2:  # the bucket and the delta that it keeps
                chain[0].die()

        net.on_fetched = die_after_the_first
        after = await sent(chain, announced(1, ["a1", "b1", "c1"], bases=["a0", "b0", "c0"]))
        assert after[1] is None
        assert contents((await chain[1].relay.newest(1))[1]) == ["a1", "b1", "c1"]

    run_virtual(main())


def test_deltas_are_kept_as_long_as_their_version():
    async def main() -> None:
        node = Net().chain(1, keep=1)[0]
        await sent([node], announced(0, ["a0"]))
        await sent([node], announced(1, ["a1"], bases=["a0"]))
        assert set(node.relay._buckets) == {"a1", "a0>a1"}
        await sent([node], announced(2, ["a2"], bases=["a1"]))
        assert set(node.relay._buckets) == {"a2", "a1>a2"}

    run_virtual(main())


def test_a_bucket_that_occurs_twice_in_a_version_travels_once():
    async def main() -> None:
        net = Net()
        (node,) = net.chain(1)
        await sent([node], announced(0, ["zeros", "a", "zeros"]))
        assert [bucket for _, _, bucket in net.fetched] == ["zeros", "a"]
        assert contents((await node.relay.newest(0))[1]) == ["zeros", "a", "zeros"]

    run_virtual(main())


def test_overlapping_versions_fetch_no_bucket_twice():
    async def main() -> None:
        net = Net(bytes_per_s=1000.0)
        chain = net.chain(2)
        both = [sent(chain, announced(v, ["frozen", f"head-{v}"])) for v in (0, 1)]
        assert await asyncio.gather(*both) == [[None, None], [None, None]]
        assert len(net.fetched) == len(set(net.fetched)) == 2 * 3
        assert contents((await chain[1].relay.newest(1))[1]) == ["frozen", "head-1"]

    run_virtual(main())


# --------------------------------------------------------------------------------------------------------------- deaths


@given(data=st.data(), num_relays=st.integers(2, 6), num_buckets=st.integers(1, 7))
def test_survivors_of_any_deaths_get_the_version_without_duplicates(data, num_relays, num_buckets):
    deaths = data.draw(
        st.dictionaries(st.integers(0, num_relays - 1), st.integers(0, num_buckets), max_size=num_relays - 1)
    )

    async def main() -> None:
        net = Net(bytes_per_s=1000.0, hop_s=0.1)
        chain = net.chain(num_relays)
        received: dict[str, int] = defaultdict(int)

        def count(by: str) -> None:
            received[by] += 1
            if received[by] == deaths.get(chain.index(net.nodes[by])):
                net.nodes[by].die()

        net.on_fetched = count
        for dead in (i for i, after in deaths.items() if after == 0):
            chain[dead].die()
        buckets = [f"b{i}" for i in range(num_buckets)]
        outcomes = await sent(chain, announced(0, buckets))
        for i, node in enumerate(chain):
            if i in deaths:
                assert isinstance(outcomes[i], WorkerDied)
            else:
                assert outcomes[i] is None
                assert contents((await node.relay.newest(0))[1]) == buckets
        attempts = defaultdict(list)
        for by, source, bucket in net.fetched:
            attempts[by, bucket].append(source)
        for sources in attempts.values():
            assert all(net.is_gone(source) for source in sources[:-1])
        assert now() < TRANSFER_S, "the dead are skipped, nobody waits for a deadline"

    run_virtual(main())


class Hung(Node):
    """Alive, and answers nothing about buckets."""

    async def accept(self, version: int, rank: int, sources: Sequence[RelayPeer]) -> None:
        await asyncio.get_running_loop().create_future()

    async def give(self, bucket: str, *, wait: bool) -> object:
        return await asyncio.get_running_loop().create_future()


class Deaf(Hung):
    async def announce(self, announcement: Announcement) -> None:
        await asyncio.get_running_loop().create_future()


class Cut(Hung):
    """Behind a link that was cut after the announcement."""

    async def ping(self) -> None:
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("kind", "after_s"), [(Hung, WAIT_S), (Deaf, LOOK_S), (Cut, 2 * LOOK_S)])
def test_a_hanging_master_leaves_the_others_time_within_the_deadline(kind, after_s):
    async def main() -> None:
        net = Net()
        chain = [kind(net, "relay-0"), Node(net, "relay-1"), Node(net, "relay-2")]
        tasks = await broadcast(chain, announced(0, ["a"]), TRANSFER_S, CHAIN)
        await first_success(tasks)
        assert after_s <= now() < after_s + 0.1 * WAIT_S
        await tasks[2]
        assert now() < TRANSFER_S

    run_virtual(main())


def test_a_relay_that_hangs_is_given_up_after_one_try():
    class Hung(Node):
        async def give(self, bucket: str, *, wait: bool) -> object:
            return await asyncio.get_running_loop().create_future()

    async def main() -> None:
        net = Net()
        first, hung, last = Node(net, "relay-0"), Hung(net, "relay-1"), Node(net, "relay-2")
        assert await sent([first, hung, last], announced(0, list("abcde"))) == [None] * 3
        assert WAIT_S <= now() < 1.1 * WAIT_S, "once, not for each bucket"
        assert {source for by, source, _ in net.fetched if by == "relay-2"} == {"relay-0"}

    run_virtual(main())


def test_the_last_dead_source_is_named_and_readers_are_released():
    async def main() -> None:
        net = Net(bytes_per_s=100.0)
        (node,) = net.chain(1)
        net.nodes["actor-0"] = actor = Node(net, "actor-0")
        accepting = asyncio.create_task(sent([node], announced(4, ["a"])))
        await asyncio.sleep(1)
        reader = asyncio.create_task(node.relay.give("a", wait=True))
        actor.die()
        (error,) = await accepting
        assert isinstance(error, WorkerDied) and error.worker == "actor-0"
        with pytest.raises(WeightsMismatch, match="relay-0 while sending bucket a: it is not here"):
            await reader
        assert str(await node.relay.watch()) == str(error)

    run_virtual(main())


def test_a_bucket_damaged_in_transit_is_fetched_from_another_source():
    async def main() -> None:
        net = Net(corrupt=lambda by, source: (by, source) == ("relay-2", "relay-1"))
        chain = net.chain(3)
        assert await sent(chain, announced(0, ["a"])) == [None] * 3
        assert [source for by, source, _ in net.fetched if by == "relay-2"] == ["relay-1", "relay-0"]
        assert contents((await chain[2].relay.newest(0))[1]) == ["a"]

    run_virtual(main())


def test_damage_from_every_source_is_an_error_without_a_read():
    async def main() -> None:
        net = Net(corrupt=lambda by, source: by == "relay-1")
        chain = net.chain(2)
        outcomes = await sent(chain, announced(5, ["a"]))
        assert outcomes[0] is None
        message = "actor-0 while sending a bucket of version 5 to relay-1: bucket a arrived as damaged"
        assert str(outcomes[1]) == message
        assert str(await chain[1].relay.watch()) == message
        with pytest.raises(DeadlineExceeded, match="relay-1 while serving version 0 or newer: no answer within 15 s"):
            await chain[1].relay.newest(0)

    run_virtual(main())


# --------------------------------------------------------------------------------------------------------------- refill


def test_a_restarted_relay_is_refilled_by_neighbours_with_pinned_versions():
    async def main() -> None:
        net = Net(bytes_per_s=1000.0)
        chain = net.chain(4)
        for version in range(4):
            await sent(chain, announced(version, ["frozen", f"head-{version}"]))
            if version == 1:
                for node in chain:
                    await node.relay.pin(1)
        chain[1].die()
        chain[2].die()
        chain[2].restart()
        net.fetched.clear()
        empty = Node(net, "empty")
        await chain[2].refill([chain[1], empty, chain[0], chain[3]], NOTHING)
        assert {source for _, source, _ in net.fetched} == {"relay-0"}
        assert contents((await chain[2].relay.newest(3))[1]) == ["frozen", "head-3"]
        assert contents((await chain[2].relay.pin(1))[1]) == ["frozen", "head-1"]
        for version in range(4, 8):
            await sent(chain, announced(version, ["frozen", f"head-{version}"]))
        assert contents((await chain[2].relay.pin(1))[1]) == ["frozen", "head-1"], "what was pinned stays so"

    run_virtual(main())


def test_a_relay_restarted_during_a_broadcast_gets_the_pending_version():
    async def main() -> None:
        net = Net(bytes_per_s=1000.0)
        chain = net.chain(3)
        chain[2].die()
        sending = asyncio.create_task(sent(chain, announced(0, ["a", "b", "c"])))
        await asyncio.sleep(1.5)
        chain[2].restart()
        await chain[2].refill(chain[:2], NOTHING)
        assert contents((await chain[2].relay.newest(0))[1]) == ["a", "b", "c"]
        assert (await sending)[:2] == [None, None]

    run_virtual(main())


def test_relays_that_all_lost_their_data_refill_from_the_actor():
    async def main() -> None:
        net = Net()
        chain = net.chain(2)
        await sent(chain, announced(0, ["a"]))
        last = Holding((await chain[0].relay.arrival(0))[1], None)
        for node in chain:
            node.die()
            node.restart()
        await asyncio.gather(chain[0].refill([chain[1]], last), chain[1].refill([chain[0]], last))
        assert now() < TRANSFER_S, "they do not wait for each other"
        for node in chain:
            assert contents((await node.relay.newest(0))[1]) == ["a"]

    run_virtual(main())


def test_a_pinned_version_is_refilled_from_any_neighbour():
    async def main() -> None:
        net = Net()
        chain = first, second, _ = net.chain(3)
        for version in range(2):
            await sent(chain, announced(version, [f"w-{version}"]))
        for node in chain:
            await node.relay.pin(0)
        for node, version in ((first, 2), (second, 3)):
            node.die()
            node.restart()
            await sent([first], announced(version, [f"w-{version}"]))
        await second.refill([first, chain[2]], NOTHING)
        assert [version for version in range(4) if version in second.relay._complete] == [0, 2, 3]
        assert contents((await second.relay.pin(0))[1]) == ["w-0"]

    run_virtual(main())


def test_requests_are_retried_while_relays_restart_until_the_deadline():
    answers: list[Exception | str] = [
        WorkerDied("relay-0", "x", "gone"),
        DeadlineExceeded("relay-1", "x", "hangs"),
        "a",
    ]

    async def ask() -> str:
        if isinstance(answer := answers.pop(0), str):
            return answer
        raise answer

    async def never() -> None:
        raise WorkerDied("relay-0", "answering", "it restarts")

    async def refused() -> None:
        raise WeightsMismatch("relay-0", "serving version 3", "it is gone")

    async def main() -> None:
        assert await patiently(ask, 10.0, "telling") == "a"
        with pytest.raises(DeadlineExceeded, match="within 10 s; at last: relay-0 while answering"):
            await patiently(never, 10.0, "telling")
        before_s = now()
        with pytest.raises(WeightsMismatch):
            await patiently(refused, 10.0, "telling")
        assert now() == before_s

    run_virtual(main())


# -------------------------------------------------------------------------------------------------------- slow and lost


@pytest.mark.parametrize("transfer_steps", [2, 10])
def test_a_slow_relay_skips_versions_with_bounded_memory(transfer_steps):
    """A version a second, and so many seconds for one of them into the slow relay."""

    async def main() -> None:
        net = Net(bytes_per_s=1e9)
        fast, slow = net.chain(2)
        slow.relay._store = Link(Net(bytes_per_s=1000 / transfer_steps, nodes=net.nodes), "relay-1", lambda: True)
        tasks, sizes = [], []
        for version in range(200):
            tasks += await broadcast([fast, slow], announced(version, [f"w-{version}"]), TRANSFER_S, CHAIN)
            await asyncio.sleep(1)
            waiting = sum(not task.done() for task in tasks)
            sizes.append((len(slow.relay._known), len(slow.relay._buckets), waiting))
        assert max(known for known, _, _ in sizes) <= 2 + 1 + 2, "complete, under way, waiting"
        assert max(held for _, held, _ in sizes) <= 2 + 1
        assert max(waiting for _, _, waiting in sizes) <= 1 + 2
        assert (await slow.relay.newest(0))[0].version >= 199 - 2 * transfer_steps - 2
        assert all(task.exception() is None for task in tasks if task.done())

    run_virtual(main())


def test_a_slow_relay_completes_versions_of_ranks_that_are_not_in_step():
    """A version a second from each of two ranks, half a second apart, and three seconds for a part of it."""

    async def main() -> None:
        net = Net(bytes_per_s=1e9)
        fast, slow = net.chain(2)
        slow.relay._store = Link(Net(bytes_per_s=1000 / 1.5, nodes=net.nodes), "relay-1", lambda: True)
        for version in range(60):
            for rank in range(2):
                part = announced(version, [f"{version}/{rank}"], rank=rank, num_ranks=2)
                await broadcast([fast, slow], part, TRANSFER_S, CHAIN)
                await asyncio.sleep(0.5)
        assert (await slow.relay.newest(0))[0].version >= 50

    run_virtual(main())


def test_an_unsent_version_is_forgotten_once_newer_ones_arrive():
    async def main() -> None:
        (node,) = Net().chain(1)
        await node.announce(announced(0, ["a"]))
        reader = asyncio.create_task(node.relay.arrival(0))
        await sent([node], announced(1, ["b"]))
        await asyncio.sleep(1)
        assert not reader.done()
        await sent([node], announced(2, ["c"]))
        with pytest.raises(WeightsMismatch, match="receiving version 0"):
            await reader
        assert [known.version for known in (await node.holding()).announcements] == [2, 1]
        assert now() < 2

    run_virtual(main())


# --------------------------------------------------------------------------------------------------------------- memory


def test_buckets_borrowed_without_memory_are_copied_with_the_next_version():
    async def main() -> None:
        net = Net()
        has_room = False
        first, small = Node(net, "relay-0"), Node(net, "relay-1", room=lambda: has_room)
        await sent([first, small], announced(0, ["frozen", "head-0"]))
        assert {blob.owner for blob in (await small.relay.newest(0))[1]} == {"relay-0"}  # type: ignore[attr-defined]
        has_room = True
        first.die()
        await sent([small], announced(1, ["frozen", "head-1"]))
        assert {blob.owner for blob in (await small.relay.newest(1))[1]} == {"relay-1"}  # type: ignore[attr-defined]
        net.fetched.clear()
        await sent([small], announced(2, ["frozen", "head-2"]))
        assert [bucket for _, _, bucket in net.fetched] == ["head-2"]

    run_virtual(main())


def test_a_full_relay_evicts_old_versions_and_then_borrows_buckets():
    async def main() -> None:
        net = Net()

        def has_room() -> bool:
            """For two buckets: a third fits only once an older version is gone."""
            return sum(isinstance(b, Blob) and b.owner == "relay-1" for b in small.relay._buckets.values()) < 2

        first, small = Node(net, "relay-0"), Node(net, "relay-1", room=has_room)
        chain = [first, small]
        for version in (0, 1, 2):
            await sent(chain, announced(version, [f"w-{version}"]))
        with pytest.raises(WeightsMismatch, match="it holds 1, 2 by this time"):
            await small.relay.pin(0)
        assert [blob.owner for blob in (await small.relay.newest(2))[1]] == ["relay-1"]  # type: ignore[attr-defined]
        await sent(chain, announced(3, ["x", "y", "z"]))
        owners = [blob.owner for blob in (await small.relay.newest(3))[1]]  # type: ignore[attr-defined]
        assert owners == ["relay-1", "relay-0", "relay-0"]
        assert contents((await small.relay.newest(3))[1]) == ["x", "y", "z"]
        assert "no memory for copies of its own" in str(await small.relay.watch())
        assert small.relay._reports.empty()

    run_virtual(main())


# -------------------------------------------------------------------------------------------------------------- readers


def test_a_reader_waits_for_the_requested_version_or_a_newer():
    async def main() -> None:
        (node,) = Net().chain(1)
        reader = asyncio.create_task(node.relay.newest(at_least=2))
        await sent([node], announced(1, ["one"]))
        await asyncio.sleep(1)
        assert not reader.done()
        await sent([node], announced(3, ["three"]))
        manifest, refs = await reader
        assert (manifest.version, contents(refs)) == (3, ["three"])

    run_virtual(main())


def test_a_reader_never_sees_a_version_that_is_not_complete():
    async def main() -> None:
        (node,) = Net(bytes_per_s=1000.0).chain(1)
        await sent([node], announced(0, ["old"]))
        sending = asyncio.create_task(sent([node], announced(1, ["a", "b", "c"])))
        await asyncio.sleep(2.5)
        assert (await node.relay.newest(0))[0].version == 0
        await sending
        assert (await node.relay.newest(0))[0].version == 1

    run_virtual(main())


def test_successive_versions_keep_their_own_bytes():
    async def main() -> None:
        (node,) = Net().chain(1)
        held = []
        for version in range(5):
            await sent([node], announced(version, ["frozen", f"head-{version}"]))
            held.append(await node.relay.newest(version))
        assert [contents(refs) for _, refs in held] == [["frozen", f"head-{v}"] for v in range(5)]

    run_virtual(main())


def test_a_late_older_version_does_not_hide_a_newer_one():
    async def main() -> None:
        (node,) = Net().chain(1)
        for version in (4, 3):
            await sent([node], announced(version, [f"w-{version}"]))
        assert (await node.relay.newest(0))[0].version == 4

    run_virtual(main())


def test_only_the_newest_versions_and_their_buckets_are_kept():
    async def main() -> None:
        (node,) = Net().chain(1)
        for version in range(4):
            await sent([node], announced(version, ["frozen", f"head-{version}"]))
        assert sorted(node.relay._buckets) == ["frozen", "head-2", "head-3"]
        with pytest.raises(WeightsMismatch, match="receiving version 1: it holds 2, 3 by this time"):
            await node.relay.arrival(1)

    run_virtual(main())


def test_a_pinned_version_stays_until_another_is_pinned():
    async def main() -> None:
        (node,) = Net().chain(1)
        for version in range(3):
            await sent([node], announced(version, [f"w-{version}"]))
        await node.relay.pin(2)
        for version in range(3, 7):
            await sent([node], announced(version, [f"w-{version}"]))
        manifest, refs = await node.relay.pin(2)
        assert (manifest.version, contents(refs)) == (2, ["w-2"]), "a replica that is replaced meanwhile finds it too"
        assert (await node.relay.newest(0))[0].version == 6
        await node.relay.pin(6)
        await sent([node], announced(7, ["w-7"]))
        with pytest.raises(WeightsMismatch, match="relay-0 while pinning version 2: it holds 6, 7 by this time"):
            await node.relay.pin(2)

    run_virtual(main())


def test_a_pin_waits_for_its_version_to_come():
    async def main() -> None:
        (node,) = Net().chain(1)
        pin = asyncio.create_task(node.relay.pin(2))
        await sent([node], announced(1, ["one"]))
        await asyncio.sleep(1)
        assert not pin.done()
        await sent([node], announced(2, ["two"]))
        assert contents((await pin)[1]) == ["two"]

    run_virtual(main())


def test_repeating_a_version_is_ignored_and_other_bytes_are_refused():
    async def main() -> None:
        net = Net()
        (node,) = net.chain(1)
        assert await sent([node], announced(3, ["a"])) == [None]
        assert await sent([node], announced(3, ["a"])) == [None]
        assert len(net.fetched) == 1
        (error,) = await sent([node], announced(3, ["b"]))
        assert isinstance(error, WeightsMismatch)
        assert (
            str(error)
            == "relay-0 while receiving the announcement of version 3: actor-0 published it with other bytes before"
        )
        assert contents((await node.relay.newest(3))[1]) == ["a"]

    run_virtual(main())
