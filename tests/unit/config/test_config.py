"""Configuration: valid and invalid files, and readable errors."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from algorithms.grpo import GRPO
from algorithms.kto import KTO
from rlsys.agents.workflow import SingleTurn, Workflow
from rlsys.algorithm import Algorithm, Column
from rlsys.config import Config
from rlsys.config.loader import tree_in
from rlsys.config.plugins import ALGORITHMS, KINDS, PluginKind, adapter
from rlsys.config.resource_plan import plan_of
from rlsys.config.rollout_section import RolloutSection
from rlsys.config.run_sections import RunSection
from rlsys.errors import ConfigError, ModelError
from rlsys.launch.preflight import check_model
from rlsys.stabilizer import StabilizerPlugin
from rlsys.types import PolicyVersion
from rlsys.util.url_credentials import credential_in, without_credentials
from rlsys.workflows.offline import Offline
from tests.growth import growth

MINIMAL = """\
run: {steps: 10}
model: {path: some/model}
data:
  path: rows.jsonl
"""


@dataclass(frozen=True, kw_only=True)
class Strict(Algorithm):
    """An algorithm of a user, found by `module:Name`, that tolerates one step of staleness."""

    beta: float = 0.5
    """Something positive."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}; allowed is more than 0")

    @property
    def max_safe_staleness(self) -> int:
        return 1


STRICT = f"{__name__}:Strict"


@dataclass(frozen=True, kw_only=True)
class Damp(StabilizerPlugin):
    """A stabilizer of a user."""

    factor: float = 0.5
    """Of every gradient."""


@dataclass(frozen=True, kw_only=True)
class Calibrating(StabilizerPlugin):
    """A stabilizer of a user that begins with steps without staleness."""

    needs: int = 4
    """So many."""

    @property
    def synchronous_steps(self) -> int:
        return self.needs


@dataclass(frozen=True, kw_only=True)
class WarmsUp(Algorithm):
    """An algorithm of a user that leaves the policy alone at first."""

    for_steps: int = 0
    """So long."""

    def trains_policy(self, version: PolicyVersion) -> bool:
        return version >= self.for_steps


@dataclass(frozen=True, kw_only=True)
class Curious(Algorithm):
    """An algorithm of a user that asks for whatever it is told to."""

    asks: tuple[str, ...] = ()
    """Columns, by name."""

    @property
    def columns(self) -> frozenset[Column]:
        known = {str(column): column for column in Column}
        return frozenset(known.get(name, name) for name in self.asks)  # type: ignore[misc]


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(*paths: Path, overrides: tuple[str, ...] = ()) -> list[str]:
    """The lines of the message, file names without their folder."""
    with pytest.raises(ConfigError) as caught:
        Config.load(list(paths), overrides)
    return str(caught.value).replace(f"{paths[0].parent}/", "").splitlines()


def bomb(depth: int) -> str:
    """YAML whose aliases stand for ten to the power of `depth` values."""
    return "".join(f"k{i}: &k{i} [{', '.join(10 * [f'*k{i - 1}' if i else 'x'])}]\n" for i in range(depth))


def documented(model: type[BaseModel], at: str = "") -> list[tuple[str, str | None]]:
    """Every key of the sections, and every section in another one, with its documentation."""
    found = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        section = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        if at or section is None:  # the class describes a section of the configuration itself
            found.append((f"{at}{name}", field.description))
        if section is not None:
            found += documented(section, f"{at}{name}.")
    return found


def leaves(schema: Mapping[str, Any]) -> set[str]:
    """Keys that a user can set, at any depth: entries of a list, and of a mapping by name, count once, and so does a
    plug-in, whose keys belong to it."""
    plugins = {"algorithm", "stabilizer", "rollout.workflow", "tracking"}

    def sections(node: Any) -> Iterator[Mapping[str, Any]]:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "properties" in node:
            yield node
        inner = [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("patternProperties", {}).values()]
        for each in (*inner, node.get("items"), node.get("additionalProperties")):
            if isinstance(each, dict):
                yield from sections(each)

    def keys(section: Mapping[str, Any], at: str) -> Iterator[str]:
        for name, node in section["properties"].items():
            inner = [] if at + name in plugins else list(sections(node))
            yield from (key for each in inner for key in keys(each, f"{at}{name}."))
            if not inner:
                yield at + name

    return set(keys(schema, ""))


def test_three_keys_are_enough(tmp_path: Path):
    config = Config.load(write(tmp_path, MINIMAL))
    assert config.run.steps == 10
    assert config.algorithm == GRPO()
    assert config.run_dir == Path("runs/run")
    assert config.permits == config.train.groups_per_step == 32
    assert config.samples_per_step == 256


def test_later_files_and_then_the_command_line_take_precedence(tmp_path: Path):
    base = write(tmp_path, MINIMAL + "train: {lr: 1, warmup_steps: 1, clip_norm: 1}\n")
    over = write(tmp_path, "[train]\nlr = 2.0\nwarmup_steps = 2\n", "over.toml")
    train = Config.load([base, over], ["train.lr=1e-5", "--rollout.temperature=0.7"]).train
    assert (train.lr, train.warmup_steps, train.clip_norm) == (1e-5, 2, 1.0)


def test_a_learning_rate_without_a_point_is_a_number(tmp_path: Path):
    assert Config.load(write(tmp_path, MINIMAL + "train: {lr: 1e-6}\n")).train.lr == 1e-6


