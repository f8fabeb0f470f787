"""Repacking of the last trajectories on old weights: Laminar's Algorithm 1 (arXiv:2510.12633).

Most of a batch finishes long before its longest trajectories. Until those end, their replica decodes at a fraction of
its speed and keeps old weights. Packed on a few replicas they take no longer, and the emptied replicas load new weights
and start again.

    moves = plan_repack(loads, before={"rollout-0": 0.9, "rollout-1": 0.8}, newest=7, max_requests=64)
    assert moves == (Move(source="rollout-1", to="rollout-0", version=6),)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from math import log2
from statistics import median

from rlsys.contracts import Rollouts
from rlsys.errors import WorkerError
from rlsys.monitoring.events import Events, TrajectoriesMoved
from rlsys.types import PolicyVersion, ReplicaLoad
from rlsys.util.deadlines import now, timeout

KV_MAX = 0.9
"""Maximum share of its cache that a destination may fill: Laminar's C_max. The paper gives no value."""


SLOWDOWN = 1.25
"""A replica may have as many requests as slow each of them down by this factor."""
SIZES_PER_OCTAVE = 2
"""Numbers of requests that differ by less than half an octave are measured together."""
NUM_KEPT = 16
"""Newest measurements of one size that count."""


class StepTimes:
    """Seconds of a decoding step by number of requests, measured from what the replicas report.

    A step of few requests takes as long as reading the weights; from some number on it takes longer with every request
    (the roofline). That number is Laminar's B.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, ReplicaLoad]] = {}
        self._step_s: dict[int, deque[float]] = {}
        """By size."""

    def observe(self, loads: Sequence[ReplicaLoad], at_s: float) -> None:
        """Measure each replica that sampled from one version since the last observation. `at_s` is the time now."""
        for load in loads:
            before_s, before = self._last.get(load.replica, (at_s, load))
            num_tokens = load.stats.num_tokens - before.stats.num_tokens
            num_requests = (load.stats.num_running + before.stats.num_running) / 2
            is_whole = load.version == before.version and min(load.stats.num_running, before.stats.num_running) > 0
            if is_whole and num_tokens > 0 and not (load.is_loading or before.is_loading):
                measured = self._step_s.setdefault(_size(num_requests), deque(maxlen=NUM_KEPT))
                measured.append((at_s - before_s) * num_requests / num_tokens)
        self._last = {load.replica: (at_s, load) for load in loads}

    def most_requests(self, num_slots: int) -> int:
        """Return the most requests of a replica that do not slow each other down, `num_slots` at most; that is also the
        result until two sizes are measured."""
        times = {size: median(measured) for size, measured in sorted(self._step_s.items())}
        allowed_s = SLOWDOWN * min(times.values(), default=0.0)
        slow = [size for size, step_s in times.items() if step_s > allowed_s]
        return min(num_slots, max(1, int(2 ** (min(slow) / SIZES_PER_OCTAVE)))) if slow else num_slots


def _size(num_requests: float) -> int:
    return int(SIZES_PER_OCTAVE * log2(num_requests))


@dataclass
class Repacker:
    """One loop over all replicas; `plan_repack` chooses sources and destinations."""

    rollouts: Rollouts
    every_s: float
    """Seconds between two observations; a publish triggers the next one at once."""
    num_slots: int
    """Requests that an engine runs at a time. Fewer go together if `StepTimes` measures that more slow each other."""
    events: Events
    num_moved: int = 0
    _newest: PolicyVersion = -1
    _peaks: dict[str, tuple[PolicyVersion, float]] = field(default_factory=dict)
    """By replica: its version at the last observation, and its peak cache use under that version."""
    _step_times: StepTimes = field(default_factory=StepTimes)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def on_publish(self, version: PolicyVersion) -> None:
        """Record a publish of `version`, and observe at once the replicas that still sample from older weights."""
        self._newest = version
        self._wake.set()

    def metrics(self) -> dict[str, float]:
        """Return the groups moved since the run began."""
        return {"async/moved": self.num_moved}

    async def run(self) -> None:
        """Observe and repack periodically.

        Consumes loads of replicas, produces moves. Waits for `every_s`; unblocked earlier by a publish.
        """
        while True:
            self._wake.clear()
            with suppress(WorkerError):  # callers of that replica receive the error and act on it
                await self._look()
            with suppress(TimeoutError):
                async with timeout(self.every_s):
                    await self._wake.wait()

    async def _look(self) -> None:
        """Observe the load of every replica, and execute the planned moves.

        The planner counts a replica as past its peak if it uses less cache than its maximum under this version.
        Comparing with the last observation alone fails: the use of the last few trajectories grows until one ends.
        """
        loads = await self.rollouts.loads()
        held = {load.replica: load.version for load in loads}
        before = {name: peak for name, (version, peak) in self._peaks.items() if held.get(name) == version}
        self._step_times.observe(loads, now())
        moves = plan_repack(loads, before, self._newest, self._step_times.most_requests(self.num_slots))
        self._peaks = {
            load.replica: (load.version, max(load.stats.kv_used, before.get(load.replica, 0.0))) for load in loads
        }
        for move in moves:
            if num_groups := await self.rollouts.drain(move.source, move.to):
                self.num_moved += num_groups
                self.events.emit(TrajectoriesMoved(move.source, move.to, num_groups, move.version))


@dataclass(frozen=True, slots=True)
class Move:
    """Move of all groups of `source` to replica `to`; both have `version` loaded."""

    source: str
    to: str
    version: PolicyVersion


def plan_repack(
    loads: Sequence[ReplicaLoad], before: Mapping[str, float], newest: PolicyVersion, max_requests: int
) -> tuple[Move, ...]:
    """Plan the moves that empty replicas, best fit first: each source goes into the fullest bin with room for it.

    A replica is a candidate if all of these are true. Its cache use is below `KV_MAX` and below its use `before` (by
    replica; a new replica is no candidate). No request waits, and 1 to `max_requests` - 1 requests run. It is not
    loading weights, and its version is older than `newest`, so it starts nothing new until it is empty. No bin exceeds
    `KV_MAX` or `max_requests`. A replica is source or destination, never both.
    """
    candidates = [load for load in loads if _is_candidate(load, before, newest, max_requests)]
    candidates.sort(key=lambda load: (load.version, load.stats.kv_used, load.replica))
    return tuple(
        Move(source, to, version)
        for version, group in groupby(candidates, key=lambda load: load.version)
        for source, to in _plan_consolidation(list(group), max_requests).items()
    )


def _is_candidate(load: ReplicaLoad, before: Mapping[str, float], newest: PolicyVersion, max_requests: int) -> bool:
    stats = load.stats
    is_emptying = stats.kv_used < min(KV_MAX, before.get(load.replica, 0.0))
    has_work = 0 < load.num_present < max_requests and stats.num_waiting == 0
    return is_emptying and has_work and not load.is_loading and load.version < newest


def _plan_consolidation(loads: Sequence[ReplicaLoad], max_requests: int) -> dict[str, str]:
    """Return source -> destination among replicas of one version, given by ascending cache use."""
    kv_used = {load.replica: load.stats.kv_used for load in loads}
    num_requests = {load.replica: load.num_present for load in loads}
    destinations: dict[str, str] = {}
    for source in kv_used:
        if source in destinations.values():
            continue
        fitting = [
            to
            for to in kv_used
            if to != source
            and to not in destinations
            and kv_used[to] + kv_used[source] <= KV_MAX
            and num_requests[to] + num_requests[source] <= max_requests
        ]
        if fitting:
            destinations[source] = to = max(fitting, key=lambda to: kv_used[to])
            kv_used[to] += kv_used[source]
            num_requests[to] += num_requests[source]
    return destinations
