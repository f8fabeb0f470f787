"""Common work of the three jobs of `benchmarks.group_queue`. Needs only numpy and Ray.

A group is `EPISODES` episodes: token ids and logprobs, as two arrays. Two producers make groups; one consumer takes
them and reads them. Submit is when a producer begins to send a group; take is when the consumer has its arrays.
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
"""Most groups between producers and consumer, where the system bounds them."""
TAKEN_AT_ONCE = 8
"""Groups of one take at full speed; paced takes have one."""


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
    """Producer process, which sends groups by the `put` of a system."""

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
        """Send one group; `name` is the load's."""
        raise NotImplementedError


class Consumer:
    """Consumer process, which receives groups by the `take` of a system."""

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
        """Return the submit time and the arrays of each group taken; waits until there is one."""
        raise NotImplementedError


def start_ray() -> None:
    """Start a local cluster for one system."""
    connect(None, 4)


def play(producer: type[Producer], consumer: type[Consumer], *given: object) -> None:
    """Play every load in processes of these kinds, and print the result."""
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
    """Parse the loads from the first argument, in JSON."""
    return [Load(**row) for row in json.loads(sys.argv[1])]


def answer(taken: Sequence[Taken]) -> None:
    """Print the result line of a job, in the order of the loads."""
    print(json.dumps([asdict(one) for one in taken]), flush=True)