def test_all_problems_are_listed_with_place_and_nearest_key(tmp_path: Path):
    path = write(
        tmp_path,
        MINIMAL
        + """\
  pth: 3
train:
  lr: abc
  betas: [0.9, x]
learning: {a: 1}
algorithm: {type: grop}
""",
    )
    assert refusal(path, overrides=("limits.group=auto", "--limits.group_s=-1", "groups_per_step=4")) == [
        "8 problems in the configuration:",
        "  job.yaml:5: data.pth: unknown key; did you mean `data.path`?",
        "  job.yaml:10: algorithm.type: no algorithm is named 'grop'; did you mean `grpo`?",
        "  job.yaml:7: train.lr: input should be a valid number, unable to parse string as a number (got 'abc')",
        "  job.yaml:8: train.betas[1]: input should be a valid number, unable to parse string as a number (got 'x')",
        "  command line: --limits.group_s=-1: limits.group_s: input should be greater than 0 (got -1)",
        "  command line: limits.group=auto: limits.group: unknown key; did you mean `limits.group_s`?",
        f"  job.yaml:9: learning: unknown key; the top level has: {', '.join(Config.model_fields)}",
        "  command line: groups_per_step=4: groups_per_step: unknown key; did you mean `train.groups_per_step`?",
    ]


def test_an_address_of_ray_client_is_refused_with_the_ways_to_join(tmp_path: Path):
    _, problem = refusal(write(tmp_path, MINIMAL), overrides=("ray=ray://head:10001",))
    assert "ray: a driver must run inside the cluster" in problem
    assert "`rlsys submit --address http://HEAD:8265`" in problem


def test_whole_weights_beside_others_need_the_local_engine(tmp_path: Path):
    path = write(tmp_path, MINIMAL)
    for other in ("rollout.engine=vllm", "rollout.tensor_parallel=2"):
        beside = ("rollout.weight_change=beside", other)
        (problem,) = refusal(path, overrides=beside)[1:]
        assert "train.lora: should be set: with rollout.weight_change beside, vLLM keeps several adapters" in problem
        assert Config.load(path, (*beside, "train.lora={rank: 4}")).resident_versions == 2
    (problem,) = refusal(path, overrides=("resources.rollout.gpus=1", "rollout.tensor_parallel=2"))[1:]
    assert "resources.rollout.gpus: should be 2, one for each shard (rollout.tensor_parallel)" in problem


def test_problems_inside_a_list_are_named_by_line_and_index(tmp_path: Path):
    path = write(
        tmp_path, MINIMAL + "reward:\n  fn:\n    - fn: exact\n    - fn: my.py:fmt\n      weight: x\n    - {}\n"
    )
    problem = "input should be a valid number, unable to parse string as a number (got 'x')"
    assert refusal(path)[1:] == [
        f"  job.yaml:9: reward.fn[1].weight: {problem}",
        "  job.yaml:10: reward.fn[2].fn: required, and not given",
    ]
    override = "reward.fn=[{fn: exact}, {fn: my.py:fmt, weight: x}]"
    assert refusal(path, overrides=(override,))[1:] == [f"  command line: {override}: reward.fn[1].weight: {problem}"]


