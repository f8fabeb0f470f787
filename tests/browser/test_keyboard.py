"""Every view is reached, and everything on it used, without a mouse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import shown

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


@pytest.mark.parametrize(
    ("view", "query"),
    [
        ("overview", {}),
        ("groups", {"step": 12}),
        ("group", {"step": 12, "group_id": 68}),
        ("episode", {"step": 12, "group_id": 69, "episode": 0}),
        ("cluster", {}),
        ("ledger", {}),
        ("alerts", {}),
    ],
)
def test_tab_reaches_every_control_with_a_visible_focus(visit: Visit, view: str, query: dict) -> None:
    page = visit(view, "small", **query)
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


def test_what_changes_is_told_to_a_screen_reader(visit: Visit) -> None:
    page = visit("overview", "planted")

    assert page.locator("[role=status][aria-live], [role=status]").count()
    expect(page.get_by_test_id("banner")).to_have_attribute("role", "alert")
    assert page.evaluate("() => document.documentElement.lang") == "en"
    assert page.locator("main h1").count() == 1
