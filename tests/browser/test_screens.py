"""Every view on three screens, light and dark: nothing is cut off, every axis has a unit, every text is readable.

RLSYS_SCREENS=/tmp/screens pytest tests/browser/test_screens.py      # keeps a picture of each, to look at
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import NARROW, Complaints, address_of, shown
from tests.browser.onpage import VIEWS, Scheme, each_view
from tests.dashboards import served
from tests.histories import History, Shape

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Visit

SCREENS = os.environ.get("RLSYS_SCREENS", "")
_READABLE = (Path(__file__).parent / "readable.js").read_text()


@pytest.mark.parametrize(
    "screens",
    [
        pytest.param([(390, "light"), (1440, "dark"), (2560, "light")], id="three"),
        pytest.param([(390, "dark"), (1440, "light"), (2560, "dark")], id="three others", marks=pytest.mark.nightly),
    ],
)
@each_view
def test_a_view_is_readable_on_every_screen(
    page: Page, visit: Visit, name: str, screens: Sequence[tuple[int, Scheme]]
) -> None:
    view, run, query = VIEWS[name]
    visit(view, run, **query)
    assert name == "components" or page.get_by_test_id("error").count() == 0
    for width, scheme in screens:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth", timeout=3_000)
        wrong = page.evaluate(f"() => {_READABLE}.wrong()")
        assert not any(wrong.values()), f"{width} pixels, {scheme}: {wrong}"
        _kept(page, f"{name}-{width}-{scheme}")


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("cut", "width: 2rem; overflow: hidden; white-space: nowrap"),
        ("cut", "height: 0.8rem; width: 8rem; overflow: hidden"),
        ("cut", "position: absolute; left: -3rem; top: 0; width: 20rem"),
        ("overlapping", "position: absolute; left: 2rem; top: 20rem"),
        ("faint", "color: rgb(136 136 136); background: rgb(119 119 119)"),
    ],
)
def test_what_cannot_be_read_is_found(visit: Visit, name: str, style: str) -> None:
    page = visit("log", "small")
    page.evaluate(
        """(style) => {
          const planted = document.querySelector("main").appendChild(document.createElement("p"));
          planted.style.cssText = style;
          planted.textContent = "planted where nobody can read it";
        }""",
        style,
    )
    assert "planted" in str(page.evaluate(f"() => {_READABLE}.wrong()")[name])


@pytest.mark.parametrize(("view", "run", "least"), [("overview", "small", 15), ("cluster", "small", 1)])
def test_every_axis_of_every_chart_has_a_unit(visit: Visit, view: str, run: str, least: int) -> None:
    page = visit(view, run)
    charts = page.locator("section.chart")
    expect(charts.nth(least - 1)).to_be_visible()
    for chart in charts.all():
        title = chart.get_by_role("heading").inner_text()
        assert chart.get_by_test_id("unit-y").inner_text().strip(), title
        assert chart.get_by_test_id("unit-x").inner_text().strip(), title
        assert chart.locator("summary", has_text="Data").count() == 1, f"{title}: no table of its numbers"


def test_numbers_under_a_chart_are_those_that_were_written(visit: Visit, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "small" / "metrics.jsonl").read_text().splitlines()]
    written = {row["step"]: row["policy/entropy"] for row in rows if "policy/entropy" in row}
    page = visit("overview", "small")
    chart = page.locator("section.chart", has=page.get_by_role("heading", name="Entropy", exact=True))
    chart.locator("summary").click()
    table = chart.locator("tbody tr")
    expect(table).to_have_count(len(written))

    read = dict(text.split() for text in table.all_inner_texts())

    assert {int(step): float(value) for step, value in read.items()} == pytest.approx(written, rel=1e-4)


# ---------------------------------------------------------------------------------------------- empty and error states


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of which there is little: one that has only begun, one whose last line was cut, one of an older version."""
    root = tmp_path_factory.mktemp("bare")
    History(root / "fresh", Shape(steps=5)).start()
    cut = History(root / "cut", Shape(steps=2))
    cut.start()
    cut.step()
    lines = (
        b'{"kind":"step_done","time_s":17672\xff',
        b'{"kind":"of_the_future","time_s":1767225700.0}',
        b'{"kind":"st',
    )
    with (cut.folder / "events.jsonl").open("ab") as events:
        events.write(b"\n".join(lines))
    old = root / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 1, "time_s": 1767225600.0, "reward/mean": 0.5}\n')
    return root


@pytest.fixture
def bare_tab(tab: Page, bare: Path) -> Iterator[tuple[Page, str]]:
    """The tab, and the address of a server of `bare`."""
    complaints = Complaints()
    with served(bare) as url:
        with complaints.of(tab):
            yield tab, url
        tab.goto("about:blank")
    complaints.check(url.rstrip("/"))


def test_empty_views_say_why_and_what_to_do(bare_tab: tuple[Page, str]) -> None:
    page, url = bare_tab
    page.set_viewport_size(NARROW)
    for run, view in product(("fresh", "old"), ("overview", "groups", "tasks", "cluster", "ledger", "alerts", "log")):
        page.goto(f"{url}{address_of(view, run)}")
        shown(page, view)
        assert page.get_by_test_id("error").count() == 0, (run, view)
        assert len(page.locator("main").inner_text()) > 20, (run, view)
        _kept(page, f"{run}-{view}-390-light")
    page.goto(f"{url}{address_of('groups', 'fresh')}")
    expect(page.get_by_test_id("empty").first).to_be_visible()


def test_a_run_with_broken_event_lines_opens_and_counts_them(bare_tab: tuple[Page, str]) -> None:
    page, url = bare_tab
    page.goto(f"{url}{address_of('overview', 'cut')}")
    shown(page, "overview")

    expect(page.get_by_test_id("progress")).to_contain_text("step 1 of 2")
    expect(page.get_by_test_id("num-corrupt")).to_contain_text("1 line of its files could not be read")
    expect(page.get_by_test_id("num-unknown")).to_contain_text("1 event of a kind this version does not know")


@pytest.mark.parametrize(
    ("view", "run", "query", "said"),
    [
        ("overview", "no such run", {}, "no such run"),
        ("group", "small", {"step": 12, "group_id": 9999}, "9999"),
        ("episode", "small", {"step": 999, "group_id": 1, "episode": 0}, "999"),
        ("task", "small", {"task": "nobody"}, "nobody"),
        ("groups", "small", {"step": "x"}, "step"),
        ("nonsense", "small", {}, "nonsense"),
    ],
)
def test_a_missing_page_names_its_address_and_offers_a_retry(
    page: Page, origin: str, complaints: Complaints, view: str, run: str, query: dict, said: str
) -> None:
    complaints.expected += ["404", "400"]
    page.goto(f"{origin}/{address_of(view, run, **query)}")
    error = page.get_by_test_id("error")
    expect(error).to_contain_text(said)
    expect(error).to_have_attribute("role", "alert")
    expect(error.get_by_role("button", name="Try again")).to_be_visible()
    _kept(page, f"error-{view}-1280-light")


def _kept(page: Page, name: str) -> None:
    if SCREENS:
        Path(SCREENS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(SCREENS) / f"{name}.png", full_page=True)
