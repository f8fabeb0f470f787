"""Deadlines that count only the time in which this process runs.

If a process is stopped, or its machine sleeps, all ordinary timers expire on wake-up. It would treat all workers as
dead, although their answers wait unread in its sockets. Here time is counted in short ticks; a tick that lasts much
longer than planned is a gap, and is not counted. The wall clock is not used. One ticker serves all the deadlines of an
event loop, so that a deadline costs a table entry instead of a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import signature
from math import inf
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

TICK_S = 1.0
"""Longest tick, and the longest delay of a tick that is not a gap."""
ROUNDING_S = 1e-6
"""Differences of times below this are rounding."""


@asynccontextmanager
async def timeout(seconds: float | None) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, in counted seconds; None never times out. Raises `TimeoutError`."""
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
    """Return after `seconds` counted seconds."""
    over = asyncio.Event()
    ticks = ticker()
    entry = ticks.call_later(seconds, over.set)
    try:
        await over.wait()
    finally:
        ticks.cancel(entry)


async def unless(work: Coroutine[Any, Any, T], *troubles: Awaitable[None]) -> T:
    """Return the result of `work`; if one of the `troubles` raises before, cancel it and raise that.

    Waits for `work`; unblocked by its end, or by a trouble. All of them have ended when this returns.
    """
    main = asyncio.create_task(work)
    others = [asyncio.ensure_future(trouble) for trouble in troubles]
    try:
        done, _ = await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
        if main not in done:
            for trouble in done:
                trouble.result()
        return await main
    finally:
        for task in (main, *others):
            task.cancel()
        await asyncio.gather(main, *others, return_exceptions=True)


def now() -> float:
    """Return the counted seconds of this event loop. Gaps are detected only while a deadline is pending."""
    return ticker().now()


class PausedDeadline:
    """Deadline whose clock runs inside its `with` blocks, such as while a group waits for tokens, and stands still
    while the deadline is held. Blocks side by side count once."""

    def __init__(self, seconds: float, on_end: Callable[[], object]) -> None:
        """`on_end` is called once, when the clock has run for `seconds`."""
        self._left_s, self._on_end = seconds, on_end
        self._num_running, self._began_s = 0, 0.0
        self._entry: object | None = None
        self._is_held = self.is_over = False

    def __enter__(self) -> None:
        self._num_running += 1
        self._turn()

    def __exit__(self, *raised: object) -> None:
        self._num_running -= 1
        self._turn()

    def hold(self, *, is_held: bool) -> None:
        """Stop the clock, or let it go on."""
        self._is_held = is_held
        self._turn()

    def _turn(self) -> None:
        """Start or stop the clock, if it does not run as it should."""
        runs = self._num_running > 0 and not self._is_held and self._left_s < inf
        if runs and self._entry is None:
            self._began_s = now()
            self._entry = ticker().call_later(self._left_s, self._end)
        elif not runs and self._entry is not None:
            ticker().cancel(self._entry)
            self._left_s -= now() - self._began_s
            self._entry = None

    def _end(self) -> None:
        self.is_over = True
        self._on_end()


class Progress:
    """Time of the last progress. The drivers of a run share it: one may wait for another that makes progress."""

    def __init__(self) -> None:
        self._last_s: float | None = None

    def mark_progress(self) -> None:
        self._last_s = now()

    def idle_s(self) -> float:
        """Seconds since the last progress, or since the first call."""
        if self._last_s is None:
            self.mark_progress()
        assert self._last_s is not None
        return now() - self._last_s


class Ticker:
    """Timer of callbacks in counted seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        self._counted_s = 0.0
        """Counted seconds up to the last tick."""
        self._nearest_s = inf
        """No entry is due before this."""
        self._tick: asyncio.TimerHandle | None = None
        self._asked_s = 0.0
        self._began_s = self._loop.time()

    def now(self) -> float:
        return self._counted_s + self._lasted_s()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        """Call `callback` after `seconds` counted seconds; return a handle for `cancel`."""
        entry, due_s = object(), self.now() + seconds
        self._due[entry] = (due_s, callback)
        if self._tick is None or due_s < self._nearest_s:
            self._nearest_s = due_s
            self._count()
            self._arm()
        return entry

    def cancel(self, entry: object) -> None:
        """Cancel a callback; does nothing if it was called."""
        self._due.pop(entry, None)

    def _lasted_s(self) -> float:
        """Counted seconds since the last tick: 0 in a gap."""
        lasted_s = self._loop.time() - self._began_s
        return lasted_s if self._tick is None or lasted_s <= self._asked_s + TICK_S else 0.0

    def _count(self) -> None:
        """End the current tick."""
        self._counted_s += self._lasted_s()
        self._began_s = self._loop.time()
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    def _arm(self) -> None:
        """Begin a tick."""
        self._asked_s = min(TICK_S, max(0.0, self._nearest_s - self._counted_s))
        self._tick = self._loop.call_later(self._asked_s, self._on_tick)

    def _on_tick(self) -> None:
        self._count()
        latest_s = self._counted_s + ROUNDING_S
        if self._nearest_s <= latest_s:
            due = [entry for entry, (due_s, _) in self._due.items() if due_s <= latest_s]
            callbacks = [self._due.pop(entry)[1] for entry in due]
            self._nearest_s = min((due_s for due_s, _ in self._due.values()), default=inf)
            for callback in callbacks:
                callback()
        if self._due and self._tick is None:
            self._arm()


_tickers: dict[asyncio.AbstractEventLoop, Ticker] = {}


def ticker() -> Ticker:
    """Return the ticker of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _tickers:
        for closed in [other for other in _tickers if other.is_closed()]:
            del _tickers[closed]
        _tickers[loop] = Ticker(loop)
    return _tickers[loop]


_phases: dict[Callable[..., Any], tuple[str, float, tuple[str, ...]]] = {}
"""Text, patience and parameter names of each method marked by `remote`."""


def remote(text: str, *, patience: float = 1.0) -> Callable[[F], F]:
    """Mark a method that other processes call with its phase and its deadline.

    `text` names the phase in errors, with the method's arguments in braces: `sending bucket {bucket}`. `patience` is
    the deadline, in multiples of the caller's deadline for an answer; `inf` waits for ever.
    """

    def mark_method(method: F) -> F:
        _, *names = signature(method).parameters
        _phases[method] = text, patience, tuple(names)
        return method

    return mark_method


def phase_of(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, float]:
    """Return the phase of a call with these arguments, and its patience."""
    if method not in _phases:
        return method.__name__, 1.0
    text, patience, names = _phases[method]
    return text.format_map({**dict(zip(names, args, strict=False)), **kwargs}) if "{" in text else text, patience
