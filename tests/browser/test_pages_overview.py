"""Runs, compare, overview, alerts, log and configuration: what a person finds there, and what the shell does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlsys.monitoring.alert_rules import RULES
from rlsys.monitoring.events import CheckpointSaved, GroupScored
from tests.browser.conftest import shown
from tests.browser.onpage import rows_of, see
from tests.histories import History, Shape

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.browser.conftest import Complaints, Visit


def chart_of(page: Page, title: str) -> Locator:
    """A chart by what stands above it."""
    return page.locator("section.chart", has=page.get_by_role("heading", name=title, exact=True))


# ------------------------------------------------------------------------------------------------------ runs, compare


def test_a_run_is_found_by_what_is_typed_and_opened(visit: Visit) -> None:
    page = visit("runs")
    row = page.locator("tr", has=see(page, "run-planted"))
    expect(row).to_contain_text("silent")
    expect(row).to_contain_text("70 / 200")
    see(page, "ask-search").fill("plant")
    see(page, "ask-filter").fill("status = 'silent'")
    see(page, "ask").click()
    expect(see(page, "rows").locator("tbody tr")).to_have_count(1)
    see(page, "ask-search").fill("nobody")
    see(page, "ask").click()
    expect(see(page, "empty")).to_contain_text("No run matches")
    see(page, "empty").get_by_role("link").click()

    see(page, "run-planted").click()

    shown(page, "overview")
    expect(see(page, "progress")).to_have_text("step 70 of 200")
    expect(see(page, "banner")).to_contain_text("Nothing was written since")


def test_chosen_runs_are_compared_by_curves_and_configuration(visit: Visit) -> None:
    page = visit("runs")
    expect(see(page, "compare")).to_contain_text("Compare the")
    see(page, "choose-small").check()
    expect(see(page, "compare")).to_be_disabled()
    see(page, "choose-planted").check()
    see(page, "compare").click()
    shown(page, "compare")

    expect(see(page, "legend-policy/entropy")).to_contain_text("small")
    expect(see(page, "legend-policy/entropy")).to_contain_text("planted")
    assert "algorithm.type rlsys.testing.fake_world:RewardAsAdvantage grpo" in rows_of(
        page, "differences"
    )  # the newest run first
    see(page, "lacking").locator("summary").click()
    assert "algorithm.clip_high not there 0.28" in rows_of(page, "lacking-keys")

    see(page, "add-metric").fill("loss")
    see(page, "add-metric").press("Enter")
    expect(chart_of(page, "loss")).to_be_visible()
    page.reload()
    expect(chart_of(page, "loss")).to_be_visible()
    page.get_by_role("button", name="Remove loss").click()
    expect(chart_of(page, "loss")).to_have_count(0)


def test_a_point_of_a_compared_curve_opens_the_step_of_its_run(visit: Visit) -> None:
    page = visit("compare", run=["small", "planted"], metric="policy/entropy")
    see(page, "legend-policy/entropy").get_by_role("button", name="small").click(modifiers=["Shift"])
    plot = see(page, "chart-policy/entropy").locator(".plot")
    plot.focus()
    plot.press("Home")
    plot.press("Enter")
    shown(page, "groups")
    expect(see(page, "run-name")).to_have_text("small")
    expect(see(page, "title")).to_have_text("Groups of step 1")


def test_rewards_of_the_runs_shown_over_wall_time_are_two_choices_away(visit: Visit) -> None:
    page = visit("runs")
    see(page, "compare").click()
    shown(page, "compare")
    see(page, "x-axis").select_option("time")
    expect(see(page, "chart-reward/mean").get_by_test_id("unit-x")).to_contain_text("time since the run began")
    expect(see(page, "legend-reward/mean")).to_contain_text("planted")


def test_one_run_is_not_compared_with_nothing(visit: Visit) -> None:
    expect(see(visit("compare", run=["small"]), "empty")).to_contain_text("Two runs are needed")


# ----------------------------------------------------------------------------------------------------------- overview


def test_the_metric_of_an_alert_leads_to_its_chart(visit: Visit) -> None:
    page = visit("alerts", "planted")
    page.get_by_test_id("alert-entropy_collapse").get_by_role("link", name="policy/entropy").click()
    shown(page, "overview")
    expect(chart_of(page, "policy/entropy").locator("canvas")).to_be_in_viewport()


def test_the_share_of_failed_episodes_opens_why_and_which(visit: Visit, folder: Path) -> None:
    history = History(folder / "failing", Shape(steps=30))
    history.start()
    for _ in range(30):
        history.step()
    why = "the tool `ask` did not answer within 10 s"
    history.emit(GroupScored(900, "task-900", (None, None, 1.0), {why: 2.0}))
    history.events.close()
    page = visit("overview", "failing")
    see(page, "why-failed").click()
    reason = see(page, "failure-reasons").locator("tbody tr").first
    expect(reason).to_contain_text(why)
    reason.get_by_role("link", name="2", exact=True).click()
    shown(page, "tables")
    assert rows_of(page, "rows")
    assert all("failed" in row for row in rows_of(page, "rows"))


def test_a_run_whose_events_do_not_tell_why_leads_to_its_failed_episodes(visit: Visit) -> None:
    page = visit("overview", "small")
    see(page, "why-failed").click()
    see(page, "failures").get_by_role("link", name="the failed episodes").click()
    shown(page, "tables")
    assert all("failed" in row for row in rows_of(page, "rows"))


def test_the_overview_leaves_out_what_a_run_does_not_report(visit: Visit) -> None:
    page = visit("overview", "planted")
    for title in ("Reward", "Entropy", "Gradient alignment", "Staleness", "Where the trainer's time goes", "Speed"):
        expect(chart_of(page, title)).to_be_visible()
    expect(chart_of(page, "Evaluation")).to_have_count(0)
    expect(chart_of(page, "Tool calls")).to_have_count(0)  # reported, and 0 throughout


def test_arrow_keys_read_a_chart_value_by_value(visit: Visit) -> None:
    page = visit("overview", "small")
    chart = chart_of(page, "Entropy")
    plot = chart.locator(".plot")
    expect(plot.locator("canvas")).to_be_visible()
    plot.focus()
    plot.press("Home")
    expect(chart.get_by_test_id("unit-x")).to_have_text("step 1")
    plot.press("ArrowRight")
    expect(chart.get_by_test_id("unit-x")).to_have_text("step 2")
    second = float(chart.locator(".legend b").inner_text())
    chart.locator("summary").click()

    table = chart.locator("tbody tr").nth(1)

    assert second == pytest.approx(float(table.locator("td").inner_text()), abs=5e-4)
    expect(chart_of(page, "Loss").get_by_test_id("unit-x")).to_have_text("step 2")  # charts share the cursor


def test_any_metric_is_found_by_its_meaning_and_charted(visit: Visit) -> None:
    page = visit("overview", "small")
    see(page, "search-metrics").fill("before clipping")
    expect(see(page, "metrics").locator("tbody tr")).to_have_count(1)
    see(page, "show-optim/grad_norm").click()
    expect(chart_of(page, "optim/grad_norm")).to_be_visible()
    page.reload()
    expect(chart_of(page, "optim/grad_norm")).to_be_visible()
    see(page, "search-metrics").fill("before clipping")
    see(page, "show-optim/grad_norm").click()
    expect(chart_of(page, "optim/grad_norm")).to_have_count(0)


# ------------------------------------------------------------------------------------------------- alerts, log, config


def test_every_rule_is_told_with_its_threshold(visit: Visit) -> None:
    page = visit("alerts", "small")
    expect(see(page, "open")).to_contain_text("Nothing looks wrong now")
    see(page, "all-rules").locator("summary").click()
    expect(see(page, "rules")).to_be_visible()
    rules = rows_of(page, "rules")
    assert [next(row for row in rules if row.startswith(name.replace("_", " "))) for name in RULES]


def test_older_lines_of_a_log_are_pages_away(visit: Visit, folder: Path) -> None:
    history = History(folder / "wordy", Shape(steps=2))
    for step in range(450):
        history.emit(CheckpointSaved(step, f"checkpoints/step_{step}", 0.1), 1.0)
    history.events.close()
    page = visit("log", "wordy")
    lines = see(page, "rows").locator("tbody tr")
    expect(lines).to_have_count(200)
    expect(lines.first).to_contain_text("checkpoint of step 449")

    see(page, "page-after").click()
    expect(lines.last).to_contain_text("checkpoint of step 50")
    see(page, "page-after").click()

    expect(lines).to_have_count(50)
    expect(lines.last).to_contain_text("checkpoint of step 0")
    expect(see(page, "page-after")).to_have_count(0)
    see(page, "ask-search").fill("step_37")
    see(page, "ask").click()
    expect(lines).to_have_count(11)


def test_the_configuration_is_the_file_and_can_be_searched(visit: Visit, folder: Path) -> None:
    page = visit("config", "small")
    assert see(page, "config").inner_text() == (folder / "small" / "config.resolved.yaml").read_text()
    see(page, "filter").fill("CLIP_high")
    expect(see(page, "config")).to_have_text("  clip_high: 0.28")


# -------------------------------------------------------------------------------------------------------------- shell


def test_colours_follow_the_system_until_the_person_chooses(visit: Visit) -> None:
    page = visit("overview", "small")
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert dark != light
    expect(see(page, "theme")).to_contain_text("auto")
    see(page, "theme").click()
    see(page, "theme").click()
    expect(see(page, "theme")).to_contain_text("light")
    assert page.evaluate(background) == light
    page.reload()
    shown(page, "overview")
    assert page.evaluate(background) == light


def test_what_failed_can_be_tried_again(visit: Visit, complaints: Complaints) -> None:
    page = visit("runs")
    complaints.expected.append("ERR_FAILED")
    page.route("**/api/stream*", lambda route: None)  # never answered: news of the run would try again by itself
    page.route("**/api/metrics*", lambda route: route.abort())
    see(page, "run-small").click()
    error = see(page, "error")
    expect(error).to_contain_text("nobody answers")
    expect(error).to_contain_text("“Overview” could not be shown")
    expect(error.locator("details")).to_contain_text("/api/metrics")
    page.unroute("**/api/metrics*")

    error.get_by_role("button", name="Try again").click()

    expect(chart_of(page, "Entropy")).to_be_visible()
    expect(error).to_have_count(0)


def test_a_failed_request_is_reported_and_the_charts_stay(visit: Visit, complaints: Complaints) -> None:
    page = visit("overview", "small")
    complaints.expected += ["ERR_FAILED", "nobody answers"]
    page.route("**/api/series*", lambda route: route.abort())
    see(page, "show-loss").or_(see(page, "show-async/dropped")).first.click()
    expect(see(page, "problem")).to_contain_text("nobody answers")
    expect(chart_of(page, "Entropy")).to_be_visible()


@pytest.fixture
def asked(page: Page, origin: str) -> Any:
    """What a piece of JavaScript gives, beside the modules of the pages."""
    page.goto(origin)
    shown(page, "runs")
    return page.evaluate


def test_an_update_changes_only_what_differs(asked: Any) -> None:
    kept = asked("""async () => {
      const { html, update } = await import("/html.js");
      const root = document.body.appendChild(document.createElement("div"));
      const pressed = [];
      const row = (name, word) =>
        html`<li key=${name}><button onclick=${() => pressed.push(word)}>${name}</button></li>`;
      const draw = (names, word) => update(root,
        html`<details><summary>${word}</summary></details><ul>${names.map((name) => row(name, word))}</ul>`);
      draw(["a", "b"], "old");
      root.querySelector("details").open = true;
      const [a, b] = root.querySelectorAll("button");
      b.focus();
      draw(["c", "a", "b"], "new");
      a.click();
      const texts = [...root.querySelectorAll("li")].map((row) => row.textContent);
      draw(["b"], "last");
      return { texts, pressed, isOpen: root.querySelector("details").open, isFocused: document.activeElement === b,
               text: root.textContent };
    }""")
    assert kept == {
        "texts": ["c", "a", "b"], "pressed": ["new"], "isOpen": True, "isFocused": True, "text": "lastb",
    }  # fmt: skip


def test_a_chart_that_is_gone_leaves_nothing_behind(asked: Any) -> None:
    assert asked("""async () => {
      const { Chart } = await import("/charts.js");
      const { html, update } = await import("/html.js");
      const { default: uPlot } = await import("/vendor/uPlot.esm.js");
      const root = document.body.appendChild(document.createElement("div"));
      update(root, html`<${Chart} id="x" title="X" sync="alone" lines=${[{ label: "a", xs: [1, 2], ys: [3, 4] }]} />`);
      const numDrawn = uPlot.sync("alone").plots.length;
      update(root);
      return [numDrawn, uPlot.sync("alone").plots.length, document.getElementById("chart-x")];
    }""") == [1, 0, None]


def test_an_older_answer_never_lands_last(asked: Any) -> None:
    assert asked("""async () => {
      const { numbered } = await import("/api.js");
      const newest = numbered();
      const [first, second] = [newest(), newest()];
      return [first(), second()];
    }""") == [False, True]


def test_who_follows_a_run_that_is_gone_is_told(asked: Any, complaints: Complaints) -> None:
    complaints.expected.append("404")
    said = asked("""async () => {
      const { stream } = await import("/api.js");
      let end;
      const state = await new Promise((said) => { end = stream("nobody", () => {}, said); });
      end();
      return state;
    }""")
    assert said == "gone"


def test_text_is_never_markup_and_links_lead_nowhere_else(asked: Any) -> None:
    assert asked("""async () => {
      const { html, update } = await import("/html.js");
      const root = document.body.appendChild(document.createElement("div"));
      update(root, html`<p title=${"<b>"}>${"<img src=x onerror=alert(1)>"}</p>`);
      const refused = [{ href: "javascript:alert(1)" }, { href: "//evil.test" }, { href: "https://evil.test" },
                       { dangerouslySetInnerHTML: { __html: "<b>" } }].filter((props) => {
        try { html`<a ...${props} />`; return false; } catch { return true; }
      });
      const shown = root.querySelector("p");
      return [shown.children.length, shown.textContent, refused.length];
    }""") == [0, "<img src=x onerror=alert(1)>", 4]
