"""Cluster and ledger: what every worker did, which weights each replica holds, what is pending and for how long."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlsys.monitoring.events import RunEnded
from tests.browser.conftest import NARROW, Visit, shown
from tests.browser.onpage import rows_of, see
from tests.histories import History, Shape

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

WHOLE = "0:00 to 1:03"
"""What is shown of the run `small` at first: all of it."""


def seconds_shown(page: Page) -> float:
    """Length of the stretch of time on the lanes, from its address."""
    begin, end = re.findall(r"(?:from|to)=([\d.]+)", page.url)
    return float(end) - float(begin)


def drag(page: Page, begin: float, end: float) -> None:
    """Over the first lane, from one share of its width to another."""
    bar = page.locator(".lane-bar").first.bounding_box()
    assert bar
    y = bar["y"] + 8
    page.mouse.move(bar["x"] + begin * bar["width"], y)
    page.mouse.down()
    page.mouse.move(bar["x"] + end * bar["width"], y, steps=4)
    page.mouse.up()


def test_every_worker_has_a_lane_with_its_busy_share(visit: Visit) -> None:
    page = visit("cluster", "small")
    lanes = see(page, "lane")
    workers = [lane.get_attribute("data-worker") for lane in lanes.all()]
    assert workers == [
        "actor",
        "rollout-0",
        "rollout-1",
        "rollout-2",
        "rollout-2.1",
        "rollout-3",
        "reward-0",
        "reward-1",
    ]
    assert "30 %" in lanes.first.inner_text()
    assert lanes.first.locator("path[data-activity=training]").count() == 1
    assert (
        "training" in see(page, "legend-lanes").inner_text() and "blank: idle" in see(page, "legend-lanes").inner_text()
    )
    assert "h:min:s" in see(page, "unit-x").first.inner_text()
    see(page, "data-lanes").locator("summary").click()
    assert len(rows_of(page, "lane-shares")) == len(workers)


def test_lane_zoom_by_button_key_or_drag_survives_a_reload(visit: Visit) -> None:
    page = visit("cluster", "small")
    expect(see(page, "lanes-shown")).to_contain_text(WHOLE)
    drag(page, 0.25, 0.75)
    expect(see(page, "lanes-shown")).to_contain_text("0:16 to 0:47")
    assert seconds_shown(page) == pytest.approx(31.5, abs=0.5)
    see(page, "lanes-in").click()
    expect(see(page, "lanes-shown")).to_contain_text("(16 s)")
    see(page, "lanes").focus()
    page.keyboard.press("-")
    expect(see(page, "lanes-shown")).to_contain_text("0:16 to 0:47")
    page.keyboard.press("ArrowLeft")
    expect(see(page, "lanes-shown")).to_contain_text("0:08 to 0:39")
    page.reload()
    shown(page, "cluster")
    expect(see(page, "lanes-shown")).to_contain_text("0:08 to 0:39")
    see(page, "lanes-newest").click()
    expect(see(page, "lanes-shown")).to_contain_text(WHOLE)


def test_pointing_at_a_lane_tells_what_its_worker_did(visit: Visit) -> None:
    page = visit("cluster", "small")
    see(page, "lanes").focus()
    for _ in range(3):
        page.keyboard.press("+")
    expect(see(page, "lanes-shown")).to_contain_text("(7.9 s)")
    path = page.locator("[data-worker=actor] path[data-activity=training]").bounding_box()
    assert path
    page.mouse.move(path["x"] + 3, path["y"] + 3)
    assert re.fullmatch(r"actor: training from 0:\d\d\.\d to 0:\d\d\.\d \(\d+ ms\)", see(page, "readout").inner_text())


def test_queue_and_failures_are_shown_with_their_numbers(visit: Visit) -> None:
    page = visit("cluster", "small")
    chart = see(page, "chart-queue")
    assert chart.get_attribute("data-unit") == "groups"
    see(page, "data-queue").locator("summary").click()
    assert rows_of(page, "table-queue")[-1] == "1:03 5 0"
    expect(see(page, "legend-speeds")).to_contain_text("rollout-2")
    see(page, "data-speeds").locator("summary").click()
    expect(see(page, "table-speeds").locator("tbody tr").first).to_be_visible()
    (row,) = rows_of(page, "restarts")
    assert row.startswith("rollout-2 0:23 rolling out group 58 ") and row.endswith(
        " the process ended with SIGKILL its log"
    )


def test_lanes_of_a_telephone_stay_within_it(visit: Visit, page: Page) -> None:
    page.set_viewport_size(NARROW)
    visit("cluster", "small")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    name, bar = page.locator(".lane-name").first.bounding_box(), page.locator(".lane-bar").first.bounding_box()
    assert name and bar and bar["y"] >= name["y"] + name["height"] - 1, "names stand above their lanes"


def test_lanes_follow_a_live_run_unless_zoomed_in(visit: Visit, folder: Path) -> None:
    history = History(folder / "moving", Shape(), begin_s=time.time() - 20)
    history.start()
    history.step()
    page = visit("cluster", "moving")
    expect(see(page, "lanes-shown")).to_contain_text("0:00.0 to 0:05.0")
    history.step()
    expect(see(page, "lanes-shown")).to_contain_text("0:00.0 to 0:07.0")
    see(page, "lanes-in").click()
    kept = see(page, "lanes-shown").inner_text()
    history.step()
    expect(see(page, "newest")).to_have_text("The newest version is 3.")
    assert see(page, "lanes-shown").inner_text() == kept
    assert page.evaluate("document.activeElement.dataset.testid") == "lanes-in"


def test_a_run_without_steps_shows_that_data_is_missing(visit: Visit, folder: Path) -> None:
    history = History(folder / "begun", Shape())
    history.emit(RunEnded(0, "failed", "no model"))
    page = visit("cluster", "begun")
    assert "No worker told what it did" in page.locator("main").inner_text()
    visit("ledger", "begun")
    assert "No group is pending" in see(page, "none-pending").inner_text()


def test_the_ledger_accounts_for_every_group(visit: Visit) -> None:
    page = visit("ledger", "small")
    sums = {
        name: int(see(page, f"num-{name}").locator("dd").inner_text())
        for name in ("issued", "trained", "dropped", "pending")
    }
    assert sums == {"issued": 183, "trained": 177, "dropped": 3, "pending": 3}
    assert rows_of(page, "dropped") == ["failed 3 2 % its rollout or its reward failed"]
