"""Twelve questions that a researcher asks: each is answered within three clicks from the overview of the run.

A click is anything a hand does: a press, a text that is typed and sent, a choice from a list, a drag.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from tests import questioned
from tests.browser.conftest import shown
from tests.questioned import swept_run

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.browser.conftest import Visit

MOST_CLICKS = 3


@dataclass
class Hand:
    """What a researcher does on a page, and how often."""

    page: Page
    num_clicks: int = 0

    def press(self, name: str, role: Literal["link", "button"] = "link", within: Locator | None = None) -> None:
        """Click on the first link, button or the like of this name."""
        self._count()
        (within or self.page).get_by_role(role, name=name, exact=True).first.click()

    def tick(self, label: str) -> None:
        self._count()
        self.page.get_by_label(label).check()

    def type(self, text: str, field: str) -> None:
        """Type a text into a field, and send it."""
        self._count()
        box = self.page.get_by_role("searchbox", name=field)
        box.fill(text)
        box.press("Enter")

    def choose(self, option: str, field: str) -> None:
        """Choose from a list."""
        self._count()
        self.page.get_by_role("combobox", name=field, exact=True).select_option(label=option)

    def drag(self, plot: Locator, begin: float, end: float) -> None:
        """Drag over a part of a chart: from and to a share of its width."""
        self._count()
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + begin * box["width"], y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + end * box["width"], y, steps=5)
        self.page.mouse.up()

    def _count(self) -> None:
        self.num_clicks += 1
        assert self.num_clicks <= MOST_CLICKS, "more clicks than a researcher has patience for"


@pytest.fixture(scope="module")
def asked(folder: Path) -> str:
    """The run that most questions are about; beside it, four of a sweep."""
    for place, (lr, step_s, best) in enumerate(
        [(1e-6, 1.0, 0.5), (2e-6, 2.0, 0.6), (4e-6, 4.0, 0.7), (8e-6, 8.0, 0.8)]
    ):
        swept_run(folder / f"sweep-{place + 1}", lr, step_s, best)
    return "asked"


@pytest.fixture
def hand(visit: Visit, asked: str) -> Hand:
    """The hand of somebody who looks at the overview of the run."""
    return Hand(visit("overview", asked))


@pytest.fixture
def hand_at_runs(visit: Visit, asked: str) -> Hand:
    """The hand of somebody who looks at the list of runs."""
    return Hand(visit("runs"))


def rows(page: Page, heading: str) -> Locator:
    """Rows of the table with such a column."""
    table = page.get_by_role("table").filter(has=page.get_by_role("columnheader", name=heading))
    return table.first.locator("tbody").get_by_role("row")


def test_which_tasks_got_worse_between_step_50_and_100(hand: Hand) -> None:
    hand.drag(hand.page.get_by_role("img", name="Reward, by step").locator(".u-over"), 0.495, 0.999)
    hand.press("Tasks that lost most between these steps")
    expect(rows(hand.page, "change").first).to_contain_text(questioned.FORGOTTEN_TASK)
    expect(rows(hand.page, "change").first).to_contain_text("-1")


def test_what_is_the_longest_truncated_answer(hand: Hand) -> None:
    hand.press("Tables")
    hand.press("Longest truncated")
    first = rows(hand.page, "length").first
    expect(first).to_contain_text(str(questioned.LONGEST_TOKENS))
    hand.press(str(questioned.LONGEST_STEP), within=first)
    shown(hand.page, "episode")
    expect(hand.page.get_by_role("heading", level=1)).to_have_text(f"Episode 0 of {questioned.LONGEST_TASK}")
    expect(hand.page.get_by_role("main")).to_contain_text(questioned.LONGEST_TEXT)


def test_how_does_the_reward_of_four_runs_rise_over_wall_time(hand_at_runs: Hand) -> None:
    hand, page = hand_at_runs, hand_at_runs.page
    hand.type("sweep", "Text anywhere")
    hand.press("Compare the 4 shown", "button")
    hand.choose("wall time", "x")
    chart = page.get_by_role("img", name="reward/mean, by wall time")
    expect(chart).to_have_accessible_name(
        "reward/mean, by wall time. Last: sweep-4 0.800, sweep-3 0.700, sweep-2 0.600, sweep-1 0.500."
    )


def test_what_changed_in_the_configuration_between_two_runs(hand_at_runs: Hand) -> None:
    hand = hand_at_runs
    hand.tick("Compare sweep-1")
    hand.tick("Compare sweep-4")
    hand.press("Compare 2 runs", "button")
    expect(hand.page.get_by_role("row", name="train.lr 1e-06 8e-06")).to_be_visible()


def test_what_did_the_log_of_the_actor_say_before_it_died(hand: Hand) -> None:
    hand.press("Cluster")
    hand.press("its log")
    expect(rows(hand.page, "Level").first).to_contain_text(questioned.LAST_WORDS)


def test_why_did_samples_fail(hand: Hand) -> None:
    hand.press("13 % failed", "button")
    reasons = rows(hand.page, "Why")
    expect(reasons).to_have_count(2)
    expect(reasons.first).to_contain_text(questioned.EXCEPTION)
    expect(reasons.first).to_contain_text(str(questioned.NUM_EXCEPTIONS))
    expect(reasons.nth(1)).to_contain_text(questioned.RARE_EXCEPTION)


def test_which_replica_is_slow_and_since_when(hand: Hand) -> None:
    hand.press("slow worker")
    card = hand.page.get_by_role("article").filter(has=hand.page.get_by_role("heading", name="slow worker"))
    expect(card).to_contain_text(f"{questioned.SLOW_REPLICA} takes 6.0 times as long as its peers")
    expect(card).to_contain_text("since step 78")


def test_when_did_the_reward_fall_and_which_alert_says_why(hand: Hand) -> None:
    expect(hand.page.get_by_role("listitem").filter(has_text="reward drop")).to_contain_text("since step 93")
    hand.press("entropy collapse")
    card = hand.page.get_by_role("article").filter(has=hand.page.get_by_role("heading", name="entropy collapse"))
    expect(card).to_contain_text("since step 94")
    expect(card).to_contain_text(f"the last step above half of that was {questioned.COLLAPSE_STEP - 1}")


def test_which_episodes_have_this_text_in_their_answer(hand: Hand) -> None:
    hand.press("Tables")
    hand.type("banana", "Text anywhere")
    found = rows(hand.page, "answer")
    expect(found).to_have_count(1)
    for text in (str(questioned.ODD_STEP), questioned.ODD_TASK, questioned.ODD_TEXT):
        expect(found).to_contain_text(text)


def test_which_samples_of_an_evaluation_failed_and_why(hand: Hand) -> None:
    hand.press("Evaluations")
    hand.press("1", within=rows(hand.page, "why samples failed").first)
    failed = rows(hand.page, "reason")
    expect(failed).to_have_count(1)
    expect(failed).to_contain_text(questioned.BAD_SAMPLE)
    expect(failed).to_contain_text(questioned.EXCEPTION)


def test_what_is_stuck_and_for_how_long(hand: Hand) -> None:
    hand.press("Ledger")
    first = rows(hand.page, "In this state").first
    for text in (questioned.STUCK_TASK, questioned.STUCK_REPLICA, "5 min 15 s"):
        expect(first).to_contain_text(text)


def test_which_groups_were_dropped_and_why(hand: Hand) -> None:
    hand.press("Ledger")
    hand.press(questioned.DROPPED_REASON)
    dropped = rows(hand.page, "text")
    expect(dropped).to_have_count(1)
    expect(dropped).to_contain_text(f"{questioned.DROPPED_TASK}): {questioned.DROPPED_REASON}: it has 9,000 tokens")
