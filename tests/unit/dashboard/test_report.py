"""`rlsys report`: one file, with all content as text and without scripts."""

from __future__ import annotations

import subprocess
import sys
import time
from html.parser import HTMLParser
from math import nan
from pathlib import Path

import orjson
import pytest

from rlsys.config.changed_keys import changed_keys
from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.report.html_report import report_of
from rlsys.dashboard.report.markup import h, join_html, table
from rlsys.dashboard.report.plots import plot, short
from rlsys.dashboard.responses import Series
from rlsys.monitoring.events import RunEnded, RunStarted, StepDone
from rlsys.replay.rollout_parquet import read_records
from tests.histories import History, Shape, small_run
from tests.rollouts import damage, lines_of, write_lines

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></pre></style>\"'><svg onload=alert(3)>&lt;\u202e\0"
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "section", "article", "h1", "h2", "h3", "h4", "p", "b",
    "pre", "code", "dl", "dt", "dd", "div", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "ul",
    "li", "span", "svg", "path", "text", "circle",
}  # fmt: skip


class Page(HTMLParser):
    """What a browser would make of it: elements with their attributes, and the text in each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._inside.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._inside):
            self.texts[tag][-1] += data

    @property
    def text(self) -> str:
        return self.texts["main"][0]


def report(run: Path) -> Page:
    return Page(report_of(Readings(run), changed_keys))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(small_run(tmp_path_factory.mktemp("report") / "small"))


def test_it_tells_of_everything_a_reader_asks_for(small: Page) -> None:
    assert small.texts["h1"] == ["small"]
    assert small.texts["h2"] == [
        "Learning", "Alerts", "Who waited", "Metrics", "Best and worst groups",
        "Configuration, where it differs from the defaults",
    ]  # fmt: skip
    for told in (
        "finished after step 30 of 30",
        "training, mean of 20 steps",
        "Over: worker failed in steps 10 to 20.",
        "The trainer waits for groups",
        "rollout-2.1",
        "3 pending at the end",
        "algorithm.group_size4 (default: 8)",
    ):
        assert told in small.text


def test_best_and_worst_groups_of_the_run_show_their_text(small: Page) -> None:
    titles = [title for title in small.texts["h3"] if " group: " in title]
    assert [title.partition(":")[0] for title in titles] == ["Best group"] * 2 + ["Worst group"] * 2
    assert len({title.partition("task ")[2].partition(",")[0] for title in titles}) == 4
    assert any("plus zero?" in text for text in small.texts["pre"])
    rewards = [text for text in small.texts["p"] if text.startswith("Rewards: ")]
    assert "Rewards: 1, 1, 1, 1; " in rewards[0]
    assert "Rewards: 0, 0, 0, 0; " in rewards[-1]
    assert sum(title.startswith("Episode ") for title in small.texts["h4"]) == 16


def test_every_score_has_its_failed_share(small: Page) -> None:
    scores = [row for row in small.texts["tr"] if row.startswith(("training", "held_out"))]
    assert len(scores) == 2
    assert all(row.count("failed ") == 3 for row in scores)


def test_evaluations_are_a_table_with_the_mean_first(small: Page) -> None:
    head = next(row for row in small.texts["tr"] if row.startswith("step"))
    assert head.startswith("stepmeanmean ci95pass@1num tasks")


def test_every_chart_has_units_on_both_axes_and_a_label(small: Page) -> None:
    charts = [attributes for tag, attributes in small.elements if tag == "svg" and "aria-label" in attributes]
    assert len(charts) == len(small.texts["figure"]) > 8
    for figure in small.texts["svg"]:
        assert figure == "" or "step" in figure
    assert all(" → " in (chart["aria-label"] or "") for chart in charts)
    units = [
        attributes for tag, attributes in small.elements if tag == "text" and "unit" in (attributes["class"] or "")
    ]
    assert len(units) == 2 * len(charts)


def test_it_holds_no_script_and_may_fetch_nothing(small: Page) -> None:
    assert {tag for tag, _ in small.elements} <= ALLOWED
    names = {name for _, attributes in small.elements for name in attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "href", "style", "srcdoc", "action"}
    (policy,) = [a["content"] for tag, a in small.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert "url(" not in small.texts["style"][0]
    assert "@import" not in small.texts["style"][0]


def hostile_run(folder: Path) -> Path:
    """A run in which whatever is a text tries to be markup."""
    history = History(folder, Shape(steps=2))
    history.start()
    history.step()
    history.step()
    history.end("failed", HOSTILE)
    (rollouts,) = folder.glob("rollouts/step_000002.parquet")
    lines = lines_of(rollouts)
    for line in lines:
        line["task"] |= {"prompt": HOSTILE, "answer": HOSTILE}
        for trajectory in (t for episode in line["episodes"] for t in episode["trajectories"]):
            for turn in trajectory["turns"]:
                turn["text"] = HOSTILE
    write_lines(rollouts, lines)
    (folder / "config.resolved.yaml").write_text(f"model: {{path: {orjson.dumps(HOSTILE).decode()}}}\n")
    return folder


def test_what_models_and_tasks_say_stays_text(tmp_path: Path) -> None:
    page = report(hostile_run(tmp_path / "<img src=x onerror=alert(4)>"))
    assert {tag for tag, _ in page.elements} <= ALLOWED
    assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}
    shown = HOSTILE.replace("\0", "␀").replace("\u202e", "⟨U+202E⟩")
    assert page.texts["h1"] == ["<img src=x onerror=alert(4)>"]
    assert sum(shown in text for text in page.texts["pre"]) >= 3
    assert any(shown in text for text in page.texts["p"])


@pytest.mark.parametrize(
    "code", [0x7F, 0x85, 0x9F, 0x61C, 0x200B, 0x200D, 0x200F, 0x2028, 0x2029, 0x202A, 0x202E, 0x2066, 0x2069, 0xFEFF]
)
def test_a_character_that_nobody_would_see_is_named(code: int) -> None:
    assert h("p", f"a{chr(code)}b") == f"<p>a⟨U+{code:04X}⟩b</p>"


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(), begin_s=time.time())
    history.start()
    page = report(history.folder)
    assert "after step 0 of 30" in page.text
    assert "No step was done." in page.text


def test_a_damaged_group_costs_the_report_no_more_than_itself(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    rollouts = run / "rollouts" / "step_000030.parquet"
    damage(rollouts, *range(len(read_records(rollouts))))
    page = report(run)
    assert "Best and worst groups" in page.texts["h2"]
    assert sum(" group: " in title for title in page.texts["h3"]) == 4


def test_a_run_that_failed_before_starting_has_a_report(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape())
    history.emit(RunEnded(0, "failed", "ModelError: there is no model at models/x"))
    history.events.close()
    assert "failed after step 0. Error: ModelError: there is no model at models/x" in report(history.folder).text


def test_the_policies_of_a_run_are_parts_of_its_report(tmp_path: Path) -> None:
    shared = History(tmp_path / "joint", Shape())
    shared.emit(RunStarted(str(shared.folder), 0, 30))
    for policy in ("solver", "proposer"):
        small_run(shared.folder / "policies" / policy)
    assert report(shared.folder).texts["h1"] == ["joint", "proposer", "solver"]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuch, match="is no run directory"):
        report_of(Readings(tmp_path), changed_keys)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    command = [sys.executable, "-m", "rlsys.cli", "report", str(run), "-o", str(tmp_path / "none" / "out.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rlsys: cannot write {tmp_path}/none/out.html: No such file or directory")


def test_the_command_writes_the_file_and_says_where(tmp_path: Path) -> None:
    run, output = small_run(tmp_path / "run"), tmp_path / "out.html"
    command = [sys.executable, "-m", "rlsys.cli", "report", str(run), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{output}\n"
    assert Page(output.read_text()).texts["title"] == ["run – rlsys report"]


def series(*values: float | None, name: str = "x", unit: str = "s") -> Series:
    return Series(name, unit, "", range(1, len(values) + 1), values, len(values))


def test_a_line_is_broken_where_a_value_is_missing() -> None:
    drawn = plot("T", [series(1.0, 2.0, None, 4.0, nan, 6.0)])
    found = [a["d"] or "" for tag, a in Page(f"<main>{drawn}</main>").elements if a.get("class") == "line k0"]
    assert [line.count("M") for line in found] == [3, 1]  # the line, and its mark in the legend


@pytest.mark.parametrize("values", [(0.0,), (5.0, 5.0), (-1e-9, 1e12), (0.0, 0.0, 0.0), (1e300, -1e300), (-3.0, -2.9)])
def test_any_values_give_axes_with_ticks(values: tuple[float, ...]) -> None:
    page = Page(f"<main>{plot('T', [series(*values)])}</main>")
    assert len([a for tag, a in page.elements if a.get("class") == "y"]) >= 2
    assert "nan" not in page.text


def test_close_ticks_have_enough_digits_to_differ() -> None:
    page = Page(f"<main>{plot('T', [series(1.0501, 1.0502, 1.0504)])}</main>")
    labels = [text for text in page.texts["text"] if text.startswith("1.05")]
    assert len(set(labels)) == len(labels) > 2


@pytest.mark.parametrize(("lowest", "has_band"), [((0.0, 0.0), False), ((0.0, 0.5), True)])
def test_a_band_of_rewards_is_drawn_if_it_moves(tmp_path: Path, lowest: tuple[float, ...], has_band: bool) -> None:
    history = History(tmp_path / "run", Shape())
    history.emit(RunStarted(str(tmp_path / "run"), 0, 2))
    for step, least in enumerate(lowest, start=1):
        history.emit(StepDone(step, {"reward/mean": 0.7, "reward/min": least, "reward/max": 1.0}))
    page = report(history.folder)
    assert any(attributes.get("class") == "band" for _, attributes in page.elements) == has_band
    assert ("area: least to greatest" in page.text) == has_band


def test_a_chart_of_nothing_is_left_out() -> None:
    assert plot("T", [series(None, nan)]) == plot("T", []) == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.7126, "0.713"), (12345.0, "12.3k"), (1934.4, "1,934"), (4.1e-5, "4.1e-05"), (3e6, "3M"), (2e10, "20G"),
     (None, "–"), (nan, "–"), (-15000.0, "-15k"), (0.0, "0")],
)  # fmt: skip
def test_numbers_are_shown_short(value: float | None, shown: str) -> None:
    assert short(value) == shown


def test_only_what_was_made_as_markup_is_markup() -> None:
    assert h("p", "<b>", h("b", "&"), class_='"') == '<p class="&quot;">&lt;b&gt;<b>&amp;</b></p>'
    assert join_html("<", h("br")) == "&lt;<br>"
    assert "<td>&lt;i&gt;</td>" in table(("a",), [("<i>",)])
