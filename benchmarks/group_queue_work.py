"""Common work of the three jobs of `benchmarks.group_queue`, and those of the peers. Needs only numpy and Ray.

A group is `EPISODES` episodes: token ids and logprobs, as two arrays. Two producers make groups; one consumer takes
them and reads them. Submit is when a producer begins to send a group; take is when the consumer has its arrays.

The job on TransferQueue runs in a separate environment without rlsys. It uses the low-level client of the tutorials:
put, get_meta, get_data, clear_samples. The controller polls: where it may block, it sleeps five seconds whenever a
batch is not complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.util.queue import Empty, Queue

from workers.ray.cluster import connect

EPISODES = 8
PRODUCERS = 2
IN_FLIGHT = 64
"""Most groups between producers and consumer, where the system bounds them."""
TAKEN_AT_ONCE = 8
"""Groups of one take at full speed; paced takes have one."""
POLL_S = 0.0005
"""Seconds between two polls of TransferQueue's consumer when no group was ready."""

Put: TypeAlias = Callable[[str, float, np.ndarray, np.ndarray], None]
"""Function that sends a group: the name of its load, its submit time, ids and logprobs."""
Take: TypeAlias = Callable[[str, int], Iterable[tuple[float, Any, Any]]]
"""Function that waits for so many groups of a load; it returns the submit time and the arrays of each."""


@dataclass(frozen=True, slots=True)
class Load:
    """One stretch of work."""

    tokens: int
    """Tokens of a group, over its episodes."""
    groups: int
    interval_s: float
    """Seconds between two groups of one producer; 0: full speed."""

    @property
    def at_once(self) -> int:
        """Groups of one take."""
        return 1 if self.interval_s else TAKEN_AT_ONCE


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of one stretch."""

    groups_per_s: float
    """Rate from the first submit to the last take."""
    p50_s: float
    """Median seconds from submit to take."""
    p99_s: float

    @classmethod
    def of(cls, submitted_s: Sequence[float], taken_s: Sequence[float]) -> Taken:
        """Summarise times of the machine's monotonic clock, by group."""
        waited_s = np.subtract(taken_s, submitted_s)
        p50_s, p99_s = np.percentile(waited_s, [50, 99])
        return cls(len(taken_s) / (max(taken_s) - min(submitted_s)), float(p50_s), float(p99_s))


