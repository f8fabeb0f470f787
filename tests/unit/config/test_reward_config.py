"""The `reward` section: one function, several, a model; and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.config.resource_plan import plan_of
from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import RewardSpec
from rlsys.types import Json

RM = "{fn: model, args: {path: rm}}"
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


def test_a_name_alone_is_a_function_of_a_list() -> None:
    assert functions("reward.fn=[exact, format]") == functions("reward.fn=[{fn: exact}, {fn: format}]")


def test_a_model_stands_beside_functions_or_alone() -> None:
    assert functions(f"reward.fn=[{RM}]") == ()
    assert functions(f"reward.fn=[{{fn: exact}}, {RM}]") == (RewardSpec("exact", "exact"),)


def test_tasks_without_functions_have_the_default() -> None:
    sources = "data.path=[{path: a}, {path: b}]"
    default, own = RewardSpec("exact", "exact"), RewardSpec("math", "math", source="b")
    assert functions(sources, "reward.fn=[{fn: math, source: b}]") == (default, own)
    unused = Config.load([], [*MINIMAL, sources, "reward.fn=[{fn: math, source: b}]", "algorithm=distill"])
    assert unused.reward_functions == (RewardSpec("zero", "zero"), own)
    assert functions(sources, f"reward.fn=[{{fn: math, source: b}}, {RM}]") == (own,)


def test_a_models_resources_are_planned_for_each_worker() -> None:
    keys = ["resources.reward={cpus: 3, gpus: 1}", "reward.workers=3"]
    (role,) = [r for r in plan_of(Config.load([], [*MINIMAL, *keys])).roles if r.name == "reward"]
    assert (role.count, role.num_cpus, role.num_gpus) == (3, 3.0, 1.0)


def test_every_problem_of_a_list_is_named_with_its_place() -> None:
    assert refusal("reward.fn=[{fn: exact, weigth: 2}, {fn: my.py, weight: x}, {name: a b}]") == [
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
    assert refusal(f"reward.fn=[{{fn: a.py:model}}, {RM}]") == [f"reward.fn[{i}].name: 'model' {taken}" for i in (0, 1)]
    assert len(functions("reward.fn=[{fn: a.py:x}, {fn: b.py:x, name: y}, {fn: a.py:model}]")) == 3
    assert len(functions("reward.fn=a.py:model")) == 1


def test_a_model_has_a_path_and_no_place_of_its_own() -> None:
    alone = "the reward model scores every episode under its own name: leave this out"
    assert refusal("reward.fn=model") == [
        "reward.fn: the model needs its path; write it as [{fn: model, args: {path: ...}}]"
    ]
    assert refusal("reward.fn=[{fn: model, args: {pth: x}}]") == [
        "reward.fn[0].args.path: required, and not given",
        "reward.fn[0].args.pth: unknown key; it has: path, dtype, max_tokens",
    ]
    assert refusal("reward.fn=[{fn: model, args: {path: x}, name: mine}]") == [f"reward.fn[0].name: {alone}"]


def test_a_function_of_a_source_that_is_not_there_is_refused() -> None:
    own = "reward.fn=[{fn: math, source: sum}]"
    assert refusal("data.path=[{path: sums}, {path: b}]", own) == [
        "reward.fn[0].source: no source of data or evaluation is called 'sum'; did you mean `sums`?"
    ]
    assert refusal(own) == [
        (
            "reward.fn[0].source: no source of data or evaluation is called 'sum'; data.path has one source, whose "
            "rewards name none"
        )
    ]


def test_a_malformed_reward_fn_is_answered_with_the_right_form() -> None:
    forms = "give one function, such as `exact`, or a list, such as [{fn: exact}]"
    assert refusal("reward.fn={fn: exact}") == [f"reward.fn: {forms} (got {{'fn': 'exact'}})"]
    assert refusal("reward.fn=3") == [f"reward.fn: {forms} (got 3)"]


def test_a_judge_that_may_outlast_its_call_is_refused() -> None:
    remedy = "raise it, or lower `timeout_s` in the args of 'llm_judge'"
    judge = "reward.fn=[{{fn: llm_judge, args: {{base_url: http://x/v1, model: m{}}}}}]"
    assert refusal(judge.format("")) == [f"reward.timeout_s: is 10, and llm_judge waits 50 s for one request: {remedy}"]
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
    others = "reward.fn=[{fn: exact}, {fn: math, source: a}, {fn: parallel, source: a, given: exact}]"
    (problem,) = refusal("data.path=[{path: a}, {path: b}]", others)
    assert problem == "reward.fn[2].given: no function without `given` is named 'exact'; give math"


def test_an_empty_list_is_refused() -> None:
    assert refusal("reward.fn=[]") == ["reward.fn: names no function; leave the key out for the default"]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    several = "reward.fn=[{fn: exact}, {fn: my.py:fmt, weight: 0.2, args: {pattern: '.*'}}]"
    for overrides in (("reward.fn=exact",), (several,), (f"reward.fn=[{RM}]",)):
        config = Config.load([], [*MINIMAL, *overrides])
        (tmp_path / "resolved.yaml").write_text(config.to_yaml())
        assert Config.load(tmp_path / "resolved.yaml") == config


def test_paths_are_made_absolute_for_workers() -> None:
    here = Path.cwd()
    model = "{fn: model, args: {path: tests}}"
    listed = f"reward.fn=[{{fn: my.py:x}}, {{fn: pkg.mod:y}}, {{fn: exact}}, {model}]"
    reward = Config.load([], [*MINIMAL, listed]).reward.with_absolute_paths()
    assert [spec.fn for spec in reward.functions] == [f"{here}/my.py:x", "pkg.mod:y", "exact"]
    assert reward.model is not None and reward.model.args["path"] == f"{here}/tests"
    assert Config.load([], [*MINIMAL, "reward.fn=my.py:x"]).reward.with_absolute_paths().fn == f"{here}/my.py:x"
    hub = Config.load([], [*MINIMAL, "reward.fn=[{fn: model, args: {path: org/name}}]"]).reward.with_absolute_paths()
    assert hub.model is not None and hub.model.args["path"] == "org/name"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"reward.fn=[{RM}]", r"reward\.workers: the reward model needs a worker"),
        ("curation.stored_successes=4", r"curation\.stored_successes: a reward worker puts them into groups"),
    ],
)
def test_what_needs_a_reward_worker_is_refused_without_one(override: str, told: str):
    keys = ["run.steps=2", "model.path=m", "data.path=d", "reward.fn=exact", "asynchrony.max_staleness=1"]
    with pytest.raises(ConfigError, match=told):
        Config.load([], [*keys, "reward.workers=0", override])
