"""Deadlines that only time this process lived through can reach.

A process that is stopped, or a machine that sleeps, comes back to find that every timer is over: it would take all its
workers for dead, with their answers lying unread in its sockets. Here time is counted in short ticks, and a tick that
lasted much longer than asked is a gap, which does not count. The wall clock is not looked at. One ticker serves all the
deadlines of an event loop, so that a deadline costs an entry in a table and no timer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import signature
from math import inf
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

TICK_S = 1.0
"""Longest tick; also how much longer than asked a tick may last before it is a gap."""
ROUNDING_S = 1e-6
"""Differences of times below this are rounding."""


@asynccontextmanager
async def timeout(seconds: float | None) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, in seconds that count; None waits for ever. Raises `TimeoutError`."""
    async with asyncio.timeout(None) as scope:
        if seconds is None:
            yield
            return
        loop, ticks = asyncio.get_running_loop(), ticker()
        entry = ticks.call_later(seconds, lambda: scope.reschedule(loop.time()))
        try:
            yield
        finally:
            ticks.cancel(entry)


async def sleep(seconds: float) -> None:
    """Return once `seconds` have passed that count."""
    over = asyncio.Event()
    ticks = ticker()
    entry = ticks.call_later(seconds, over.set)
    try:
        await over.wait()
    finally:
        ticks.cancel(entry)


def now() -> float:
    """Seconds that counted in this event loop. Gaps are noticed only while somebody waits for a deadline."""
    return ticker().now()


class Progress:
    """When something last moved. Drivers of one run share it: each may wait for another, and all is well as long as any
    of them gets on."""

    def __init__(self) -> None:
        self._last_s: float | None = None

    def moved(self) -> None:
        """Something moved."""
        self._last_s = now()

    def idle_s(self) -> float:
        """Seconds since something last moved, or since this was first asked."""
        if self._last_s is None:
            self.moved()
        assert self._last_s is not None
        return now() - self._last_s


class Ticker:
    """Calls back when seconds that count have passed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        self._counted_s = 0.0
        """Seconds that counted, up to the last tick."""
        self._nearest_s = inf
        """No entry is due before this."""
        self._tick: asyncio.TimerHandle | None = None
        self._asked_s = 0.0
        self._began_s = self._loop.time()

    def now(self) -> float:
        """Seconds that counted."""
        return self._counted_s + self._lasted_s()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        """Call back once `seconds` have passed that count; returns what `cancel` takes."""
        entry, due_s = object(), self.now() + seconds
        self._due[entry] = (due_s, callback)
        if self._tick is None or due_s < self._nearest_s:
            self._nearest_s = due_s
            self._count()
            self._arm()
        return entry

    def cancel(self, entry: object) -> None:
        """Do not call back; nothing to do if that is over."""
        self._due.pop(entry, None)

    def _lasted_s(self) -> float:
        """Seconds since the last tick that count: none of a gap."""
        lasted_s = self._loop.time() - self._began_s
        return lasted_s if self._tick is None or lasted_s <= self._asked_s + TICK_S else 0.0

    def _count(self) -> None:
        """End the tick under way."""
        self._counted_s += self._lasted_s()
        self._began_s = self._loop.time()
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    def _arm(self) -> None:
        """Begin a tick."""
        self._asked_s = min(TICK_S, max(0.0, self._nearest_s - self._counted_s))
        self._tick = self._loop.call_later(self._asked_s, self._ticked)

    def _ticked(self) -> None:
        self._count()
        if self._nearest_s <= self._counted_s + ROUNDING_S:
            self._call_due()
        if self._due and self._tick is None:
            self._arm()

    def _call_due(self) -> None:
        latest_s = self._counted_s + ROUNDING_S
        due = [entry for entry, (due_s, _) in self._due.items() if due_s <= latest_s]
        callbacks = [self._due.pop(entry)[1] for entry in due]
        self._nearest_s = min((due_s for due_s, _ in self._due.values()), default=inf)
        for callback in callbacks:
            callback()


_tickers: dict[asyncio.AbstractEventLoop, Ticker] = {}


def ticker() -> Ticker:
    """That of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _tickers:
        for closed in [other for other in _tickers if other.is_closed()]:
            del _tickers[closed]
        _tickers[loop] = Ticker(loop)
    return _tickers[loop]


_phases: dict[Callable[..., Any], tuple[str, float, tuple[str, ...]]] = {}
"""Text, patience and names of the parameters of each method that `remote` marks."""


def remote(text: str, *, patience: float = 1.0) -> Callable[[F], F]:
    """Mark a method that other processes call: what it does, in words, and how long its callers wait for it.

    `text` names the phase in errors, with the method's arguments in braces: `giving bucket {bucket}`. `patience` is the
    deadline in those that the caller has for an answer; `inf` waits for ever.
    """

    def marked(method: F) -> F:
        _, *names = signature(method).parameters
        _phases[method] = text, patience, tuple(names)
        return method

    return marked


def phase_of(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, float]:
    """The phase of a call with these arguments, and its patience."""
    if method not in _phases:
        return method.__name__, 1.0
    text, patience, names = _phases[method]
    return text.format_map({**dict(zip(names, args, strict=False)), **kwargs}) if "{" in text else text, patience
