"""Who runs on a replica's engine: its own groups, and the guests of other replicas.

A group that moves keeps its session where it began; its requests come here from there. What keeps an engine from
changing its weights is not whose groups run on it but that any do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workers.engines.engine import Completion, Engine, Request

NOTHING = Completion((), (), (), None)
"""What a request has sampled that has not run yet."""


class Ticket(NamedTuple):
    """One group being played: `owner` is the replica its sessions are on, `number` tells its attempts apart."""

    owner: str
    group_id: int
    number: int


@dataclass(eq=False)
class EngineStay:
    """A group's time on this engine."""

    ticket: Ticket
    since_s: float = field(default_factory=time.monotonic)
    """On this machine's monotonic clock."""
    running: dict[str, Request] = field(default_factory=dict)
    """By request id."""
    finished: list[tuple[Request, Completion]] = field(default_factory=list)
    """What was sampled whole here, as long as the recorder has not noted it."""
    noted: dict[int, int] = field(default_factory=dict)
    """Tokens that the recorder has noted, by the request's seed."""
    is_over: bool = False
    _is_quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_quiet.set()

    def begin(self, request: Request) -> None:
        """A request begins to run."""
        self.running[request.id] = request
        self._is_quiet.clear()

    def end(self, request: Request) -> None:
        """It runs no more."""
        del self.running[request.id]
        if not self.running:
            self._is_quiet.set()

    async def quiet(self) -> None:
        """Return once none of its requests runs; unblocked by the engine answering or aborting them."""
        await self._is_quiet.wait()


class Occupancy:
    """The groups on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stays: dict[Ticket, EngineStay] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._stays)

    def __iter__(self) -> Iterator[EngineStay]:
        return iter(tuple(self._stays.values()))

    async def empty(self) -> None:
        """Return once no group is here; unblocked by the last of them leaving."""
        while self._stays:  # a guest may have come between the event and this line
            await self._is_empty.wait()

    def enter(self, ticket: Ticket) -> None:
        """A group is here from now."""
        self._stays[ticket] = EngineStay(ticket)
        self._is_empty.clear()

    async def generate(self, ticket: Ticket, request: Request) -> Completion:
        """What the engine makes of a request of this group.

        Finish `abort` if the group has left meanwhile, or had before: then its tokens so far, to go on with elsewhere.
        Raises what the engine raises.
        """
        stay = self._stays.get(ticket)
        if stay is None or stay.is_over:
            return replace(request.begun or NOTHING, finish="abort")
        stay.begin(request)
        try:
            done = await self._engine.generate(request)
        finally:
            stay.end(request)
        if done.finish != "abort":
            stay.finished.append((request, done))
        return done

    async def leave(self, ticket: Ticket, *, keep_cache: bool = False) -> None:
        """Abort what the group still runs, and return once that has ended; nothing to do if it is not here.

        `keep_cache`: its tokens come with their keys and values, if the engine can give them.
        """
        if (stay := self._stays.get(ticket)) is None:
            return
        stay.is_over = True
        for request_id in stay.running:
            self._engine.abort(request_id, keep_cache=keep_cache)
        await stay.quiet()
        if self._stays.pop(ticket, None) and not self._stays:
            self._is_empty.set()
