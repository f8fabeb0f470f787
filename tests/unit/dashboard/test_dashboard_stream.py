"""Stream to pages that follow a run, and clean-up after closed pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from rlsys.dashboard.responses import Change
from rlsys.dashboard.stream import Changes, TooManyPages
from rlsys.errors import RlsysError


class Files:
    """A run whose state is set by hand, and a count of the looks at it."""

    def __init__(self) -> None:
        self.now = Change(1, 0, "running")
        self.is_there = True
        self.num_looks = 0
        self._loop, self._looked = asyncio.get_running_loop(), asyncio.Event()

    def change(self, run: str | None) -> Change:
        self.num_looks += 1
        self._loop.call_soon_threadsafe(self._looked.set)
        if not self.is_there:
            raise RlsysError("it was deleted")
        return self.now

    async def looked_at(self, times: int = 1) -> None:
        """Wait until somebody has looked so many times more."""
        for _ in range(times):
            self._looked.clear()
            await self._looked.wait()


def changes_of(files: Files, limit: int = 64) -> Changes:
    return Changes(files, poll_s=0.001, limit=limit)


async def others_end() -> None:
    """Wait until no other task is left."""
    this = asyncio.current_task()
    if others := asyncio.all_tasks() - {this}:
        await asyncio.wait(others)


def test_a_page_is_told_what_is_and_then_what_changes() -> None:
    async def follow() -> None:
        files = Files()
        page = changes_of(files).follow("run", files.now, None)
        assert await anext(page) == Change(1, 0, "running")
        files.now = Change(2, 1, "running")
        assert await anext(page) == files.now
        files.now = Change(2, 1, "silent")  # nothing was written, which is the news
        assert await anext(page) == files.now

    asyncio.run(follow())


def test_a_page_with_a_known_revision_waits_for_the_next() -> None:
    async def follow() -> None:
        files = Files()
        page = changes_of(files).follow("run", files.now, 1)
        told = asyncio.ensure_future(anext(page))
        await files.looked_at(3)
        assert not told.done()
        files.now = Change(2, 1, "running")
        assert await told == files.now

    asyncio.run(follow())


def test_many_pages_of_a_run_share_one_file_check() -> None:
    async def follow() -> None:
        files = Files()
        changes = changes_of(files)
        pages = [changes.follow("run", files.now, None) for _ in range(20)]
        assert [await anext(page) for page in pages] == [files.now] * 20
        told = [asyncio.ensure_future(anext(page)) for page in pages]
        looks = files.num_looks
        files.now = Change(2, 1, "running")
        assert await asyncio.gather(*told) == [files.now] * 20
        assert files.num_looks - looks <= 2

    asyncio.run(follow())


def test_nothing_is_left_of_pages_that_have_gone() -> None:
    async def follow() -> None:
        files = Files()
        changes = changes_of(files)
        pages = [changes.follow("run", files.now, 1) for _ in range(5)]
        waiting = [asyncio.ensure_future(anext(page)) for page in pages]
        await files.looked_at()
        assert changes.num_pages == 5
        for one in waiting:
            one.cancel()
        await others_end()  # those pages, and the poll
        assert changes.num_pages == 0

    asyncio.run(follow())


def test_there_is_a_limit_to_the_pages_that_follow() -> None:
    async def follow() -> None:
        files = Files()
        changes = changes_of(files, limit=1)
        page = changes.follow("run", await changes.now("run"), None)
        await anext(page)
        with pytest.raises(TooManyPages, match="1 pages follow runs already"):
            await changes.now("run")
        await page.aclose()
        assert await changes.now("run") == files.now

    asyncio.run(follow())


def test_the_page_limit_holds_for_concurrent_requests() -> None:
    async def follow() -> None:
        files = Files()
        changes = changes_of(files, limit=4)

        async def told() -> Change | None:
            page = changes.follow("run", await changes.now("run"), None)
            open_pages.append(page)
            return await anext(page, None)

        open_pages: list[AsyncGenerator[Change]] = []
        answers = await asyncio.gather(*(told() for _ in range(40)), return_exceptions=True)
        assert (answers.count(files.now), changes.num_pages) == (4, 4)
        for page in open_pages:
            await page.aclose()

    asyncio.run(follow())


def test_the_list_of_runs_is_polled_less_often_than_runs() -> None:
    async def follow() -> None:
        files = Files()
        changes = Changes(files, poll_s=0.001, list_poll_s=1000.0)
        lists, run = changes.follow(None, files.now, None), changes.follow("run", files.now, None)
        assert [await anext(lists), await anext(run)] == [files.now] * 2
        told = [asyncio.ensure_future(anext(page)) for page in (lists, run)]
        files.now = Change(2, 1, "running")
        assert await told[1] == files.now
        assert not told[0].done()
        changes.close()
        assert await told[0] == files.now

    asyncio.run(follow())


def test_what_pages_follow_ends_with_the_run_or_the_server() -> None:
    async def follow() -> None:
        files = Files()
        changes = changes_of(files)
        page = changes.follow("run", files.now, 1)
        told = asyncio.ensure_future(anext(page, None))
        await files.looked_at()
        files.is_there = False
        assert await told is None
        files.is_there = True
        page = changes.follow("run", files.now, 1)
        other = asyncio.ensure_future(anext(page, None))
        await files.looked_at()
        files.now = Change(2, 9, "finished")
        changes.close()
        assert await other == files.now  # the last word of a run that ends its dashboard
        assert await anext(page, None) is None

    asyncio.run(follow())
