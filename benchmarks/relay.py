"""Relay tier: the trainer's stall for a publish, and the delay until every node has the new weights.

    python -m benchmarks.relay [--quick | --short] [--megabytes 270]

A local cluster of raylets, one relay and one rollout reader on each, at 1, 2, 4 and 8 of them. A trainer's process on
the first, with float32 parameters of a transformer's shapes, publishes them as bfloat16 (10 MB, 270 MB, 1 GB) with the
publisher of a run. Every figure is the median of repeats; every row follows one publish:

`stall_ms`         the trainer waits: cast and copy into the host buffer. One copy of the published bytes, in the same
                   process right before, is `memcpy_ms`; `stall_over_memcpy` compares the two of each repeat.
`all_relays_ms`    from the end of the publish until every relay holds the version.
`all_readers_ms`   until a reader on every node, which pulls continuously, has the tensors.
`changed`          share of the tensors that differ from the previous version: all, or 1 %; `sent_share` is that of the
                   transferred bytes.
`left_out`         rows for which this machine lacks memory: the current and the next version, at every node.

All nodes have one address, so nothing is sent as a delta; `deltas` has what those save, see `benchmarks.weight_deltas`.
`stall_over_memcpy` of the whole is the worst row at 270 MB and above. `flatness` is, for each size, the largest stall
over the smallest, over the number of relays. All nodes are on this machine and share its cores and memory bandwidth. So
the time until all relays hold a version grows with their number, unlike between machines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import inf

import ray
import torch
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from torch import Tensor

from benchmarks.measure import in_fresh_process, parser_of, print_result, progress, raylets, spreads
from rlsys.weight_sync.relay import Relay
from rlsys.weight_sync.sync import TensorSpec
from workers.ray.cluster import NO_MATHS, Resources
from workers.ray.remote_proxy import Remote, start
from workers.relay.relay_pool import RayRelays
from workers.transport.object_store import ObjectStorePublisher, ObjectStorePuller

MEGABYTE = 10**6
SIZES = (10, 270, 1000)
"""Megabytes that are published."""
NUM_RELAYS = (1, 2, 4, 8)
WORST_FROM = 270
TENSORS_PER_LAYER = 7
NUM_LAYERS = 30
DEADLINE_S = 300.0
KEEP = 1
"""Versions that a relay keeps, so that 1 GB on 8 relays fits a machine of 24 GB."""
ROOM = 0.6
"""Share of the machine's memory for versions at all nodes; the rest is for processes and the trainer."""