def test_a_missing_key_is_named_with_its_section(tmp_path: Path):
    both = "give the number of steps here, or that of passes over the data in run.epochs, and not both"
    assert refusal(write(tmp_path, "run: {name: a}\nmodel: {path: x}\n"))[1:] == [
        f"  job.yaml:1: run.steps: {both}",
        "  job.yaml: data: required, and not given",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0", "should be greater than or equal to 0.01"),
        ("rollout.replicas=0", "should be greater than or equal to 1"),
        ("train.lr=.inf", "should be a finite number"),
        ("train.betas=[0.9, 1.0]", "train.betas[1]: input should be less than 1"),
        ("train.final_lr_fraction=1.5", "less than or equal to 1"),
        ("train.lr_schedule=cosine", "cosine with train.final_lr_fraction 1 is constant: set that to the end"),
        ("run.resume=yes_please", "should be auto, never, must, or the folder of a run, or its URL"),
        ("run.name=a/b", "should match pattern"),
        ("reward.fn=mine.py", "mine.py is a file; say what in it is meant, as in `mine.py:name`"),
        ("reward.fn=exat", "reward.fn: no reward function is named 'exat'; did you mean `exact`?"),
        ("reward.fn=[{fn: judge}]", "reward.fn[0].fn: no reward function is named 'judge'; "),
        ("rollout=", "should be a section with keys (got None)"),
        ("algorithm=3", "should be a name, or a section with a `type` and its keys"),
        ("algorithm=grop", "no algorithm is named 'grop'; did you mean `grpo`?"),
        ("rollout.workflow.type=nowhere:Name", "rollout.workflow.type: cannot import workflow 'nowhere:Name'"),
        ("rollout.workflow=singel_turn", "no workflow is named 'singel_turn'; did you mean `single_turn`?"),
        ("rollout.workflow.max_trns=3", "unknown key; did you mean `rollout.workflow.max_turns`?"),
        ("rollout.workflow.max_turns=0", "rollout.workflow.max_turns: input should be greater than 0"),
        ("algorithm.type=nowhere:Name", "cannot import algorithm 'nowhere:Name'"),
        ("algorithm.type=json:Name", "module 'json' has no 'Name'"),
        ("algorithm.type=json:JSONEncoder", "is not a dataclass derived from rlsys.algorithm.Algorithm"),
        ("algorithm.clip_hih=0.3", "unknown key; did you mean `algorithm.clip_high`?"),
        ("algorithm.clip_high=wide", "algorithm.clip_high: input should be a valid number"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, override: str, message: str):
    assert message in refusal(write(tmp_path, MINIMAL), overrides=(override,))[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=1e30", "run.steps: unable to parse input string as an integer"),
        ("run.steps=true", "run.steps: should be a number (got true)"),
        (f"train.groups_per_step=1{'0' * 400}", "train.groups_per_step: input should be less than or equal to 100000"),
        ("resources.reward.cpus=true", "resources.reward.cpus: should be a number (got true)"),
        ("limits.group_s=1e300", "limits.group_s: input should be less than or equal to 1000000000"),
        (f"run.seed=1{'0' * 400}", "run.seed: should be a number of at most 92233720368"),
        ("train.lora={rank: 1000000000000000000}", "train.lora.rank: input should be less than or equal to 4096"),
        ("reference.sync={every: 0}", "reference.sync.every: input should be greater than 0"),
        ("reference.sync={mixup: 0}", "reference.sync.mixup: input should be greater than 0"),
        ("reference.sync={mixup: 1.5}", "reference.sync.mixup: input should be less than or equal to 1"),
        ("train.mesh.shard=20000", "train.mesh.shard: input should be less than or equal to 10000"),
        ("algorithm.group_size=200000", "algorithm.group_size: input should be less than or equal to 100000"),
        ("algorithm.clip_high=true", "algorithm.clip_high: should be a number (got true)"),
        ("alerts={idle_side: true}", "alerts.idle_side: should be a number (got true)"),
        ("train.betas=[0.9, false]", "train.betas[1]: should be a number (got false)"),
        (r'model.path="a\0b"', "model.path: contains a NUL"),
        ("agents={a\ud800: b}", "the value is not valid YAML"),
    ],
)
def test_numbers_and_texts_that_mean_nothing_are_refused(tmp_path: Path, override: str, message: str):
    assert message in "\n".join(refusal(write(tmp_path, MINIMAL), overrides=(override,)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.kl_coef=0.1", "train.lora={}"), "reference.sync: should be null with train.lora"),
        (
            ("algorithm.kl_coef=0",),
            "reference.sync: GRPO asks for no reference: leave this out, or set algorithm.kl_coef",
        ),
        (("algorithm.kl_coef=0.1", "reference.path=org/other"), "begins as model.path: leave out reference.path"),
    ],
)
def test_a_reference_that_cannot_follow_the_policy_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str):
    path = write(tmp_path, MINIMAL)
    assert message in "\n".join(refusal(path, overrides=("reference.sync={}", *overrides)))


TOGETHER = "placement.together=[actor,rollout]"
ON_GPUS = ("resources.actor.gpus=1", "resources.rollout.gpus=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("placement.together=[rollout,critic]",), "placement.together: should have actor too"),
        (("placement.together=[actor,reward]",), "placement.together[1]: input should be 'actor', 'rollout'"),
        (("placement.together=[actor,actor]",), "placement.together: should name each role once"),
        ((TOGETHER, "rollout.engine={urls: [http://127.0.0.1:1]}"), "placement.together: a vLLM server keeps its dev"),
        ((TOGETHER, "rollout.tensor_parallel=2"), "rollout.tensor_parallel: should be 1 with placement.together"),
        ((TOGETHER, "resources.actor.gpus=1"), "resources.rollout.gpus: should be 1, as placement.together has it"),
        ((TOGETHER, *ON_GPUS[:1], "resources.rollout.gpus=0.5"), "resources.rollout.gpus: should be 1"),
        ((TOGETHER, "resources.rollout.labels={a: b}"), "resources.rollout.labels: should be those of actor"),
        (
            (TOGETHER, *ON_GPUS, "rollout.replicas=2"),
            "rollout.replicas: should be at most 1, one on the device of",
        ),
        ((TOGETHER, "policies={a: {}, b: {}}"), "placement.together: several policies cannot share devices"),
    ],
)
def test_devices_that_cannot_be_shared_are_refused(tmp_path: Path, overrides: tuple[str, ...], message: str):
    assert message in "\n".join(refusal(write(tmp_path, MINIMAL), overrides=overrides))


def test_roles_that_share_devices_are_those_of_the_run(tmp_path: Path):
    every = "placement.together=[actor,rollout,critic,reference]"
    path = write(tmp_path, MINIMAL)
    assert Config.load(path).tenants == ()
    assert Config.load(path, [every]).tenants == ("actor", "rollout")
    evaluated = Config.load(path, [every, "algorithm.kl_coef=0.1", "eval.every=5", "eval.data={a: x.jsonl}"])
    assert evaluated.tenants == ("actor", "reference", "rollout", "evaluation")
    assert evaluated.columns_of_steps == {Column.REFERENCE_LOGPROBS}
    assert Config.load(path, [TOGETHER, "algorithm.kl_coef=0.1"]).columns_of_steps == frozenset()


def test_shared_devices_are_reserved_once(tmp_path: Path):
    ranks = ("train.mesh.shard=4", "rollout.replicas=4", "reward.workers=0", *ON_GPUS)
    assert plan_of(Config.load(write(tmp_path, MINIMAL), ranks)).num_gpus == 8
    shared = plan_of(Config.load(write(tmp_path, MINIMAL), (*ranks, TOGETHER)))
    assert (shared.num_gpus, shared.num_cpus) == (4, 4)
    assert "  4 x rollout: 0.5 CPUs, 0.5 GPUs each, on shared devices" in list(shared.lines())


