"""The job of `benchmarks.queue` on rlsys: queue in the driver, streams to producers, parcels to the consumer.

`python -m benchmarks.queue_rlsys`. Producers answer as rollouts do, and their payloads stay where they are; the driver
has metadata and references; the consumer fetches payloads as a rank of the actor does.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import count

import ray

from benchmarks.queue_work import IN_FLIGHT, PRODUCERS, Load, Pace, Taken, answer, loads_of_argv, payload, read
from rlsys.queue import StreamingQueue
from rlsys.table import EPISODES, REWARD
from rlsys.types import Acknowledged, EpisodeMeta, Group, Outcome, OutcomeKind, SampleMeta, TrajectoryMeta, VersionSpan
from workers.cluster import NO_MATHS
from workers.remote_proxy import Remote, start
from workers.streams import CallStream, Parcel, answer_in_chunks

DEADLINE_S = 600.0


class Producer:
    """Rolls out groups."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._turn = asyncio.Lock()

    async def begin(self, load: Load) -> None:
        self._load, self._pace = load, Pace(load, self._place)

    def run(self, serials: list[int]) -> AsyncIterator[object]:
        return answer_in_chunks(serials, self._rolled_out)

    async def _rolled_out(self, serial: int) -> tuple[tuple[float, Group], tuple]:
        async with self._turn:
            await asyncio.sleep(self._pace.left_s())
            arrays = payload(self._load.tokens, serial)
            return (time.monotonic(), _metadata(serial, *arrays[0].shape)), arrays


class Consumer:
    """Reads groups."""

    def read(self, parcel: Parcel) -> list[float]:
        times_s = []
        for ids, logprobs in parcel.open():
            read(ids, logprobs)
            times_s.append(time.monotonic())
        return times_s


class Pipeline:
    """The driver's side of one load."""

    def __init__(self, load: Load, streams: list[CallStream], consumer: Remote[Consumer]) -> None:
        self._load, self._streams, self._consumer = load, streams, consumer
        self._queue = StreamingQueue(load.at_once, IN_FLIGHT // load.at_once - 1, 1, 0, load.groups)
        self._serials = count()
        self._submitted_s: dict[int, float] = {}

    async def run(self) -> Taken:
        producers = [asyncio.create_task(self._produce()) for _ in range(self._queue.capacity)]
        serials, taken_s = [], []
        for version in range(self._load.groups // self._load.at_once):
            rows = await self._queue.take(version=version, on_stale=_never)
            taken_s += await self._consumer.call(
                Consumer.read, Parcel.of((row.serial, row.group.payload) for row in rows)
            )
            serials += [row.serial for row in rows]
            self._queue.release(rows, version + 1)
        for producer in producers:
            producer.cancel()
        return Taken.of([self._submitted_s[serial] for serial in serials], taken_s)

    async def _produce(self) -> None:
        while True:
            async with self._queue.permit() as permit:
                serial = next(self._serials)
                permit.open(serial)
                (submitted_s, group), payload_ref = await self._streams[serial % PRODUCERS].call(serial)
                self._submitted_s[serial] = submitted_s
                group = _with_payload(group, payload_ref)
                permit.put(EPISODES, group)
                permit.put(REWARD, group)


def _metadata(serial: int, num_episodes: int, num_tokens: int) -> Group:
    sample = SampleMeta(0, num_tokens, num_tokens, 0)
    episode = EpisodeMeta((TrajectoryMeta("policy", None, Outcome(OutcomeKind.OK), 1.0, (sample,)),))
    return Group(
        serial=serial,
        task_id=f"task-{serial}",
        permit_version=serial,
        replica="rollout-0",
        episodes=(episode,) * num_episodes,
        versions=(VersionSpan(serial, num_episodes * num_tokens),),
        weights=(Acknowledged("rollout-0", serial, "hash"),),
        payload=None,
    )


def _with_payload(group: Group, payload_ref: object) -> Group:
    return Group(**{**vars(group), "payload": payload_ref})


def _never(group: Group) -> None:
    raise AssertionError(f"group {group.serial} is stale")


async def play(loads: list[Load]) -> list[Taken]:
    """Play every load."""
    actors = [start(Producer, "producer", partial(Producer, i), NO_MATHS, DEADLINE_S) for i in range(PRODUCERS)]
    consumer = start(Consumer, "consumer", Consumer, NO_MATHS, DEADLINE_S)
    streams = [
        CallStream[int, tuple[float, Group]]("producer", "rolling out", lambda s, a=actor: a.stream(Producer.run, s))
        for actor in actors
    ]
    taken = []
    for load in loads:
        await asyncio.gather(*(actor.call(Producer.begin, load) for actor in actors))
        taken.append(await Pipeline(load, streams, consumer).run())
    return taken


def main() -> int:
    """Start Ray, play, answer."""
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    answer(asyncio.run(play(loads_of_argv())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
