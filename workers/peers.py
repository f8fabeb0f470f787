"""The actors that a replica talks to, besides its relay: other replicas, and the partial response pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlsys.types import Acknowledged, PolicyVersion
from workers.cluster import RayActor, call
from workers.engines.base import Completion, Request
from workers.occupancy import Ticket
from workers.partials import Note, Partial

ANSWER_S = 30.0
"""Deadline of a question that is answered without sampling anything."""
QUESTION_S = 2.0
"""Deadline of a question on which only a choice depends, that can be made without the answer."""


class Peer(Protocol):
    """A replica on which groups of another, or its own, run. Every method may raise `WorkerDied` naming it."""

    @property
    def name(self) -> str: ...

    async def host(self, tickets: Sequence[Ticket], held: Acknowledged) -> bool:
        """Let these groups run here from now; False if this replica does not hold exactly `held`, or will not soon."""
        ...

    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        """Sample for a group that runs here; finish `abort` if it was let go meanwhile."""
        ...

    async def let_go(self, ticket: Ticket, *, keep_cache: bool = False) -> None:
        """The group is here no more: returns once its requests are aborted, with their cache if that is to be kept."""
        ...


@dataclass(frozen=True, slots=True)
class RayPeer:
    """Implements `Peer` by the Ray actor of that replica."""

    name: str
    actor: RayActor

    async def host(self, tickets: Sequence[Ticket], held: Acknowledged) -> bool:
        return await call(self.actor.host.remote(tickets, held), self.name, "taking guests", ANSWER_S)

    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        """Without a deadline of its own: the lease of the group bounds it."""
        phase = f"sampling for group {ticket.serial} of {ticket.owner}"
        return await call(self.actor.serve.remote(ticket, request), self.name, phase)

    async def let_go(self, ticket: Ticket, *, keep_cache: bool = False) -> None:
        await call(self.actor.let_go.remote(ticket, keep_cache), self.name, "letting a group go", ANSWER_S)


@dataclass(frozen=True, slots=True)
class RayPartials:
    """Implements `PartialStore` by its Ray actor."""

    actor: RayActor

    async def record(self, notes: Sequence[Note]) -> Sequence[tuple[int, int]]:
        return await call(self.actor.record.remote(notes), "partials", "keeping what was sampled", ANSWER_S)

    async def recall(self, serial: int) -> Mapping[int, Partial]:
        return await call(self.actor.recall.remote(serial), "partials", "recalling a group", ANSWER_S)

    async def version(self, serial: int) -> PolicyVersion | None:
        """The newest version of what is kept of a group; None if that is nothing."""
        return await call(self.actor.version.remote(serial), "partials", "recalling a group's version", QUESTION_S)

    async def forget(self, ticket: Ticket) -> None:
        await call(self.actor.forget.remote(ticket), "partials", "forgetting a group", ANSWER_S)
