"""Reward functions: lookup by name, arguments by name, and never a silent 0."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.data.row_adapters import json_text
from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import (
    NOT_APPLICABLE,
    RewardFunction,
    RewardInput,
    RewardSpec,
    RewardSum,
    results_of,
    score_of,
    total,
    weight_score,
)
from rlsys.rewards.reward_registry import BUILTIN
from rlsys.types import Episode, Json, Score, Task, Trajectory, Turn, VersionSpan, is_success

TASK = Task(id="t1", prompt="Sort 312", answer="123", info={"level": "easy"})
CHAT = Task(id="t2", prompt=({"role": "user", "content": "Sort 312"},), answer="123")

Judge = Callable[..., list[Score]]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RewardFunction]:
    """Load the function `judge` of a user's file with this source."""

    def load(source: str, args: Mapping[str, Json] | None = None) -> RewardFunction:
        path = tmp_path / "judges.py"
        path.write_text(source)
        return RewardFunction.load(f"{path}:judge", args)

    return load


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def scores(load, runner: asyncio.Runner) -> Judge:
    """What a user's function says of completions of a task."""

    def scores(
        source: str, *completions: str, task: Task = TASK, args: Mapping[str, Json] | None = None
    ) -> list[Score]:
        function = load(source, args)
        said = [RewardInput(text, tuple(map(ord, text))) for text in completions]
        return function.scores(results_of(function.begin(task, said), runner), len(said))

    return scores


@pytest.fixture
def values(scores: Judge) -> Callable[..., list[float | None]]:
    """The same, values alone."""
    return lambda *arguments, **options: [score.value for score in scores(*arguments, **options)]


