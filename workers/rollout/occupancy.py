"""Groups on a replica's engine: the replica's own groups, and guests from other replicas.

A group that moves keeps its sessions at the first replica; only its requests come here. A weight change between
groups waits for both kinds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workers.engines.engine import Completion, Engine, Request

NOTHING = Completion((), (), (), None)
"""The completion of a request that has not sampled yet."""


class Ticket(NamedTuple):
    """One attempt at a group: `owner` is the replica of its sessions, and `number` distinguishes its attempts."""

    owner: str
    group_id: int
    number: int


@dataclass(eq=False)
class EngineStay:
    """Stay of one group on this engine."""

    ticket: Ticket
    since_s: float = field(default_factory=time.monotonic)
    """Start of the stay, on this machine's monotonic clock."""
    running: dict[str, Request] = field(default_factory=dict)
    """By request id."""
    finished: list[tuple[Request, Completion]] = field(default_factory=list)
    """Requests that finished here and that are not in the partial response pool yet."""
    noted: dict[int, int] = field(default_factory=dict)
    """Number of tokens already in the partial response pool, by the request's seed."""
    is_over: bool = False
    _is_quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_quiet.set()

    def begin(self, request: Request) -> None:
        """Register a running request."""
        self.running[request.id] = request
        self._is_quiet.clear()

    def end(self, request: Request) -> None:
        """Remove a request that has ended."""
        del self.running[request.id]
        if not self.running:
            self._is_quiet.set()

    async def quiet(self) -> None:
        """Return once no request of the group runs; unblocked by the engine answering or aborting them."""
        await self._is_quiet.wait()


class Occupancy:
    """Groups on one engine."""

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
        """Return once no group is here; unblocked by the last group leaving."""
        while self._stays:  # a guest may have come between the event and this line
            await self._is_empty.wait()

    def enter(self, ticket: Ticket) -> None:
        """Register a group."""
        self._stays[ticket] = EngineStay(ticket)
        self._is_empty.clear()

    async def generate(self, ticket: Ticket, request: Request) -> Completion:
        """Sample a request of this group.

        Finish `abort` if the group has left, before or during the call: then with its tokens so far, to continue
        elsewhere. Raises the errors of the engine.
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
        """Abort the group's requests, and return once they have ended. Does nothing if the group is not here.

        `keep_cache`: the tokens come with their keys and values, if the engine supports it.
        """
        if (stay := self._stays.get(ticket)) is None:
            return
        stay.is_over = True
        for request_id in stay.running:
            self._engine.abort(request_id, keep_cache=keep_cache)
        await stay.quiet()
        if self._stays.pop(ticket, None) and not self._stays:
            self._is_empty.set()
