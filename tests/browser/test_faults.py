"""A person who has only the dashboard finds out what is wrong with a run: four planted faults, four questions.

They are asked of a run that was killed long ago, and where the answer depends on the time also of one that goes on.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import planted_in_thread
from tests.planted import (
    COLLAPSE_STEP,
    LENGTH_S,
    NUM_STEPS,
    STALE_REPLICA,
    STALE_VERSION,
    STUCK_TASK,
)

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from tests.browser.conftest import Visit


@pytest.fixture(scope="module")
def live(folder: Path) -> str:
    """Written up to this moment."""
    planted_in_thread(folder / "live", begin_s=time.time() - LENGTH_S)
    return "live"


@pytest.fixture(params=["killed", "live"])
def run(request: pytest.FixtureRequest, live: str) -> str:
    """A run with planted faults."""
    return "planted" if request.param == "killed" else live


def test_which_replica_is_stale(visit: Visit, run: str) -> None:
    page = visit("cluster", run)
    said = page.get_by_test_id("stale").inner_text()
    rows = page.get_by_test_id("replicas").locator("tbody tr")

    assert f"{STALE_REPLICA} is stale: it holds version {STALE_VERSION}" in said
    assert [row.split()[0] for row in rows.all_inner_texts() if "stale" in row] == [STALE_REPLICA]
    others = re.findall(r"rollout-\d", said.replace(STALE_REPLICA, ""))
    assert not others, "a replica that works properly is not accused"
    assert rows.first.inner_text().startswith(STALE_REPLICA), "stale ones stand on top"


def test_which_task_never_finishes(visit: Visit, run: str) -> None:
    page = visit("ledger", run)
    first = page.get_by_test_id("rows").locator("tbody tr").first

    assert f"Task {STUCK_TASK} is rolled out at rollout-" in page.get_by_test_id("overdue").inner_text()
    assert STUCK_TASK in first.inner_text()
    assert "overdue" in first.inner_text()

    first.get_by_test_id("task-link").click()
    page.get_by_test_id("view-task").wait_for()
    assert STUCK_TASK in page.get_by_test_id("title").inner_text()
    assert "0 trained" in page.get_by_test_id("view-task").inner_text()


@pytest.mark.parametrize("view", ["overview", "cluster"])
def test_who_is_the_bottleneck(visit: Visit, view: str) -> None:
    box = visit(view, "planted").get_by_test_id("bottleneck")
    said = box.inner_text()

    busy = r"The trainer waits for groups \d+ ?% of the time, and the busiest reward worker \(reward-0\) is at work"
    assert re.search(busy, said)
    assert "add reward workers" in said


def test_lanes_show_which_worker_is_busy_all_the_time(visit: Visit) -> None:
    page = visit("cluster", "planted")
    lanes = page.get_by_test_id("lane").all_inner_texts()
    shares = {worker: int(share.removesuffix("%")) for worker, share in (text.split(maxsplit=1) for text in lanes)}

    assert max(shares, key=lambda worker: shares[worker]) == "reward-0"
    assert shares["reward-0"] >= 95
    assert shares[STALE_REPLICA] < 10 < shares["rollout-0"] < 60


def test_when_entropy_collapsed(visit: Visit) -> None:
    page = visit("alerts", "planted")
    alert = page.get_by_test_id("open").get_by_test_id("alert-entropy_collapse")
    said = alert.get_by_test_id("sentence").inner_text()
    found = re.search(
        r"Entropy fell to 0\.\d+ nats from 0\.[89]\d* nats.* the last step above half of that was (\d+)", said
    )

    assert found, said
    assert int(found[1]) + 1 == COLLAPSE_STEP
    assert re.search("go back to a checkpoint\\s+before the fall", said)


def test_when_entropy_collapsed_can_be_read_off_its_chart(visit: Visit) -> None:
    page = visit("overview", "planted")
    chart = page.locator("section.chart", has=page.get_by_role("heading", name="Entropy", exact=True))
    chart.scroll_into_view_if_needed()

    mark = re.search(r"entropy collapse at step (\d+)", chart.inner_text())
    assert mark
    assert COLLAPSE_STEP <= int(mark[1]) <= COLLAPSE_STEP + 5

    chart.locator("summary").click()
    expect(chart.locator("tbody tr")).to_have_count(NUM_STEPS)
    rows = [re.findall(r"[\d.]+", row) for row in chart.locator("tbody tr").all_inner_texts()]
    values = {int(step): float(value) for step, value, *_ in rows}
    assert min(value for step, value in values.items() if step < COLLAPSE_STEP) > 0.5
    assert max(value for step, value in values.items() if step >= COLLAPSE_STEP) < 0.5


def test_a_run_without_faults_is_not_accused_of_any(visit: Visit) -> None:
    assert visit("cluster", "small").get_by_test_id("stale").count() == 0
    assert visit("ledger", "small").get_by_test_id("overdue").count() == 0
    page = visit("alerts", "small")
    assert page.locator("[data-testid=open] [data-testid^=alert-]").count() == 0