def refusal(spec: str, args: Mapping[str, Json] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        RewardFunction.load(spec, args)
    return str(caught.value)


# ------------------------------------------------------------------------------------------- functions of a completion


def test_arguments_are_picked_by_name(scores) -> None:
    (score,) = scores("def judge(level, task_id, completion, prompt): return [level, task_id, completion, prompt]", "x")
    assert score.failure == "returned ['easy', 't1', 'x', 'Sort 312'] (list), not a number"


def test_a_default_stands_in_for_an_absent_column(load, values) -> None:
    source = "def judge(level='hard', weight=0.5): return weight if level == 'easy' else 0"
    load(source).check([])
    assert values(source, "x") == [0.5]


def test_double_star_takes_everything(scores) -> None:
    (score,) = scores("def judge(completion, **columns): return sorted(columns)", "x")
    assert "['answer', 'completion_ids', 'episode', 'ground_truth', " in score.failure


@pytest.mark.parametrize("answer", [["12", "21"], {"a": 1}])
def test_an_answer_that_is_no_text_comes_as_the_row_has_it(load, answer: Json) -> None:
    task = Task(id="t", prompt="p", answer=json_text(answer), info={"ground_truth": answer})
    one = load("def judge(completion, answer): return float(answer == eval(completion))")
    both = load("def judge(completions, answer): return [float(a == eval(c)) for c, a in zip(completions, answer)]")
    for function in (one, both):
        said = [RewardInput(str(answer))]
        assert [score.value for score in function.scores(function.begin(task, said), 1)] == [1.0]


def test_a_column_cannot_hide_what_is_always_there(values) -> None:
    task = Task(id="t", prompt="p", info={"completion": "column"})
    assert values("def judge(completion): return completion == 'said'", "said", task=task) == [1.0]


def test_the_tokens_of_a_completion_can_be_asked_for(load, values) -> None:
    source = "def judge(completion_ids): return sum(completion_ids)"
    assert values(source, "ab") == [97 + 98]
    assert load(source).wants_ids
    assert not load("def judge(completion): return 0").wants_ids


def test_an_argument_missing_from_the_columns_is_refused(load) -> None:
    judge = load("def judge(completion, anwser): return 0")
    with pytest.raises(ConfigError, match=r"asks for anwser.*available are completion, .*task_id, .*episode, level"):
        judge.check(["level"])
    load("def judge(level): return 0").check(["level"])


def test_a_later_row_without_the_column_fails_alone(scores) -> None:
    assert scores("def judge(depth): return depth", "x") == [Score(None, "the row of task t1 has no depth")]
    batched = "def judge(completions, depth): return depth"
    assert scores(batched, "x", "y") == [Score(None, "the row of task t1 has no depth")] * 2


def test_what_the_function_raises_says_where(scores, tmp_path: Path) -> None:
    (score,) = scores("def judge(completion):\n    return int(completion)", "abc")
    where = f"{tmp_path / 'judges.py'}:2"
    assert score.failure == f"raised ValueError: invalid literal for int() with base 10: 'abc' at {where}"


def test_an_error_inside_a_library_also_names_the_users_line(scores, tmp_path: Path) -> None:
    (score,) = scores("import json\ndef judge(completion):\n    return json.loads(completion)", "{")
    assert re.search(rf"at {tmp_path}/judges.py:3, in .*decoder.py:\d+$", score.failure)


def test_a_function_says_itself_why_it_cannot_judge(scores) -> None:
    source = "from rlsys.errors import CannotScore\ndef judge(): raise CannotScore('the sandbox is down')"
    assert scores(source, "x") == [Score(None, "the sandbox is down")]


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, Score(1.0)),
        (3, Score(3.0)),
        (None, NOT_APPLICABLE),
        (np.float32(0.5), Score(0.5)),
        (torch.tensor([0.5]), Score(0.5)),
        (float("nan"), Score(None, "returned nan")),
        (float("-inf"), Score(None, "returned -inf")),
        (-1.1e30, Score(None, "returned -1.1e+30, whose size is more than 1e+30")),
        (1e30, Score(1e30)),
        ("1.0", Score(None, "returned '1.0' (str), not a number")),
        ([1.0], Score(None, "returned [1.0] (list), not a number")),
        (10**400, Score(None, f"returned {'1' + '0' * 56}... (int), not a number")),
        ({"score": 1, "acc": True, "pred": "12", "nan": math.nan}, Score(1.0, parts={"acc": 1.0})),
        ({"score": 1, "\ud800": 2}, Score(1.0, parts={"\ufffd": 2.0})),
        ({"score": math.nan}, Score(None, "returned nan")),
        ({"score": None, "acc": 1}, NOT_APPLICABLE),
        ({"acc": 1}, Score(None, "returned {'acc': 1} (dict), which has no `score`")),
    ],
)
def test_only_a_finite_number_is_a_score(value: object, score: Score) -> None:
    assert score_of(value) == score


class Own(float):
    """A number of the user's own class, which no worker can unpickle."""

    def __repr__(self) -> str:
        raise ValueError("no words for it")


class OwnScore(Score):
    """A score of the user's own class."""


class Unreadable:
    """An object whose number cannot be had."""

    def __float__(self) -> float:
        raise Speechless


class Speechless(Exception):
    """An error that cannot be written."""

    def __str__(self) -> str:
        raise ValueError("no words for it")


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (Own(0.5), 0.5),
        ({"score": Own(0.5), "length": Own(3)}, 0.5),
        (OwnScore(Own(0.5), parts={"length": Own(3)}), 0.5),
        (Score(math.nan), None),
        (Score(1e40), None),
        (Unreadable(), None),
        (object.__new__(type("Odd", (), {"__repr__": lambda self: 1 / 0})), None),
    ],
    ids=["number", "in a dict", "score", "no number", "too large", "unreadable", "no words"],
)
def test_a_result_of_a_class_of_the_users_own_is_a_plain_score(value: object, score: float | None) -> None:
    found = score_of(value)
    numbers = [found.value, *found.parts.values()]
    assert (found.value, type(found)) == (score, Score)
    assert {type(number) for number in numbers} <= {float, type(None)}
    assert bool(found.failure) == (score is None)


# ------------------------------------------------------------------------------------------------- TRL, as documented

