"""What the pages compute before they draw: each function by itself, in the browser that will run it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from rlsys.monitoring.events import ACTIVITIES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Logic: TypeAlias = Callable[..., Any]


@pytest.fixture(scope="module")
def logic(chromium: Browser, origin: str) -> Iterator[Logic]:
    """What a function of a module makes of its arguments: `logic("agents.js", "treeOrder", agents)`."""
    page = chromium.new_page()
    page.goto(origin)
    call = "async ([module, name, all]) => (await import(`/${module}`))[name](...all)"
    yield lambda module, function, *arguments: page.evaluate(call, [module, function, arguments])
    page.close()


def test_text_that_hides_or_turns_around_is_made_visible(logic: Logic) -> None:
    said = "a\u202eb\x00\x1b[31m\n"
    assert logic("tokens.js", "visible", said) == "a[U+202E]b\u2400\u241b[31m\n"


def test_chatml_is_split_into_messages_and_other_text_stays_whole(logic: Logic) -> None:
    chatml = "<|im_end|>\n<|im_start|>tool\n<b>3</b><|im_end|>\n<|im_start|>assistant\n"
    other = "[INST] hello [/INST]"
    told = [{"role": "tool", "text": "<b>3</b>"}]
    assert logic("conversation.js", "messagesOf", chatml) == told
    assert logic("conversation.js", "messagesOf", other) == [{"role": "prompt", "text": other}]


def test_a_damaged_tree_of_agents_loses_none(logic: Logic) -> None:
    agents = [{"parent": None}, {"parent": 0}, {"parent": 7}, {"parent": 3}, {"parent": 1}]
    order = logic("agents.js", "treeOrder", agents)
    assert [(node["index"], node["depth"]) for node in order] == [(0, 0), (1, 1), (4, 2), (2, 0), (3, 0)]


def test_rewards_are_counted_each_once_by_the_histogram(logic: Logic) -> None:
    few = logic("plotting.js", "histogramOf", [0, 1, 1, None])
    assert [(column["from"], column["to"], column["count"]) for column in few] == [(0, 0, 1), (1, 1, 2)]
    many = logic("plotting.js", "histogramOf", [i / 99 for i in range(100)])
    assert sum(column["count"] for column in many) == 100
    assert all(a["to"] == b["from"] for a, b in itertools.pairwise(many))


def test_every_activity_has_its_look(logic: Logic) -> None:
    looks = {name: logic("lanes.js", "shapeOf", name) for name in ACTIVITIES}
    assert {name: look["help"] for name, look in looks.items()} == dict(ACTIVITIES)


def test_times_are_counted_from_the_start_of_the_run(logic: Logic) -> None:
    assert logic("lanes.js", "sinceBegin", 3725) == "1:02:05"
    assert logic("lanes.js", "sinceBegin", 61.26, 0.1) == "1:01.3"
    assert logic("lanes.js", "sinceBegin", 59.96, 0.1) == "1:00.0"
    assert logic("lanes.js", "sinceBegin", -5) == "-0:05"


def test_a_window_never_leaves_the_run(logic: Logic) -> None:
    run, window = {"from": 100, "to": 160}, {"from": 150, "to": 160}
    assert logic("lanes.js", "panned", window, 3, run) == window
    assert logic("lanes.js", "zoomed", window, 0.001, run) == run
    assert logic("lanes.js", "zoomed", window, 2, run, 160) == {"from": 155, "to": 160}
    assert logic("lanes.js", "dragged", window, 0.5, 0.5001, run) is None, "that was a click"


def test_numbers_read_as_people_write_them(logic: Logic) -> None:
    written: dict[str, dict[float | None, str]] = {
        "number": {0.5231: "0.523", 1_234_567: "1.23M", 1234.5: "1,235", 0.00001234: "1.23e-5", None: "–"},
        "percent": {0.004: "0.4 %", 0.815: "82 %"},
        "duration": {0: "0 s", 0.012: "12 ms", 59.7: "1 min", 7500: "2 h 5 min", 200_000: "2 d 8 h"},
    }
    for function, cases in written.items():
        assert [logic("format.js", function, value) for value in cases] == list(cases.values())


def test_one_of_a_unit_is_singular(logic: Logic) -> None:
    cases = {(1, "agents"): "1 agent", (2, "agents"): "2 agents", (1, "tokens/s"): "1 tokens/s", (1, "s"): "1.0 s"}
    assert [logic("format.js", "quantity", *case) for case in cases] == list(cases.values())


def test_no_two_activities_of_a_lane_share_a_colour(logic: Logic) -> None:
    colours = [logic("lanes.js", "shapeOf", name)["colour"] for name in ACTIVITIES]
    assert len(set(colours)) == len(colours)


def test_runs_that_are_compared_never_look_alike(logic: Logic) -> None:
    looks = {str(logic("plotting.js", "lookOf", index)) for index in range(44)}
    assert len(looks) == 44


# ------------------------------------------------------------------------------------------------------------- charts


@pytest.mark.parametrize(
    ("by", "values", "shown"),
    [
        (0.25, [0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        (50, [100, 150], ["100", "150"]),
        (0.00002, [0.00004], ["4.0e-5"]),
        (10_000, [20_000], ["20K"]),
    ],
)
def test_ticks_have_the_digits_that_tell_them_apart(
    logic: Logic, by: float, values: list[float], shown: list[str]
) -> None:
    assert [logic("plotting.js", "tick", value, by) for value in values] == shown


def test_charts_side_by_side_show_the_same_steps(logic: Logic) -> None:
    evaluation = {"kind": "points", "xs": [10, 20], "ys": [0.4, 0.6]}
    assert logic("plotting.js", "columnsOf", [evaluation], [1, 30]) == [[1, 10, 20, 30], [None, 0.4, 0.6, None]]


STEP = {"kind": "whole", "xs": [1, 2, 3], "ys": [2, 2, 2]}
TRAINS = {"kind": "stack", "xs": [1, 2, 3], "ys": [1, 1, 1]}


def test_occasional_phases_take_no_time_at_other_steps(logic: Logic) -> None:
    saves = {"kind": "stack", "xs": [2], "ys": [0.5]}
    columns = logic("plotting.js", "columnsOf", [TRAINS, saves, STEP])
    assert columns == [[1, 2, 3], [1, 1, 1], [1, 1.5, 1], [2, 2, 2]]


def test_a_thinned_series_keeps_its_last_value_in_a_stack(logic: Logic) -> None:
    thinned = {"kind": "stack", "xs": [1, 3], "ys": [2, 4], "isThinned": True}
    assert logic("plotting.js", "columnsOf", [TRAINS, thinned])[1:] == [[1, 1, 1], [3, 4, 5]]


def test_nothing_is_stacked_at_steps_that_told_no_times(logic: Logic) -> None:
    evaluates = {"kind": "stack", "xs": [0, 1, 2, 3], "ys": [9, 0, 0, 0]}
    xs, trains, sums, _ = logic("plotting.js", "columnsOf", [TRAINS, evaluates, STEP], [0, 4])
    assert (xs, trains, sums) == ([0, 1, 2, 3, 4], [None, 1, 1, 1, None], [None, 1, 1, 1, None])


def test_gaps_stay_gaps(logic: Logic) -> None:
    broken = {"kind": "stack", "xs": [1, 2, 3], "ys": [1, None, 1]}
    whole = {"kind": "whole", "xs": [1, 2, 3], "ys": [2, None, 2]}
    line = {"kind": "line", "xs": [1, 2, 3], "ys": [5, None, 7]}
    assert logic("plotting.js", "columnsOf", [broken, whole, line])[1:] == [[1, None, 1], [2, None, 2], [5, None, 7]]


@pytest.mark.parametrize(
    ("kind", "is_thinned", "told"),
    [("stack", False, [None, 0.5, None]), ("stack", True, [None, 0.5, 0.5]), ("points", False, [None, 0.5, 0.5])],
)
def test_legend_shows_step_values_for_phases_and_last_for_metrics(
    logic: Logic, kind: str, is_thinned: bool, told: list[float | None]
) -> None:
    line = {"kind": kind, "xs": [2], "ys": [0.5], "isThinned": is_thinned}
    assert [logic("plotting.js", "toldAt", line, step) for step in (1, 2, 3)] == told


@pytest.mark.parametrize(
    ("low", "high", "is_stacked", "least"),
    [(0.9, 1.0, False, 0.892), (0.9, 1.0, True, 0), (0.2, 1.0, False, 0), (-1.0, 1.0, False, -1.16), (3, 3, True, 0)],
)
def test_an_axis_starts_at_zero_unless_that_flattens_the_line(
    logic: Logic, low: float, high: float, is_stacked: bool, least: float
) -> None:
    begin, end = logic("plotting.js", "rangeOf", low, high, is_stacked)
    assert begin == pytest.approx(least)
    assert end > high


def test_noise_about_zero_is_not_drawn_as_movement(logic: Logic) -> None:
    assert logic("plotting.js", "rangeOf", 1e-12, 3e-12, False, 0.001) == [0, 0.001]
    assert logic("plotting.js", "rangeOf", -1e-9, 1e-9, False, 0.001) == [-0.001, 0.001]
    begin, end = logic("plotting.js", "rangeOf", 0.5, 0.5001, False, 0.01)
    assert end - begin >= 0.01


def test_of_a_thousand_alerts_a_chart_tells_the_newest(logic: Logic) -> None:
    marks = logic("plotting.js", "newestOf", [{"x": step, "text": "not finite"} for step in range(1000)])
    assert [mark["x"] for mark in marks["told"]] == [999, 998, 997]
    assert marks["numMore"] == 997
    assert len(marks["drawn"]) == 20


def test_groups_of_a_task_in_one_step_are_one_point(logic: Logic) -> None:
    def point(step: int | None, mean: float | None, num: int) -> dict[str, Any]:
        lows = {"reward_min": mean, "reward_max": None if mean is None else mean + 1, "reward_mean": mean}
        return {"step": step, "num_episodes": num, "length_mean": 10 * num, **lows}

    points = [point(7, 1.0, 2), point(3, 0.0, 4), point(None, 0.5, 4), point(7, 4.0, 4), point(9, None, 4)]
    assert logic("views/task.js", "byStep", points) == [
        {"step": 3, "reward_min": 0, "reward_max": 1, "reward_mean": 0, "length_mean": 40},
        {"step": 7, "reward_min": 1, "reward_max": 5, "reward_mean": 3, "length_mean": pytest.approx(200 / 6)},
    ]


def test_runs_of_one_name_are_told_apart_by_their_folders(logic: Logic) -> None:
    runs = [{"id": "exp1/seed0", "name": "seed0"}, {"id": "exp2/seed0", "name": "seed0"}]
    assert logic("views/compare.js", "labelsOf", runs) == ["exp1/seed0", "exp2/seed0"]
    assert logic("views/compare.js", "labelsOf", [{"id": "exp1/a", "name": "a"}, runs[0]]) == ["a", "seed0"]