class Trainer:
    """Trainer process: parameters, and the publisher of a run."""

    def __init__(self, num_bytes: int, relays: list[Remote[Relay]]) -> None:
        self._publisher = ObjectStorePublisher(relays, DEADLINE_S)
        size = num_bytes // 2 // (NUM_LAYERS * TENSORS_PER_LAYER)
        names = [f"layers.{i:02}.{j}" for i in range(NUM_LAYERS) for j in range(TENSORS_PER_LAYER)]
        flat = torch.randn(size * len(names))
        self._parameters: dict[str, Tensor] = dict(zip(names, flat.split(size), strict=True))
        self._specs = [TensorSpec(name, "bfloat16", (size,)) for name in names]
        self._source = flat[: len(flat) // 2]  # as many bytes as are published
        self._target = torch.ones_like(self._source)

    def warm(self) -> None:
        """Write into the host buffer once, to allocate its memory before the first publish."""
        for name, tensor in self._publisher.begin(self._specs).items():
            tensor.copy_(self._parameters[name])

    def publish(self, version: int, changed: float) -> tuple[float, float, float]:
        """Change this share of the parameters, and publish all.

        Returns the seconds of the stall and of one copy of the same bytes, and the end of the publish by the wall
        clock, which all processes of this machine share.
        """
        for name in list(self._parameters)[: max(1, round(changed * len(self._parameters)))]:
            self._parameters[name].add_(1.0)
        began_s = time.monotonic()
        self._target.copy_(self._source)
        start_s = time.monotonic()
        for name, tensor in self._publisher.begin(self._specs).items():
            tensor.copy_(self._parameters[name])
        receipt = self._publisher.publish(version, None, start_s)
        return receipt.stall_s, start_s - began_s, time.time()


class Reader:
    """Reader process, which pulls as a rollout does."""

    def __init__(self, relays: list[Remote[Relay]]) -> None:
        self._puller = ObjectStorePuller(relays, DEADLINE_S)

    async def pull(self, version: int) -> float:
        """Pull `version`; return the wall-clock time at which all its tensors arrived."""
        await self._puller.pull(version)
        return time.time()


class Tier:
    """Relays, a trainer and a reader on each node."""

    def __init__(self, num_bytes: int) -> None:
        self.relays = RayRelays.start(DEADLINE_S, Relay, KEEP)
        members = self.relays.members
        build = partial(Trainer, num_bytes, members)
        self.trainer = start(Trainer, "trainer", build, Resources(1), DEADLINE_S, place=members[0].place)
        read = partial(Reader, members)
        self.readers = [start(Reader, "reader", read, NO_MATHS, inf, place=member.place) for member in members]

    async def publishes(self, schedule: Sequence[float]) -> list[dict[str, float]]:
        """Publish once for each share of changed tensors; return the figures of each publish but the first, which
        stores the data that later ones replace."""
        await self.trainer.call(Trainer.warm)
        rows = []
        for version, changed in enumerate((1.0, *schedule)):
            rows.append(await self._publish(version, changed))
            progress(len(self.readers), "relays", changed, rows[-1])
        return rows[1:]

    async def _publish(self, version: int, changed: float) -> dict[str, float]:
        reads = [asyncio.ensure_future(r.call(Reader.pull, version)) for r in self.readers]
        holds = [asyncio.create_task(self._holds(member, version)) for member in self.relays.members]
        stall_s, memcpy_s, ended_s = await self.trainer.call(Trainer.publish, version, changed)
        held_s, read_s = await asyncio.gather(*holds), await asyncio.gather(*reads)
        arrival = await self.relays.arrival(version)
        return {
            "stall_ms": 1e3 * stall_s,
            "memcpy_ms": 1e3 * memcpy_s,
            "stall_over_memcpy": stall_s / memcpy_s,
            "all_relays_ms": 1e3 * (max(held_s) - ended_s),
            "all_readers_ms": 1e3 * (max(read_s) - ended_s),
            "sent_share": arrival.num_sent / arrival.num_bytes,
        }

    async def _holds(self, member: Remote[Relay], version: int) -> float:
        await member.proxy.arrival(version)
        return time.time()

    def close(self) -> None:
        self.relays.close()
        for process in [self.trainer, *self.readers]:
            process.kill()


def main() -> None:
    """Measure, and print the result line."""
    parser = parser_of(__doc__, quick="10 MB only")
    parser.add_argument("--megabytes", type=int, help="this size only")
    parser.add_argument("--relays", type=int, help="this number of relays only")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    is_short = arguments.size == "short"
    sizes = SIZES if arguments.size == "full" else SIZES[:1]
    sizes = (arguments.megabytes,) if arguments.megabytes else sizes
    numbers = (arguments.relays,) if arguments.relays else NUM_RELAYS[:1] if is_short else NUM_RELAYS
    repeats = 1 if is_short else arguments.repeats
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    enable_token_auth_by_default()
    asked = [(size, n) for size in sizes for n in numbers]
    rows = [row for size, n in asked if fits(size, n) for row in measured(size, n, repeats)]
    full = [row for row in rows if row["changed"] == 1.0]
    stalls_ms: dict[int, list[float]] = defaultdict(list)
    for row in full:
        stalls_ms[row["megabytes"]].append(row["stall_ms"]["median"])
    large = (row["stall_over_memcpy"]["median"] for row in full if row["megabytes"] >= WORST_FROM)
    print_result(
        {
            "stall_over_memcpy": max(large, default=None),
            "flatness": {size: round(max(stalls) / min(stalls), 3) for size, stalls in stalls_ms.items()},
            "left_out": [f"{size} MB, {n} relays" for size, n in asked if not fits(size, n)],
            "deltas": in_fresh_process("benchmarks.weight_deltas:after_steps", arguments.size),
            "rows": rows,
        }
    )


def fits(megabytes: int, num_relays: int) -> bool:
    """True if this machine has the memory for `num_relays` nodes."""
    return 2 * num_relays * megabytes * MEGABYTE <= ROOM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measured(megabytes: int, num_relays: int, repeats: int) -> list[dict]:
    """Measure two rows: everything changed, and 1 %."""
    num_bytes = megabytes * MEGABYTE
    memory = 2 * num_bytes + max(100 * MEGABYTE, num_bytes // 3)  # two versions, and buckets in transit
    with raylets(num_relays, 2, memory) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        tier = Tier(num_bytes)
        try:
            publishes = asyncio.run(tier.publishes([1.0] * repeats + [0.01] * repeats))
        finally:
            tier.close()
    rows = [{name: round(value, 4) for name, value in publish.items()} for publish in publishes]
    return [
        {"megabytes": megabytes, "relays": num_relays, "changed": changed, **spreads(half)}
        for changed, half in ((1.0, rows[:repeats]), (0.01, rows[repeats:]))
    ]


if __name__ == "__main__":
    main()