def test_the_ranks_of_the_actor_are_the_reference_that_follows_them(tmp_path: Path):
    config = Config.load(write(tmp_path, MINIMAL), ("algorithm.kl_coef=0.1", "reference.sync={}"))
    assert (config.is_own_reference, config.has_reference) == (True, False)


def test_a_section_built_in_python_refuses_a_truth_value_too():
    with pytest.raises(ValidationError, match="should be a number"):
        RunSection(steps=True)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.path=https://me:secret@host/rows", "data.path"),
        ("model.path=https://secret@host/m", "model.path"),
        ("reward.fn=[{fn: llm_judge, args: {base_url: 'http://me:secret@host/v1'}}]", "reward.fn[0].args.base_url"),
        ("rollout.workflow={type: play, environment: 'mcp:https://me:secret@h'}", "rollout.workflow.environment"),
        ("tracking=[{type: wandb, project: 'https://me:secret@h'}]", "tracking[0].project"),
        ("policies={a: {model: {path: 'https://me:secret@h'}}}", "policies.a.model.path"),
        *(
            (f"data.path='{url}'", "data.path")
            for url in (
                "https://me:sec/secret@host/rows",
                "https://me:?secret@host/rows",
                "https://me:12#secret@host/rows",
                "https://me:12/secret@host/rows",
                "https://me:a@secret@host",
                "https://me:a secret@host",
                'https://me:a"/secret@host',
                "HTTPS://ME:/secret@HOST",
                "s3://me:/secret@bucket",
            )
        ),
    ],
)
def test_credentials_in_urls_are_refused_and_not_repeated(tmp_path: Path, override: str, key: str):
    text = "\n".join(refusal(write(tmp_path, MINIMAL), overrides=(override,)))
    assert f"{key}: has a user name or password in a URL" in text and "`api_key_env`" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    "parameter",
    [
        "api_key", "api-key", "apikey", "API_KEY", "key", "token", "access_token", "auth_token", "client_secret", "sig",
        "password", "X-Amz-Signature", "X-Amz-Security-Token", "AWSAccessKeyId", "subscription-key", "code&key", "jwt",
        "authorization", "pwd", "x-goog-signature", "accessToken", "api%5Fkey",
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["?", "?a=b&", "#", "/v1?a&", ";"])
def test_credentials_in_parameters_of_urls_are_refused(tmp_path: Path, parameter: str, before: str):
    override = f"reward.fn=[{{fn: llm_judge, args: {{base_url: 'https://host/{before}{parameter}=secret-x'}}}}]"
    text = "\n".join(refusal(write(tmp_path, MINIMAL), overrides=(override,)))
    assert "reward.fn[0].args.base_url: has a credential (`" in text and "`api_key_env`" in text
    assert "secret-x" not in text


@pytest.mark.parametrize(
    "url",
    [
        "https://host:8080/rows?max_tokens=5&split=train", "hf://datasets/me/rows@main", "https://host/a@b?page=2",
        "https://host/rows?api_key=", "https://host/v1?monkey=1&keyword=x&design=3", "s3://bucket/key=value/rows.jsonl",
        "Mail me@host about http://host/x", "f(x)?key=1", "https://h?page_token=2",
    ],
)  # fmt: skip
def test_urls_without_credentials_are_read(url: str):
    assert credential_in(url) is None and without_credentials(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "docker://host:5000/image@sha256:1f",
        "http://host:8000/v1/models/org/name@main",
        "see http://localhost:8000/docs,mail=a@b.c",
    ],
)
def test_what_follows_a_port_is_no_password(url: str):
    assert credential_in(url) is None


@pytest.mark.parametrize(
    ("start", "repeated", "end"), [("", "a://a?", ""), ("", "a.", ""), ("", "a://a:", '"@'), ("a://x?", "a-", "")]
)
def test_the_search_for_credentials_takes_time_in_proportion_to_the_text(start: str, repeated: str, end: str):
    def search(times: int) -> None:
        text = start + repeated * times + end
        credential_in(text)
        without_credentials(text)

    assert growth(search, 2000, 60_000) < 200


@pytest.mark.parametrize("override", ["train.lr", "=3", "train..lr=3", "train.lr=[1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str):
    assert repr(override) in refusal(write(tmp_path, MINIMAL), overrides=(override,))[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "run: {steps: 1\nmodel: 3", "a.yaml:2: not valid YAML"),
        ("a.yaml", "run: {}\nrun: {}\n", "a.yaml:2: not valid YAML: found duplicate key"),
        ("a.yaml", "- 1\n", "a.yaml:1: a configuration is a mapping of sections, not a list"),
        ("a.toml", "run = \n", "a.toml: not valid TOML"),
        ("a.toml", f"a = {'9' * 5000}", "a.toml: not valid TOML: Exceeds the limit"),
        ("a.toml", f"a = {'[' * 2000}", "a.toml: not valid TOML: it is nested too deeply"),
        ("a.yaml", "run: {}\na: 2024-99-99", "a.yaml:2: not valid YAML: '2024-99-99' is of the type timestamp"),
        ("a.yaml", "run: {}\n2024-01-01: {}", "a.yaml:2: not valid YAML: the key '2024-01-01' is no text"),
        ("a.yaml", f"run: {{}}\na: {'9' * 5000}", "a.yaml:2: not valid YAML: '999"),
        ("a.yaml", "a: !!bool x", "a.yaml:1: not valid YAML: "),
        ("a.yaml", "a: &x {b: *x}", "a.yaml:1: not valid YAML: it is nested too deeply, or contains itself"),
        ("a.yaml", "[" * 5000, "a.yaml:1: not valid YAML: it is nested too deeply"),
        ("a.yaml", bomb(9), "a.yaml:1: not valid YAML: it has more than 100000 keys"),
    ],
)
def test_an_unparsable_file_is_named_with_its_line(tmp_path: Path, name: str, text: str, message: str):
    assert refusal(write(tmp_path, text, name))[0].startswith(message)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    assert refusal(tmp_path / "gone.yaml") == ["cannot read configuration gone.yaml: No such file or directory"]


