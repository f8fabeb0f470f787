"""Repacking of the last trajectories on old weights, which frees replicas for new weights."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from rlsys.contracts import Rollouts
from rlsys.errors import WorkerError
from rlsys.loop.repack_plan import Move, plan_repack
from rlsys.monitoring.events import Events, TrajectoriesMoved
from rlsys.types import PolicyVersion
from rlsys.util.deadlines import timeout

KV_MAX = 0.9
"""Maximum share of its cache that a destination may fill: Laminar's C_max. The paper gives no value."""


@dataclass
class Repacker:
    """One loop over all replicas; `rlsys.loop.repack_plan` chooses sources and destinations."""

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
        moves = plan_repack(loads, before, self._newest, KV_MAX, self.max_requests)
        self._peaks = {
            load.replica: (load.version, max(load.stats.kv_used, before.get(load.replica, 0.0))) for load in loads
        }
        for move in moves:
            await self._carry_out(move)

    async def _carry_out(self, move: Move) -> None:
        if num_groups := await self.rollouts.move(move.source, move.to):
            self.num_moved += num_groups
            self.events.emit(TrajectoriesMoved(move.source, move.to, num_groups, move.version))
