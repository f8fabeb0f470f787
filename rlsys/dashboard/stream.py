"""Tells pages that a run has written something, so that they ask again.

Files are looked at every 0.3 s, once for all pages that watch the same run, and every 2 s for those that show the list
of runs: the file systems of clusters (NFS, Lustre, FUSE) notify nobody of what another machine wrote.
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
    """As many pages as can be told of changes are open already."""


class Source(Protocol):
    """Who knows of changes."""

    def change(self, run: str | None) -> Change:
        """How a run is now, or the list of runs; see `Change`. Raises `RlsysError` if there is no such run."""
        ...


@dataclass
class _Watch:
    """What is known of a run that pages watch."""

    latest: Change
    num_pages: int = 0
    is_over: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `latest` is another, or it is over; a new one then takes its place."""

    def wake(self) -> None:
        """Tell every page."""
        self.moved.set()
        self.moved = asyncio.Event()


class Changes:
    """What pages follow: one poll per watched run, and none where nobody watches."""

    def __init__(self, source: Source, poll_s: float = 0.3, list_poll_s: float = 2.0, limit: int = 64) -> None:
        """`poll_s`, `list_poll_s`: seconds between two looks at a run, and at the list, which costs as many looks as it
        has runs. `limit`: pages that may follow at the same time."""
        self._source, self._poll_s, self._list_poll_s, self._limit = source, poll_s, list_poll_s, limit
        self._watches: dict[str | None, _Watch] = {}
        self._polls: set[asyncio.Task[None]] = set()
        self._is_closing = asyncio.Event()

    @property
    def num_pages(self) -> int:
        """That follow now."""
        return sum(watch.num_pages for watch in self._watches.values())

    async def now(self, run: str | None) -> Change:
        """How it is, for who wants to `follow`. Raises `TooManyPages`, or `RlsysError` if there is no such run."""
        if self.num_pages >= self._limit:
            raise TooManyPages(f"{self._limit} pages follow runs already, which is the limit; close one")
        return await run_in_threadpool(self._source.change, run)

    async def follow(self, run: str | None, now: Change, seen: int | None) -> AsyncGenerator[Change]:
        """Every change, that of `now` included unless it is revision `seen`; where many come at once, the last of them.

        Waits for the poll of the run. Ends when the run is gone, or with the server; at once if others took the last
        places since `now` answered: the browser then asks again, and is told.
        """
        if self.num_pages >= self._limit:
            return
        watch = self._watch(run, now)
        watch.num_pages += 1
        told = now if now.revision == seen else None
        try:
            while True:
                moved = watch.moved
                if watch.latest != told:
                    told = watch.latest
                    yield told
                elif watch.is_over:
                    return
                else:
                    await moved.wait()
        finally:
            watch.num_pages -= 1

    def close(self) -> None:
        """End what all pages follow, after one more look: a run that ends its dashboard has ended."""
        self._is_closing.set()

    def _watch(self, run: str | None, now: Change) -> _Watch:
        if run not in self._watches:
            self._watches[run] = _Watch(now)
            poll = asyncio.create_task(self._poll(run, self._watches[run]))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)
        return self._watches[run]

    async def _poll(self, run: str | None, watch: _Watch) -> None:
        """Look again and again, until no page follows or the run is gone. A poll, for the reason above."""
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
            pass  # it was deleted: whoever asks again is told
        finally:
            del self._watches[run]
            watch.is_over = True
            watch.wake()