BOXED = r"""
import re

def judge(completions, ground_truth, **kwargs):
    # What is in the box must be the ground truth.
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
"""
CONVERSATIONAL = r"""
import re

def judge(completions, **kwargs):
    # A form that every reply should have.
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]
"""
TASK_SPECIFIC = """
def judge(prompts, completions, level, log_extra=None, log_metric=None, trainer_state=None, **kwargs):
    if log_extra:
        log_extra("length", [len(c) for c in completions])
    if log_metric:
        log_metric("accuracy", 0.5)
    assert trainer_state.global_step == 0 and set(kwargs) >= {"answer", "completion_ids", "task_id"}
    return [len(c) if kind == "easy" else None for c, kind in zip(completions, level)]
"""
ASYNC = """
import asyncio

async def judge(prompts, completions, completion_ids, **kwargs):
    async def one(prompt, ids):
        await asyncio.sleep(0)
        return float(len(prompt) + len(ids))
    return await asyncio.gather(*(one(p, i) for p, i in zip(prompts, completion_ids)))
"""


def test_a_trl_function_of_plain_text_runs_unchanged(values) -> None:
    assert values(BOXED, r"so \boxed{123}", r"\boxed{132}", "123") == [1.0, 0.0, 0.0]


def test_a_trl_function_of_conversations_runs_unchanged(values) -> None:
    replies = ("<think>a</think><answer>b</answer>", "b")
    assert values(CONVERSATIONAL, *replies, task=CHAT) == [1.0, 0.0]


def test_a_trl_function_of_one_kind_of_task_runs_unchanged(scores) -> None:
    logged = [{"length": 3.0, "accuracy": 0.5}, {"length": 0.0, "accuracy": 0.5}]
    assert scores(TASK_SPECIFIC, "abc", "") == [Score(3.0, parts=logged[0]), Score(0.0, parts=logged[1])]
    hard = Task(id="t", prompt="p", info={"level": "hard"})
    assert scores(TASK_SPECIFIC, "abc", task=hard) == [NOT_APPLICABLE]


def test_an_async_trl_function_runs_unchanged(values) -> None:
    assert values(ASYNC, "a", "abc") == [9.0, 11.0]
    assert values(ASYNC, "abc", task=CHAT) == [4.0]


def test_the_column_ground_truth_goes_before_the_answer(values) -> None:
    task = Task(id="t", prompt="p", answer="1", info={"ground_truth": "2"})
    assert values(BOXED, r"\boxed{2}", r"\boxed{1}", task=task) == [1.0, 0.0]


def test_a_group_function_that_raises_fails_every_completion(scores, tmp_path: Path) -> None:
    got = scores("def judge(completions): return [1 / len(c) for c in completions]", "abc", "", "ab")
    assert len(got) == 3
    assert {score.value for score in got} == {None}
    assert got[0].failure.startswith(f"raised ZeroDivisionError: division by zero at {tmp_path / 'judges.py'}:1")


@pytest.mark.parametrize(
    ("returned", "failure"),
    [
        ("[1.0]", "returned 1 rewards for 2 completions"),
        ("[1.0, 2.0, 3.0]", "returned 3 rewards for 2 completions"),
        ("0.5", "returned 0.5 (float), not a list of 2 numbers"),
        ("None", "returned None (NoneType), not a list of 2 numbers"),
        ("'ab'", "returned 'ab' (str), not a list of 2 numbers"),
        ("{0.5, 1.5}", "returned {0.5, 1.5} (set), not a list of 2 numbers"),
        ("__import__('numpy').array(0.5)", "returned array(0.5) (ndarray), not a list of 2 numbers"),
        ("{'score': 1.0, 'acc': 1}", "returned {'score': 1.0, 'acc': 1} (dict), not a list of 2 numbers"),
    ],
)
def test_what_is_not_one_value_per_completion_fails_all(scores, returned: str, failure: str) -> None:
    assert scores(f"def judge(completions): return {returned}", "a", "b") == [Score(None, failure)] * 2


def test_a_generator_is_not_a_list(scores) -> None:
    (score,) = scores("def judge(completions): yield 1 / 0", "a")
    assert score.failure.endswith("(generator), not a list of 1 numbers")


