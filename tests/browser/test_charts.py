"""Charts: what a person does with one, and that the address keeps it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlsys.monitoring.events import StepDone
from tests.browser.conftest import shown
from tests.browser.onpage import rows_of, see
from tests.histories import History, Shape

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Visit


def plot_of(page: Page, chart: str) -> Any:
    """The place of the plot of a chart on the page."""
    over = see(page, f"chart-{chart}").locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box
    return box


def test_x_is_wall_time_tokens_or_episodes_and_the_address_keeps_it(visit: Visit) -> None:
    page = visit("overview", "small")
    see(page, "x-axis").select_option("time")
    expect(see(page, "chart-entropy").get_by_test_id("unit-x")).to_have_text("time since the run began (h:min:s)")
    page.reload()
    shown(page, "overview")
    expect(see(page, "x-axis")).to_have_value("time")
    see(page, "data-entropy").locator("summary").click()
    times = [row.split()[0] for row in rows_of(page, "table-entropy")]
    assert times[-1] == "1:03", "the last step was done 63 s after the run began"
    see(page, "x-axis").select_option("samples")
    expect(page.locator("main")).to_contain_text("does not record what x should count")


def test_smoothing_draws_the_raw_line_behind(visit: Visit) -> None:
    page = visit("overview", "small", smooth=0.9)
    expect(see(page, "smooth")).to_have_value("0.9")
    drawn = page.evaluate("""async () => {
      const { drawnOf } = await import("/plotting.js");
      return drawnOf([{ kind: "line", label: "a", xs: [1, 2, 3], ys: [0, 10, null] }], 0.5);
    }""")
    assert [line["kind"] for line in drawn] == ["raw", "line"]
    assert drawn[0]["ys"] == [0, 10, None]
    assert drawn[1]["ys"] == [0, pytest.approx(20 / 3), None]


def test_the_legend_names_only_bands_that_are_drawn(visit: Visit) -> None:
    page = visit("overview", "planted")
    assert see(page, "legend-reward").inner_text().split()[0] == "mean", "rewards lie between 0 and 1 in every step"
    see(page, "data-reward").locator("summary").click()
    expect(see(page, "table-reward")).to_contain_text("lowest")


def test_dragging_looks_closer_at_a_finer_resolution(visit: Visit, folder: Path) -> None:
    history = History(folder / "thousands", Shape(steps=5000, groups=1, size=2))
    for step in range(1, 5001):
        history.emit(StepDone(step, {"policy/entropy": (step % 7) / 7, "reward/mean": 0.5, "time/step": 1.0}))
    history.events.close()
    page = visit("overview", "thousands")
    box = plot_of(page, "entropy")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + 50, steps=4)
    page.mouse.up()
    expect(see(page, "show-whole")).to_be_visible()
    assert "from=" in page.url and "to=" in page.url
    see(page, "data-entropy").locator("summary").click()
    steps = see(page, "table-entropy").locator("tbody th")
    expect(steps.first).to_have_text(re.compile("2[45].."))
    numbers = [int(text) for text in steps.all_inner_texts()]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "every step of the stretch"
    see(page, "show-whole").click()
    expect(steps.first).to_have_text("1")


def test_a_click_on_a_point_opens_its_step(visit: Visit) -> None:
    page = visit("overview", "small")
    box = plot_of(page, "reward")
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 60)
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 60)
    shown(page, "groups")
    expect(see(page, "title")).to_have_text("Groups of step 30")


def test_lines_are_hidden_and_isolated_by_the_legend(visit: Visit) -> None:
    page = visit("overview", "small")
    lengths = see(page, "legend-lengths").locator("button")
    lengths.nth(1).click()
    expect(lengths.nth(1)).to_have_attribute("aria-pressed", "false")
    lengths.nth(0).click(modifiers=["Shift"])
    expect(lengths.nth(0)).to_have_attribute("aria-pressed", "true")
    assert {lengths.nth(i).get_attribute("aria-pressed") for i in range(1, lengths.count())} == {"false"}
    page.reload()
    expect(lengths.nth(2)).to_have_attribute("aria-pressed", "false")
    see(page, "show-lines").click()
    expect(lengths.nth(2)).to_have_attribute("aria-pressed", "true")


def test_one_chart_fills_the_window_until_escape(visit: Visit) -> None:
    page = visit("overview", "small")
    see(page, "full-entropy").click()
    box = see(page, "chart-entropy").bounding_box()
    assert box and box["width"] >= 1270 and box["height"] >= 890
    page.keyboard.press("Escape")
    expect(see(page, "chart-entropy")).not_to_have_class("chart full")
    shown(page, "overview")


def test_a_chart_is_saved_as_numbers_and_as_a_picture(visit: Visit, tmp_path: Path) -> None:
    page = visit("overview", "small")
    see(page, "log-entropy").click()
    expect(see(page, "log-entropy")).to_have_attribute("aria-pressed", "true")
    see(page, "data-entropy").locator("summary").click()
    with page.expect_download() as numbers:
        see(page, "csv-entropy").click()
    lines = numbers.value.path().read_text().splitlines()
    assert lines[0] == "step,policy (nats)"
    assert len(lines) == 31
    with page.expect_download() as picture:
        see(page, "png-entropy").click()
    assert picture.value.suggested_filename == "Entropy.png"
    assert picture.value.path().read_bytes().startswith(b"\x89PNG")


def test_metrics_are_found_by_a_regular_expression_and_charted_at_once(visit: Visit) -> None:
    page = visit("overview", "small")
    see(page, "search-metrics").fill("^policy/(entropy|kl_ref)")
    expect(see(page, "metrics").locator("tbody tr")).to_have_count(2)
    see(page, "chart-found").click()
    expect(see(page, "chart-metric-policy/entropy")).to_be_visible()
    expect(see(page, "chart-metric-policy/kl_ref")).to_be_visible()
    see(page, "search-metrics").fill("policy/[")
    expect(see(page, "empty")).to_contain_text("No metric matches")


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (2560, 1440)])
def test_reward_and_evaluation_are_the_largest_and_above_the_fold(visit: Visit, width: int, height: int) -> None:
    page = visit("overview", "small")
    page.set_viewport_size({"width": width, "height": height})
    size_of = "node => parseFloat(getComputedStyle(node).fontSize)"
    largest = page.evaluate("""() => Math.max(...[...document.querySelectorAll("main *")].filter(
      (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.nodeValue.trim()))
      .map((node) => parseFloat(getComputedStyle(node).fontSize)))""")
    for name in ("figure-reward", "figure-evaluation"):
        assert see(page, name).locator("dd").evaluate(size_of) == largest
        expect(see(page, name)).to_be_in_viewport(ratio=1)
    for chart in ("reward", "evaluation"):
        expect(see(page, f"chart-{chart}").locator("canvas")).to_be_in_viewport(ratio=1)
