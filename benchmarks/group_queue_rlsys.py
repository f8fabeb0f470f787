"""The job of `benchmarks.group_queue` on rlsys: queue in the driver, streams to producers, parcels to the consumer.

Producers answer as rollouts do, and keep their payloads. The driver has
metadata and references; the consumer fetches payloads as a rank of the actor does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from benchmarks.group_queue_work import IN_FLIGHT, PRODUCERS, Load, Pace, Taken, payload, read, start_ray
from rlsys.contracts import Busy, RolledOut
from rlsys.data.task_source import TaskSource
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.task_ledger import Ledger
from rlsys.testing import tasks
from rlsys.types import Group
from tests.groups import episode
from tests.groups import group as group_of
from workers.ray.cluster import NO_MATHS
from workers.ray.remote_proxy import CallStream, Parcel, Remote, answer_in_chunks, start

DEADLINE_S = 600.0


class Producer:
    """Producer that rolls out groups."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._turn = asyncio.Lock()

    async def begin(self, load: Load) -> None:
        self._load, self._pace = load, Pace(load, self._place)

    def run(self, group_ids: list[int]) -> AsyncIterator[object]:
        return answer_in_chunks(group_ids, self._rolled_out)

    async def _rolled_out(self, group_id: int) -> tuple[tuple[float, Group], tuple]:
        async with self._turn:
            await asyncio.sleep(self._pace.left_s())
            arrays = payload(self._load.tokens, group_id)
            num_episodes, num_tokens = arrays[0].shape
            metadata = group_of(
                group_id, versions=[group_id], episodes=[episode(1.0, num_trained=num_tokens)] * num_episodes
            )
            return (time.monotonic(), metadata), arrays


class Consumer:
    """Consumer that reads groups."""

    def read(self, parcel: Parcel) -> list[float]:
        times_s = []
        for ids, logprobs in parcel.open():
            read(ids, logprobs)
            times_s.append(time.monotonic())
        return times_s


class Pipeline:
    """Driver of one load."""

    def __init__(self, load: Load, streams: list[CallStream], consumer: Remote[Consumer]) -> None:
        self._load, self._streams, self._consumer = load, streams, consumer
        ledger = Ledger(TaskSource(tasks(1), seed=0), group_size=1, seed=0)
        self._queue = GroupQueue(load.at_once, IN_FLIGHT // load.at_once - 1, 1, 0, load.groups, ledger)
        self._submitted_s: dict[int, float] = {}

    async def run(self) -> Taken:
        producers = [asyncio.create_task(self._produce()) for _ in range(self._queue.capacity)]
        group_ids, taken_s = [], []
        for version in range(self._load.groups // self._load.at_once):
            rows = await self._queue.take(version)
            taken_s += await self._consumer.call(
                Consumer.read, Parcel.of((row.group_id, row.group.payload) for row in rows)
            )
            group_ids += [row.group_id for row in rows]
            self._queue.release(rows, version + 1)
        for producer in producers:
            producer.cancel()
        return Taken.of([self._submitted_s[group_id] for group_id in group_ids], taken_s)

    async def _produce(self) -> None:
        while True:
            async with self._queue.permit() as permit:
                group = self._queue.start_rollout(permit)
                (submitted_s, episodes), payload_ref = await self._streams[group.group_id % PRODUCERS].call(
                    group.group_id
                )
                self._submitted_s[group.group_id] = submitted_s
                episodes = replace(episodes, payload=payload_ref)
                self._queue.finish_rollout(group, RolledOut(episodes, Busy("producer", submitted_s, submitted_s)))
                self._queue.score(group, episodes)
                self._queue.offer(group)


def play(loads: Sequence[Mapping]) -> list[dict]:
    """Play every load; return the fields of each `Taken`."""
    start_ray()
    return asyncio.run(_played([Load(**row) for row in loads]))


async def _played(loads: Sequence[Load]) -> list[dict]:
    actors = [start(Producer, "producer", partial(Producer, i), NO_MATHS, DEADLINE_S) for i in range(PRODUCERS)]
    consumer = start(Consumer, "consumer", Consumer, NO_MATHS, DEADLINE_S)
    streams = [
        CallStream[int, tuple[float, Group]]("producer", "rolling out", lambda s, a=actor: a.stream(Producer.run, s))
        for actor in actors
    ]
    taken = []
    for load in loads:
        await asyncio.gather(*(actor.call(Producer.begin, load) for actor in actors))
        taken.append(asdict(await Pipeline(load, streams, consumer).run()))
    return taken
