"""Leases of devices that several workers share in turns: actor, critic, reference, rollout and evaluation replicas.

One role at a time holds the shared devices: its workers are awake, and those of all other roles sleep. The learner
takes a lease of a role before it lets its workers compute, and lends the devices to the rollouts while it waits for
groups. A hand-over is in this order, and the workers have a deadline for each part:

    the holder pauses and moves out  ->  no role is the holder  ->  the next one moves in, goes on, and is the holder

If a worker dies or freezes during a hand-over, there is no holder, or the one from before. The pool of a replica
replaces it. The death of a rank is raised to the learner, and `restart`, a part of its recovery, replaces all ranks. A
role that shares nothing keeps its devices for ever, and its leases cost nothing.
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
    """Leases of the shared devices: one role at a time is their holder."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """Workers that share their devices, by role; empty if all have their own."""
    holder: str = ""
    """Role whose workers are awake; empty: none."""
    span: Callable[[str, Collection[str]], AbstractContextManager[Any]] = lambda phase, workers: nullcontext()
    """Times the hand-overs; see `StepClock.span`."""
    _using: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _handing_over: asyncio.Task[None] | None = field(default=None, init=False)
    """The newest hand-over. No caller that is cancelled ends it."""

    @asynccontextmanager
    async def lease(self, role: str) -> AsyncIterator[None]:
        """Let the workers of a role hold their devices inside the block.

        Waits for the lease of another role to end, and for the hand-over. Raises `WorkerDied` or `DeadlineExceeded`
        for a worker that dies or freezes during the hand-over.
        """
        if role not in self.tenants:
            yield
            return
        async with self._using:
            await self._grant(role)
            yield

    async def restart(self, models: Mapping[M, TrainedModel]) -> None:
        """Replace all ranks of trained models. Those that share devices are set up one after the other, and sleep
        then; so does the holder, if it is another role."""
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
