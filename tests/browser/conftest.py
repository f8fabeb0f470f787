"""A real server, a real browser: every test of this folder drives the pages in headless Chromium.

Whatever a page complains of fails the test that made it: an error, a word on the console, something the content
security policy forbids, a request to anywhere but its own server. A test that provokes an error says so with
`complaints.expected.append("404")`, a part of what will be said.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote, urlencode

import pytest

from tests.dashboards import served
from tests.histories import small_run
from tests.hostile import hostile_run
from tests.planted import BEGIN_S, planted_run
from tests.questioned import questioned_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Error, Page, Request, ViewportSize

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]
WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 390, "height": 844}
PATIENCE_MS = 10_000
"""What a page is given to show something; on two cores that others use, too."""


@dataclass
class Complaints:
    """What a page complained of, and the addresses it asked."""

    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    """Parts of complaints that are no fault."""

    @contextmanager
    def of(self, page: Page) -> Iterator[None]:
        """Note all that a page complains of in the block, and whom it asks."""
        page.on("console", self._console)
        page.on("pageerror", self._error)
        page.on("dialog", self._dialog)
        page.on("request", self._request)
        try:
            yield
        finally:
            page.remove_listener("console", self._console)
            page.remove_listener("pageerror", self._error)
            page.remove_listener("dialog", self._dialog)
            page.remove_listener("request", self._request)

    def _error(self, error: Error) -> None:
        self.said.append(f"error: {error}")

    def _request(self, request: Request) -> None:
        self.asked.append(request.url)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):  # breaches of the content security policy are among them
            self.said.append(message.text)

    def _dialog(self, dialog: Dialog) -> None:
        """No page has any reason to open one of the browser's own."""
        self.said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def check(self, origin: str) -> None:
        """Fail on what was not expected, and on requests to anywhere else."""
        wrong = [text for text in self.said if not any(part in text for part in self.expected)]
        assert not wrong, "\n".join(wrong)
        foreign = [url for url in self.asked if not url.startswith((f"{origin}/", "data:", "blob:"))]
        assert not foreign, foreign


Visit: TypeAlias = "Callable[..., Page]"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip("there is no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        api.expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: `small` finished, `planted` was killed and has four faults, the actor of `asked` died,
    `hostile.RUN` says all that can break a page. Tests of runs that go on write theirs beside them."""
    root = tmp_path_factory.mktemp("runs")
    small_run(root / "small")
    planted_in_thread(root / "planted")
    questioned_run(root / "asked")
    hostile_run(root)
    return root


@pytest.fixture(scope="session")
def origin(folder: Path) -> Iterator[str]:
    """Address of a server of `folder`, without a slash at its end."""
    with served(folder) as url:
        yield url.rstrip("/")


@pytest.fixture
def complaints() -> Complaints:
    """Of the page of this test; a test adds to `expected` what it provokes."""
    return Complaints()


@pytest.fixture(scope="session")
def tab(chromium: Browser) -> Iterator[Page]:
    """One tab for all tests: to begin a new one takes three times as long as to load a page again."""
    context = chromium.new_context(viewport=WIDE, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def page(tab: Page, origin: str, complaints: Complaints) -> Iterator[Page]:
    """A page as good as new, 1280 wide and light, that is listened to."""
    tab.set_viewport_size(WIDE)
    tab.emulate_media(color_scheme="light")
    with complaints.of(tab):
        yield tab
    if tab.url.startswith(origin):
        tab.evaluate("() => localStorage.clear()")
    tab.unroute_all()
    tab.goto("about:blank")
    complaints.check(origin)


@pytest.fixture
def visit(page: Page, origin: str) -> Visit:
    """Go to a view: `visit("overview", "small")`, `visit("group", "small", step=3, group_id=18)`, `visit("runs")`."""

    def go(view: str, run: str | None = None, /, **query: object) -> Page:
        page.goto(f"{origin}/{address_of(view, run, **query)}")
        shown(page, view)
        return page

    return go


def planted_in_thread(folder: Path, begin_s: float = BEGIN_S) -> None:
    """`planted_run`, beside Playwright, whose event loop has this thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(planted_run, folder, begin_s).result()


def address_of(view: str, run: str | None = None, /, **query: object) -> str:
    """The part of an address after the server's: `#/run/small/group?step=3`."""
    asked = f"?{urlencode(query, doseq=True)}" if query else ""
    return f"#/{'' if view == 'runs' else view}{asked}" if run is None else f"#/run/{quote(run, safe='')}/{view}{asked}"


def shown(page: Page, view: str) -> None:
    """Wait until a view is there, with what it asked the server for."""
    page.locator(f"main:not([aria-busy]) [data-testid=view-{view}]").wait_for()