def test_a_configuration_path_with_a_nul_is_refused(tmp_path: Path):
    assert refusal(tmp_path / "a\0.yaml")[0].endswith("embedded null byte")


def test_a_configuration_may_come_from_the_shell_but_not_from_a_pipe_in_a_folder(tmp_path: Path):
    ours, theirs = os.pipe()
    os.write(theirs, b"run: {steps: 3}\n")
    os.close(theirs)
    try:
        assert tree_in(Path(f"/dev/fd/{ours}")) == {"run": {"steps": 3}}  # as `<(command)` gives it
    finally:
        os.close(ours)
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="it is no regular file"):
        tree_in(tmp_path / "config.yaml")


def test_problems_in_toml_carry_their_line(tmp_path: Path):
    path = write(tmp_path, "[run]\nsteps = 1\nsed = 2\n[data]\npath = 'x'\n[model]\npath = 'y'\n", "job.toml")
    assert refusal(path)[1:] == ["  job.toml:3: run.sed: unknown key; did you mean `run.seed`?"]


def test_custom_algorithms_are_found_by_import_path_and_validated(tmp_path: Path):
    path = write(tmp_path, MINIMAL + f"algorithm: {{type: '{STRICT}', beta: 0.25, group_size: 4}}\n")
    assert Config.load(path).algorithm == Strict(beta=0.25, group_size=4)
    assert (
        "algorithm.bta: unknown key; did you mean `algorithm.beta`?" in refusal(path, overrides=("algorithm.bta=1",))[1]
    )
    assert refusal(path, overrides=("algorithm.beta=-1",))[1].endswith(
        "algorithm: beta is -1.0; allowed is more than 0"
    )


def test_changing_the_type_drops_the_keys_of_the_old_one(tmp_path: Path):
    path = write(tmp_path, MINIMAL + "algorithm: {type: grpo, clip_high: 0.3}\n")
    assert Config.load(path, [f"algorithm.type={STRICT}", "algorithm.beta=2"]).algorithm == Strict(beta=2)


def test_a_plugin_may_be_named_without_a_section(tmp_path: Path):
    path = write(tmp_path, MINIMAL + "algorithm: kto\nrollout: {workflow: offline}\n")
    config = Config.load(path, ["rollout.workflow.max_turns=3", "algorithm.group_size=4"])
    assert (config.algorithm, config.rollout.workflow) == (KTO(group_size=4), Offline(max_turns=3))
    assert Config.load(path, ["rollout.workflow.max_turns=3", "rollout.workflow=single_turn"]).rollout == (
        RolloutSection(workflow=SingleTurn())
    )
    assert refusal(path, overrides=("rollout.workflow.max_trns=1",))[1] == (
        "  command line: rollout.workflow.max_trns=1: rollout.workflow.max_trns: unknown key; did you mean "
        "`rollout.workflow.max_turns`?"
    )


def test_a_name_without_a_section_carries_its_line(tmp_path: Path):
    path = write(tmp_path, MINIMAL + "rollout:\n  workflow: recroded\n")
    assert re.search(r":\d+: rollout\.workflow\.type: no workflow is named 'recroded'", refusal(path)[1])


class Forgot(Workflow):
    """A workflow with a field that no decorator made one."""

    times: int = 2


def test_a_plugin_whose_fields_lack_the_decorator_is_named(tmp_path: Path):
    spec = f"{Forgot.__module__}:Forgot"
    assert (
        "has the field 'times', but is no dataclass: decorate it with @dataclass(frozen=True, kw_only=True)"
        in (refusal(write(tmp_path, MINIMAL), overrides=(f"rollout.workflow={spec}",))[1])
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["algorithm=ppo"], "rollout.early_ends: PPO needs all episodes of a group; take an algorithm such as grpo"),
        (
            ["reward.fn=[{fn: model, args: {path: m}}]"],
            "rollout.early_ends: a replica has no reward model: set this to false",
        ),
        (["rollout.workflow.keep=1"], "rollout.workflow.keep: unknown key"),
    ],
)
def test_early_ends_that_cannot_work_are_refused(tmp_path: Path, overrides: list[str], problem: str):
    keys = ("rollout.early_ends=true", *overrides)
    assert problem in "\n".join(refusal(write(tmp_path, MINIMAL), overrides=keys))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["success_within=[0.8,0.2]"], "success_within: the least, 0.8, is above the greatest, 0.2"),
        (["success_within=[0,1.5]"], "success_within[1]: input should be less than or equal to 1 (got 1.5)"),
        (
            ["fewer_above=0.6", "algorithm.group_size=2"],
            "fewer_above: groups of 1 are too small for the algorithm: raise algorithm.group_size (2)",
        ),
        (
            ["stored_successes=4"],
            "stored_successes: what is stored is older than the step that trains it: set asynchrony.max_staleness to 1",
        ),
        (
            ["stored_successes=4", "asynchrony.max_staleness=1", "algorithm={type: ppo, group_size: 1}"],
            "stored_successes: a group needs other episodes beside it: raise algorithm.group_size",
        ),
        (
            ["stored_staleness=4", "asynchrony.max_staleness=1"],
            "stored_staleness: nothing is stored: set curation.stored_successes",
        ),
        (
            ["stored_staleness=4", "stored_successes=4", "algorithm={type: ppo}"],
            "stored_staleness: the loss of PPO does not correct for tokens of any age: set it to 0",
        ),
        (["length_cap=0.5"], "length_cap: input should be greater than or equal to 1 (got 0.5)"),
        (["sucess_within=[0,1]"], "sucess_within: unknown key; did you mean `curation.success_within`?"),
    ],
)
def test_curation_that_cannot_work_is_refused_with_the_remedy(tmp_path: Path, overrides: list[str], problem: str):
    keys = [key if "." in key.partition("=")[0] or "{" in key else f"curation.{key}" for key in overrides]
    assert f"curation.{problem}" in refusal(write(tmp_path, MINIMAL), overrides=(*keys,))[1]


