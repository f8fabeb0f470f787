"""Notification of pages that a run has written something, so that they query again.

Files are polled every 0.3 s, once for all pages that watch the same run, and every 2 s for the list of runs. File
systems of clusters (NFS, Lustre, FUSE) do not notify of writes by another machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from starlette.concurrency import run_in_threadpool

from rlsys.dashboard.responses import Change
from rlsys.errors import RlsysError


class TooManyPages(RlsysError):
    """The limit of pages that follow changes is reached."""


class Source(Protocol):
    """Source of changes."""

    def change(self, run: str | None) -> Change:
        """Current state of a run, or of the list of runs; see `Change`. Raises `RlsysError` if there is no such run."""


@dataclass
class _Watch:
    """State of a watched run."""

    latest: Change
    num_pages: int = 0
    is_over: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `latest` changes, or the watch is over; a new event then replaces it."""

    def wake(self) -> None:
        """Notify every page."""
        self.moved.set()
        self.moved = asyncio.Event()


class Changes:
    """Changes that pages follow: one poll per watched run, and none without a page."""

    def __init__(self, source: Source, poll_s: float = 0.3, list_poll_s: float = 2.0, limit: int = 64) -> None:
        """`poll_s`, `list_poll_s`: seconds between two polls of a run, and of the list, which costs one poll per run.
        `limit`: most pages that follow at the same time."""
        self._source, self._poll_s, self._list_poll_s, self._limit = source, poll_s, list_poll_s, limit
        self._watches: dict[str | None, _Watch] = {}
        self._polls: set[asyncio.Task[None]] = set()
        self._is_closing = asyncio.Event()

    @property
    def num_pages(self) -> int:
        """Pages that follow now."""
        return sum(watch.num_pages for watch in self._watches.values())

    async def now(self, run: str | None) -> Change:
        """Current state, as an argument of `follow`. Raises `TooManyPages`, or `RlsysError` if there is no such run."""
        if self.num_pages >= self._limit:
            raise TooManyPages(f"{self._limit} pages follow runs already, which is the limit; close one")
        return await run_in_threadpool(self._source.change, run)

    async def follow(self, run: str | None, now: Change, seen: int | None) -> AsyncGenerator[Change]:
        """Every change, beginning with `now` unless that is revision `seen`; of several at once, only the last.

        Waits for the poll of the run. Unblocked by a change, by the removal of the run, or by the end of the server.
        Ends at once if the limit of pages was reached after `now`: the browser then asks again, and gets the error.
        """
        if self.num_pages >= self._limit:
            return
        watch = self._watch(run, now)
        watch.num_pages += 1
        sent = now if now.revision == seen else None
        try:
            while True:
                moved = watch.moved
                if watch.latest != sent:
                    sent = watch.latest
                    yield sent
                elif watch.is_over:
                    return
                else:
                    await moved.wait()
        finally:
            watch.num_pages -= 1

    def close(self) -> None:
        """End all pages' streams after one more poll, because a run that ends its dashboard has ended."""
        self._is_closing.set()

    def _watch(self, run: str | None, now: Change) -> _Watch:
        if run not in self._watches:
            self._watches[run] = _Watch(now)
            poll = asyncio.create_task(self._poll(run, self._watches[run]))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)
        return self._watches[run]

    async def _poll(self, run: str | None, watch: _Watch) -> None:
        """Poll until no page follows or the run is gone. The module docstring explains the poll."""
        is_last, poll_s = False, self._list_poll_s if run is None else self._poll_s
        try:
            while watch.num_pages and not is_last:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_closing.wait(), poll_s)
                is_last = self._is_closing.is_set()
                change = await run_in_threadpool(self._source.change, run)
                if change != watch.latest:
                    watch.latest = change
                    watch.wake()
        except RlsysError:
            pass  # deleted: the next request gets the error
        finally:
            del self._watches[run]
            watch.is_over = True
            watch.wake()
