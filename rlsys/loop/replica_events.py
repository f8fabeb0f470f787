"""Periodic observation of replicas and groups, emitted as events for dashboards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nsmallest

from rlsys.contracts import Rollouts
from rlsys.errors import WorkerError
from rlsys.loop.group_queue import GroupQueue, State
from rlsys.monitoring.events import Events, GroupPlaced, QueueSeen, ReplicaSeen
from rlsys.types import PolicyVersion, ReplicaLoad

AGAIN_S = 10.0
"""Seconds after which an unchanged replica is reported again."""
AT_ONCE = 100
"""Replicas per observation without a measurable cost. With more replicas, observations are proportionally rarer."""
RAREST_S = 20.0
"""Maximum seconds between two observations: readers treat a replica not reported for 30 s as gone."""
PLACES_AT_ONCE = 1000
"""Maximum group placements per observation, oldest groups first; the next observation reports others."""


@dataclass
class ReplicaWatcher:
    """One loop over all replicas of a driver. It only emits events, and changes nothing."""

    rollouts: Rollouts
    queue: GroupQueue
    events: Events
    every_s: float
    """Seconds between two observations of up to `AT_ONCE` replicas."""
    _told: dict[str, tuple[tuple[PolicyVersion, bool], float]] = field(default_factory=dict)
    """By replica: last reported version and `is_loading`, and the time, in seconds of the event loop."""
    _depth: QueueSeen | None = None

    def on_publish(self, version: PolicyVersion) -> None:
        """Do nothing: replicas tell what they hold."""

    def metrics(self) -> dict[str, float]:
        """Return none: observations are events."""
        return {}

    async def run(self) -> None:
        """Observe periodically.

        Consumes loads and placements, produces events. Waits for `pause_s`; nothing unblocks it.
        """
        while True:
            num_replicas = 0
            # The callers of a failed replica handle its error; here it is only missing.
            with suppress(WorkerError):
                loads = await self.rollouts.loads()
                num_replicas = len(loads)
                self._see(loads)
            self._place(self.rollouts.placements())
            depth = QueueSeen(len(self.queue.ledger.open), self.queue.num_finished)
            if depth != self._depth:
                self.events.emit(depth)
            self._depth = depth
            await asyncio.sleep(self.pause_s(num_replicas))  # replicas send no notifications

    def pause_s(self, num_replicas: int) -> float:
        """Return the seconds between two observations of this many replicas."""
        return max(self.every_s, min(self.every_s * num_replicas / AT_ONCE, RAREST_S))

    def _see(self, loads: Iterable[ReplicaLoad]) -> None:
        now_s = asyncio.get_running_loop().time()
        for load in loads:
            holds, stats = (load.version, load.is_loading), load.stats
            held, told_s = self._told.get(load.replica, (None, now_s))
            if holds == held and now_s - told_s < AGAIN_S:
                continue
            self._told[load.replica] = (holds, now_s)
            numbers = (load.num_present, stats.num_waiting, stats.kv_used, stats.num_tokens)
            self.events.emit(ReplicaSeen(load.replica, *holds, *numbers))

    def _place(self, placements: Mapping[int, str]) -> None:
        """Emit the placements that changed since the last observation.

        In a run of several policies, `placements` also contains groups that this driver has settled, and policies
        instead of replicas. Only replicas of groups in state ROLLING_OUT are reported.
        """
        groups = {n: group for n in placements if (group := self.queue.groups.get(n))}
        groups = {n: group for n, group in groups.items() if group.state is State.ROLLING_OUT}
        moved = (n for n, group in groups.items() if group.replica != placements[n] in self._told)
        for group_id in nsmallest(PLACES_AT_ONCE, moved):
            groups[group_id].replica = placements[group_id]
            self.events.emit(GroupPlaced(group_id, placements[group_id]))