def test_staleness_beyond_the_limit_of_the_algorithm_is_refused(tmp_path: Path):
    path = write(tmp_path, MINIMAL + f"algorithm: {{type: '{STRICT}'}}\n")
    assert Config.load(path, ["asynchrony.max_staleness=1"]).permits == 64
    line = refusal(path, overrides=("asynchrony.max_staleness=2", "run.sed=1"))[2]
    assert "asynchrony.max_staleness: 2 is more than Strict is safe for (1)" in line
    assert "set it to 1 or less" in line


def test_more_groups_in_flight_than_the_driver_has_room_for_are_refused(tmp_path: Path):
    overrides = ("train.groups_per_step=1000", "asynchrony.max_staleness=1000")
    line = refusal(write(tmp_path, MINIMAL), overrides=overrides)[1]
    assert "asynchrony.max_staleness: with train.groups_per_step 1000, 1,001,000 groups may be in flight" in line


@pytest.mark.parametrize(
    ("keys", "is_cautioned"),
    [
        (["algorithm.correction=tis", "asynchrony.max_staleness=4"], True),
        (["algorithm.correction=tis", "asynchrony.max_staleness=2"], False),
        (["algorithm.correction=none", "asynchrony.max_staleness=4"], False),
        (["algorithm.correction=[geometric, tis]", "asynchrony.max_staleness=4"], False),
        (["algorithm={correction: tis, proximal: interpolated}", "asynchrony.max_staleness=4"], False),
        (["algorithm.correction=tis", "train.updates_per_step=2", "asynchrony.max_staleness=4"], False),
        (["algorithm.type=dart", "asynchrony.max_staleness=4"], False),
    ],
)
def test_staleness_without_any_clip_is_cautioned(tmp_path: Path, keys: list[str], is_cautioned: bool):
    config = Config.load(write(tmp_path, MINIMAL), keys)
    cautions = [line for line in plan_of(config).lines() if line.startswith("caution: asynchrony.max_staleness: 4 ")]
    assert len(cautions) == is_cautioned
    assert all("set algorithm.correction to none, or this to 2 or less" in line for line in cautions)


@pytest.mark.slow
@given(
    lr=st.floats(1e-12, 1, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
    name=st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}\Z"),
    address=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
    beta=st.floats(1e-9, 1e9),
)
@example(lr=1e-3, seed=0, name="run", address="next\x85line\u2028", beta=1.0)
def test_the_resolved_configuration_loads_back_as_the_same(
    tmp_path_factory: pytest.TempPathFactory, lr: float, seed: int, name: str, address: str | None, beta: float
):
    config = Config.model_validate(
        {
            "run": {"steps": 3, "seed": seed, "name": name},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "train": {"lr": lr},
            "ray": address,
            "algorithm": Strict(beta=beta),
        }
    )
    path = write(tmp_path_factory.mktemp("resolved"), config.to_yaml())
    assert Config.load(path) == config


def test_python_builds_the_same_configuration_and_gets_the_same_refusal(tmp_path: Path):
    sections = {"run": {"steps": 10}, "model": {"path": "some/model"}, "data": {"path": "rows.jsonl"}}
    assert Config.model_validate({**sections, "algorithm": GRPO()}) == Config.load(write(tmp_path, MINIMAL))
    with pytest.raises(ValidationError, match=r"clip_hih"):
        Config.model_validate({**sections, "algorithm": {"type": "grpo", "clip_hih": 1}})


def test_a_configuration_cannot_be_changed(tmp_path: Path):
    config = Config.load(write(tmp_path, MINIMAL))
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 3  # pyrefly: ignore[read-only]


def test_every_key_has_a_docstring():
    assert [key for key, text in documented(Config) if not text] == []


@pytest.mark.parametrize("url", ["s3://", "s3:///", "file:///", "memory://", " s3:// "])
def test_checkpoints_at_a_url_of_nothing_are_refused(url: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"checkpoint\.to: should be a URL with a bucket or folder"):
        Config.load(write(tmp_path, MINIMAL), [f"checkpoint.to='{url}'"])
    loaded = Config.load(write(tmp_path, MINIMAL), ["checkpoint.to=' s3://bucket/ '"])
    assert loaded.checkpoint.to == "s3://bucket"


