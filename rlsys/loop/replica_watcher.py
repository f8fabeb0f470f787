"""Looks at the pipe every few seconds, for whoever watches a run: what replicas hold and do, and where groups are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nsmallest

from rlsys.contracts import Rollouts
from rlsys.errors import WorkerError
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.in_flight_group import State
from rlsys.monitoring.events import Events, GroupPlaced, QueueSeen, ReplicaSeen
from rlsys.types import PolicyVersion, ReplicaLoad

AGAIN_S = 10.0
"""Seconds after which a replica is told of again, though it holds what it held."""
AT_ONCE = 100
"""Replicas that a look may ask without being noticed. With more of them, looks are rarer in proportion."""
RAREST_S = 20.0
"""Seconds between two looks, at most: a reader takes a replica that is not told of for 30 s for one that is gone."""
PLACES_AT_ONCE = 1000
"""Groups of which one look tells where they are, the oldest first; the next look tells of others."""


@dataclass
class ReplicaWatcher:
    """One loop over all replicas of a driver: it only tells, and whatever it finds changes nothing."""

    rollouts: Rollouts
    queue: GroupQueue
    events: Events
    every_s: float
    """Seconds between two looks at `AT_ONCE` replicas or fewer."""
    _told: dict[str, tuple[tuple[PolicyVersion, bool], float]] = field(default_factory=dict)
    """By replica: version and `is_loading` as told last, and when, in seconds of the event loop."""
    _depth: QueueSeen | None = None

    async def run(self) -> None:
        """One look after the other.

        Consumes loads and placements, produces events. Waits for `pause_s`; nothing unblocks it.
        """
        while True:
            num_replicas = 0
            # A replica that is gone or wrong is the business of who waits for its groups; here it is just not seen.
            with suppress(WorkerError):
                loads = await self.rollouts.loads()
                num_replicas = len(loads)
                self._see(loads)
            self._place(self.rollouts.placements())
            self._count()
            await asyncio.sleep(self.pause_s(num_replicas))  # a replica announces what it does to nobody

    def pause_s(self, num_replicas: int) -> float:
        """Seconds from a look at so many replicas to the next."""
        return max(self.every_s, min(self.every_s * num_replicas / AT_ONCE, RAREST_S))

    def _see(self, loads: Iterable[ReplicaLoad]) -> None:
        now_s = asyncio.get_running_loop().time()
        for load in loads:
            holds, stats = (load.version, load.is_loading), load.stats
            held, told_s = self._told.get(load.replica, (None, now_s))
            if holds == held and now_s - told_s < AGAIN_S:
                continue
            self._told[load.replica] = (holds, now_s)
            numbers = (stats.num_running, stats.num_waiting, stats.kv_used, stats.num_tokens)
            self.events.emit(ReplicaSeen(load.replica, *holds, *numbers))

    def _place(self, placements: Mapping[int, str]) -> None:
        """Tell of groups that are somewhere else than at the last look.

        In a run of several policies `placements` knows of groups that this driver is done with, and says whom others
        wait for: only groups that it wants rolled out, and at replicas, are told.
        """
        groups = {n: group for n in placements if (group := self.queue.groups.get(n))}
        groups = {n: group for n, group in groups.items() if group.state is State.ROLLING_OUT}
        moved = (n for n, group in groups.items() if group.replica != placements[n] in self._told)
        for group_id in nsmallest(PLACES_AT_ONCE, moved):
            groups[group_id].replica = placements[group_id]
            self.events.emit(GroupPlaced(group_id, placements[group_id]))

    def _count(self) -> None:
        depth = QueueSeen(len(self.queue.ledger.open), self.queue.num_finished)
        if depth != self._depth:
            self.events.emit(depth)
        self._depth = depth
