"""The `reward` section: one function, several, a model; and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.config.resource_plan import plan_of
from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import RewardSpec
from rlsys.types import Json

MINIMAL = ("run.steps=1", "model.path=m", "data.path=d")


def functions(*overrides: str) -> tuple[RewardSpec, ...]:
    return Config.load([], [*MINIMAL, *overrides]).reward.functions


def refusal(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load([], [*MINIMAL, *overrides])
    text = str(caught.value)
    for override in overrides:
        text = text.replace(f"  command line: {override}: ", "")
    return text.splitlines()[1:]


def test_one_function_is_named_as_it_is() -> None:
    assert functions() == functions("reward.fn=exact") == (RewardSpec("exact", "exact"),)
    assert functions("reward.fn=my.py:judge") == (RewardSpec("my.py:judge", "judge"),)


def test_several_functions_have_weights_names_and_args() -> None:
    several = "reward.fn=[{fn: exact}, {fn: my.py:fmt, weight: 0.2, name: format, args: {pattern: '.*', n: [1]}}]"
    args: dict[str, Json] = {"pattern": ".*", "n": [1]}
    assert functions(several) == (RewardSpec("exact", "exact"), RewardSpec("my.py:fmt", "format", 0.2, args))


def test_a_model_stands_beside_functions_or_alone() -> None:
    assert functions("reward.model.path=rm") == ()
    assert functions("reward.model.path=rm", "reward.fn=exact") == (RewardSpec("exact", "exact"),)


def test_a_models_resources_are_planned_for_each_worker() -> None:
    model = "reward.model={path: rm, num_cpus: 2, num_gpus: 1}"
    (role,) = [r for r in plan_of(Config.load([], [*MINIMAL, model, "reward.workers=3"])).roles if r.name == "reward"]
    assert (role.count, role.num_cpus, role.num_gpus) == (3, 3.0, 1.0)


def test_every_problem_of_a_list_is_named_with_its_place() -> None:
    assert refusal("reward.fn=[{fn: exact, weigth: 2}, {fn: my.py, weight: x}, {name: a b}]", "reward.model.pth=x") == [
        "reward.model.path: required, and not given",
        "reward.model.pth: unknown key; did you mean `reward.model.path`?",
        "reward.fn[0].weigth: unknown key; did you mean `reward.fn[0].weight`?",
        "reward.fn[1].fn: my.py is a file; say what in it is meant, as in `my.py:name`",
        "reward.fn[1].weight: input should be a valid number, unable to parse string as a number (got 'x')",
        "reward.fn[2].fn: required, and not given",
        "reward.fn[2].name: string should match pattern '^[A-Za-z0-9_.-]+$' (got 'a b')",
    ]


def test_two_functions_cannot_have_one_name() -> None:
    taken = "is the name of another function too; give each a different `name`"
    assert refusal("reward.fn=[{fn: a.py:x}, {fn: b.py:x}, {fn: exact}]") == [
        f"reward.fn[0].name: 'x' {taken}",
        f"reward.fn[1].name: 'x' {taken}",
    ]
    assert refusal("reward.fn=[{fn: a.py:model}]", "reward.model={path: x}") == [f"reward.fn[0].name: 'model' {taken}"]
    assert refusal("reward.fn=a.py:model", "reward.model={path: x}") == [
        "reward.fn: 'model' is the name of the reward model too; write it as [{fn: a.py:model, name: another}]"
    ]
    assert len(functions("reward.fn=[{fn: a.py:x}, {fn: b.py:x, name: y}, {fn: a.py:model}]")) == 3
    assert len(functions("reward.fn=a.py:model")) == 1


def test_a_malformed_reward_fn_is_answered_with_the_right_form() -> None:
    forms = "give one function, such as `exact`, or a list, such as [{fn: exact}]"
    assert refusal("reward.fn={fn: exact}") == [f"reward.fn: {forms} (got {{'fn': 'exact'}})"]
    assert refusal("reward.fn=3") == [f"reward.fn: {forms} (got 3)"]
    assert refusal("reward.fn=[exact, my.py:x]") == [
        "reward.fn[0]: write it as {fn: exact}",
        "reward.fn[1]: write it as {fn: my.py:x}",
    ]


def test_a_judge_that_may_outlast_its_call_is_refused() -> None:
    remedy = "raise it, or lower `timeout_s` in the args of 'llm_judge'"
    judge = "reward.fn=[{{fn: llm_judge, args: {{base_url: http://x/v1, model: m{}}}}}]"
    assert refusal(judge.format("")) == [f"reward.timeout_s: is 10, and llm_judge waits 60 s for one request: {remedy}"]
    assert refusal(judge.format(", timeout_s: 20")) == [
        f"reward.timeout_s: is 10, and llm_judge waits 20 s for one request: {remedy}"
    ]
    assert functions(judge.format(""), "reward.timeout_s=60")
    assert functions(judge.format(", timeout_s: 2.5"))


def test_a_function_applies_given_another_that_exists() -> None:
    right, bonus = functions("reward.fn=[{fn: exact}, {fn: parallel, given: exact}]")
    assert (right.given, bonus.given) == (None, "exact")
    wrong = "reward.fn[1].given: no function without `given` is named"
    assert refusal("reward.fn=[{fn: exact}, {fn: parallel, given: exat}]") == [f"{wrong} 'exat'; did you mean `exact`?"]
    assert refusal("reward.fn=[{fn: exact}, {fn: parallel, given: parallel}]") == [f"{wrong} 'parallel'; give exact"]
    source = "data.sources=[{path: a.jsonl, reward: [{fn: exact}, {fn: parallel, given: x}]}]"
    assert any(
        "reward[1].given: no function without `given` is named 'x'; give exact" in line for line in refusal(source)
    )


def test_an_empty_list_is_refused() -> None:
    assert refusal("reward.fn=[]") == ["reward.fn: names no function; leave the key out for the default"]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    several = "reward.fn=[{fn: exact}, {fn: my.py:fmt, weight: 0.2, args: {pattern: '.*'}}]"
    for overrides in (("reward.fn=exact",), (several,), ("reward.model.path=rm",)):
        config = Config.load([], [*MINIMAL, *overrides])
        (tmp_path / "resolved.yaml").write_text(config.to_yaml())
        assert Config.load(tmp_path / "resolved.yaml") == config


def test_paths_are_made_absolute_for_workers() -> None:
    here = Path.cwd()
    model = f"reward.model.path={Path('tests')}"
    reward = Config.load(
        [], [*MINIMAL, "reward.fn=[{fn: my.py:x}, {fn: pkg.mod:y}, {fn: exact}]", model]
    ).reward.rooted()
    assert [spec.fn for spec in reward.functions] == [f"{here}/my.py:x", "pkg.mod:y", "exact"]
    assert reward.model is not None and reward.model.path == f"{here}/tests"
    one = Config.load([], [*MINIMAL, "reward.fn=my.py:x", "reward.model.path=org/name"]).reward.rooted()
    assert one.fn == f"{here}/my.py:x"
    assert one.model is not None and one.model.path == "org/name"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("reward.model.path=m", r"reward\.workers: the reward model needs a worker"),
        ("curation.stored_successes=4", r"curation\.stored_successes: a reward worker puts them into groups"),
    ],
)
def test_what_needs_a_reward_worker_is_refused_without_one(override: str, told: str):
    keys = ["run.steps=2", "model.path=m", "data.path=d", "reward.fn=exact", "asynchrony.max_staleness=1"]
    with pytest.raises(ConfigError, match=told):
        Config.load([], [*keys, "reward.workers=0", override])
