"""The job of `benchmarks.queue` on TransferQueue, in the environment made for it: no rlsys here.

`python -m benchmarks.queue_transferqueue`. Its low-level client, as its tutorials use it: put, get_meta, get_data,
clear_samples. Its controller polls: where it may block, it sleeps five seconds whenever a batch is not complete.
"""

# pyright: reportMissingImports=false, reportFunctionMemberAccess=false

from __future__ import annotations

import logging
import time

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.queue_work import EPISODES, PRODUCERS, Load, Pace, Taken, answer, loads_of_argv, payload, read

POLL_S = 0.0005
"""Between two questions of the consumer, if there was nothing for it."""
FIELDS = ["ids", "logprobs", "submitted_s"]


class Producer:
    """Puts groups."""

    def __init__(self, place: int) -> None:
        tq.init()
        self._client, self._place = tq.get_client(), place

    def run(self, load: Load, partition: str) -> None:
        pace = Pace(load, self._place)
        for i in range(load.groups // PRODUCERS):
            time.sleep(pace.left_s())
            ids, logprobs = map(torch.from_numpy, payload(load.tokens, i))
            submitted_s = torch.full((EPISODES, 1), time.monotonic(), dtype=torch.float64)
            rows = TensorDict({"ids": ids, "logprobs": logprobs, "submitted_s": submitted_s}, batch_size=EPISODES)
            self._client.put(data=rows, partition_id=partition)


class Consumer:
    """Gets groups."""

    def __init__(self) -> None:
        tq.init()
        self._client = tq.get_client()

    def run(self, load: Load, partition: str) -> Taken:
        submitted_s, taken_s = [], []
        while len(taken_s) < load.groups:
            size = load.at_once * EPISODES
            meta = self._client.get_meta(FIELDS, size, partition, task_name="train")
            if not meta.size:
                time.sleep(POLL_S)
                continue
            rows = self._client.get_data(meta)
            ids, logprobs, stamps = (rows[field].unbind() for field in FIELDS)  # a tensor per episode
            for first in range(0, size, EPISODES):
                for episode in range(first, first + EPISODES):
                    read(ids[episode].numpy(), logprobs[episode].numpy())
                submitted_s.append(float(stamps[first]))
                taken_s.append(time.monotonic())
            self._client.clear_samples(meta)
        return Taken.of(submitted_s, taken_s)


def main() -> None:
    """Play every load."""
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    producers = [ray.remote(Producer).options(num_cpus=0).remote(place) for place in range(PRODUCERS)]
    consumer = ray.remote(Consumer).options(num_cpus=0).remote()
    taken = []
    for number, load in enumerate(loads_of_argv()):
        work = [producer.run.remote(load, f"load_{number}") for producer in producers]
        taken.append(ray.get(consumer.run.remote(load, f"load_{number}")))
        ray.get(work)
    answer(taken)
    tq.close()


if __name__ == "__main__":
    main()
