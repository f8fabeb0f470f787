"""Every view is reached, and everything on it used, without a mouse."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import shown
from tests.browser.onpage import VIEWS, each_view

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Visit

PLACES = {
    "o": "overview",
    "g": "groups",
    "t": "tasks",
    "v": "evaluations",
    "c": "cluster",
    "l": "ledger",
    "a": "alerts",
    "x": "tables",
    "e": "log",
    "f": "config",
    "r": "runs",
}


FIRST_STEP = """() => {
  const chart = document.getElementById("chart-entropy");
  chart.querySelector("[role=img]").dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
  return chart.querySelector("[data-testid=unit-x]").textContent === "step 1";
}"""
"""Press Home in the chart; true once its cursor is at the first step."""


def pressed(page: Page, keys: str) -> None:
    for key in keys.split():
        page.keyboard.press(key)


def from_the_top(page: Page) -> None:
    """The next stop of the Tab key is the first."""
    page.evaluate("() => document.body.setAttribute('tabindex', '-1')")
    page.evaluate("() => document.body.focus()")
    page.evaluate("() => document.body.removeAttribute('tabindex')")


def focused(page: Page) -> str:
    """`data-testid` of what has the focus, else its tag."""
    return page.evaluate("() => document.activeElement.dataset.testid ?? document.activeElement.tagName.toLowerCase()")


def test_two_keys_go_to_every_view_of_a_run(visit: Visit) -> None:
    page = visit("overview", "small")
    for key, view in [*PLACES.items()][1:]:
        pressed(page, f"g {key}")
        shown(page, view)
    assert page.url.endswith("#/")


def test_from_the_list_of_runs_to_an_episode_and_back(visit: Visit) -> None:
    page = visit("runs")
    rows = page.locator("main [data-row]")
    expect(rows.first).to_be_visible()
    pressed(page, "j")
    expect(rows.nth(0)).to_be_focused()
    pressed(page, "j j k")
    expect(rows.nth(1)).to_be_focused()

    page.get_by_test_id("run-small").focus()
    pressed(page, "Enter")
    shown(page, "overview")
    pressed(page, "g g")
    shown(page, "groups")
    pressed(page, "j Enter")
    shown(page, "group")
    pressed(page, "j Enter")
    shown(page, "episode")

    for view in ("group", "groups", "overview", "runs"):
        pressed(page, "Escape")
        shown(page, view)


def test_brackets_walk_along_steps_groups_and_episodes(visit: Visit) -> None:
    page = visit("groups", "small", step=12)
    title = page.get_by_test_id("title")
    pressed(page, "]")
    expect(title).to_contain_text("13")
    pressed(page, "[")
    expect(title).to_contain_text("12")

    page = visit("group", "small", step=12, group_id=68)
    pressed(page, "]")
    expect(title).to_contain_text("Group 69")

    page = visit("episode", "small", step=12, group_id=69, episode=0)
    pressed(page, "]")
    expect(title).to_contain_text("Episode 1")


def test_the_question_mark_shows_the_keys_and_escape_hides_them(visit: Visit) -> None:
    page = visit("overview", "small")
    pressed(page, "?")
    expect(page.get_by_test_id("help-dialog")).to_be_visible()
    for key in PLACES:
        expect(page.get_by_test_id("help-dialog")).to_contain_text(f"g {key}")
    pressed(page, "Escape")
    expect(page.get_by_test_id("help-dialog")).to_be_hidden()
    shown(page, "overview")


@pytest.mark.parametrize("view", ["overview", "groups", "log"])
def test_a_slash_goes_to_the_search_where_letters_are_letters(visit: Visit, view: str) -> None:
    page = visit(view, "small")
    pressed(page, "/")
    field = page.locator(":focus")
    pressed(page, "g c j ?")

    assert page.evaluate("() => document.activeElement.type") == "search"
    expect(field).to_have_value("gcj?")
    pressed(page, "Escape")
    assert page.evaluate("() => document.activeElement.type") != "search"
    shown(page, view)


def test_the_first_tab_stop_skips_to_the_content(visit: Visit) -> None:
    page = visit("overview", "small")
    from_the_top(page)
    pressed(page, "Tab")
    assert focused(page) == "skip"
    expect(page.get_by_test_id("skip")).to_be_in_viewport()

    pressed(page, "Enter")
    assert focused(page) == "main"
    shown(page, "overview")


@each_view
def test_tab_reaches_every_control_with_a_visible_focus(visit: Visit, name: str) -> None:
    view, run, query = VIEWS[name]
    page = visit(view, run, **query)
    from_the_top(page)
    controls = page.evaluate(
        """() => [...document.querySelectorAll('a[href], button, input, select, summary')].filter((node) =>
            !node.disabled && node.checkVisibility() && !(node.type === 'radio' && !node.checked)).length"""
    )
    stops: list[str] = []
    for _ in range(controls + 100):
        pressed(page, "Tab")
        stop = page.evaluate(_STOP)
        if stop["name"] in ("BODY", *stops[:1]):
            break
        stops.append(stop["name"])
        assert stop["isSeen"], f"nothing shows that {stop['name']} has the focus"

    natives = [name for name in stops if name.split()[0] in ("A", "BUTTON", "INPUT", "SELECT", "SUMMARY")]
    assert len(natives) == controls


_STOP = """() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  const isSeen = node.matches(':focus-visible') && (style.outlineStyle !== 'none' || style.boxShadow !== 'none');
  window.stops ??= new Map();
  if (!window.stops.has(node)) window.stops.set(node, window.stops.size);
  const said = node.textContent.slice(0, 30);
  const name = node === document.body ? 'BODY' : `${node.tagName} ${window.stops.get(node)} ${said}`;
  return { name, isSeen };
}"""


def test_agents_and_colours_of_an_episode_are_chosen_by_keys(visit: Visit) -> None:
    page = visit("episode", "small", step=12, group_id=69, episode=0)
    page.get_by_test_id("by-logprob").focus()
    pressed(page, "ArrowRight")
    assert focused(page) == "by-ratio"
    expect(page.get_by_test_id("by-ratio")).to_be_checked()

    page.get_by_test_id("tree").locator("[tabindex='0'], button, a").first.focus()
    pressed(page, "ArrowDown")
    assert "subagent" in page.evaluate("() => document.activeElement.textContent")


def test_lines_of_a_chart_are_hidden_and_isolated_by_keys(visit: Visit) -> None:
    page = visit("overview", "small")
    lines = page.get_by_test_id("legend-lengths").get_by_role("button")
    first, second = lines.nth(0), lines.nth(1)
    first.focus()
    pressed(page, "Space")
    expect(first).to_have_attribute("aria-pressed", "false")
    expect(first).to_be_focused()
    pressed(page, "Enter")
    expect(first).to_have_attribute("aria-pressed", "true")
    pressed(page, "Shift+Enter")
    expect(second).to_have_attribute("aria-pressed", "false")
    expect(first).to_have_attribute("aria-pressed", "true")


def test_keys_look_closer_at_a_chart_and_open_a_step(visit: Visit) -> None:
    page = visit("overview", "small")
    chart = page.get_by_test_id("chart-entropy")
    plot = chart.get_by_role("img", name="Entropy")
    expect(plot.locator("canvas")).to_be_visible()
    plot.focus()
    pressed(page, "End +")
    expect(page).to_have_url(re.compile("from=15.5&to=30"))
    expect(chart.get_by_role("button", name="Show all")).to_be_visible()
    pressed(page, "-")
    expect(chart.get_by_role("button", name="Show all")).to_have_count(0)
    page.wait_for_function(FIRST_STEP)  # the points of the whole run have come
    expect(plot).to_be_focused()
    pressed(page, "Home ArrowRight Enter")
    expect(page.get_by_test_id("title")).to_have_text("Groups of step 2")


def test_a_chart_is_enlarged_and_left_by_keys(visit: Visit) -> None:
    page = visit("overview", "small")
    full = page.get_by_role("button", name="Full screen: Entropy")
    full.focus()
    pressed(page, "Enter")
    expect(full).to_have_attribute("aria-pressed", "true")
    expect(full).to_be_focused()
    pressed(page, "Tab")
    expect(full).not_to_be_focused()
    pressed(page, "Escape")
    expect(full).to_have_attribute("aria-pressed", "false")
    shown(page, "overview")


def test_numbers_of_a_chart_are_unfolded_and_scrolled_by_keys(visit: Visit) -> None:
    page = visit("overview", "small")
    chart = page.get_by_test_id("chart-entropy")
    chart.locator("summary").focus()
    pressed(page, "Enter")
    expect(chart.get_by_role("button", name="CSV")).to_be_visible()
    pressed(page, "Tab Tab Tab")
    numbers = chart.get_by_role("region", name="Numbers of Entropy")
    expect(numbers).to_be_focused()
    pressed(page, "End")
    expect(numbers.get_by_text("30", exact=True)).to_be_in_viewport()


def test_a_table_is_sorted_by_keys_and_keeps_the_focus(visit: Visit) -> None:
    page = visit("groups", "small", step=12)
    button = page.get_by_role("button", name=re.compile("staleness"))
    heading = page.get_by_role("columnheader").filter(has=button)
    button.focus()
    pressed(page, "Enter")
    expect(heading).to_have_attribute("aria-sort", "descending")
    expect(button).to_be_focused()
    pressed(page, "Space")
    expect(heading).to_have_attribute("aria-sort", "ascending")
    expect(button).to_be_focused()


def test_tokens_are_read_by_keys_and_the_focus_leaves_them(visit: Visit) -> None:
    page = visit("episode", "small", step=12, group_id=68, episode=0)
    tokens = page.get_by_test_id("tokens").first
    tokens.focus()
    pressed(page, "ArrowRight ArrowRight")
    expect(page.get_by_test_id("tip")).to_contain_text("zero")
    pressed(page, "Escape")
    expect(page.get_by_test_id("tip")).to_be_hidden()
    shown(page, "episode")
    pressed(page, "End Tab")
    expect(page.get_by_test_id("tip")).to_be_hidden()
    expect(tokens).not_to_be_focused()


def test_lanes_are_moved_and_unfolded_by_keys(visit: Visit) -> None:
    page = visit("cluster", "small")
    lanes, extent = page.get_by_role("group", name="What every worker did"), page.get_by_test_id("lanes-shown")
    before = extent.inner_text()
    lanes.focus()
    pressed(page, "+")
    expect(extent).not_to_have_text(before)
    expect(lanes).to_be_focused()
    pressed(page, "Home")
    expect(extent).to_have_text(before)
    page.get_by_test_id("data-lanes").locator("summary").focus()
    pressed(page, "Space")
    expect(page.get_by_test_id("lane-shares")).to_be_visible()


def test_a_dialog_holds_the_focus_and_gives_it_back(visit: Visit) -> None:
    page = visit("overview", "small")
    page.get_by_role("button", name="Keys").focus()
    pressed(page, "Enter")
    dialog = page.get_by_role("dialog")
    for _ in range(6):
        pressed(page, "Tab")
        assert page.evaluate(
            "() => document.activeElement === document.body || !!document.activeElement.closest('dialog')"
        )
    dialog.get_by_role("button", name="Close").focus()
    pressed(page, "Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Keys")).to_be_focused()


def test_what_changes_is_told_to_a_screen_reader(visit: Visit) -> None:
    page = visit("overview", "planted")

    assert page.locator("[role=status][aria-live], [role=status]").count()
    expect(page.get_by_test_id("banner")).to_have_attribute("role", "alert")
    assert page.evaluate("() => document.documentElement.lang") == "en"
    assert page.locator("main h1").count() == 1
