"""Weights on their way: the trainer's stall for a publish, and the delay until every replica computes with them.

    python -m benchmarks.relay [--quick | --short] [--megabytes 270]

A local cluster of raylets, one relay and one replica on each. One or two ranks of a trainer on the first, with float32
parameters of a transformer's shapes, publish them as bfloat16 (10 MB, 270 MB, 1 GB) with the publisher of a run. A
replica copies what it pulls into parameters of its own, and compares their checksums with those that were published.
Every figure is the median of repeats; each repeat is one publish of weights that have all changed.

`stall_ms`         the rank is blocked: in the publish, and after a forward and backward beside which the weights are
                   copied. `copy_ms`: the same where no forward and backward is between them.
`slowdown_ms`      so much longer the forward and backward take than without a publish beside them.
`memcpy_ms`        one copy of as many bytes as the rank publishes, in its process right before.
`all_relays_ms`    from the publish until every relay holds the version.
`freshness_ms`     until every replica computes with it, and has compared the checksums.
`transport`        `shared_memory`, which a run chooses where all nodes are on one machine, as here; `object_store` is
                   that of several machines. `sent_share` is the share of the bytes that it sends to another node.
`left_out`         rows for which this machine lacks memory.

Of the whole: `stall_over_memcpy` is the worst row of one rank at 270 MB and above, `stall_2_over_1` the stall of two
ranks over that of one at 270 MB and above (worst), `freshness_s` that of 1 GB on 4 nodes, `hop_s` and `bytes_per_s` of
a link are those that relays measure in the object store, for `rlsys simulate`. All nodes are on this machine and share
its cores and memory bandwidth. So the time of `object_store` grows with the number of nodes, unlike between machines.
`deltas` has what deltas save between machines, see `benchmarks.weight_deltas`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial
from math import inf
from statistics import median

import ray
import torch
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from torch import Tensor

from benchmarks.measure import in_fresh_process, parser_of, print_result, progress, raylets, spreads
from rlsys.weight_sync.manifest import Rectangle, TensorSpec
from rlsys.weight_sync.relay import Relay
from workers.ray.cluster import NO_MATHS, Resources
from workers.ray.worker_process import start
from workers.relay.relay_pool import RayRelays
from workers.transport.checksums import hash_of
from workers.transport.publisher import WeightPublisher
from workers.transport.puller import WeightPuller
from workers.transport.route import Route, TransportSpec
from workers.transport.transport import TransportName

MEGABYTE = 10**6
SIZES = (10, 270, 1000)
"""Megabytes that are published."""
LAYOUTS: tuple[tuple[TransportName, int, int], ...] = (
    ("shared_memory", 1, 1),
    ("shared_memory", 4, 1),
    ("shared_memory", 4, 2),
    ("object_store", 1, 1),
    ("object_store", 2, 1),
    ("object_store", 4, 1),
    ("object_store", 4, 2),
)
"""Transport, nodes and ranks."""
WORST_FROM = 270
TENSORS_PER_LAYER = 7
NUM_LAYERS = 30
NUM_COLUMNS = 1024
DEADLINE_S = 300.0
KEEP = 1
"""Versions that a relay keeps, so that 1 GB on 4 relays fits a machine of 24 GB."""
ROOM = 0.75
"""Share of the machine's memory for weights; the rest is for processes."""
COMPUTED = 6
"""Copies that a forward and backward take as long as, at the least: a step is longer."""