def test_only_the_invalid_entry_of_a_list_fails(scores) -> None:
    source = "import numpy as np\ndef judge(completions): return (np.float32(0.5), 'x', {'score': 1, 'acc': 0}, None)"
    assert scores(source, "a", "b", "c", "d") == [
        Score(0.5),
        Score(None, "returned 'x' (str), not a number"),
        Score(1.0, parts={"acc": 0.0}),
        NOT_APPLICABLE,
    ]


def test_group_functions_cannot_ask_for_names_of_one_completion(load) -> None:
    with pytest.raises(ConfigError, match="for prompt, which not every row has; available are completions, prompts, "):
        load("def judge(completions, prompt): return []").check([])
    with pytest.raises(ConfigError, match="asks for one completion and for all of a group"):
        load("def judge(completion, completions): return 0")


# ------------------------------------------------------------------------------------------------ verl, as documented

VERL = """
def judge(data_source, solution_str, ground_truth, extra_info=None):
    if data_source not in ("", "lighteval/MATH"):
        raise NotImplementedError(f"no reward for {data_source}")
    is_right = solution_str.split()[-1] == ground_truth
    level = (extra_info or {}).get("level", 1)
    return {"score": 1.0 * level if is_right else 0.0, "acc": is_right, "pred": solution_str}
"""


def test_a_verl_function_runs_unchanged(scores) -> None:
    assert scores(VERL, "it is 123", "it is 132") == [
        Score(1.0, parts={"acc": 1.0}),
        Score(0.0, parts={"acc": 0.0}),
    ]


def test_a_verl_function_gets_the_columns_of_a_verl_row(scores, values) -> None:
    row: dict[str, Json] = {"data_source": "lighteval/MATH", "ground_truth": "7", "extra_info": {"level": 3}}
    assert values(VERL, "7", task=Task(id="t", prompt="p", info=row)) == [3.0]
    other = Task(id="t", prompt="p", info={**row, "data_source": "gsm8k"})
    assert "NotImplementedError: no reward for gsm8k" in scores(VERL, "7", task=other)[0].failure


def test_names_of_verl_are_there_only_for_its_functions(load) -> None:
    load(VERL).check([])
    with pytest.raises(ConfigError, match="asks for data_source, which not every row has"):
        load("def judge(completion, data_source): return 0").check([])


# -------------------------------------------------------------------------------------------- async, classes and args


def test_async_functions_of_a_group_run_together(values) -> None:
    source = """
import asyncio
here = []
async def judge(completion):
    here.append(completion)
    while len(here) < 3:
        await asyncio.sleep(0)
    return len(completion)
"""
    assert values(source, "a", "ab", "abc") == [1.0, 2.0, 3.0]


def test_what_an_async_function_raises_stays_with_its_completion(scores, tmp_path: Path) -> None:
    source = "import asyncio\nasync def judge(completion):\n    await asyncio.sleep(0)\n    return int(completion)"
    right, wrong = scores(source, "7", "x")
    assert right == Score(7.0)
    assert wrong.failure.endswith(f"with base 10: 'x' at {tmp_path / 'judges.py'}:4")


def test_an_async_function_that_cancels_itself_fails(scores) -> None:
    source = "import asyncio\nasync def judge(completion): raise asyncio.CancelledError"
    assert scores(source, "x")[0].failure.startswith("raised CancelledError")


def test_a_plain_function_may_run_its_own_event_loop(values) -> None:
    source = "import asyncio\nasync def one(): return 0.5\ndef judge(completion): return asyncio.run(one())"
    assert values(source, "x") == [0.5]


def test_args_are_given_by_name(values) -> None:
    source = "def judge(completion, pattern, times=1): return times * (pattern in completion)"
    assert values(source, "abc", args={"pattern": "b", "times": 3}) == [3.0]
    batched = "def judge(completions, pattern): return [pattern in c for c in completions]"
    assert values(batched, "abc", "c", args={"pattern": "b"}) == [1.0, 0.0]


def test_args_that_the_function_does_not_take_are_refused(load) -> None:
    source = "def judge(completion, pattern): return 0"
    with pytest.raises(ConfigError, match="args: it has no argument patern; it has completion, pattern"):
        load(source, {"patern": "b"})
    with pytest.raises(ConfigError, match="args cannot set completion, which the task gives"):
        load(source, {"completion": "b"})
    load("def judge(completion, **rest): return 0", {"anything": 1}).check([])


