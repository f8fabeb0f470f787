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

import ray

from benchmarks.queue_work import IN_FLIGHT, PRODUCERS, Load, Pace, Taken, answer, loads_of_argv, payload, read
from rlsys.contracts import Busy, RolledOut
from rlsys.data.source import TaskSource
from rlsys.group_queue import GroupQueue
from rlsys.ledger import Ledger
from rlsys.types import (
    Acknowledged,
    EpisodeMeta,
    Group,
    Outcome,
    OutcomeKind,
    SampleMeta,
    Task,
    TrajectoryMeta,
    VersionSpan,
)
from workers.cluster import RayActor, Resources, spawn
from workers.streams import CallStream, Parcel, answer_in_chunks


class Producer:
    """Rolls out groups."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._turn = asyncio.Lock()

    async def begin(self, load: Load) -> None:
        self._load, self._pace = load, Pace(load, self._place)

    async def run(self, serials: list[int]) -> AsyncIterator[object]:
        async for part in answer_in_chunks(serials, self._rolled_out):
            yield part

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

    def __init__(self, load: Load, streams: list[CallStream], consumer: RayActor) -> None:
        self._load, self._streams, self._consumer = load, streams, consumer
        ledger = Ledger(TaskSource([Task(id="task", prompt="a task")], seed=0), group_size=1, seed=0)
        self._queue = GroupQueue(load.at_once, IN_FLIGHT // load.at_once - 1, 1, 0, load.groups, ledger)
        self._submitted_s: dict[int, float] = {}

    async def run(self) -> Taken:
        producers = [asyncio.create_task(self._produce()) for _ in range(self._queue.capacity)]
        serials, taken_s = [], []
        for version in range(self._load.groups // self._load.at_once):
            groups = await self._queue.take(version)
            taken_s += await self._consumer.read.remote(Parcel.of((each.serial, each.group.payload) for each in groups))
            serials += [each.serial for each in groups]
            self._queue.release(groups, version + 1)
        assert not self._queue.dropped
        for producer in producers:
            producer.cancel()
        return Taken.of([self._submitted_s[serial] for serial in serials], taken_s)

    async def _produce(self) -> None:
        while True:
            async with self._queue.permit() as permit:
                issued = self._queue.start_rollout(permit)
                serial = issued.serial
                (submitted_s, group), payload_ref = await self._streams[serial % PRODUCERS].call(serial)
                self._submitted_s[serial] = submitted_s
                group = _with_payload(group, payload_ref)
                self._queue.finish_rollout(issued, RolledOut(group, Busy("rollout-0", 0.0, 0.0)))
                self._queue.score(issued, group)
                self._queue.offer(issued)


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


async def play(loads: list[Load]) -> list[Taken]:
    """Play every load."""
    actors = [spawn(Producer, Resources(num_cpus=0.0), place) for place in range(PRODUCERS)]
    consumer = spawn(Consumer, Resources(num_cpus=0.0))
    streams = [CallStream("producer", "rolling out", lambda s, a=actor: a.run.remote(s)) for actor in actors]
    taken = []
    for load in loads:
        await asyncio.gather(*(actor.begin.remote(load) for actor in actors))
        taken.append(await Pipeline(load, streams, consumer).run())
    return taken


def main() -> int:
    """Start Ray, play, answer."""
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    answer(asyncio.run(play(loads_of_argv())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
