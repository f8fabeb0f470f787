"""Leases of devices that several workers share in turns: actor, critic, reference, rollout and evaluation replicas.

One role at a time holds the shared devices: its workers are awake, and those of all other roles sleep. The learner
takes a lease of a role before it lets its workers compute, and lends the devices to the rollouts while it waits for
groups. A hand-over is in this order, and the workers have a deadline for each part:

    holder sleeps (pauses, moves out)  ->  nobody holds  ->  next role wakes (moves in, goes on)  ->  next role holds

If a worker dies or freezes in it, nobody holds the devices, or the same as before. A replica is replaced by its pool.
The death of a rank is raised to the learner, and `restart`, a part of its recovery, replaces all ranks. Roles that
share nothing hold their devices for ever, and their leases cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlsys.contracts import Tenant, TrainedModel

ACTOR, ROLLOUT, EVALUATION, REFERENCE = "actor", "rollout", "evaluation", "reference"
"""Roles that may share devices, and `critic`."""


M = TypeVar("M", bound=str)


@dataclass
class DeviceLeases:
    """Who may compute on the shared devices."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """Workers that share their devices, by role; empty if all have their own."""
    holder: str = ""
    """Role whose workers are awake; empty: none."""
    span: Callable[[str, Collection[str]], AbstractContextManager[Any]] = lambda phase, workers: nullcontext()
    """Times the hand-overs; see `StepClock.span`."""
    num_handed_over: int = 0
    """Hand-overs so far."""
    _using: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _handing_over: asyncio.Task[None] | None = field(default=None, init=False)
    """The newest hand-over. No caller that is cancelled ends it."""

    @asynccontextmanager
    async def lease(self, role: str) -> AsyncIterator[None]:
        """Let the workers of a role hold their devices inside the block.

        Waits for the lease of another role to end, and for the hand-over. Raises the death or silence of a worker in
        it.
        """
        if role not in self.tenants:
            yield
            return
        async with self._using:
            await self._grant(role)
            yield

    async def restart(self, models: Mapping[M, TrainedModel]) -> None:
        """Replace all ranks of trained models. Those that share devices are set up one after the other, and sleep then;
        whoever held the devices sleeps too."""
        shared = [name for name in models if name in self.tenants]
        await asyncio.gather(*(model.restart() for name, model in models.items() if name not in shared))
        if not shared:
            return
        async with self._using:
            await self._settle()
            await asyncio.gather(*(models[name].end() for name in shared))  # one of them may have failed while it woke
            if self.holder and self.holder not in models:
                await self.tenants[self.holder].sleep()
            self.holder = ""
            for name in shared:
                await models[name].restart()
                await self.tenants[name].sleep()

    async def _grant(self, role: str) -> None:
        await self._settle()
        if self.holder != role:
            self._handing_over = asyncio.create_task(self._hand_over(role))
            await asyncio.shield(self._handing_over)

    async def _settle(self) -> None:
        """Return once no hand-over is under way, which a caller that was cancelled has left behind."""
        if self._handing_over is not None:
            await asyncio.wait([self._handing_over])

    async def _hand_over(self, role: str) -> None:
        with self.span("hand_over", [role]):
            if self.holder:
                await self.tenants[self.holder].sleep()
                self.holder = ""
            await self.tenants[role].wake()
            self.holder = role
            self.num_handed_over += 1
