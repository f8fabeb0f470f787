"""The report of a run that is longer than any paper, as it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rlsys.config.changed_keys import changed_keys
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.report.html_report import report_of
from tests.longrun import long_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

A4_PX = (694, 1030)
"""Width and height of what is printed on a page, in CSS pixels."""


@pytest.fixture(scope="module")
def printed(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The report in a dark browser whose window is as wide as the paper."""
    folder = tmp_path_factory.mktemp("report")
    path = folder / "report.html"
    path.write_text(report_of(Readings(long_run(folder / "long")), changed_keys))
    context = chromium.new_context(viewport={"width": A4_PX[0], "height": A4_PX[1]}, color_scheme="dark")
    page = context.new_page()
    page.goto(path.as_uri())
    page.emulate_media(media="print")
    yield page
    context.close()


def heights(page: Page, elements: str) -> list[float]:
    return page.evaluate(
        "css => [...document.querySelectorAll(css)].map((e) => e.getBoundingClientRect().height)", elements
    )


def styles(page: Page, elements: str, name: str) -> set[str]:
    script = "([css, name]) => [...document.querySelectorAll(css)].map((e) => getComputedStyle(e)[name])"
    return {*page.evaluate(script, [elements, name])}


def test_it_prints_on_six_pages_at_most(printed: Page) -> None:
    pdf = printed.pdf(format="A4")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 6


def test_no_page_break_cuts_a_table_a_chart_or_an_answer(printed: Page) -> None:
    for elements in (".scrolls", "tr", "figure", "article", "pre"):
        assert styles(printed, elements, "breakInside") == {"avoid"}
        assert max(heights(printed, elements)) < A4_PX[1] / 2
    assert styles(printed, "h2, h3, h4", "breakAfter") == {"avoid"}


def test_no_column_runs_off_the_paper(printed: Page) -> None:
    right = "css => Math.max(...[...document.querySelectorAll(css)].map((e) => e.getBoundingClientRect().right))"
    assert printed.evaluate(right, "th, td, dd, pre, figure, p, h3") <= A4_PX[0]
    assert printed.evaluate("document.documentElement.scrollWidth") <= A4_PX[0]


def test_charts_stand_two_in_a_row(printed: Page) -> None:
    script = """() => [...document.querySelectorAll('.charts')].map((charts) =>
        [...charts.children].map((e) => { const box = e.getBoundingClientRect(); return [box.top, box.left]; }))"""
    for places in printed.evaluate(script):
        rows = {top: [left for other, left in places if other == top] for top, _ in places}
        assert [len(set(lefts)) for lefts in rows.values()][: len(places) // 2] == [2] * (len(places) // 2)


@pytest.mark.parametrize("media", ["print", "screen"])
def test_best_and_worst_groups_are_shown(printed: Page, media: str) -> None:
    printed.emulate_media(media=media)  # type: ignore[arg-type]
    try:
        for title in ("Best group", "Worst group"):
            groups = printed.locator("section", has=printed.locator("h3", has_text=title))
            assert groups.count() == 2
            for text in ("Rewards: ", "A train leaves at 9:40", "It arrives at 13:40."):
                assert text in groups.first.inner_text()
            assert groups.first.locator("article").count() == 4
    finally:
        printed.emulate_media(media="print")


def test_paper_is_light_where_the_reader_is_dark(printed: Page) -> None:
    assert styles(printed, "body", "backgroundColor") == {"rgb(255, 255, 255)"}
    printed.emulate_media(media="screen")
    assert styles(printed, "body", "backgroundColor") == {"rgb(20, 23, 26)"}
    printed.emulate_media(media="print")