def test_a_class_is_made_once_with_args_and_called(scores) -> None:
    source = """
class judge:
    def __init__(self, step=1): self.step, self.count = step, 0
    async def __call__(self, completion):
        self.count += self.step
        return self.count
"""
    assert scores(source, "a", "b", args={"step": 2}) == [Score(2.0), Score(4.0)]


def test_a_class_that_cannot_be_made_is_refused(load) -> None:
    source = "class judge:\n    def __init__(self, n): raise ValueError('n is too small')\n    def __call__(self): ..."
    with pytest.raises(ConfigError, match="needs args: n"):
        load(source)
    with pytest.raises(ConfigError, match="args: n is too small"):
        load(source, {"n": 1})
    with pytest.raises(ConfigError, match="no argument m; it has n"):
        load(source, {"n": 1, "m": 2})
    with pytest.raises(ConfigError, match="no `__call__`"):
        load("class judge: ...")


# ------------------------------------------------------------------------------------------------------------- finding


def test_specs_that_name_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("def first(): ...\ndef second(): ...\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    names = f"{', '.join(BUILTIN)}, `module:name` or `path/file.py:name`"
    assert refusal("exakt") == f"reward 'exakt': did you mean `exact`? give {names}"
    assert refusal("zzz") == f"reward 'zzz': give {names}"
    module = "reward 'no_such_module:judge': cannot import no_such_module"
    assert refusal("no_such_module:judge") == f"{module}: ModuleNotFoundError: No module named 'no_such_module'"
    assert refusal("nowhere/judges.py:judge").endswith(f"FileNotFoundError: no such file (looked in {Path.cwd()})")
    assert "has no function judge; it has first, second" in refusal(f"{tmp_path}/judges.py:judge")


def test_a_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "near_by_helper.py").write_text(f"VALUE = {value}\n")
        (tmp_path / name / "json.py").write_text("raise RuntimeError('it hides an installed module')\n")
        source = "import json\nfrom near_by_helper import VALUE\ndef judge(): return VALUE\n"
        (tmp_path / name / "judges.py").write_text(source)
    functions = [RewardFunction.load(f"{tmp_path}/{name}/judges.py:judge") for name in "ab"]
    assert [function.scores(function.begin(TASK, [RewardInput("")]), 1)[0].value for function in functions] == [1, 2]


