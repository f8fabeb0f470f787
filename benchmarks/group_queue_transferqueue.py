"""The job of `benchmarks.group_queue` on TransferQueue, in a separate environment without rlsys.

`python -m benchmarks.group_queue_transferqueue LOADS`. It uses the low-level client of the tutorials: put, get_meta,
get_data, clear_samples. The controller polls: where it may block, it sleeps five seconds whenever a batch is not
complete.
"""

# pyright: reportMissingImports=false, reportFunctionMemberAccess=false

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks import group_queue_work as work
from benchmarks.group_queue_work import EPISODES

POLL_S = 0.0005
"""Seconds between two polls of the consumer when no group was ready."""
FIELDS = ["ids", "logprobs", "submitted_s"]


class Producer(work.Producer):
    """Producer that puts groups."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        tq.init()
        self._client = tq.get_client()

    def put(self, name: str, submitted_s: float, ids: np.ndarray, logprobs: np.ndarray) -> None:
        at_s = torch.full((EPISODES, 1), submitted_s, dtype=torch.float64)
        columns = {"ids": torch.from_numpy(ids), "logprobs": torch.from_numpy(logprobs), "submitted_s": at_s}
        self._client.put(data=TensorDict(columns, batch_size=EPISODES), partition_id=name)


class Consumer(work.Consumer):
    """Consumer that gets groups."""

    def __init__(self) -> None:
        tq.init()
        self._client = tq.get_client()

    def take(self, name: str, at_once: int) -> Iterator[tuple[float, list[np.ndarray], list[np.ndarray]]]:
        while not (meta := self._client.get_meta(FIELDS, at_once * EPISODES, name, task_name="train")).size:
            time.sleep(POLL_S)
        rows = self._client.get_data(meta)
        ids, logprobs, stamps = (rows[field].unbind() for field in FIELDS)  # a tensor per episode
        for first in range(0, at_once * EPISODES, EPISODES):
            of_group = slice(first, first + EPISODES)
            yield float(stamps[first]), [t.numpy() for t in ids[of_group]], [t.numpy() for t in logprobs[of_group]]
        self._client.clear_samples(meta)


if __name__ == "__main__":
    work.start_ray()
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    work.play(Producer, Consumer)
    tq.close()
