"""Puts the last trajectories of old weights together, so that the replicas they leave can start on new ones."""

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
"""Share of its cache that a replica may fill with what others hand it: Laminar's C_max. It publishes no value."""


@dataclass
class Repacker:
    """One loop over all replicas; `rlsys.loop.repack_plan` says who gives to whom."""

    rollouts: Rollouts
    every_s: float
    """Seconds between two looks; a publish brings the next one forward."""
    max_requests: int
    """Requests a replica decodes as fast as one: Laminar's B."""
    events: Events
    num_moved: int = 0
    """Groups moved so far."""
    _newest: PolicyVersion = -1
    _peaks: dict[str, tuple[PolicyVersion, float]] = field(default_factory=dict)
    """By replica: the version it held at the last look, and the most it was seen to use of its cache under it."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def published(self, version: PolicyVersion) -> None:
        """Weights of `version` are out: replicas that still sample from older ones are looked at now."""
        self._newest = version
        self._wake.set()

    async def run(self) -> None:
        """One look after the other.

        Consumes loads of replicas, produces moves. Waits for `every_s`; unblocked earlier by a publish.
        """
        while True:
            self._wake.clear()
            with suppress(WorkerError):  # whoever waits for a group of that replica hears of it, and acts on it
                await self._look()
            with suppress(TimeoutError):
                async with timeout(self.every_s):
                    await self._wake.wait()

    async def _look(self) -> None:
        """See what every replica is doing, and carry out what that calls for.

        A replica is past its peak, as the planner wants to know, if it uses less than it ever did under its version.
        Its use at the last look alone would not tell: that of the last few trajectories grows until one of them ends.
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
