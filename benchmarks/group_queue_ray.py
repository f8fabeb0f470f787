"""The job of `benchmarks.group_queue` on `ray.util.queue.Queue`, payloads through it.

`python -m benchmarks.group_queue_ray LOADS`.
"""

from __future__ import annotations

import numpy as np
from ray.util.queue import Empty, Queue

from benchmarks import group_queue_work as work


class Producer(work.Producer):
    """Producer that puts groups."""

    def __init__(self, queue: Queue, place: int) -> None:
        super().__init__(place)
        self._queue = queue

    def put(self, name: str, submitted_s: float, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._queue.put((submitted_s, ids, logprobs))


class Consumer(work.Consumer):
    """Consumer that gets groups."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def take(self, name: str, at_once: int) -> list:
        """Take a batch if available, else the next group: the fewest calls."""
        if at_once > 1:
            try:
                return self._queue.get_nowait_batch(at_once)
            except Empty:
                pass
        return [self._queue.get()]


if __name__ == "__main__":
    work.start_ray()
    work.play(Producer, Consumer, Queue(maxsize=work.IN_FLIGHT, actor_options={"num_cpus": 0}))
