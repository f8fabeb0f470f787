"""Runs that are not like others: of several policies, of older versions, without rollouts, that failed in odd ways."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlsys.monitoring.events import RunEnded, StepDone, WorkerFailed
from tests.browser.conftest import shown
from tests.browser.onpage import rows_of, see
from tests.histories import History, Shape
from tests.rollouts import lines_of, write_lines

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from tests.browser.conftest import Visit

FEW = Shape(steps=2, groups=3, size=2, replicas=2)


def written(folder: Path, shape: Shape = FEW) -> History:
    """A run that has done its steps, and not yet said that it ended."""
    history = History(folder, shape)
    history.start()
    for _ in range(shape.steps):
        history.step()
    return history


@pytest.fixture(scope="module")
def pair(folder: Path) -> str:
    """A finished run of two policies."""
    for name in ("solver", "proposer"):
        written(folder / "pair" / "policies" / name).end("finished")
    whole = History(folder / "pair", FEW)
    (folder / "pair" / "config.resolved.yaml").write_text("run:\n  name: pair\n")
    whole.emit(RunEnded(2, "finished", ""))
    whole.events.close()
    return "pair"


def test_a_run_of_several_policies_links_to_each_and_back(visit: Visit, pair: str) -> None:
    page = visit("overview", pair)
    assert [row.split()[:4] for row in rows_of(page, "policies")] == [
        ["proposer", "✓", "finished", "grpo"],
        ["solver", "✓", "finished", "grpo"],
    ]
    assert "No step is done yet" not in page.locator("main").inner_text()

    see(page, "row-solver").click()
    expect(see(page, "run-name")).to_have_text("solver")
    see(page, "to-whole").click()
    expect(see(page, "run-name")).to_have_text("pair")


@pytest.mark.parametrize("view", ["groups", "tasks", "cluster", "ledger"])
def test_what_each_policy_tells_is_not_missed_in_the_whole(visit: Visit, pair: str, view: str) -> None:
    said = visit(view, pair).locator("main").inner_text()
    assert "of a run of several policies are told by each of them" in said
    assert "older version" not in said


def test_groups_without_written_episodes_are_listed_with_the_reason(visit: Visit, folder: Path) -> None:
    history = written(folder / "unwritten")
    history.end("finished")
    shutil.rmtree(history.folder / "rollouts")
    config = history.folder / "config.resolved.yaml"
    config.write_text(config.read_text().replace("rollouts_every: 1", "rollouts_every: 0"))
    page = visit("groups", "unwritten")
    expect(see(page, "title")).to_have_text("Groups of step 2")
    assert len(rows_of(page, "rows")) == FEW.groups
    expect(see(page, "not-written")).to_contain_text("as record.rollouts_every is 0")

    see(page, "rows").locator("tbody th a").first.click()
    shown(page, "task")
    expect(see(page, "group-link")).to_have_count(0)


def test_per_token_advantages_are_not_shown_as_one_number(visit: Visit, folder: Path) -> None:
    history = written(folder / "ppo", Shape(steps=1, groups=1, size=2))
    history.end("finished")
    path = history.folder / "rollouts" / "step_000001.parquet"
    (line,) = lines_of(path)
    for episode in line["readings"]:
        for reading in (turn for turns in episode for turn in turns):
            reading["advantages"] = [0.25] * len(reading["pieces"])
    write_lines(path, [line])

    cards = visit("group", "ppo", step=1, group_id=0).locator("[data-testid=episode]").all_inner_texts()
    assert all("one per token" in card for card in cards)
    page = visit("episode", "ppo", step=1, group_id=0, episode=0, by="advantage")
    expect(see(page, "advantage")).to_contain_text("one per token")
    expect(see(page, "who")).to_contain_text("advantage one per token")


def test_a_run_whose_numbers_are_not_finite_opens_with_gaps(visit: Visit, folder: Path) -> None:
    history = written(folder / "nan")
    history.emit(StepDone(3, {"loss": math.nan, "policy/entropy": math.inf, "time/step": math.nan}))
    history.emit(RunEnded(3, "failed", "loss is not finite"))
    history.events.close()
    page = visit("overview", "nan")
    expect(see(page, "open-alerts")).to_contain_text("not finite")
    see(page, "data-entropy").locator("summary").click()
    assert rows_of(page, "table-entropy")[-1] == "3 –"


def test_a_replica_that_is_gone_is_told_to_be(visit: Visit, folder: Path) -> None:
    history = written(folder / "lost replica")
    history.emit(WorkerFailed("rollout-1", "rolling out group 3", "SIGKILL"))
    for _ in range(20):
        history.step()
    history.events.close()
    path = history.folder / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    died = next(i for i, line in enumerate(lines) if b"SIGKILL" in line)
    path.write_bytes(b"".join(line for i, line in enumerate(lines) if i < died or b'"rollout-1"' not in line))
    (row,) = (row for row in rows_of(visit("cluster", "lost replica"), "replicas") if row.startswith("rollout-1"))
    assert "does not answer" in row


@pytest.fixture
def old(folder: Path) -> str:
    """A run of a version whose events told neither of groups nor of what workers did."""
    history = written(folder / "old")
    history.events.close()
    kept = (b'"run_started"', b'"weights_published"', b'"replica_seen"', b'"step_done"')
    path = history.folder / "events.jsonl"
    path.write_bytes(
        b"".join(line for line in path.read_bytes().splitlines(keepends=True) if any(k in line for k in kept))
    )
    return "old"


def test_pages_of_an_older_run_name_the_missing_data(visit: Visit, old: str) -> None:
    expect(see(visit("ledger", old), "empty")).to_contain_text(
        "do not tell of groups: it was written by an older version"
    )
    page = visit("tasks", old)
    see(page, "rows").locator("tbody th a").first.click()
    expect(see(page, "table-groups")).to_have_attribute("aria-current", "true")
    expect(see(visit("cluster", old), "empty")).to_contain_text("do not tell what its workers did")
    page = visit("groups", old)
    see(page, "rows").locator("tbody th a").first.click()
    shown(page, "group")
    expect(see(page, "task-name")).to_have_text("task-3")
    expect(see(page, "task-link")).to_have_count(0)
    assert "The ledger" not in page.locator("header").inner_text()


def test_a_log_that_is_replaced_while_somebody_reads_begins_anew(visit: Visit, folder: Path) -> None:
    history = written(folder / "replaced")
    history.events.close()
    page = visit("log", "replaced")
    expect(see(page, "rows")).to_contain_text("start ray")

    path = history.folder / "events.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])

    expect(see(page, "rows").locator("tbody tr")).to_have_count(1)
    expect(see(page, "problem")).to_have_count(0)
