"""Servers reached by URL that do not answer: one piece of work asks again, and the others wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from rlsys.errors import EndpointDown
from rlsys.monitoring.events import EndpointFailed, EndpointRecovered, Events

T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Seconds before a server is asked again: each further time twice as long."""


@dataclass
class _Outage:
    """One server, from its first failure until it answers."""

    began_s: float
    wait_s: float = FIRST_WAIT_S
    is_over: bool = False
    num_waiting: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the piece of work that asks again."""


class Endpoints:
    """Outages of servers of rewards, judges, tools and environments."""

    def __init__(self, events: Events, max_attempts: int) -> None:
        """`max_attempts` bounds the attempts at work that alone gets no answer; see `persist`."""
        self._events, self._max_attempts = events, max_attempts
        self._outages: dict[str, _Outage] = {}
        self._answered_s: dict[Hashable, float] = {}
        """By kind of work: when the newest attempt began that was answered."""

    async def persist(self, attempt_once: Callable[[], Awaitable[T]], kind: Hashable) -> T:
        """Attempt until all servers that it needs answer.

        Waits for a server that is down; unblocked by an answer to the work that asks again, or by being the next to
        ask, after a pause. Raises `EndpointDown` after `max_attempts` attempts in an outage in which other work of this
        `kind` is answered, for then the request is the cause; never for a server that asks to be asked later.
        """
        num_alone, outage = 0, None
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                answer = await (attempt_once() if outage is None else self._ask_again(outage, attempt_once))
            except EndpointDown as down:
                outage = self._outage_of(down)
                num_alone += not down.is_busy and self._answered_s.get(kind, 0.0) > outage.began_s
                if num_alone >= self._max_attempts:
                    self._end(outage)
                    raise
            else:
                self._answered_s[kind] = max(began_s, self._answered_s.get(kind, 0.0))
                return answer

    async def _ask_again(self, outage: _Outage, attempt_once: Callable[[], Awaitable[T]]) -> T:
        """Wait for the turn to ask, and for the pause; ask at once if the server has answered meanwhile."""
        outage.num_waiting += 1
        try:
            async with outage.turn:
                if not outage.is_over:
                    pause_s, outage.wait_s = outage.wait_s, min(2 * outage.wait_s, LONGEST_WAIT_S)
                    await asyncio.sleep(pause_s)
                    answer = await attempt_once()
                    self._end(outage)
                    return answer
        finally:
            outage.num_waiting -= 1
        return await attempt_once()

    def _outage_of(self, down: EndpointDown) -> _Outage:
        if down.endpoint not in self._outages:
            self._outages[down.endpoint] = _Outage(asyncio.get_running_loop().time())
            self._events.emit(EndpointFailed(down.endpoint, down.detail))
        return self._outages[down.endpoint]

    def _end(self, outage: _Outage) -> None:
        if outage.is_over:
            return
        outage.is_over = True
        endpoint = next(name for name, each in self._outages.items() if each is outage)
        del self._outages[endpoint]
        seconds = asyncio.get_running_loop().time() - outage.began_s
        self._events.emit(EndpointRecovered(endpoint, seconds, outage.num_waiting))
