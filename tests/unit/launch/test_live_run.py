"""What a Python program gives in place of files and names, before anything starts."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset

from rlsys.config import Config
from rlsys.data.task_file import load_tasks
from rlsys.errors import ConfigError, DataError
from rlsys.launch.live_run import saved_rows, with_given
from rlsys.launch.preflight import training_tasks
from rlsys.rewards.given_functions import code_of, give
from rlsys.rewards.reward_function import RewardInput, RewardSum
from rlsys.types import Task
from rlsys.util.event_loops import run_to_end

ROWS = [{"prompt": "2+3?", "answer": "5", "level": 1}, {"prompt": "1+1?", "answer": "2", "level": 0}]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.load([], ["run.steps=2", "model.path=m", f"run.folder={tmp_path}", "data.shuffle=false"])


def given(config: Config, **more: object) -> Config:
    return with_given(config, **{"reward": None, "data": None, "eval_data": None, **more})  # type: ignore[arg-type]


def test_without_rows_from_anywhere_nothing_is_trained(config: Config):
    with pytest.raises(ConfigError, match=r"data: required, .*: set data\.path, .* in Python, pass rows as `data`"):
        training_tasks(config)


def test_rows_are_saved_once_and_read_back(config: Config):
    first, again = given(config, data=ROWS), given(config, data=(row for row in ROWS))
    assert first.data == again.data and not first.data.shuffle, "the other keys of the section stay"
    assert [task.answer for task in load_tasks(str(first.data.path))] == ["5", "2"]
    assert given(config, data=ROWS[:1]).data.path != first.data.path


def test_a_data_set_and_a_generator_are_rows_too(config: Config):
    def generated():
        yield from ROWS

    listed = load_tasks(str(given(config, data=ROWS).data.path))
    for rows in (Dataset.from_list(ROWS), generated()):
        assert load_tasks(str(given(config, data=rows).data.path)) == listed
    assert list(given(config, eval_data=Dataset.from_list(ROWS)).eval.data) == ["data"]


def test_a_function_is_called_with_what_it_asks_for(config: Config):
    factor = 2.0

    def levelled(completion, answer, level):
        return factor * level * (completion == answer)

    chosen = given(config, reward=[levelled, "exact"])
    assert [spec.fn for spec in chosen.reward.functions] == ["given:levelled", "exact"]
    task = Task(id="t", prompt="2+3?", answer="5", info={"level": 3})
    assert RewardSum(chosen.reward.functions).score(task, [RewardInput("5")])[0].value == 7.0


def test_what_can_be_called_is_a_reward(config: Config):
    class Judge:
        def __call__(self, completion, answer):
            return 10.0 * (completion == answer)

        def strict(self, completion, answer):
            return 100.0 * (completion == answer)

    def scaled(completion, answer, factor=1.0):
        return factor * (completion == answer)

    whole = [partial(scaled, factor=2.0), Judge(), Judge().strict, lambda completion: 1000.0, lambda answer: 1e4]
    chosen = given(config, reward=[*whole, partial(scaled, factor=1e5)])
    names = ["scaled", "Judge", "strict", "reward", "reward_2", "scaled_2"]
    assert [spec.name for spec in chosen.reward.functions] == names
    task = Task(id="t", prompt="2+3?", answer="5", info={"factor": 7.0})
    assert RewardSum(chosen.reward.functions).score(task, [RewardInput("5")])[0].value == 111112.0


def test_rows_of_a_data_set_have_no_nulls_of_other_rows(config: Config):
    def row(**arguments: str) -> dict[str, object]:
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return {"prompt": [{"role": "user", "content": "a"}, call]}

    rows = [row(city="Rome"), row(sum="3")]
    assert load_tasks(str(given(config, data=Dataset.from_list(rows)).data.path)) == load_tasks(
        str(given(config, data=rows).data.path)
    )


def test_a_configuration_with_a_given_function_loads_elsewhere_and_says_what_is_missing(config: Config):
    shown = Config.load([], ["run.steps=2", "model.path=m", "data.path=none", "reward.fn=given:gone"])
    with pytest.raises(ConfigError, match=r"reward\.fn: given:gone was a function of a Python program.*reward=gone"):
        _ = shown.reward.functions


def test_what_is_no_function_is_refused(config: Config):
    with pytest.raises(ConfigError, match=r"reward: 3 is no function: give one, or the name of one"):
        given(config, reward=[3])  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ConfigError, match=r"no reward function is named 'exactt'; did you mean"):
        given(config, reward="exactt")


def test_a_function_that_holds_a_lock_cannot_be_sent():
    lock = threading.Lock()

    def locked(completion):
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match="reward locked: it cannot be sent to other processes"):
        code_of(give(locked))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "there are no rows"),
        (["2+3?"], r"row 1 is '2\+3\?'"),
        ([*ROWS, {"prompt": {1, 2}}], "row 3 cannot be saved"),
    ],
)
def test_rows_that_cannot_be_saved_are_named(config: Config, rows: list, words: str):
    with pytest.raises(DataError, match=words):
        saved_rows(config, rows)


def test_a_coroutine_runs_to_its_end_inside_a_running_loop():
    async def inner() -> str:
        return threading.current_thread().name

    async def outer() -> str:
        return run_to_end(inner)

    assert run_to_end(outer).startswith("rlsys")
