"""Reward functions are found by name, called by the names of their arguments, and never give a silent 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlsys.errors import ConfigError
from rlsys.rewards.calling import RewardFunction, score_of
from rlsys.types import Score, Task

TASK = Task(id="t1", prompt="Sort 312", answer="123", info={"level": "easy"})


@pytest.fixture
def load(tmp_path: Path):
    """Load the function `judge` of a user's file with this source."""

    def load(source: str) -> RewardFunction:
        path = tmp_path / "judges.py"
        path.write_text(source)
        return RewardFunction.load(f"{path}:judge")

    return load


def refusal(spec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RewardFunction.load(spec)
    return str(caught.value)


def test_exact_compares_without_surrounding_spaces() -> None:
    exact = RewardFunction.load("exact")
    assert exact.score(TASK, " 123\n") == Score(1.0)
    assert exact.score(TASK, "132") == Score(0.0)


def test_arguments_are_picked_by_name(load) -> None:
    judge = load("def judge(level, task_id, completion, prompt): return [level, task_id, completion, prompt]")
    assert judge.score(TASK, "x").failure == "returned ['easy', 't1', 'x', 'Sort 312'] (list), not a number"


def test_a_default_stands_in_for_an_absent_column(load) -> None:
    judge = load("def judge(level='hard', weight=0.5): return weight if level == 'easy' else 0")
    judge.check([])
    assert judge.score(TASK, "x") == Score(0.5)


def test_double_star_takes_everything(load) -> None:
    judge = load("def judge(completion, **columns): return len(columns)")
    assert judge.score(TASK, "x") == Score(5.0)


def test_a_column_cannot_hide_what_is_always_there(load) -> None:
    judge = load("def judge(completion): return completion == 'said'")
    assert judge.score(Task(id="t", prompt="p", info={"completion": "column"}), "said") == Score(1.0)


def test_an_argument_that_no_row_has_is_refused_before_the_run(load) -> None:
    judge = load("def judge(completion, anwser): return 0")
    with pytest.raises(ConfigError, match=r"asks for anwser.*available are completion, prompt, .*, task_id, level"):
        judge.check(["level"])
    load("def judge(level): return 0").check(["level"])


def test_a_later_row_without_the_column_fails_alone(load) -> None:
    judge = load("def judge(depth): return depth")
    assert judge.score(TASK, "x") == Score(None, "the row of task t1 has no depth")


def test_what_the_function_raises_says_where(load, tmp_path: Path) -> None:
    judge = load("def judge(completion):\n    return int(completion)")
    failure = judge.score(TASK, "abc").failure
    expected = f"raised ValueError: invalid literal for int() with base 10: 'abc' at {tmp_path / 'judges.py'}:2"
    assert failure == expected


def test_an_error_inside_a_library_also_names_the_users_line(load, tmp_path: Path) -> None:
    judge = load("import json\ndef judge(completion):\n    return json.loads(completion)")
    assert re.search(rf"at {tmp_path}/judges.py:3, in .*decoder.py:\d+$", judge.score(TASK, "{").failure)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, Score(1.0)),
        (3, Score(3.0)),
        (None, Score(None, "not applicable")),
        (float("nan"), Score(None, "returned nan")),
        (float("-inf"), Score(None, "returned -inf")),
        ("1.0", Score(None, "returned '1.0' (str), not a number")),
        ([1.0], Score(None, "returned [1.0] (list), not a number")),
        (10**400, Score(None, f"returned {'1' + '0' * 56}... (int), not a number")),
    ],
)
def test_only_a_finite_number_is_a_score(value: object, score: Score) -> None:
    assert score_of(value) == score


def test_specs_that_name_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("def first(): ...\ndef second(): ...\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    assert "give exact, `module:name` or `path/file.py:name`" in refusal("exakt")
    assert "cannot import no_such_module" in refusal("no_such_module:judge")
    assert "no such file" in refusal("nowhere/judges.py:judge")
    assert "has no function judge; it has first, second" in refusal(f"{tmp_path}/judges.py:judge")
    assert "SyntaxError" in refusal(f"{tmp_path}/broken.py:judge")


def test_functions_that_cannot_be_called_by_name_are_refused(load) -> None:
    with pytest.raises(ConfigError, match="passed by name, which completion cannot be"):
        load("def judge(completion, /): return 0")
    with pytest.raises(ConfigError, match="async"):
        load("async def judge(completion): return 0")
