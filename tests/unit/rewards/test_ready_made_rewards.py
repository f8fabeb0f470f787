"""Ready-made reward functions: accepted answers, and inputs they refuse to score."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from statistics import fmean

import pytest

from algorithms.dapo import DAPO
from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import RewardFunction, RewardInput, RewardSpec, RewardSum, results_of
from rlsys.types import Episode, Json, Score, Task, Trajectory, Turn
from tests.groups import episode, group

HAS_GYM = importlib.util.find_spec("reasoning_gym") is not None


def scores(name: str, answer: str | None, *completions: str, **args: Json) -> list[Score]:
    function = RewardFunction.load(name, args)
    function.check([])
    said = [RewardInput(text) for text in completions]
    with asyncio.Runner() as runner:
        return function.scores(
            results_of(function.begin(Task(id="t", prompt="p", answer=answer), said), runner), len(said)
        )


def values(name: str, answer: str | None, *completions: str, **args: Json) -> list[float | None]:
    return [score.value for score in scores(name, answer, *completions, **args)]


def refusal(name: str, args: Mapping[str, Json]) -> str:
    with pytest.raises(ConfigError) as caught:
        RewardFunction.load(name, args)
    return str(caught.value)


def test_exact_compares_without_surrounding_spaces() -> None:
    assert values("exact", "123", " 123\n", "132") == [1.0, 0.0]


@pytest.mark.parametrize(("name", "args"), [("exact", {}), ("regex", {"pattern": "."}), ("math", {})])
def test_a_row_without_an_answer_cannot_be_scored(name: str, args: dict[str, Json]) -> None:
    assert scores(name, None, "123", **args) == [Score(None, "the row has no answer")]


def of_verl(data_source: str, answer: str, *completions: str) -> list[float | None]:
    with asyncio.Runner() as runner:
        function = RewardFunction.load("verl", {})
        task = Task(id="t", prompt="p", answer=answer, info={"data_source": data_source})
        said = [RewardInput(text) for text in completions]
        return [s.value for s in function.scores(results_of(function.begin(task, said), runner), len(said))]


def test_rows_of_verl_are_scored_by_the_rule_of_their_source() -> None:
    said = ("so #### 72", "#### 71, no: #### 1,072", "72", "#### 72.")
    assert of_verl("openai/gsm8k", "72", *said) == [1, 0, 0, 1]
    assert of_verl("openai/gsm8k", "1072", said[1]) == [1]
    for name in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "numina_olympiads"):
        assert of_verl(name, r"\frac{1}{2}", r"\boxed{0.5}", r"\boxed{2}", "1/2") == [1, 0, 0]
    said = ("Answer: 113", "answer: 112\nAnswer: $113$", r"Answer: \boxed{113}", "113", "Answer: 12")
    assert of_verl("aime2024", "113", *said) == [1, 1, 1, -1, -1]
    assert of_verl("math_dapo", "113", said[0]) == [1]


def test_a_source_without_a_rule_is_no_zero() -> None:
    assert of_verl("sums", "5", "5") == [None]


def test_regex_compares_its_last_match_with_the_answer() -> None:
    assert values("regex", "42", "#### 41, no: #### 42", "#### 42 or #### 41", "42", pattern=r"#### (\S+)") == [1, 0, 0]


def test_regex_can_count_the_first_match_or_any() -> None:
    said = ("1 2 3", "2 1 3", "3 3 2")
    assert values("regex", "2", *said, pattern=r"\d", counts="first") == [0, 1, 0]
    assert values("regex", "2", *said, pattern=r"\d", counts="any") == [1, 1, 1]
    assert values("regex", "2", *said, pattern=r"\d") == [0, 0, 1]


def test_a_group_of_regex_that_matched_nothing_is_empty_text() -> None:
    assert values("regex", "2", "b", pattern="a(2)|b") == [0.0]


def test_format_wants_the_whole_completion_to_have_the_form() -> None:
    good = "<think>first\nthen</think>\n<answer>12</answer>\n"
    assert values("format", None, good, f"Well: {good}", "12") == [1, 0, 0]
    assert values("format", None, "12", "12.", pattern=r"\d+") == [1, 0]


def test_what_the_template_began_a_reply_with_is_a_part_of_its_format() -> None:
    said = [RewardInput("x</think><answer>4</answer>", opening=opening) for opening in ("<think>", "")]
    function = RewardFunction.load("format")
    assert [score.value for score in function.scores(function.begin(Task(id="t", prompt="p"), said), 2)] == [1, 0]


def test_an_answer_that_is_a_list_is_for_functions_of_ones_own() -> None:
    task = Task(id="t", prompt="p", answer='["a","b"]', info={"ground_truth": ["a", "b"]})
    function = RewardFunction.load("exact")
    (score,) = function.scores(function.begin(task, [RewardInput("a")]), 1)
    assert score.failure == "the answer is a list: compare with it in a function of your own"


def test_wrong_arguments_of_ready_made_functions_are_refused_before_running() -> None:
    assert refusal("regex", {}) == "reward 'regex' needs args: pattern"
    assert "pattern '(' is no regular expression" in refusal("regex", {"pattern": "("})
    assert "pattern '(' is no regular expression" in refusal("format", {"pattern": "("})
    assert "counts is 'most'; give first, last or any" in refusal("regex", {"pattern": ".", "counts": "most"})
    assert "no argument tolerance" in refusal("math", {"tolerance": 1})


def test_overlong_replies_are_punished_softly() -> None:
    judge = RewardFunction.load("overlong", {"max_tokens": 10, "overlong_tokens": 4}).function
    assert [judge([7] * num) for num in (0, 6, 7, 9, 10, 99)] == [0, 0, -0.25, -0.75, -1, -1]


def test_the_overlong_punishment_is_that_of_dapo() -> None:
    shaped = RewardFunction.load("overlong", {"max_tokens": 10, "overlong_tokens": 4}).function
    lengths = (1, 6, 7, 8, 10, 12)
    scored = group(0, episodes=[episode(1.0, num_trained=num) for num in lengths])
    assigned = DAPO(max_length=10, overlong_tokens=4, std_normalize=False).assign(scored)
    rewards = [1.0 + float(str(shaped([7] * num))) for num in lengths]
    assert [a.advantage for a in assigned] == pytest.approx([r - fmean(rewards) for r in rewards])


def test_a_target_length_costs_its_distance() -> None:
    judge = RewardFunction.load("target_length", {"tokens": 8}).function
    assert [judge([7] * num) for num in (0, 6, 8, 12, 24)] == [-1, -0.25, 0, -0.5, -2]
    assert "tokens: should be 1 or more" in refusal("target_length", {"tokens": 0})
    assert "overlong_tokens: should be from 1 to max_tokens, 4 (got 5)" in refusal(
        "overlong", {"max_tokens": 4, "overlong_tokens": 5}
    )


def test_shaping_is_a_part_of_the_reward_with_its_own_metric() -> None:
    args: dict[str, Json] = {"max_tokens": 4, "overlong_tokens": 2}
    specs = [RewardSpec("exact", "exact"), RewardSpec("overlong", "overlong", 0.5, args)]
    task = Task(id="t", prompt="2+3?", answer="5")
    (score,) = RewardSum(specs).score(task, [RewardInput("5", ids=(1, 2, 3))])
    assert (score.value, score.parts) == (0.75, {"exact": 1.0, "overlong": -0.5})


def test_only_right_answers_have_a_bonus_for_parallel_work() -> None:
    specs = [RewardSpec("exact", "exact"), RewardSpec("parallel", "parallel", args={"share": 0.4}, given="exact")]
    turns = tuple(Turn((1,), (2,) * 10, (0.0,) * 10, (), "stop", "5") for _ in range(2))
    trajectories = (Trajectory("root", turns),)
    inputs = [
        RewardInput(said, episode=Episode(trajectories, num_sequential=longest))
        for said, longest in (("5", 20), ("5", 15), ("5", 2), ("6", 2))
    ]
    scores = RewardSum(specs).score(Task(id="t", prompt="2+3?", answer="5"), inputs)
    assert [score.value for score in scores] == [1.0, 1.1, 1.2, 0.0]
    assert [score.parts.get("parallel") for score in scores] == [0.0, pytest.approx(0.1), 0.2, None]
    assert "cap: should be from 0 to share, 0.1 (got 0.2)" in refusal("parallel", {"share": 0.1})


# -------------------------------------------------------------------------------------------------------- mathematics


@pytest.mark.parametrize("gold", ["0.5", r"\frac12", r"so it is \boxed{\frac{1}{2}}", "$1/2$"])
def test_math_compares_what_is_in_the_last_box(gold: str) -> None:
    said = (r"\boxed{7}, no, \boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{\frac{1}{2}}, no, \boxed{7}")
    assert values("math", gold, *said) == [1, 1, 0]


def test_math_reads_an_answer_of_gsm8k() -> None:
    gold = "He buys 24*75=<<24*75=1800>>1800 grams.\n#### 1,800"
    assert values("math", gold, r"\boxed{1800}", r"\boxed{24}", "#### 1,800") == [1, 0, 0]


def test_math_knows_thousands_sets_and_formulas() -> None:
    assert values("math", "1,234", r"\boxed{1234}", r"\boxed{1{,}234}", r"\boxed{234}") == [1, 1, 0]
    assert values("math", r"\{1, 2\}", r"\boxed{\{2, 1\}}", r"\boxed{\{1\}}") == [1, 0]
    assert values("math", "(x+1)^2", r"\boxed{x^2+2x+1}", r"\boxed{x^2+1}") == [1, 0]


def test_a_completion_without_a_readable_box_is_wrong() -> None:
    assert values("math", "2", "2", r"\boxed{}", r"\boxed{2", r"\boxed{)(}", r"\boxed{\frac{}") == [0, 0, 0, 0, 0]


def test_math_cannot_judge_by_an_answer_that_it_cannot_read() -> None:
    for gold in ("", ")(", r"\boxed{", r"\boxed{}"):
        (score,) = scores("math", gold, r"\boxed{2}")
        assert score == Score(None, f"the answer {gold!r} cannot be read as mathematics")


def test_math_says_nothing_of_time_outs() -> None:
    script = "from rlsys.rewards.math_reward import math; math('\\\\boxed{2}', '2')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


# ------------------------------------------------------------------------------------------------------ reasoning-gym


@pytest.mark.skipif(HAS_GYM, reason="reasoning-gym is installed")
def test_a_missing_reward_package_is_named_with_its_install_command() -> None:
    assert refusal("reasoning_gym", {}) == (
        "reward 'reasoning_gym': No module named 'reasoning_gym'; pip install reasoning-gym (extra `gym`)"
    )


@pytest.mark.skipif(not HAS_GYM, reason="reasoning-gym is not installed")
def test_reasoning_gym_scores_by_the_data_set_of_the_row() -> None:
    import reasoning_gym  # type: ignore[import-not-found]

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=1)[0]
    task = Task(
        id="t", prompt=entry["question"], answer=str(entry["answer"]), info={"metadata": dict(entry["metadata"])}
    )
    function = RewardFunction.load("reasoning_gym")
    function.check(["metadata"])
    said = [
        RewardInput(f"<answer>{task.answer}</answer>"),
        RewardInput(f"{task.answer}"),
        RewardInput("<answer>x</answer>"),
    ]
    with asyncio.Runner() as runner:
        right, plain, wrong = function.scores(results_of(function.begin(task, said), runner), 3)
        unknown = Task(id="t", prompt="p", answer="1", info={"metadata": {}})
        (refused,) = function.scores(results_of(function.begin(unknown, said[:1]), runner), 1)
    assert right.value == plain.value == 1.0
    assert wrong.value is not None and wrong.value < 1.0
    assert refused.failure == "the row's `metadata` has no `source_dataset`"
