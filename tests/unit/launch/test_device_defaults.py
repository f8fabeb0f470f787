"""Defaults that follow from the device: constants on CPUs, the model and the memory plan on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.config.resource_plan import plan_of
from rlsys.errors import ConfigError
from rlsys.launch.device_defaults import filled_keys, with_device_defaults, with_gpus
from rlsys.launch.fitting import memory_plan
from rlsys.launch.live_run import with_given
from rlsys.launch.preflight import with_steps
from rlsys.launch.run_folder import write_run_dir
from tests.by_day import first_by_day

pytestmark = pytest.mark.slow

PLANNED = Path(__file__).parents[3] / "docs" / "plan"
GB = 10**9
ON_GPUS = ["resources.actor.gpus=1", "resources.rollout.gpus=1", "rollout.engine=local"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The configuration of a model of half a billion parameters that is stored in bfloat16."""
    facts = json.loads((PLANNED / "qwen2.5-0.5b" / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**facts, "dtype": "bfloat16"}))
    return tmp_path / "model"


def config_of(model: Path, *overrides: str) -> Config:
    needed = [f"run.folder={model.parent}", "run.steps=1", "data.path=tasks.jsonl", "reward.fn=math"]
    return Config.load([], [f"model.path={model}", *needed, *overrides])


def filled(model: Path, gpu_memory: int | None, *overrides: str) -> list[str]:
    given = config_of(model, *overrides)
    return [*filled_keys(given, with_device_defaults(given, gpu_memory))]


def test_on_cpus_the_defaults_are_constants_and_no_model_is_read(tmp_path: Path):
    found = filled(tmp_path / "none", 80 * GB)
    assert found == ["model.dtype=float32", "rollout.slots=64", "train.micro_batch_tokens=8192"]
    given = config_of(tmp_path / "none")
    assert (given.dtype, given.slots, given.micro_batch_tokens) == ("float32", 64, 8192)


def gpus_of(config: Config) -> dict[str, float]:
    return {role: own.num_gpus for role, own in config.resources.items()}


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ((), 2),
        (("rollout.replicas=3", "train.mesh.shard=4"), 7),
        (("rollout.engine=vllm", "rollout.tensor_parallel=2"), 3),
        (("algorithm.kl_coef=.1",), 3),
        (("algorithm.kl_coef=.1", "reference.sync={}"), 2),
        (("algorithm.type=ppo",), 3),
        (("eval.every=1", "eval.data=tasks.jsonl", "eval.replicas=2"), 4),
        (("resources.reward={cpus: 2}", "resources.actor.threads=4"), 2),
    ],
)
def test_workers_take_gpus_where_there_is_one_for_each(model: Path, overrides: tuple[str, ...], needed: int):
    given = config_of(model, *overrides)
    on_gpus = with_gpus(given, needed)
    shards = given.rollout.tensor_parallel
    assert gpus_of(on_gpus) == {"actor": 1, "critic": 1, "reference": 1, "rollout": shards, "reward": 0}
    assert plan_of(on_gpus).num_gpus == needed
    assert with_gpus(given, needed - 1) == given
    assert {own.threads for own in on_gpus.resources.values()} == {own.threads for own in given.resources.values()}