class Trainer:
    """Process of one rank: its rows of every parameter, and the publisher of a run."""

    def __init__(self, rank: int, num_ranks: int, num_bytes: int, route: Route) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._publisher = WeightPublisher(route)
        rows = num_bytes // 2 // (NUM_LAYERS * TENSORS_PER_LAYER) // NUM_COLUMNS // num_ranks
        shape = (rows * num_ranks, NUM_COLUMNS)
        names = [f"layers.{i:02}.{j}" for i in range(NUM_LAYERS) for j in range(TENSORS_PER_LAYER)]
        self._shards: dict[str, tuple[Rectangle, Tensor]] = {
            name: (
                Rectangle(TensorSpec(name, "bfloat16", shape), (rank * rows, 0), (rows, NUM_COLUMNS)),
                torch.randn(rows, NUM_COLUMNS),
            )
            for name in names
        }
        self._source = torch.randn(sum(r.num_bytes for r, _ in self._shards.values()) // 4)
        self._target = torch.ones_like(self._source)
        self._matrix = torch.randn(512, 512)

    def publish(self, version: int, num_products: int) -> tuple[float, float, float, float, float]:
        """Change all parameters and publish them, beside a forward and backward of `num_products` products.

        Returns the seconds of one copy of the same bytes, of the computation alone and beside the publish, and for
        which the publish blocked it; and its beginning by the wall clock, which all processes of this machine share.
        """
        for _, shard in self._shards.values():
            shard.add_(1.0)
        self._publisher.announce_again(-1)  # returns once the version before is with the relays
        began_s = time.monotonic()
        self._target.copy_(self._source)
        copied_s = time.monotonic()
        self._compute(num_products)
        computed_s = time.monotonic()
        start_s = time.time()
        rectangles = [rectangle for rectangle, _ in self._shards.values()]
        self._publisher.publish(version, self._shards, rectangles, rank=self._rank, num_ranks=self._num_ranks)
        published_s = time.monotonic()
        self._compute(num_products)
        beside_s = time.monotonic() - published_s
        self._publisher.wait_copied()
        stall_s = time.monotonic() - computed_s - beside_s
        return copied_s - began_s, computed_s - copied_s, beside_s, stall_s, start_s

    def products_of(self, copies: int) -> int:
        """Number of products that take as long as this many copies."""
        began_s = time.monotonic()
        self._target.copy_(self._source)
        self._target.copy_(self._source)
        copied_s = time.monotonic()
        self._compute(20)
        return 1 + int(10 * copies * (copied_s - began_s) / (time.monotonic() - copied_s))

    def _compute(self, num_products: int) -> None:
        for _ in range(num_products):
            self._matrix @ self._matrix


class Replica:
    """Process that pulls and loads as a rollout does."""

    def __init__(self, route: Route) -> None:
        self._puller = WeightPuller(route)
        self._parameters: dict[str, Tensor] = {}

    async def pull(self, version: int) -> float:
        """Compute with `version`; return the wall-clock time at which that is proved."""
        manifest, weights = await self._puller.pull(version)
        for name, tensor in weights.items():
            if name not in self._parameters:
                self._parameters[name] = torch.empty_like(tensor)
            self._parameters[name].copy_(tensor)
        assert hash_of(self._parameters) == manifest.hash
        return time.time()


class Tier:
    """Relays, ranks of a trainer, and a replica on each node."""

    def __init__(self, num_bytes: int, transport: TransportName, num_ranks: int) -> None:
        self.relays = RayRelays.start(DEADLINE_S, Relay, KEEP, transport=TransportSpec(transport))
        route, members = self.relays.route, self.relays.members
        self.trainers = [
            start(
                Trainer, f"actor-{rank}", partial(Trainer, rank, num_ranks, num_bytes, route), Resources(1), DEADLINE_S,
                place=members[0].place,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self.replicas = [
            start(Replica, "rollout", partial(Replica, route), NO_MATHS, inf, place=member.place) for member in members
        ]

    async def publishes(self, repeats: int) -> list[dict[str, float]]:
        """Publish several times; return the figures of each publish but the first two, which allocate memory."""
        num_products = await self.trainers[0].call(Trainer.products_of, COMPUTED)
        rows = []
        for version in range(repeats + 2):
            rows.append(await self._publish(2 * version, num_products))
            at_once = await self._publish(2 * version + 1, 0)
            rows[-1]["copy_ms"] = at_once["stall_ms"]
            progress(len(self.replicas), "nodes", len(self.trainers), "ranks", rows[-1])
        return rows[2:]

    async def _publish(self, version: int, num_products: int) -> dict[str, float]:
        pulls = [asyncio.ensure_future(replica.call(Replica.pull, version)) for replica in self.replicas]
        holds = [asyncio.create_task(self._holds(i, version)) for i in range(len(self.relays.members))]
        told = await asyncio.gather(*(t.call(Trainer.publish, version, num_products) for t in self.trainers))
        held_s, pulled_s = await asyncio.gather(*holds), await asyncio.gather(*pulls)
        arrival = await self.relays.arrival(version)
        began_s = max(start_s for *_, start_s in told)
        stall_s = max(each_s for *_, each_s, _ in told)
        slowdown_s = max(beside_s - alone_s for _, alone_s, beside_s, *_ in told)
        memcpy_s = max(copy_s for copy_s, *_ in told)
        links = [(await member.proxy.holding()).link for member in self.relays.members]
        measured = [link.bytes_per_s for link in links if link.is_measured]
        return {
            "stall_ms": 1e3 * stall_s,
            "memcpy_ms": 1e3 * memcpy_s,
            "stall_over_memcpy": stall_s / memcpy_s,
            "slowdown_ms": 1e3 * slowdown_s,
            "all_relays_ms": 1e3 * (max(held_s) - began_s),
            "freshness_ms": 1e3 * (max(pulled_s) - began_s),
            "sent_share": arrival.num_sent / arrival.num_bytes,
            "link_mb_per_s": median(measured) / 1e6 if measured else 0.0,
        }

    async def _holds(self, place: int, version: int) -> float:
        await self.relays.members[place].proxy.arrival(version)
        return time.time()

    def close(self) -> None:
        self.relays.close()
        for process in [*self.trainers, *self.replicas]:
            process.kill()


def main() -> None:
    """Measure, and print the result line."""
    parser = parser_of(__doc__, quick="10 MB only")
    parser.add_argument("--megabytes", type=int, help="this size only")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    is_short = arguments.size == "short"
    sizes = SIZES if arguments.size == "full" else SIZES[:1]
    sizes = (arguments.megabytes,) if arguments.megabytes else sizes
    layouts = (LAYOUTS[0],) if is_short else LAYOUTS
    repeats = 1 if is_short else arguments.repeats
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    enable_token_auth_by_default()
    asked = [(size, *layout) for size in sizes for layout in layouts]
    rows = [measured(*case, repeats) for case in asked if fits(*case)]
    print_result(
        {
            "stall_over_memcpy": max((row["stall_over_memcpy"]["median"] for row in large(rows, 1)), default=None),
            "stall_2_over_1": max(stalls_over(rows), default=None),
            "freshness_s": next(
                (
                    row["freshness_ms"]["median"] / 1e3
                    for row in rows
                    if (row["megabytes"], row["transport"], row["nodes"], row["ranks"]) == (1000, "shared_memory", 4, 1)
                ),
                None,
            ),
            "left_out": [" ".join(map(str, case)) for case in asked if not fits(*case)],
            "deltas": in_fresh_process("benchmarks.weight_deltas:after_steps", arguments.size),
            "rows": rows,
        }
    )


def large(rows: Sequence[dict], num_ranks: int) -> list[dict]:
    """Rows of at least 270 MB and this many ranks."""
    return [row for row in rows if row["megabytes"] >= WORST_FROM and row["ranks"] == num_ranks]


def stalls_over(rows: Sequence[dict]) -> list[float]:
    """Time to copy the weights of two ranks over that of one, for each size, transport and number of nodes."""
    one = {(r["megabytes"], r["transport"], r["nodes"]): r["copy_ms"]["median"] for r in large(rows, 1)}
    two = {(r["megabytes"], r["transport"], r["nodes"]): r["copy_ms"]["median"] for r in large(rows, 2)}
    return [two[case] / one[case] for case in two.keys() & one.keys()]


def fits(megabytes: int, transport: TransportName, nodes: int, ranks: int) -> bool:
    """True if this machine has the memory."""
    versions = 4 if transport == "shared_memory" else 2.4 * nodes  # in all, or in the object store of each node
    needed = (2.6 * ranks + 1.6 * nodes + versions) * megabytes * MEGABYTE  # parameters and a copy, replicas, versions
    return needed <= ROOM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measured(megabytes: int, transport: TransportName, nodes: int, ranks: int, repeats: int) -> dict:
    """Measure one row."""
    num_bytes = megabytes * MEGABYTE
    versions = 0 if transport == "shared_memory" else 2 * num_bytes
    with raylets(nodes, 2, versions + max(100 * MEGABYTE, num_bytes // 3)) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        tier = Tier(num_bytes, transport, ranks)
        try:
            publishes = asyncio.run(tier.publishes(repeats))
        finally:
            tier.close()
    figures = spreads([{name: round(value, 4) for name, value in publish.items()} for publish in publishes])
    return {"megabytes": megabytes, "transport": transport, "nodes": nodes, "ranks": ranks, **figures}


if __name__ == "__main__":
    main()
