"""The job of `benchmarks.queue` on `ray.util.queue.Queue`, payloads through it: `python -m benchmarks.queue_ray`."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.util.queue import Empty, Queue

from benchmarks.queue_work import IN_FLIGHT, PRODUCERS, Load, Pace, Taken, answer, loads_of_argv, payload, read


class Producer:
    """Puts groups."""

    def __init__(self, queue: Queue, place: int) -> None:
        self._queue, self._place = queue, place

    def run(self, load: Load) -> None:
        pace = Pace(load, self._place)
        for i in range(load.groups // PRODUCERS):
            time.sleep(pace.left_s())
            arrays = payload(load.tokens, i)
            self._queue.put((time.monotonic(), *arrays))


class Consumer:
    """Gets groups."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def run(self, load: Load) -> Taken:
        submitted_s, taken_s = [], []
        while len(taken_s) < load.groups:
            for at_s, ids, logprobs in self._some(load.at_once):
                read(ids, logprobs)
                submitted_s.append(at_s)
                taken_s.append(time.monotonic())
        return Taken.of(submitted_s, taken_s)

    def _some(self, at_once: int) -> list:
        """A batch if it is there, else the next one: the fewest calls."""
        if at_once > 1:
            try:
                return self._queue.get_nowait_batch(at_once)
            except Empty:
                pass
        return [self._queue.get()]


def main() -> None:
    """Play every load."""
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    queue = Queue(maxsize=IN_FLIGHT, actor_options={"num_cpus": 0})
    producers: list[Any] = [ray.remote(Producer).options(num_cpus=0).remote(queue, place) for place in range(PRODUCERS)]
    consumer: Any = ray.remote(Consumer).options(num_cpus=0).remote(queue)
    taken = []
    for load in loads_of_argv():
        work = [producer.run.remote(load) for producer in producers]
        taken.append(ray.get(consumer.run.remote(load)))
        ray.get(work)
    answer(taken)


if __name__ == "__main__":
    main()
