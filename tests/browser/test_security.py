"""A model may write anything, and so may a task, a tool or an error: pages show it as text, and do nothing with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlsys.config.changed_keys import changed_keys
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.report.html_report import report_of
from tests.browser.conftest import NARROW, Complaints, address_of, shown
from tests.dashboards import served
from tests.hostile import ATTACKS, LONG, MARK, RUN, task_id_of

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.browser.conftest import Visit

TASK = task_id_of("task-0")
PLACES = {
    "runs": ("runs", None, {}),
    "compare": ("compare", None, {"run": [RUN, "small"]}),
    "overview": ("overview", RUN, {}),
    "groups": ("groups", RUN, {"step": 2}),
    "group": ("group", RUN, {"step": 2, "group_id": 3}),
    "episode": ("episode", RUN, {"step": 2, "group_id": 3, "episode": 0}),
    "episode of one word": ("episode", RUN, {"step": 2, "group_id": 3, "episode": 1}),
    "tasks": ("tasks", RUN, {}),
    "task": ("task", RUN, {"task": TASK}),
    "cluster": ("cluster", RUN, {}),
    "ledger": ("ledger", RUN, {}),
    "alerts": ("alerts", RUN, {}),
    "log": ("log", RUN, {}),
    "config": ("config", RUN, {}),
}
"""Every view of a run in which everything is hostile."""

FOREIGN = (
    "script, iframe, img, form[action], base, meta, style, link, object, embed, "
    "[onload], [onerror], [onclick], [srcdoc], a:not([href^='#'])"
)
"""What no view makes."""


def assert_is_text(page: Page, within: str = "main, header") -> None:
    """Nothing that a run wrote became part of the page."""
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    roots = page.locator(within)
    assert [root.locator(FOREIGN).count() for root in roots.all()] == [0] * roots.count()
    assert page.evaluate("window.pwned") is None
    assert page.title().endswith("rlsys")


@pytest.mark.parametrize("place", PLACES)
def test_hostile_text_is_shown_as_text(visit: Visit, place: str) -> None:
    view, run, query = PLACES[place]
    page = visit(view, run, **query)

    assert_is_text(page)
    assert MARK in page.locator("body").inner_text(), "it is shown, not left out"
    assert "window.pwned=1>" in page.locator("body").inner_text(), "so is the name of the run"
    page.set_viewport_size(NARROW)
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth", timeout=2_000)


def test_hostile_tasks_agents_and_texts_can_be_walked_through(visit: Visit) -> None:
    page = visit("groups", RUN, step=2)
    page.get_by_test_id("rows").locator("tbody th a").first.click()
    shown(page, "group")
    page.get_by_test_id("episode-link").first.click()
    shown(page, "episode")
    for key in ("logprob", "ratio", "advantage", "entropy", "mask", "version"):
        page.get_by_test_id(f"by-{key}").check()
    assert_is_text(page)

    page.get_by_test_id("title").get_by_role("link").click()
    shown(page, "task")

    assert MARK in page.get_by_test_id("title").inner_text()
    assert_is_text(page)


def test_a_word_of_a_megabyte_does_not_stop_the_page(visit: Visit) -> None:
    page = visit("episode", RUN, step=2, group_id=3, episode=1)

    text = page.locator("main").text_content() or ""
    left_out = re.search(r"([\d,]+) more characters", text)

    assert left_out, "what is not shown is counted"
    assert text.count("W") + int(left_out[1].replace(",", "")) >= len(LONG)


def test_even_if_it_became_markup_it_could_do_nothing(visit: Visit, complaints: Complaints, origin: str) -> None:
    """The second wall; and the proof that the tests above would see the first one fall."""
    page = visit("runs")
    markup = " ".join(attack for attack in ATTACKS if "http-equiv" not in attack)  # that one leaves the page
    with page.expect_console_message(lambda said: "img-src" in said.text):
        page.evaluate("markup => { document.getElementById('main').innerHTML = markup; }", markup)

    assert page.locator("main").locator(FOREIGN).count() > 5
    assert page.evaluate("window.pwned") is None
    with pytest.raises(AssertionError, match="Content Security Policy"):
        complaints.check(origin)
    complaints.said.clear()
    complaints.asked.clear()


def test_the_report_shows_hostile_text_as_text(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_of(Readings(folder / RUN), changed_keys))
    context = chromium.new_context(viewport=NARROW)
    complaints = Complaints()
    page = context.new_page()
    with complaints.of(page):
        page.goto(path.as_uri())

    assert MARK in page.locator("body").inner_text()
    assert page.locator("body").locator(FOREIGN).count() == 0
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    assert complaints.said == []
    assert complaints.asked == [path.as_uri()]
    context.close()


# --------------------------------------------------------------------------------------------------------- who may ask


def test_the_access_token_is_kept_where_scripts_cannot_read_it(chromium: Browser, folder: Path) -> None:
    token = "a-token-of-some-length"
    with served(folder, environ={"RLSYS_DASHBOARD_TOKEN": token}) as url:
        context = chromium.new_context()
        page = context.new_page()
        bare = url.split("?")[0]

        assert (page.goto(bare) or pytest.fail("no answer")).status == 401
        page.goto(url)
        shown(page, "runs")

        assert token not in page.url
        assert page.evaluate("document.cookie") == ""
        page.goto(f"{bare}{address_of('overview', 'small')}")
        shown(page, "overview")
        context.close()


def test_no_other_page_can_frame_it(chromium: Browser, origin: str, tmp_path: Path) -> None:
    other = tmp_path / "other.html"
    other.write_text(f"<iframe src='{origin}/'></iframe>")
    context = chromium.new_context()
    page = context.new_page()
    page.goto(other.as_uri())
    (frame,) = page.frames[1:]

    frame.wait_for_url("chrome-error://chromewebdata/")
    context.close()


def test_no_other_page_can_read_it(chromium: Browser, origin: str) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.route("http://other.test/", lambda route: route.fulfill(body="<p>hello</p>"))
    page.goto("http://other.test/")

    read = page.evaluate("url => fetch(url).then((r) => r.text(), (e) => `refused: ${e.name}`)", f"{origin}/api/runs")

    assert read == "refused: TypeError"
    context.close()