def test_a_run_of_epochs_or_with_rewards_of_a_program_takes_gpus_too(model: Path, tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    config = config_of(model, f"data.path={tmp_path}/tasks.jsonl")
    of_program = with_given(config, reward="exact", data=None, eval_data=None)
    of_epochs = with_steps(Config.model_validate(config.model_dump() | {"run": {"epochs": 2}}))
    for given in (of_program, of_epochs):
        assert gpus_of(with_gpus(given, 2))["actor"] == 1


def test_a_plan_of_a_run_that_joins_a_cluster_takes_no_gpus_by_default(model: Path):
    with pytest.raises(ConfigError, match=r"^--gpus 8: no worker of this configuration reserves a GPU"):
        memory_plan(config_of(model, "ray=auto"), gpus=8, gpu_memory="80GB")


def test_a_resume_keeps_its_values_where_its_gpus_are_gone(model: Path):
    first = with_device_defaults(config_of(model, *ON_GPUS), 80 * GB)
    write_run_dir(first)
    resumed = with_device_defaults(config_of(model, "run.resume=auto"), 80 * GB)
    assert (resumed.dtype, resumed.slots, resumed.micro_batch_tokens) == (
        first.dtype, first.slots, first.micro_batch_tokens
    )  # fmt: skip


@pytest.mark.parametrize("key", ["resources.rollout.gpus=0", "resources.actor.gpus=0.5"])
def test_gpus_that_a_key_gives_are_not_added_to(model: Path, key: str):
    assert with_gpus(config_of(model, key), 8) == config_of(model, key)


def test_a_plan_for_gpus_that_this_machine_has_not_uses_them(model: Path):
    plan = memory_plan(config_of(model, "rollout.replicas=3", "rollout.engine=local"), gpus=4, gpu_memory="80GB")
    assert (plan.num_reserved, plan.defaults[0]) == (4, "model.dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"^--gpus 3: no worker .* leave them out where there is a GPU for each"):
        memory_plan(config_of(model, "rollout.replicas=3"), gpus=3, gpu_memory="80GB")


def test_keys_that_are_set_stay(model: Path):
    own = ["model.dtype=float32", "rollout.slots=7", "train.micro_batch_tokens=5000"]
    config = config_of(model, *ON_GPUS, *own)
    assert with_device_defaults(config, 80 * GB) == config


def test_a_model_stored_in_bfloat16_computes_in_it_if_all_its_workers_have_gpus(model: Path):
    assert filled(model, 80 * GB, *ON_GPUS)[0] == "model.dtype=bfloat16"
    assert filled(model, 80 * GB, *ON_GPUS, "resources.rollout.gpus=0")[0] == "model.dtype=float32"
    assert filled(model, 80 * GB, *ON_GPUS, "algorithm.kl_coef=.1")[0] == "model.dtype=float32", "of the reference"
    assert (
        filled(model, 80 * GB, *ON_GPUS, "algorithm.kl_coef=.1", "resources.reference.gpus=1")[0]
        == "model.dtype=bfloat16"
    )
    assert filled(model, 80 * GB, *ON_GPUS, "algorithm.type=ppo")[0] == "model.dtype=float32", "of the critic"
    assert filled(PLANNED / "qwen2.5-0.5b", 80 * GB, *ON_GPUS)[0] == "model.dtype=float32"  # says no type


@pytest.mark.parametrize(("memory", "engine"), first_by_day([(24, "vllm"), (16, "local"), (40, "local")]))
def test_slots_and_tokens_are_the_most_that_fit(model: Path, memory: int, engine: str):
    given = config_of(model, *ON_GPUS, f"rollout.engine={engine}")
    config = with_device_defaults(given, memory * GB)

    def fits(**changed: int) -> bool:
        update = {
            "rollout": config.rollout.model_copy(update={"slots": changed.get("slots", config.slots)}),
            "train": config.train.model_copy(
                update={"micro_batch_tokens": changed.get("tokens", config.micro_batch_tokens)}
            ),
        }
        return memory_plan(config.model_copy(update=update), gpu_memory=f"{memory}GB").fits

    assert fits()
    assert config.micro_batch_tokens == 2**15 or not fits(tokens=2 * config.micro_batch_tokens)
    assert config.slots == 256 or engine == "vllm" or not fits(slots=2 * config.slots)
    assert config.micro_batch_tokens >= config.max_context_tokens


def test_more_memory_never_gives_fewer_slots_or_tokens(model: Path):
    found = [with_device_defaults(config_of(model, *ON_GPUS), memory * GB) for memory in (16, 24, 48, 80)]
    assert sorted(config.slots for config in found) == [config.slots for config in found]
    assert sorted(config.micro_batch_tokens for config in found) == [config.micro_batch_tokens for config in found]
    assert found[0].micro_batch_tokens < found[-1].micro_batch_tokens


def test_a_row_has_room_for_the_longest_sample(model: Path):
    config = with_device_defaults(config_of(model, *ON_GPUS, "rollout.max_new_tokens=60000"), 80 * GB)
    assert config.micro_batch_tokens == config.max_context_tokens > 2**15


def test_replicas_alone_on_gpus_change_only_their_slots(model: Path):
    found = filled(model, 80 * GB, *ON_GPUS, "resources.actor.gpus=0")
    assert found == ["model.dtype=float32", "rollout.slots=256", "train.micro_batch_tokens=8192"]


def test_several_policies_have_the_values_of_cpus(model: Path):
    found = filled(model, 80 * GB, *ON_GPUS, "policies={a: {}, b: {train: null}}", "agents={lead: a, other: b}")
    assert found == ["model.dtype=float32", "rollout.slots=64", "train.micro_batch_tokens=8192"]


def test_a_resume_has_the_values_that_the_run_recorded(model: Path):
    first = with_device_defaults(config_of(model, *ON_GPUS), 80 * GB)
    write_run_dir(first)
    resumed = with_device_defaults(config_of(model, *ON_GPUS, "run.resume=auto"), 16 * GB)
    assert (resumed.dtype, resumed.slots, resumed.micro_batch_tokens) == ("bfloat16", 256, first.micro_batch_tokens)
    assert with_device_defaults(config_of(model, *ON_GPUS), 16 * GB).micro_batch_tokens < first.micro_batch_tokens


def test_the_plan_names_the_defaults(model: Path):
    plan = memory_plan(config_of(model, *ON_GPUS, "train.micro_batch_tokens=2048"), gpu_memory="80GB")
    assert "defaults that follow from the device: model.dtype=bfloat16 rollout.slots=256" in plan.lines()
    assert plan.as_json()["defaults"] == ["model.dtype=bfloat16", "rollout.slots=256"]