@pytest.mark.parametrize("passes", [0, -1, 101, 10**30])
def test_passes_over_a_step_are_some_and_not_without_end(passes: int, tmp_path: Path):
    path = write(tmp_path, MINIMAL + f"algorithm: {{type: grpo, passes: {passes}}}\n")
    with pytest.raises(ConfigError, match=r"algorithm\.passes: should be (from 1 to 100|a number of at most)"):
        Config.load(path)


def test_the_number_of_keys_is_bounded():
    keys = leaves(json.loads(Path("docs/config.schema.json").read_text()))
    assert {"run.steps", "reward.fn.weight", "rollout.engine.urls", "resources.gpus", "policies"} <= keys
    assert len(keys) <= 127, sorted(keys)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in kind.entry_points()])
def test_every_installed_plugin_documents_its_keys(kind: PluginKind[Any], name: str):
    alternatives = TypeAdapter(cast("Any", Annotated[Any, kind])).json_schema()["anyOf"]
    (described,) = [s for s in alternatives if s.get("properties", {}).get("type", {}).get("const") == name]
    undocumented = [
        key for key, value in described["properties"].items() if key != "type" and "description" not in value
    ]
    assert undocumented == []


def test_an_algorithm_knows_its_name():
    assert ALGORITHMS.type_name(GRPO) == "grpo"
    assert ALGORITHMS.type_name(Strict) == STRICT
    assert adapter(GRPO) is adapter(GRPO)


def test_evaluation_data_sets_are_named_explicitly_or_by_file(tmp_path: Path):
    def sets(data: str) -> dict[str, str]:
        loaded = Config.load(write(tmp_path, MINIMAL + f"eval: {{data: {data}}}\n"))
        return {name: rows.path for name, rows in loaded.eval.data.items()}

    assert sets("{held_out: a.jsonl, hard: b/c.parquet}") == {"held_out": "a.jsonl", "hard": "b/c.parquet"}
    assert sets("data/held_out.jsonl") == {"held_out": "data/held_out.jsonl"}
    assert sets("org/sums:main#hard") == {"sums-main-hard": "org/sums:main#hard"}
    assert sets("org/set-v1.5") == {"set-v1.5": "org/set-v1.5"}
    assert sets("null") == {}


def test_a_meaningless_evaluation_is_refused_with_every_reason(tmp_path: Path):
    path = write(tmp_path, MINIMAL + "eval:\n  every: 5\n  samples: 4\n")
    assert refusal(path) == [
        "2 problems in the configuration:",
        "  job.yaml:6: eval.every: there is nothing to evaluate on; set eval.data, or set this to 0",
        "  job.yaml:7: eval.samples: greedy samples of a task are all the same; set eval.temperature, or set this to 1",
    ]
    _, problem = refusal(path, overrides=("eval.data={a/b: x.jsonl}",))
    assert "eval.data.a/b: the name of a data set is letters, digits, `_`, `-` and `.`; give another" in problem
    Config.load(path, ["eval.data=x.jsonl", "eval.temperature=0.5"])


def test_duplicate_data_set_names_are_refused(tmp_path: Path):
    path = write(tmp_path, MINIMAL + "eval:\n  data:\n    a: x.jsonl\n    a: y.jsonl\n")
    (line,) = refusal(path)
    assert 'job.yaml:8: not valid YAML: found duplicate key "a"' in line


def test_a_stabilizer_is_a_plugin_and_null_disables_it(tmp_path: Path):
    path = write(tmp_path, MINIMAL)
    assert type(Config.load(path).stabilizer).__name__ == "GAC"
    assert Config.load(path, ["stabilizer=null"]).stabilizer is None
    damped = Config.load(path, [f"stabilizer.type={__name__}:Damp", "stabilizer.factor=0.25"])
    assert damped.stabilizer == Damp(factor=0.25)
    assert Config.load(write(tmp_path, damped.to_yaml(), "resolved.yaml")) == damped
    wrong = [f"stabilizer.type={__name__}:Damp", "stabilizer.facto=1"]
    assert "stabilizer.facto: unknown key; did you mean `stabilizer.factor`?" in refusal(path, overrides=(*wrong,))[1]
    none = refusal(path, overrides=("stabilizer.type=gca",))[1]
    assert "stabilizer.type: no stabilizer is named 'gca'; did you mean `gac`?" in none
    other = refusal(path, overrides=(f"stabilizer.type={STRICT}",))[1]
    assert "is not a dataclass derived from rlsys.stabilizer.StabilizerPlugin" in other


def test_a_run_that_never_trains_the_policy_is_refused(tmp_path: Path):
    path = write(tmp_path, MINIMAL + f"algorithm: {{type: '{__name__}:WarmsUp', for_steps: 9}}\n")
    assert Config.load(path).run.steps == 10
    (_, line) = refusal(path, overrides=("algorithm.for_steps=10",))
    assert "algorithm: WarmsUp trains the policy in none of the 10 steps (run.steps): its warm-up is longer" in line


def test_a_run_shorter_than_its_calibration_is_refused(tmp_path: Path):
    keys = f"algorithm: {{type: '{__name__}:WarmsUp', for_steps: 5}}\nstabilizer: {{type: '{__name__}:Calibrating'}}\n"
    path = write(tmp_path, MINIMAL + keys)
    assert Config.load(path).stabilizer == Calibrating(needs=4)
    (_, line) = refusal(path, overrides=("stabilizer.needs=5",))
    assert "stabilizer: Calibrating needs 5 synchronous steps that train the policy before it does anything" in line
    assert "run.steps is 10" in line
    assert len(refusal(path, overrides=("stabilizer.needs=50", "run.steps=6"))) == 2, "one problem, whatever it is"


