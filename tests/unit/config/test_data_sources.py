"""Several sources of data in a configuration: their names, weights, columns and rewards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import ConfigError, DataError
from rlsys.launch.preflight import eval_sets, stream_of, training_tasks
from rlsys.rewards.reward_function import RewardInput, RewardSum

NEEDED = ["run.steps=2", "model.path=m"]


def load(*overrides: str) -> Config:
    return Config.load([], [*NEEDED, *overrides])


def written(folder: Path, name: str, *rows: dict) -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_list_is_short_for_sources_named_after_their_files():
    config = load("data=[{path: a.jsonl, weight: 0.8}, {path: org/sums#hard, weight: 0.2}]")
    assert [(source.name, source.weight) for source in config.data.sources] == [("a", 0.8), ("sums-hard", 0.2)]
    assert Config.load([], [*NEEDED, f"data={json.dumps(config.data.model_dump(mode='json'))}"]).data == config.data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("data.path=[]", r"data\.path: .*at least 1 item"),
        ("data.path=", r"data\.path: input should be a valid string"),
        ("data=[{path: a.jsonl}, {path: x/a.jsonl}]", r"data\.path\[1\]\.name: 'a' is the name of another source"),
        ("data=[{path: a.jsonl, weight: 0}]", r"data\.path: all weights are 0"),
        ("data=[{path: a, weight: {0: 1, 9: 0}}]", r"data\.path: all weights are 0 from step 9 on"),
        ("data=[{path: a, weight: {9: 1}}]", r"data\.path\[0\]\.weight: give the weight of the first steps too"),
        ("data=[{name: a}]", r"data\.path\[0\]\.path: required, and not given"),
        ("data=[{path: proposed, name: a}]", r"all weights of sources of files are 0"),
        ("data=[{path: x}, {path: proposed}, {path: proposed}]", r"data\.path\[2\]\.name: 'proposed' is the name of"),
        (
            "data=[{path: x}, {path: proposed}, {path: proposed, name: b}]",
            r"data\.path\[2\]\.path: only one source can have proposed tasks",
        ),
        ("data=[{path: a.jsonl, weight: -1}]", r"data\.path\[0\]\.weight: .*greater than or equal to 0"),
        ("data=[{path: a.jsonl, wieght: 1}]", r"data\.path\[0\]\.wieght: unknown key; did you mean"),
    ],
)
def test_what_makes_no_sense_is_named(data: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load(data)


@pytest.mark.parametrize("is_listed", [True, False])
def test_tasks_with_each_value_of_a_column_are_drawn_equally_often(tmp_path: Path, is_listed: bool):
    rows = [{"prompt": f"{i}", "answer": "", "topic": "rare" if i < 2 else "common"} for i in range(20)]
    path = written(tmp_path, "a.jsonl", *rows)
    other = written(tmp_path, "b.jsonl", *({"prompt": f"b{i}", "answer": "", "topic": "x"} for i in range(5)))
    data = f"path: [{{path: {path}, weight: 3}}, {{path: {other}}}]" if is_listed else f"path: {path}"
    config = load(f"data={{{data}, balance_by: topic}}", "reward.fn=zero")
    stream = stream_of(config, training_tasks(config))
    drawn = Counter(stream.next().info["topic"] for _ in range(80))
    assert drawn == ({"rare": 30, "common": 30, "x": 20} if is_listed else {"rare": 40, "common": 40})


def test_a_column_that_no_task_has_is_named(tmp_path: Path):
    path = written(tmp_path, "a.jsonl", {"prompt": "p", "answer": "", "topic": "t"})
    config = load(f"data.path={path}", "data.balance_by=topc", "reward.fn=zero")
    with pytest.raises(DataError, match=r"data\.balance_by: no task of tasks has a column 'topc'; there are: topic"):
        stream_of(config, training_tasks(config))


def test_each_source_has_its_own_columns_and_reward(tmp_path: Path):
    written(tmp_path, "a.jsonl", {"prompt": "2+3?", "answer": "5", "id": "x"})
    written(tmp_path, "b.jsonl", {"problem": "say ok", "id": "x"})
    (tmp_path / "judge.py").write_text("def says(completion, source):\n    return float(completion == source)\n")
    sources = f"[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl, columns: {{prompt: problem}}}}]"
    config = load(f"data={sources}", f"reward.fn=[{{fn: exact}}, {{fn: {tmp_path}/judge.py:says, source: b}}]")
    parts = training_tasks(config)
    assert {name: [task.id for task in tasks] for name, tasks in parts.items()} == {"a": ["a/x"], "b": ["b/x"]}
    rewards = RewardSum(config.reward_functions)
    values = {
        name: [score.value for score in rewards.score(tasks[0], [RewardInput("5"), RewardInput("b")])]
        for name, tasks in parts.items()
    }
    assert values == {"a": [1.0, 0.0], "b": [0.0, 1.0]}


def test_each_source_has_its_own_system_message_template_variables_and_order(tmp_path: Path):
    rows = [{"prompt": str(i), "chat_template_kwargs": {"deep": i == 0}} for i in range(20)]
    written(tmp_path, "a.jsonl", *rows)
    written(tmp_path, "b.jsonl", *rows)
    own = "system: Be brief., template_kwargs: {deep: true, tone: dry}, shuffle: false"
    config = load(f"data=[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl, {own}}}]", "reward.fn=zero")
    parts = training_tasks(config)
    assert [(task.system, task.template_kwargs) for task in (parts["a"][1], parts["b"][0], parts["b"][1])] == [
        (None, {"deep": False}),
        ("Be brief.", {"deep": True, "tone": "dry"}),
        ("Be brief.", {"deep": False, "tone": "dry"}),
    ]
    stream = stream_of(config, parts)
    drawn = [stream.next() for _ in range(40)]
    prompts = {name: [int(str(task.prompt)) for task in drawn if task.source == name] for name in parts}
    assert prompts["b"] == list(range(20)) and sorted(prompts["a"]) == list(range(20)) != prompts["a"]


def test_weights_change_at_the_steps_of_the_configuration(tmp_path: Path):
    for name in ("a", "b"):
        written(tmp_path, f"{name}.jsonl", *({"prompt": str(i)} for i in range(50)))
    own = "weight: {0: 0, 2: 0.5, 4: 3}"
    data = f"data=[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl, {own}}}]"
    config = load(data, "reward.fn=zero", "train.groups_per_step=12")
    stream = stream_of(config, training_tasks(config))
    steps = [[stream.next().source for _ in range(12)] for _ in range(6)]
    assert [step.count("b") for step in steps] == [0, 0, 4, 4, 9, 9]


def test_a_column_that_a_reward_needs_is_asked_of_its_source_alone(tmp_path: Path):
    written(tmp_path, "a.jsonl", {"prompt": "2+3?", "answer": "5"})
    written(tmp_path, "b.jsonl", {"prompt": "hard", "level": 3})
    (tmp_path / "judge.py").write_text("def by_level(completion, level):\n    return float(level)\n")
    own = f"{tmp_path}/judge.py:by_level"
    both = f"data=[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl}}]"
    assert set(training_tasks(load(both, f"reward.fn=[{{fn: exact}}, {{fn: {own}, source: b}}]"))) == {"a", "b"}
    with pytest.raises(ConfigError, match=r"data\.path: a: reward .*asks for level"):
        training_tasks(load(both, f"reward.fn=[{{fn: exact}}, {{fn: {own}, source: a}}]"))


def test_rows_of_verl_with_a_rule_of_their_own_are_not_compared_as_a_whole_unasked(tmp_path: Path):
    row = {"prompt": "2+3?", "reward_model": {"style": "rule", "ground_truth": "5"}}
    known = f"data.path={written(tmp_path, 'a.jsonl', {**row, 'data_source': 'openai/gsm8k'})}"
    with pytest.raises(ConfigError, match=r"^reward\.fn: .* data_source openai/gsm8k, .* set reward\.fn=verl to score"):
        training_tasks(load(known))
    for function in ("verl", "exact"):
        assert training_tasks(load(known, f"reward.fn={function}"))
    own = f"data.path={written(tmp_path, 'b.jsonl', {**row, 'data_source': 'sums'})}"
    assert training_tasks(load(own))
    with pytest.raises(ConfigError, match=r"^reward\.fn: verl has no rule for the data_source sums of"):
        training_tasks(load(own, "reward.fn=verl"))


def test_weights_that_follow_need_several_sources() -> None:
    with pytest.raises(ConfigError, match=r"curation\.source_weights: there is one source of data"):
        Config.load([], [*NEEDED, "data.path=a", "curation.source_weights=reward_std"])
    assert Config.load([], [*NEEDED, "data=[{path: a}, {path: b}]", "curation.source_weights=reward_std"])


def test_each_evaluation_set_has_its_own_columns_system_message_and_reward(tmp_path: Path):
    path = written(tmp_path, "a.jsonl", {"prompt": "2+3?", "answer": "5"})
    written(tmp_path, "hard.jsonl", {"problem": "say hard", "id": "x"})
    (tmp_path / "judge.py").write_text("def says(completion, source):\n    return float(completion == source)\n")
    own = "columns: {prompt: problem}, system: Be brief., template_kwargs: {deep: true}"
    config = load(
        f"data.path={path}",
        f"eval={{every: 1, data: {{same: {path}, hard: {{path: {tmp_path}/hard.jsonl, {own}}}}}}}",
        f"reward.fn=[{{fn: exact}}, {{fn: {tmp_path}/judge.py:says, source: hard}}]",
    )
    (same,), (hard,) = eval_sets(config).values()
    assert (same.prompt, same.system, same.template_kwargs) == ("2+3?", None, {})
    assert (hard.prompt, hard.system, hard.template_kwargs) == ("say hard", "Be brief.", {"deep": True})
    rewards, said = RewardSum(config.reward_functions), [RewardInput("5"), RewardInput("hard")]
    assert [score.value for score in rewards.score(same, said)] == [1.0, 0.0]
    assert [score.value for score in rewards.score(hard, said)] == [0.0, 1.0]


def test_a_reward_of_a_source_that_there_is_not_is_refused(tmp_path: Path):
    path = written(tmp_path, "a.jsonl", {"prompt": "2+3?", "answer": "5"})
    sets = "eval={every: 1, data: {hard: h.jsonl}}"
    with pytest.raises(ConfigError, match="no source of data or evaluation is called 'hadr'; did you mean `hard`"):
        load(f"data.path={path}", sets, "reward.fn=[{fn: exact}, {fn: zero, source: hadr}]")
