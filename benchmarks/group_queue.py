"""Transfer of groups from rollouts to the learner: rlsys against `ray.util.queue` and TransferQueue.

    python -m benchmarks.group_queue [--quick | --short]

Two producer processes send groups of 8 episodes to one consumer process, with 1 k and with 32 k tokens in a group: ids
and logprobs in numpy arrays, the same for all three. The first stretch is at full speed, 64 groups in flight where the
system bounds them, 8 to a take: groups per second. The second is paced, 50 groups per second in all, one to a take:
median and 99th percentile of the seconds from submit to take. Rounds alternate; figures are medians over rounds.

Submit is when a producer begins to send a group; take is when the consumer has its arrays.

rlsys: `benchmarks.group_queue_rlsys`. ray.util.queue: payloads through its actor. TransferQueue: its SimpleStorage, two
storage units, in a separate environment without rlsys, `.cache/queue/venv`, made on first use (some minutes, not
measured). So this module needs only numpy and Ray. Its threads are set to the machine's cores, as it requires. It has
the low-level client of its tutorials: put, get_meta, get_data, clear_samples. Its consumer polls, since its controller
sleeps five seconds whenever a batch is not complete.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.util.queue import Empty, Queue

from benchmarks.measure import answer_of, fresh_command, in_turn, own_python, parser_of, print_result, spread
from workers.ray.cluster import connect

REQUIREMENTS = ("torch==2.13.0+cpu", "TransferQueue==0.1.11", "ray==2.60.0", "tensordict==0.15.3")
TOKENS = {"1k": 1024, "32k": 32768}
PACED_S = 0.04
"""Seconds between two groups of one of the two producers."""
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
Taken: TypeAlias = dict[str, float]
"""Rate from the first submit to the last take, and percentiles of the seconds from submit to take, of one stretch."""


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


WARM_UP = Load(1024, 64, 0.0)


def taken_of(submitted_s: Sequence[float], taken_s: Sequence[float]) -> Taken:
    """Summarise a stretch by times of the machine's monotonic clock, by group."""
    waited_s = np.subtract(taken_s, submitted_s)
    p50_s, p99_s = np.percentile(waited_s, [50, 99]).tolist()
    rate = len(taken_s) / (max(taken_s) - min(submitted_s))
    return {"groups_per_s": rate, "p50_s": p50_s, "p99_s": p99_s}


def payload(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Build token ids and logprobs of one group."""
    ids = np.arange(seed, seed + tokens, dtype=np.int64).reshape(EPISODES, -1)
    return ids, (ids % 97).astype(np.float32)


def read(ids: Iterable[np.ndarray], logprobs: Iterable[np.ndarray]) -> float:
    """Touch every token of every episode, as a trainer does, so that a missing payload is noticed."""
    return sum(float(of_episode.sum()) for column in (ids, logprobs) for of_episode in column)


def waits_s(load: Load, producer: int) -> Iterator[float]:
    """Yield the seconds until each submit of a producer; the producers interleave."""
    next_s = time.monotonic() + load.interval_s * (1 + producer / PRODUCERS)
    while True:
        yield max(0.0, next_s - time.monotonic())
        next_s += load.interval_s


class Producer:
    """Producer process, which sends groups by the function that `connect` returns in it."""

    def __init__(self, connect: Callable[[], Put], place: int) -> None:
        self._put, self._place = connect(), place

    def run(self, load: Load, name: str) -> None:
        """Put this producer's share of a load."""
        for i, wait_s in zip(range(load.groups // PRODUCERS), waits_s(load, self._place), strict=False):
            time.sleep(wait_s)
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
        return taken_of(submitted_s, taken_s)


def play(sender: Callable[[], Put], receiver: Callable[[], Take], loads: Sequence[Mapping]) -> list[Taken]:
    """Play every load in processes of its own."""
    as_actor: Any = ray.remote(num_cpus=0)
    producers = [as_actor(Producer).remote(sender, place) for place in range(PRODUCERS)]
    consumer = as_actor(Consumer).remote(receiver)
    taken = []
    for number, load in enumerate(Load(**row) for row in loads):
        work = [producer.run.remote(load, f"load_{number}") for producer in producers]
        taken.append(ray.get(consumer.run.remote(load, f"load_{number}")))
        ray.get(work)
    return taken


def play_ray_queue(loads: Sequence[Mapping]) -> list[Taken]:
    """Play every load on `ray.util.queue.Queue`, payloads through it."""
    connect(None, 4)
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


def play_transfer_queue(loads: Sequence[Mapping]) -> list[Taken]:
    """Play every load on TransferQueue."""
    import transfer_queue
    from omegaconf import OmegaConf

    connect(None, 4)
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


def main() -> None:
    """Compare and print the result line."""
    size = parser_of(__doc__, quick="fewer groups and rounds; about a minute once set up").parse_args().size
    num_rounds, *num_groups = {"full": (5, 1600, 500), "quick": (2, 400, 200), "short": (1, 16, 4)}[size]
    peer_python = own_python(Path(".cache/queue/venv"), REQUIREMENTS, size)
    jobs = {
        "rlsys": ("benchmarks.group_queue_rlsys:play", sys.executable),
        "ray_queue": ("benchmarks.group_queue:play_ray_queue", sys.executable),
        "transferqueue": ("benchmarks.group_queue:play_transfer_queue", peer_python),
    }
    fast, paced = num_groups
    loads = [load for n in TOKENS.values() for load in (Load(n, fast, 0.0), Load(n, paced, PACED_S))]
    rounds = in_turn(num_rounds, jobs, lambda _, name: run(*jobs[name], loads))
    print_result({size: figures(rounds, place) for place, size in enumerate(TOKENS)})


def run(play: str, python: str, loads: Sequence[Load]) -> list[Taken]:
    """Run all loads of one system in fresh processes; the warm-up does not count."""
    command = fresh_command(play, [asdict(load) for load in (WARM_UP, *loads)], python=python)
    return answer_of(command, TQ_NUM_THREADS=str(os.cpu_count() or 1))[1:]


def figures(rounds: dict[str, list[list[Taken]]], place: int) -> dict[str, object]:
    """Summarise one size, by system, with the lead of rlsys over the better of the others."""
    places = {"groups_per_s": 2 * place, "p50_s": 2 * place + 1, "p99_s": 2 * place + 1}
    told = {
        name: {what: spread([taken[at][what] for taken in each]) for what, at in places.items()}
        for name, each in rounds.items()
    }
    own, *peers = [{what: row["median"] for what, row in rows.items()} for rows in told.values()]
    ahead = {what: min(peer[what] for peer in peers) / own[what] for what in ("p50_s", "p99_s")}
    ahead["groups_per_s"] = own["groups_per_s"] / max(peer["groups_per_s"] for peer in peers)
    return {**told, "times_better_than_the_best_peer": ahead}


if __name__ == "__main__":
    main()
