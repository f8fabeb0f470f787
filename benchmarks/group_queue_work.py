"""What the three jobs of `benchmarks.group_queue` share, so that their work is equal. Needs numpy and Ray only.

A group is `EPISODES` episodes: token ids and logprobs, as two arrays. Two producers make groups; one consumer takes
them and reads them. Submit is when a producer begins to hand a group over; take is when the consumer has its arrays.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray

from workers.ray.cluster import connect

EPISODES = 8
PRODUCERS = 2
IN_FLIGHT = 64
"""Groups at once between producers and consumer, where the system bounds them."""
TAKEN_AT_ONCE = 8
"""Groups of one take while as many are handed over as can be; one at a time while they are paced."""


@dataclass(frozen=True, slots=True)
class Load:
    """One stretch of work."""

    tokens: int
    """Of a group, over its episodes."""
    groups: int
    interval_s: float
    """Between two groups of one producer; 0: as fast as they can."""

    @property
    def at_once(self) -> int:
        """Groups of one take."""
        return 1 if self.interval_s else TAKEN_AT_ONCE


@dataclass(frozen=True, slots=True)
class Taken:
    """What one stretch came to."""

    groups_per_s: float
    """From the first submit to the last take."""
    p50_s: float
    """Submit to take, median."""
    p99_s: float

    @classmethod
    def of(cls, submitted_s: Sequence[float], taken_s: Sequence[float]) -> Taken:
        """Of times of the machine's monotonic clock, by group."""
        waited_s = np.subtract(taken_s, submitted_s)
        p50_s, p99_s = np.percentile(waited_s, [50, 99])
        return cls(len(taken_s) / (max(taken_s) - min(submitted_s)), float(p50_s), float(p99_s))


def payload(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and logprobs of one group."""
    ids = np.arange(seed, seed + tokens, dtype=np.int64).reshape(EPISODES, -1)
    return ids, (ids % 97).astype(np.float32)


def read(ids: Iterable[np.ndarray], logprobs: Iterable[np.ndarray]) -> float:
    """Touch every token of every episode, as a trainer does, so that a payload that never came is noticed."""
    return sum(float(of_episode.sum()) for column in (ids, logprobs) for of_episode in column)


class Pace:
    """When a producer submits its groups."""

    def __init__(self, load: Load, producer: int) -> None:
        """Producers take turns."""
        self._interval_s = load.interval_s
        self._next_s = time.monotonic() + load.interval_s * (1 + producer / PRODUCERS)

    def left_s(self) -> float:
        """Seconds until the next is due, which is then the one after."""
        left_s = self._next_s - time.monotonic()
        self._next_s += self._interval_s
        return max(0.0, left_s) if self._interval_s else 0.0


class Producer:
    """A process that hands groups over, by the `put` of a system."""

    def __init__(self, place: int) -> None:
        self._place = place

    def run(self, load: Load, name: str) -> None:
        """Put this producer's share of a load."""
        pace = Pace(load, self._place)
        for i in range(load.groups // PRODUCERS):
            time.sleep(pace.left_s())
            arrays = payload(load.tokens, i)
            self.put(name, time.monotonic(), *arrays)

    def put(self, name: str, submitted_s: float, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Hand one group over; `name` is the load's."""
        raise NotImplementedError


class Consumer:
    """The process that takes groups and reads them, by the `take` of a system."""

    def run(self, load: Load, name: str) -> Taken:
        """Take all groups of a load."""
        submitted_s, taken_s = [], []
        while len(taken_s) < load.groups:
            for at_s, ids, logprobs in self.take(name, load.at_once):
                read(ids, logprobs)
                submitted_s.append(at_s)
                taken_s.append(time.monotonic())
        return Taken.of(submitted_s, taken_s)

    def take(self, name: str, at_once: int) -> Iterable[tuple[float, Any, Any]]:
        """When each of some groups was submitted, and its arrays; waits until there is one."""
        raise NotImplementedError


def start_ray() -> None:
    """A local cluster for one system."""
    connect(None, 4)


def play(producer: type[Producer], consumer: type[Consumer], *given: object) -> None:
    """Play every load in processes of these kinds, and answer."""
    actors = [_started(producer, *given, place) for place in range(PRODUCERS)]
    taker = _started(consumer, *given)
    taken = []
    for number, load in enumerate(loads_of_argv()):
        work = [actor.run.remote(load, f"load_{number}") for actor in actors]
        taken.append(ray.get(taker.run.remote(load, f"load_{number}")))
        ray.get(work)
    answer(taken)


def _started(kind: type, *given: object) -> Any:  # noqa: ANN401  (Ray's handle)
    remote: Any = ray.remote(kind)
    return remote.options(num_cpus=0).remote(*given)


def loads_of_argv() -> list[Load]:
    """What the job was asked for: the first argument, in JSON."""
    return [Load(**row) for row in json.loads(sys.argv[1])]


def answer(taken: Sequence[Taken]) -> None:
    """The closing line of a job, in the order of the loads."""
    print(json.dumps([asdict(one) for one in taken]), flush=True)
