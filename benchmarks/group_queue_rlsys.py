"""The job of `benchmarks.group_queue` on rlsys: queue in the driver, streams to producers, parcels to the consumer.

Producers answer as rollouts do, and keep their payloads. The driver has metadata and references; the consumer fetches
payloads as a rank of the actor does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.group_queue import IN_FLIGHT, PRODUCERS, Load, Taken, payload, read, taken_of, waits_s
from rlsys.types import Busy, Group, RolloutReport
from tests.groups import episode, group, queue_of
from workers.ray.call_stream import CallStream, Parcel, answer_in_chunks
from workers.ray.cluster import NO_MATHS, connect
from workers.ray.worker_process import Remote, start

DEADLINE_S = 600.0


class Producer:
    """Producer that rolls out groups."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._turn = asyncio.Lock()

    async def begin(self, load: Load) -> None:
        self._load, self._waits_s = load, waits_s(load, self._place)

    def run(self, group_ids: list[int]) -> AsyncIterator[object]:
        return answer_in_chunks(group_ids, self._rolled_out)

    async def _rolled_out(self, group_id: int) -> tuple[tuple[float, Group], tuple]:
        async with self._turn:
            await asyncio.sleep(next(self._waits_s))
            arrays = payload(self._load.tokens, group_id)
            num_episodes, num_tokens = arrays[0].shape
            episodes = [episode(1.0, num_trained=num_tokens)] * num_episodes
            return (time.monotonic(), group(group_id, versions=[group_id], episodes=episodes)), arrays


class Consumer:
    """Consumer that reads groups."""

    def read(self, parcel: Parcel) -> list[float]:
        times_s = []
        for ids, logprobs in parcel.open():
            read(ids, logprobs)
            times_s.append(time.monotonic())
        return times_s


def play(loads: Sequence[Mapping]) -> list[Taken]:
    """Play every load."""
    connect(None, 4)
    return asyncio.run(_played([Load(**row) for row in loads]))


async def _played(loads: Sequence[Load]) -> list[Taken]:
    actors = [start(Producer, "producer", partial(Producer, i), NO_MATHS, DEADLINE_S) for i in range(PRODUCERS)]
    consumer = start(Consumer, "consumer", Consumer, NO_MATHS, DEADLINE_S)
    streams = [
        CallStream[int, tuple[float, Group]]("producer", "rolling out", lambda s, a=actor: a.stream(Producer.run, s))
        for actor in actors
    ]
    taken = []
    for load in loads:
        await asyncio.gather(*(actor.call(Producer.begin, load) for actor in actors))
        taken.append(await _drive(load, streams, consumer))
    return taken


async def _drive(load: Load, streams: list[CallStream], consumer: Remote[Consumer]) -> Taken:
    """Do the driver's work for one load."""
    queue = queue_of(load.at_once, IN_FLIGHT // load.at_once - 1, num_groups=load.groups, num_tasks=1)
    submitted_s: dict[int, float] = {}

    async def produce() -> None:
        while True:
            async with queue.permit() as permit:
                in_flight = queue.start_rollout(permit)
                group_id = in_flight.group_id
                (at_s, metadata), payload_ref = await streams[group_id % PRODUCERS].call(group_id)
                submitted_s[group_id] = at_s
                done = replace(metadata, payload=payload_ref)
                queue.finish_rollout(in_flight, replace(done, report=RolloutReport(Busy("producer", at_s, at_s))))
                queue.score(in_flight, done)
                queue.offer(in_flight)

    producers = [asyncio.create_task(produce()) for _ in range(queue.bound.capacity)]
    group_ids, taken_s = [], []
    for version in range(load.groups // load.at_once):
        rows = await queue.take(version)
        parcel = Parcel.of((row.group_id, row.group.payload) for row in rows)
        taken_s += await consumer.call(Consumer.read, parcel)
        group_ids += [row.group_id for row in rows]
        queue.release(rows, version + 1)
    for producer in producers:
        producer.cancel()
    return taken_of([submitted_s[group_id] for group_id in group_ids], taken_s)
