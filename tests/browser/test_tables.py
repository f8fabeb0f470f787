"""Tables of the index, evaluations, logs of workers and timelines: what a researcher asks, and where the answer is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from rlsys.monitoring.events import EvalDone
from rlsys.monitoring.machine_samples import MachineSample
from rlsys.replay.rollout_parquet import read_records, write_records
from rlsys.types import EpisodeSpan
from tests.browser.conftest import NARROW, shown
from tests.browser.onpage import rows_of, see
from tests.histories import BEGIN_S, History, Shape
from tests.rollouts import rollouts

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from tests.browser.conftest import Complaints, Visit


@pytest.fixture(scope="module")
def rich(folder: Path) -> str:
    """A run with an evaluation whose samples were kept, an episode with a timeline, and logs of two workers."""
    history = History(folder / "rich", Shape(steps=3, groups=2, size=2))
    history.start()
    for _ in range(3):
        history.step()
    scores = {"eval/held_out/mean": 0.5, "eval/held_out/failed_frac": 0.25}
    history.emit(EvalDone(3, "held_out", "", 4.0, scores, {"TimeoutError: no judge": 1.0}))
    history.end("finished")
    rollouts(history.folder / "evaluations/held_out/step_000003.parquet", (1.0, 0.0, None, 1.0), step=3)
    path = history.folder / "rollouts/step_000003.parquet"
    records = read_records(path)
    spans = (EpisodeSpan("turn", "", 0, 0.25, 1.5), EpisodeSpan("tool", "search", 0, 1.75, 2.0))
    timed = replace(records[0].episodes[0], began_s=BEGIN_S, spans=spans)
    write_records(path, [replace(records[0], episodes=(timed, *records[0].episodes[1:])), *records[1:]])
    (history.folder / "logs").mkdir(exist_ok=True)
    (history.folder / "machine").mkdir(exist_ok=True)
    (history.folder / "logs" / "actor.log").write_text("INFO loading\nWARNING slow disk\nERROR CUDA out of memory\n")
    (history.folder / "logs" / "rollout-0.log").write_text("INFO ready\n")
    sample = MachineSample(
        time_s=BEGIN_S, host="node-a", pid=7, cpu=1.5, memory=2**31, gpu=0.5, gpu_memory=2**30, node_cpu=0.25,
        node_memory=0.5, node_shm=2000, node_sent=10.0, node_received=20.0, log_bytes=0, log_turn=0,
    )  # fmt: skip
    later = replace(sample, time_s=BEGIN_S + 5)
    (history.folder / "machine" / "actor.jsonl").write_bytes(orjson.dumps(sample) + b"\n" + orjson.dumps(later) + b"\n")
    return "rich"


def test_the_hardest_tasks_are_one_click_away(visit: Visit) -> None:
    page = visit("tables", "small")
    page.get_by_role("link", name="Hardest tasks").click()
    expect(see(page, "table-tasks")).to_have_attribute("aria-current", "true")
    expect(see(page, "rows").locator("th[aria-sort=ascending]")).to_contain_text("reward")
    first = see(page, "rows").locator("tbody tr").first
    rewards = [float(row.split()[2]) for row in rows_of(page, "rows")]
    assert rewards == sorted(rewards)
    first.get_by_role("link").click()
    shown(page, "task")


def test_a_narrow_page_folds_the_questions_until_one_is_asked(visit: Visit) -> None:
    page = visit("groups", "small", step=30)
    expect(see(page, "ask-search")).to_be_visible()
    page.set_viewport_size(NARROW)
    expect(see(page, "ask-search")).to_be_hidden()
    expect(see(page, "sort-reward")).to_be_hidden()
    page.get_by_text("Filter and sort").click()
    expect(see(page, "ask-search")).to_be_visible()
    see(page, "sort-reward").click()
    expect(see(page, "rows").locator("th[aria-sort=descending]")).to_contain_text("reward")
    visit("groups", "small", step=29)
    expect(see(page, "ask-search")).to_be_hidden()
    visit("groups", "small", step=30, filter="failed > 0")
    expect(see(page, "ask-filter")).to_be_visible()


def test_a_table_is_no_wider_than_its_cells_need(visit: Visit) -> None:
    page = visit("evaluations", "small")
    page.set_viewport_size({"width": 2560, "height": 900})
    box = see(page, "rows").bounding_box()
    assert box and box["width"] < 1280


def test_episodes_of_all_steps_are_filtered_sorted_and_opened(visit: Visit) -> None:
    page = visit("tables", "small")
    see(page, "ask-filter").fill("outcome = 'truncated'")
    see(page, "ask").click()
    expect(see(page, "ask-filter")).to_have_attribute("value", "outcome = 'truncated'")
    see(page, "sort-length").click()
    expect(see(page, "rows").locator("th[aria-sort=descending]")).to_contain_text("length")
    assert "order=length+desc" in page.url
    expect(see(page, "rows").locator("tbody tr").first).to_contain_text("truncated")
    see(page, "rows").locator("tbody a").first.click()
    shown(page, "episode")
    expect(see(page, "outcome")).to_contain_text("truncated")


def test_a_filter_that_is_not_understood_is_explained(visit: Visit, complaints: Complaints) -> None:
    complaints.expected.append("400")
    page = visit("tables", "small", table="episodes", filter="rewrd < 0.1")
    expect(see(page, "refused")).to_contain_text("reward")


def test_runs_are_grouped_by_a_key_of_their_configuration(visit: Visit) -> None:
    page = visit("runs")
    see(page, "ask-group").fill("algorithm")
    see(page, "ask").click()
    expect(see(page, "rows").locator("thead")).to_contain_text("reward_std")
    see(page, "rows").get_by_role("link", name="grpo").click()
    expect(see(page, "ask-filter")).to_have_value("algorithm = 'grpo'")
    expect(see(page, "run-small")).to_be_visible()
    expect(see(page, "run-planted")).to_have_count(0)


def test_keys_of_the_configuration_become_columns_of_the_list_of_runs(visit: Visit) -> None:
    page = visit("runs")
    see(page, "columns").locator("summary").click()
    page.get_by_role("link", name="Column algorithm.clip_high", exact=True).click()
    expect(see(page, "sort-algorithm.clip_high")).to_be_visible()
    expect(page.locator("tr", has=see(page, "run-small"))).to_contain_text("0.280")
    see(page, "sort-algorithm.clip_high").click()
    expect(see(page, "rows").locator("th[aria-sort]")).to_contain_text("clip_high")
    assert "order=algorithm.clip_high+desc" in page.url


def test_samples_of_an_evaluation_say_why_they_failed(visit: Visit, rich: str) -> None:
    page = visit("evaluations", rich)
    (row,) = (row for row in rows_of(page, "rows") if row.startswith("3 held_out"))
    assert "0.500 25 % failed" in row and "TimeoutError: no judge" in row
    see(page, "rows").get_by_role("link", name="1", exact=True).click()
    expect(see(page, "empty")).to_be_visible()  # the event tells of one more than was written
    see(page, "empty").get_by_role("link").click()
    page.get_by_role("link", name="Failed", exact=True).click()
    expect(see(page, "rows").locator("tbody tr")).to_have_count(1)
    expect(see(page, "rows")).to_contain_text("no judge")
    see(page, "rows").locator("tbody th a").click()
    shown(page, "episode")
    expect(see(page, "replay")).to_have_count(0)
    for view in ("group", "evaluations"):
        page.keyboard.press("Escape")
        shown(page, view)


def test_an_episode_shows_when_its_parts_ran(visit: Visit, rich: str) -> None:
    group_id = 4
    page = visit("episode", rich, step=3, group_id=group_id, episode=0)
    expect(see(page, "timeline")).to_contain_text("3.8 s")
    see(page, "data-timeline").locator("summary").click()
    assert [row.split()[1:] for row in rows_of(page, "spans")] == [
        ["turn", "0:00.3", "1.5", "s"],
        ["search", "0:01.8", "2.0", "s"],
    ]


def test_logs_of_workers_are_filtered_by_worker_level_and_pattern(visit: Visit, rich: str) -> None:
    page = visit("log", rich)
    page.get_by_role("link", name="Output of workers").click()
    expect(see(page, "rows").locator("tbody tr")).to_have_count(4)
    see(page, "rows").get_by_role("link", name="rollout-0").click()
    expect(see(page, "ask-filter")).to_have_value("worker = 'rollout-0'")
    expect(see(page, "rows").locator("tbody tr", has_text="INFO ready")).to_have_count(1)
    see(page, "ask-filter").fill("level in ('warning', 'error') and text regexp 'out of .*ory'")
    see(page, "ask-filter").press("Enter")
    expect(see(page, "rows").locator("tbody tr")).to_have_count(1)
    expect(see(page, "rows")).to_contain_text("CUDA out of memory")


def test_use_of_machines_is_charted_by_worker(visit: Visit, rich: str) -> None:
    page = visit("cluster", rich)
    expect(see(page, "chart-machine-memory")).to_have_attribute("data-unit", "GiB")
    (row,) = rows_of(page, "machines")
    assert row == "actor node-a 7 1.500 2 GiB 50 % 1 GiB"