def payload(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Build token ids and logprobs of one group."""
    ids = np.arange(seed, seed + tokens, dtype=np.int64).reshape(EPISODES, -1)
    return ids, (ids % 97).astype(np.float32)


def read(ids: Iterable[np.ndarray], logprobs: Iterable[np.ndarray]) -> float:
    """Touch every token of every episode, as a trainer does, so that a missing payload is noticed."""
    return sum(float(of_episode.sum()) for column in (ids, logprobs) for of_episode in column)


class Pace:
    """Schedule of a producer's submits."""

    def __init__(self, load: Load, producer: int) -> None:
        """Interleave the producers."""
        self._interval_s = load.interval_s
        self._next_s = time.monotonic() + load.interval_s * (1 + producer / PRODUCERS)

    def left_s(self) -> float:
        """Return the seconds until the next submit, and advance to the one after."""
        left_s = self._next_s - time.monotonic()
        self._next_s += self._interval_s
        return max(0.0, left_s) if self._interval_s else 0.0


class Producer:
    """Producer process, which sends groups by the function that `connect` returns in it."""

    def __init__(self, connect: Callable[[], Put], place: int) -> None:
        self._put, self._place = connect(), place

    def run(self, load: Load, name: str) -> None:
        """Put this producer's share of a load."""
        pace = Pace(load, self._place)
        for i in range(load.groups // PRODUCERS):
            time.sleep(pace.left_s())
            arrays = payload(load.tokens, i)
            self._put(name, time.monotonic(), *arrays)


class Consumer:
    """Consumer process, which receives groups by the function that `connect` returns in it."""

    def __init__(self, connect: Callable[[], Take]) -> None:
        self._take = connect()

    def run(self, load: Load, name: str) -> Taken:
        """Take all groups of a load."""
        submitted_s, taken_s = [], []
        while len(taken_s) < load.groups:
            for at_s, ids, logprobs in self._take(name, load.at_once):
                read(ids, logprobs)
                submitted_s.append(at_s)
                taken_s.append(time.monotonic())
        return Taken.of(submitted_s, taken_s)


def start_ray() -> None:
    """Start a local cluster for one system."""
    connect(None, 4)


def play(sender: Callable[[], Put], receiver: Callable[[], Take], loads: Sequence[Mapping]) -> list[dict]:
    """Play every load in processes of its own; return the fields of each `Taken`."""
    actors = [_started(Producer, sender, place) for place in range(PRODUCERS)]
    taker = _started(Consumer, receiver)
    taken = []
    for number, load in enumerate(Load(**row) for row in loads):
        work = [actor.run.remote(load, f"load_{number}") for actor in actors]
        taken.append(ray.get(taker.run.remote(load, f"load_{number}")))
        ray.get(work)
    return [asdict(one) for one in taken]


def _started(kind: type, *given: object) -> Any:  # noqa: ANN401  (Ray's handle)
    remote: Any = ray.remote(kind)
    return remote.options(num_cpus=0).remote(*given)


def play_ray_queue(loads: Sequence[Mapping]) -> list[dict]:
    """Play every load on `ray.util.queue.Queue`, payloads through it."""
    start_ray()
    queue = Queue(maxsize=IN_FLIGHT, actor_options={"num_cpus": 0})

    def put(name: str, submitted_s: float, ids: np.ndarray, logprobs: np.ndarray) -> None:
        queue.put((submitted_s, ids, logprobs))

    def take(name: str, at_once: int) -> list:
        """Take a batch if available, else the next group: the fewest calls."""
        if at_once > 1:
            try:
                return queue.get_nowait_batch(at_once)
            except Empty:
                pass
        return [queue.get()]

    return play(lambda: put, lambda: take, loads)


def play_transfer_queue(loads: Sequence[Mapping]) -> list[dict]:
    """Play every load on TransferQueue."""
    import transfer_queue
    from omegaconf import OmegaConf

    start_ray()
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    taken = play(_transfer_sender, _transfer_receiver, loads)
    transfer_queue.close()
    return taken


def _transfer_sender() -> Put:
    import torch
    import transfer_queue
    from tensordict import TensorDict

    transfer_queue.init()
    client = transfer_queue.get_client()

    def put(name: str, submitted_s: float, ids: np.ndarray, logprobs: np.ndarray) -> None:
        at_s = torch.full((EPISODES, 1), submitted_s, dtype=torch.float64)
        columns = {"ids": torch.from_numpy(ids), "logprobs": torch.from_numpy(logprobs), "submitted_s": at_s}
        client.put(data=TensorDict(columns, batch_size=EPISODES), partition_id=name)

    return put


def _transfer_receiver() -> Take:
    import transfer_queue

    transfer_queue.init()
    client = transfer_queue.get_client()
    fields = ["ids", "logprobs", "submitted_s"]

    def take(name: str, at_once: int) -> Iterator[tuple[float, list[np.ndarray], list[np.ndarray]]]:
        while not (meta := client.get_meta(fields, at_once * EPISODES, name, task_name="train")).size:
            time.sleep(POLL_S)
        rows = client.get_data(meta)
        ids, logprobs, stamps = (rows[field].unbind() for field in fields)  # a tensor per episode
        for first in range(0, at_once * EPISODES, EPISODES):
            of_group = slice(first, first + EPISODES)
            yield float(stamps[first]), [t.numpy() for t in ids[of_group]], [t.numpy() for t in logprobs[of_group]]
        client.clear_samples(meta)

    return take
