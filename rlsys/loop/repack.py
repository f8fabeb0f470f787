"""Repacking of the last trajectories on old weights: Laminar's Algorithm 1 (arXiv:2510.12633).

Most of a batch finishes long before its longest trajectories. Until those end, their replica decodes at a fraction of
its speed and keeps old weights. Packed on a few replicas they take no longer, and the emptied replicas load new weights
and start again.

    moves = plan_repack(loads, before={"rollout-0": 0.9, "rollout-1": 0.8}, newest=7, max_requests=64)
    assert moves == (Move(source="rollout-1", to="rollout-0", version=6),)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

from rlsys.contracts import Rollouts
from rlsys.errors import WorkerError
from rlsys.monitoring.events import Events, TrajectoriesMoved
from rlsys.types import PolicyVersion, ReplicaLoad
from rlsys.util.deadlines import timeout

KV_MAX = 0.9
"""Maximum share of its cache that a destination may fill: Laminar's C_max. The paper gives no value."""


@dataclass
class Repacker:
    """One loop over all replicas; `plan_repack` chooses sources and destinations."""

    rollouts: Rollouts
    every_s: float
    """Seconds between two observations; a publish triggers the next one at once."""
    max_requests: int
    """Concurrent requests a replica decodes without slowing down: Laminar's B."""
    events: Events
    num_moved: int = 0
    _newest: PolicyVersion = -1
    _peaks: dict[str, tuple[PolicyVersion, float]] = field(default_factory=dict)
    """By replica: its version at the last observation, and its peak cache use under that version."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def published(self, version: PolicyVersion) -> None:
        """Record a publish of `version`, and observe at once the replicas that still sample from older weights."""
        self._newest = version
        self._wake.set()

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
        moves = plan_repack(loads, before, self._newest, self.max_requests)
        self._peaks = {
            load.replica: (load.version, max(load.stats.kv_used, before.get(load.replica, 0.0))) for load in loads
        }
        for move in moves:
            if num_groups := await self.rollouts.move(move.source, move.to):
                self.num_moved += num_groups
                self.events.emit(TrajectoriesMoved(move.source, move.to, num_groups, move.version))


@dataclass(frozen=True, slots=True)
class Move:
    """Move of all running requests of `source` to replica `to`; both have `version` loaded."""

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
        for source, to in _consolidated(list(group), max_requests).items()
    )


def _is_candidate(load: ReplicaLoad, before: Mapping[str, float], newest: PolicyVersion, max_requests: int) -> bool:
    stats = load.stats
    is_emptying = stats.kv_used < min(KV_MAX, before.get(load.replica, 0.0))
    has_work = 0 < stats.num_running < max_requests and stats.num_waiting == 0
    return is_emptying and has_work and not load.is_loading and load.version < newest


def _consolidated(loads: Sequence[ReplicaLoad], max_requests: int) -> dict[str, str]:
    """Return source -> destination among replicas of one version, given by ascending cache use."""
    kv_used = {load.replica: load.stats.kv_used for load in loads}
    num_requests = {load.replica: load.stats.num_running for load in loads}
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
