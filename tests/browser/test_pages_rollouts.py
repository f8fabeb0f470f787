"""Groups, one group, one episode token by token, tasks: what a person finds on these pages, and does with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.browser.conftest import NARROW, Complaints, Visit, shown
from tests.browser.onpage import rows_of, see
from tests.histories import History, Shape
from tests.longepisode import NUM_SUBAGENTS, NUM_TOKENS, SERIAL, STEP, long_run
from tests.rollouts import lines_of, write_lines

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def long(folder: Path) -> str:
    """A run with an episode of 10,000 tokens and forty subagents."""
    return long_run(folder / "long").name


def ask(page: Page, origin: str, name: str, **query: Any) -> Any:
    """What the server answers, to compare the page with."""
    answer = page.request.get(f"{origin}/api/{name}", params={"run": "small", **query})
    assert answer.ok, answer.text()
    return answer.json()


def test_groups_of_the_newest_step_list_failures_and_truncation(visit: Visit) -> None:
    page = visit("groups", "small")
    assert see(page, "title").inner_text() == "Groups of step 30"
    rows = rows_of(page, "rows")
    assert len(rows) == 6
    assert "task-8" in rows[2] and "equal rewards" in rows[2]
    badges = see(page, "rows").locator("tbody tr")
    assert badges.nth(3).locator(".badge.bad").inner_text() == "1", "one episode of task-9 failed"
    assert badges.nth(4).locator(".badge.warn").all_inner_texts() == ["equal rewards", "1"], "one was truncated"


def test_groups_are_filtered_and_an_empty_result_links_back(visit: Visit) -> None:
    page = visit("groups", "small", step=30)
    page.get_by_role("link", name="Failed", exact=True).click()
    page.get_by_role("link", name="Failed", exact=True).and_(page.locator("[aria-current=true]")).wait_for()
    assert [row.split()[0] for row in rows_of(page, "rows")] == ["task-9"]
    visit("groups", "small", step=30, search="no-such-task")
    see(page, "empty").get_by_role("link").click()
    see(page, "rows").wait_for()
    assert len(rows_of(page, "rows")) == 6


def test_a_column_of_the_histogram_lists_only_its_groups(visit: Visit) -> None:
    page = visit("groups", "small", step=30)
    columns = see(page, "column")
    label = columns.first.get_attribute("aria-label") or ""
    assert "with a mean reward of 0" in label
    columns.first.click()
    page.locator("[data-testid=column][aria-pressed=true]").wait_for()
    assert len(rows_of(page, "rows")) == int(label.split()[0])
    columns.first.click()
    page.locator("main:not(:has([data-testid=column][aria-pressed=true]))").wait_for()
    assert len(rows_of(page, "rows")) == 6


def test_steps_are_walked_by_keys_and_by_number(visit: Visit) -> None:
    page = visit("groups", "small")
    page.keyboard.press("[")
    page.get_by_text("Groups of step 29").wait_for()
    page.keyboard.press("]")
    page.get_by_text("Groups of step 30").wait_for()
    see(page, "step").fill("7")
    see(page, "step").press("Enter")
    page.get_by_text("Groups of step 7").wait_for()


def test_a_group_shows_its_episodes_side_by_side(visit: Visit, origin: str) -> None:
    page = visit("group", "small", step=30, group_id=177)
    answer = ask(page, origin, "group", step=30, group_id=177)
    cards = see(page, "episode").all()
    assert len(cards) == len(answer["episodes"]) == 4
    for card, episode in zip(cards, answer["episodes"], strict=True):
        assert episode["text"] in card.inner_text()
    failed = cards[1].inner_text()
    assert "failed" in failed and "the tool `ask` did not answer within 10 s" in failed
    assert "All rewards of this group are equal" in see(page, "zero-std").inner_text()
    assert "What is 177 plus zero?" in see(page, "task").inner_text()


def test_an_episode_reads_as_a_conversation_with_separate_tool_calls(visit: Visit) -> None:
    page = visit("episode", "small", step=30, group_id=174, episode=0)
    told = see(page, "turn").get_by_test_id("message").all_inner_texts()
    assert [text.split("\n")[0] for text in told] == ["user", "tool"]
    assert "What is 174 plus zero?" in told[0]
    assert 'ask(question="174 + 0")' in see(page, "tool-call").inner_text()
    assert see(page, "turn").count() == 2


def test_the_tree_of_agents_is_walked_by_keys(visit: Visit) -> None:
    page = visit("episode", "small", step=30, group_id=174, episode=0)
    agents = see(page, "agent")
    assert [agents.nth(i).get_attribute("aria-level") for i in range(2)] == ["1", "2"]
    agents.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("[data-testid=who]", has_text="subagent").wait_for()
    assert "called by lead" in see(page, "who").inner_text()
    assert "That is 174" in see(page, "tokens").inner_text()
    assert "agent=1" in page.url


def test_tokens_are_coloured_with_a_legend_that_accounts_for_each(visit: Visit, origin: str) -> None:
    page = visit("episode", "small", step=30, group_id=174, episode=0)
    answer = ask(page, origin, "episode", step=30, group_id=174, episode=0)
    columns = {
        "logprob, nats": "logprobs",
        "ratio": "ratios",
        "advantage": "advantages",
        "entropy, nats": "entropies",
        "mask": "masks",
        "version": "versions",
    }
    for named, column in columns.items():
        see(page, f"by-{named.split(',')[0]}").check()
        values = [v for t in answer["trajectories"] for turn in t["turns"] for v in turn[column]]
        legend = see(page, "legend")
        assert legend.inner_text().startswith(f"{named} ·")
        assert sum(map(int, legend.locator("li .num").all_inner_texts())) == len(values) > 0
        assert see(page, "tokens").first.locator("span[class^=tok-]").count() > 0
    assert "by=version" in page.url, "so that it can be linked to"


def test_token_values_are_shown_for_pointer_and_keyboard(visit: Visit, origin: str) -> None:
    page = visit("episode", "small", step=30, group_id=174, episode=0, by="none")
    turn = ask(page, origin, "episode", step=30, group_id=174, episode=0)["trajectories"][0]["turns"][1]
    text = see(page, "tokens").nth(1)
    text.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    tip = see(page, "tip").inner_text()
    assert turn["pieces"][1] == " answer" and '" answer"' in tip
    assert f"{turn['logprobs'][1]:.3f} nats" in tip
    assert f"{turn['entropies'][1]:.3f} nats" in tip
    page.keyboard.press("Escape")
    assert see(page, "tip").is_hidden() and "/episode?" in page.url
    box = text.bounding_box()
    assert box
    page.mouse.move(box["x"] + 2, box["y"] + 10)
    assert '"The"' in see(page, "tip").inner_text()
    page.mouse.move(0, 0)


def test_an_episode_is_copied_as_the_server_told_it(visit: Visit, origin: str) -> None:
    page = visit("episode", "small", step=30, group_id=174, episode=2)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    see(page, "copy-json").click()
    page.get_by_text("Copied").wait_for()
    copied = orjson.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied == ask(page, origin, "episode", step=30, group_id=174, episode=2)
    assert see(page, "replay").inner_text().endswith("small --step 30")


def test_ten_thousand_tokens_stay_quick_and_whole(visit: Visit, long: str) -> None:
    page = visit("episode", long, step=STEP, group_id=SERIAL, episode=0, by="version")
    text = see(page, "tokens").first
    assert text.locator("span").count() == 3, "one element for each version"
    begin_s = time.monotonic()
    see(page, "by-ratio").check()
    page.wait_for_function("document.querySelectorAll('.tokens .tok-around-4').length > 100")
    assert time.monotonic() - begin_s < 3, "0.15 s when nobody else works"
    assert text.locator("span").count() < NUM_TOKENS
    words = (text.text_content() or "").replace("↵", "").split()
    assert words == [f"w{i}" for i in range(NUM_TOKENS)]
    assert see(page, "agent").count() == NUM_SUBAGENTS + 1


def test_a_long_episode_fits_a_telephone(visit: Visit, long: str, page: Page) -> None:
    page.set_viewport_size(NARROW)
    visit("episode", long, step=STEP, group_id=SERIAL, episode=0)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    see(page, "tokens").first.click(position={"x": 40, "y": 60})
    tip = see(page, "tip").bounding_box()
    assert tip and tip["x"] >= 0 and tip["x"] + tip["width"] <= NARROW["width"]


def test_an_episode_without_recorded_tokens_still_shows_its_text(visit: Visit, folder: Path) -> None:
    history = History(folder / "wordless", Shape(steps=1, groups=1))
    history.start()
    history.step()
    history.end("finished")
    path = folder / "wordless" / "rollouts" / "step_000001.parquet"
    (line,) = lines_of(path)
    write_lines(path, [{**line, "readings": []}])
    page = visit("episode", "wordless", step=1, group_id=0, episode=0)
    assert "was not recorded" in see(page, "not-recorded").inner_text()
    assert "I will ask." in see(page, "tokens").first.inner_text()
    assert see(page, "by-entropy").is_disabled()


def test_a_task_lists_all_its_groups_over_time(visit: Visit) -> None:
    page = visit("task", "small", task="task-6")
    rows = rows_of(page, "rows")
    assert [row.split()[0] for row in rows] == ["174", "150", "126", "102", "78", "54", "30", "6"]
    see(page, "data-task-reward").locator("summary").click()
    assert "lowest" in see(page, "table-task-reward").inner_text()
    assert len(rows_of(page, "table-task-reward")) == len(rows)
    see(page, "rows").locator("tbody th a").nth(1).click()
    shown(page, "group")
    assert see(page, "title").inner_text() == "Group 150: task-6"


def test_tasks_are_found_by_a_part_of_their_id(visit: Visit) -> None:
    page = visit("tasks", "small")
    assert see(page, "title").inner_text() == "24 tasks"
    page.keyboard.press("/")
    page.keyboard.type("task-2")
    page.keyboard.press("Enter")
    page.get_by_text("5 tasks").wait_for()
    assert {row.split()[0] for row in rows_of(page, "rows")} == {"task-2", *(f"task-2{i}" for i in range(4))}


def test_a_missing_group_is_named_with_a_retry(visit: Visit, complaints: Complaints) -> None:
    complaints.expected.append("404")
    page = visit("group", "small", step=30, group_id=9999)
    said = see(page, "error").text_content() or ""
    assert "“Group” could not be shown" in said
    assert "9999" in said and "/api/group?run=small&step=30&group_id=9999" in said and "Try again" in said


def test_groups_follow_a_run_that_goes_on(visit: Visit, folder: Path) -> None:
    history = History(folder / "growing", Shape(), begin_s=time.time() - 10)
    history.start()
    page = visit("groups", "growing")
    assert "record.rollouts_every" in see(page, "empty").inner_text()
    history.step()
    page.get_by_text("Groups of step 1").wait_for()
    see(page, "ask-search").focus()
    page.keyboard.type("task-")
    history.step()
    page.get_by_text("Groups of step 2").wait_for()
    assert len(rows_of(page, "rows")) == history.shape.groups
    assert see(page, "ask-search").input_value() == "task-", "what is being typed stays"
    assert page.evaluate("document.activeElement.name") == "search"