def test_import_errors_of_user_files_have_their_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import math\nx = (\n")
    (tmp_path / "lacking.py").write_text("\nimport no_such_module\n")
    (tmp_path / "raising.py").write_text("def of(n):\n    return 1 / n\nx = of(0)\n")
    assert refusal(f"{tmp_path}/broken.py:x").endswith(f": SyntaxError: '(' was never closed at {tmp_path}/broken.py:2")
    assert refusal(f"{tmp_path}/lacking.py:x").endswith(f"No module named 'no_such_module' at {tmp_path}/lacking.py:2")
    assert refusal(f"{tmp_path}/raising.py:x").endswith(f": division by zero at {tmp_path}/raising.py:2")


def test_functions_that_cannot_be_called_by_name_are_refused(load) -> None:
    with pytest.raises(ConfigError, match="passed by name, which completion cannot be"):
        load("def judge(completion, /): return 0")
    assert "does not tell the names of its arguments" in refusal("builtins:max")


# ----------------------------------------------------------------------------------------------------------- weighing


def test_the_reward_is_the_weighted_sum_of_what_applies(tmp_path: Path) -> None:
    path = tmp_path / "judges.py"
    path.write_text(
        "def right(completion, answer): return completion == answer\n"
        "def maybe(completions): return [0.5 if c else None for c in completions]\n"
        "def verl(data_source, solution_str, ground_truth): return {'score': 2, 'acc': 1}\n"
        "async def fails(completion): return None if completion != 'boom' else 1 / 0\n"
    )
    rewards = RewardSum(
        [
            RewardSpec(f"{path}:right", "right"),
            RewardSpec(f"{path}:maybe", "maybe", 0.2),
            RewardSpec(f"{path}:verl", "verl", 0.0),
            RewardSpec(f"{path}:fails", "fails"),
        ]
    )
    one, none, boom = rewards.score(TASK, [RewardInput("123"), RewardInput(""), RewardInput("boom")])
    assert one == Score(1.1, parts={"right": 1.0, "maybe": 0.5, "verl": 2.0, "verl/acc": 1.0})
    assert none == Score(0.0, parts={"right": 0.0, "verl": 2.0, "verl/acc": 1.0})
    assert boom.value is None
    assert boom.failure.startswith("fails: raised ZeroDivisionError")
    assert rewards.score(TASK, []) == []
    rewards.close()


def test_every_function_is_checked_for_its_columns(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("def hard(completion, level): return 0")
    rewards = RewardSum([RewardSpec("exact", "exact"), RewardSpec(f"{tmp_path}/judges.py:hard", "hard")])
    rewards.check(["level"])
    with pytest.raises(ConfigError, match="asks for level"):
        rewards.check([])


def test_where_nothing_applies_there_is_no_reward() -> None:
    assert total([NOT_APPLICABLE, NOT_APPLICABLE]) == NOT_APPLICABLE
    assert weight_score(NOT_APPLICABLE, "a", 0.5) == NOT_APPLICABLE


def test_one_failure_fails_the_whole_and_says_which() -> None:
    failed = weight_score(Score(None, "returned nan"), "b", 1.0)
    assert total([weight_score(Score(1.0), "a", 1.0), failed, NOT_APPLICABLE]) == Score(None, "b: returned nan")


def test_a_sum_that_is_too_large_is_no_reward() -> None:
    assert total([Score(9e29), Score(9e29)]).failure == "returned 1.8e+30, whose size is more than 1e+30"


def test_weights_that_add_up_to_one_give_a_whole_success() -> None:
    shares = [weight / 20 for weight in range(21)]
    triples = [(a, b, round(1 - a - b, 9)) for a in shares for b in shares if a + b <= 1]
    for weights in triples:
        value = total([weight_score(Score(1.0), str(i), weight) for i, weight in enumerate(weights)]).value
        assert value is not None and is_success(value, 1.0), weights
    assert not is_success(1 - 1e-6, 1.0)


@given(st.lists(st.tuples(st.none() | st.integers(-9, 9), st.integers(-3, 3)), min_size=1, max_size=5))
def test_the_order_of_functions_changes_nothing(given_values: list[tuple[int | None, int]]) -> None:
    scores = [weight_score(score_of(value), str(i), weight) for i, (value, weight) in enumerate(given_values)]
    assert total(scores) == total(scores[::-1])
    applicable = [value * weight for value, weight in given_values if value is not None]
    assert total(scores).value == (sum(applicable) if applicable else None)


def test_the_global_step_of_trl_is_the_version_that_sampled(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("def judge(completions, trainer_state): return [trainer_state.global_step]\n")
    turn = Turn((1,), (2, 3), (-1.0, -1.0), (VersionSpan(6, 1), VersionSpan(7, 1)), "stop", "ab")
    rewards = RewardSum([RewardSpec(f"{tmp_path}/judges.py:judge", "judge")])
    given = RewardInput.of(Episode((Trajectory("policy", (turn,)),)))
    assert rewards.score(Task(id="t", prompt="p"), [given])[0].value == 7.0


def test_a_function_that_asks_for_it_gets_the_whole_episode(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("def judge(episode): return episode.num_tool_calls + 2\n")
    turn = Turn((1,), (2,), (-1.0,), (VersionSpan(0, 1),), "stop", "a")
    rewards = RewardSum([RewardSpec(f"{tmp_path}/judges.py:judge", "judge")])
    episode = Episode((Trajectory("lead", (turn,)), Trajectory("helper", (turn,), parent=0)), num_tool_calls=3)
    assert rewards.wants_episodes and not RewardSum([RewardSpec("exact", "exact")]).wants_episodes
    assert rewards.score(Task(id="t", prompt="p"), [RewardInput.of(episode)])[0].value == 5.0
