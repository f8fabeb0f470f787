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
ALONE_S = 120.0
"""Seconds of an outage from which a request is the cause, if others of its kind are answered."""


@dataclass
class _Outage:
    """One server, from its first failure until it answers."""

    endpoint: str
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
        ask, after a pause. Raises `EndpointDown` after `max_attempts` attempts in an outage of more than `ALONE_S`
        during which other work of this `kind` is answered, for then the request is the cause; never for a server that
        asks to be asked later.
        """
        num_alone, outage = 0, None
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                answer = await (attempt_once() if outage is None else self._ask_again(outage, attempt_once))
            except EndpointDown as down:
                outage = self._outage_of(down)
                is_alone = self._answered_s.get(kind, 0.0) > outage.began_s and self._age_s(outage) > ALONE_S
                num_alone += is_alone and not down.is_busy
                if num_alone >= self._max_attempts:
                    self._forget(outage)
                    raise
            else:
                self._answered_s[kind] = max(began_s, self._answered_s.get(kind, 0.0))
                return answer

    async def _ask_again(self, outage: _Outage, attempt_once: Callable[[], Awaitable[T]]) -> T:
        """Wait for the turn to ask, and for the pause; ask at once if the server has answered meanwhile.

        An attempt that has not failed after `LONGEST_WAIT_S` counts as an answer, and the others go on: the attempt may
        play a whole group.
        """
        outage.num_waiting += 1
        attempt: asyncio.Future[T] | None = None
        try:
            async with outage.turn:
                if not outage.is_over:
                    pause_s, outage.wait_s = outage.wait_s, min(2 * outage.wait_s, LONGEST_WAIT_S)
                    await asyncio.sleep(pause_s)
                    attempt = asyncio.ensure_future(attempt_once())
                    await asyncio.wait([attempt], timeout=LONGEST_WAIT_S)
                    if not (attempt.done() and isinstance(attempt.exception(), EndpointDown)):
                        self._end(outage)
            return await (attempt or attempt_once())
        except EndpointDown as down:
            if down.endpoint != outage.endpoint:
                self._leave(outage)
            raise
        except BaseException:
            self._leave(outage)
            raise
        finally:
            outage.num_waiting -= 1
            if attempt is not None:
                attempt.cancel()

    def _outage_of(self, down: EndpointDown) -> _Outage:
        if down.endpoint not in self._outages:
            self._outages[down.endpoint] = _Outage(down.endpoint, asyncio.get_running_loop().time())
            self._events.emit(EndpointFailed(down.endpoint, down.detail))
        return self._outages[down.endpoint]

    def _end(self, outage: _Outage) -> None:
        """Let all that wait for the server go on: it has answered."""
        if not outage.is_over:
            self._events.emit(EndpointRecovered(outage.endpoint, self._age_s(outage), outage.num_waiting))
        self._forget(outage)

    def _leave(self, outage: _Outage) -> None:
        """Forget an outage that no other work waits for, because the server will not be asked again."""
        if outage.num_waiting == 1:
            self._forget(outage)

    def _forget(self, outage: _Outage) -> None:
        outage.is_over = True
        if self._outages.get(outage.endpoint) is outage:
            del self._outages[outage.endpoint]

    def _age_s(self, outage: _Outage) -> float:
        return asyncio.get_running_loop().time() - outage.began_s