def test_more_updates_than_groups_are_refused(tmp_path: Path):
    path = write(tmp_path, MINIMAL + "train: {groups_per_step: 4}\n")
    assert Config.load(path, ["train.updates_per_step=4"]).train.updates_per_step == 4
    line = refusal(path, overrides=("train.updates_per_step=5",))[1]
    assert line.endswith("train.updates_per_step: 5 updates need as many groups, and train.groups_per_step is 4")


@pytest.mark.parametrize(
    ("asks", "roles"),
    [
        ("[]", {"rollout": 1, "reward": 1, "actor rank": 3}),
        ("[policy_mismatched]", {"rollout": 1, "reward": 1, "actor rank": 3}),
        ("[reference_logprobs]", {"rollout": 1, "reward": 1, "actor rank": 3, "reference": 1}),
        ("[reference_mismatched]", {"rollout": 1, "reward": 1, "actor rank": 3, "reference": 1}),
        ("[values]", {"rollout": 1, "reward": 1, "actor rank": 3, "critic rank": 3}),
    ],
)
def test_only_workers_for_the_requested_columns_start(tmp_path: Path, asks: str, roles: object):
    algorithm = f"{{type: '{__name__}:Curious', asks: {asks}}}"
    path = write(tmp_path, MINIMAL + f"train: {{mesh: {{shard: 3}}}}\nalgorithm: {algorithm}\n")
    assert "reference" not in {role.name for role in plan_of(Config.load(path, ["train.lora.rank=4"])).roles}
    plan = plan_of(Config.load(path, ["resources.critic.cpus=2"]))
    assert {role.name: role.count for role in plan.roles} == roles
    assert plan.num_cpus == sum(role.count * (2 if role.name == "critic rank" else 1) for role in plan.roles)


def test_a_column_that_nobody_makes_is_refused_before_anything_starts(tmp_path: Path):
    path = write(tmp_path, MINIMAL + f"algorithm: {{type: '{__name__}:Curious', asks: [values, moods]}}\n")
    _, line = refusal(path)
    assert "algorithm: Curious asks for moods, which no worker makes; columns are reference_logprobs, " in line


def test_the_critic_folder_is_checked_only_with_a_critic(tmp_path: Path):
    (tmp_path / "model").mkdir()
    path = write(tmp_path, MINIMAL + f"algorithm: {{type: '{__name__}:Curious'}}\n")
    gone = (f"model.path={tmp_path / 'model'}", f"critic.path={tmp_path / 'gone'}")
    check_model(Config.load(path, gone))
    with pytest.raises(ModelError, match=r"critic\.path: there is no folder .*gone"):
        check_model(Config.load(path, [*gone, "algorithm.asks=[values]"]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["checkpoint.best_by=eval/hard/men"],
            r"best_by: the evaluation has no .*did you mean `eval/hard/mean`",
        ),
        ([], r"checkpoint\.best_by: checkpoint\.keep_best needs the name of a metric; there are: eval/hard/mean, eval"),
        (["eval.every=0"], r"checkpoint\.keep_best: there is no evaluation; set eval\.every"),
        (
            ["checkpoint.early_stopping_patience=3", "checkpoint.keep_best=0"],
            r"checkpoint\.early_stopping_patience: needs checkpoint\.keep_best",
        ),
    ],
    ids=["unknown", "none", "no evaluation", "nothing kept"],
)
def test_a_metric_that_no_evaluation_has_is_refused(tmp_path: Path, keys: list[str], message: str):
    evaluated = ["eval.every=2", "eval.data={hard: hard.jsonl}", "checkpoint.keep_best=2", *keys]
    with pytest.raises(ConfigError, match=message):
        Config.load(write(tmp_path, MINIMAL), evaluated)


def test_a_lead_and_subagents_weigh_the_same_unless_said_otherwise() -> None:
    def over(*keys: str) -> str:
        config = Config.load([], ["run.steps=10", "model.path=m", "data.path=d", "reward.fn=exact", *keys])
        assert f"over: {config.algorithm.aggregation.over}" in config.to_yaml()
        return config.algorithm.aggregation.over

    lead = "rollout.workflow=lead_subagents"
    assert over(lead) == over(lead, "algorithm=grpo") == over(lead, "algorithm.group_size=4") == "agents"
    assert over(lead, "algorithm.type=aipo") == "agents"
    assert over(lead, "algorithm.over=tokens") == over() == "tokens"
    assert over(lead, "algorithm.type=dr_grpo") == "budget"


@pytest.mark.parametrize("name", ["a #1.jsonl", "#1.jsonl", "a\t# b"])
def test_an_override_has_no_comments(name: str):
    assert Config.load([], ["run.steps=1", "model.path=m", f"data.path={name}"]).data.path == name


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = [
        "run.folder=~/runs",
        "run.resume=~/runs/old",
        "run.steps=1",
        "model.path=~/m",
        "data.path=~/a.jsonl",
        "eval={every: 1, data: {held_out: ~/b.jsonl}}",
        "reward.fn=[~/my.py:judge, {fn: model, args: {path: ~/rm}}]",
        "rollout.chat.template=~/chat.jinja",
        "critic.path=~/c",
        "reference.path=~/r",
        "train.lora={path: ~/adapter}",
    ]
    text = Config.load([], keys).to_yaml()
    assert "~" not in text
    assert text.count(f"{tmp_path}/") == len(keys)
