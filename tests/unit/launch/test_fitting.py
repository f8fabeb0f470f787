"""Memory plan of a configuration, and the nearest one that fits."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.config.memory_plan import gigabytes
from rlsys.errors import ConfigError, ModelError
from rlsys.launch.fitting import FittedPlan, memory_plan, parsed_size
from rlsys.launch.preflight import check_rows
from tests.by_day import first_by_day

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "docs" / "plan"


def config_of(*overrides: str, model: str = "qwen2.5-7b") -> Config:
    return Config.load(FOLDER / "run.yaml", [f"model.path={FOLDER / model}", *overrides])


def plan(*overrides: str, model: str = "qwen2.5-7b", gpus: int = 8) -> FittedPlan:
    return memory_plan(config_of(*overrides, model=model), gpus=gpus, gpu_memory="80GB")


def refusal(planned: FittedPlan) -> str:
    with pytest.raises(ConfigError) as caught:
        planned.check()
    return str(caught.value)


def test_a_plan_that_fits_is_accepted():
    planned = plan("train.activation_checkpointing=full")
    planned.check()
    assert planned.fits
    assert [worker.name for worker in planned.workers] == ["actor rank", "rollout"]


def test_every_worker_of_the_configuration_has_a_row():
    planned = plan("algorithm=ppo", "resources.critic.gpus=1", "eval={every: 5, data: tasks.jsonl, replicas: 2}")
    names = [(worker.name, worker.count) for worker in planned.workers]
    assert names == [("actor rank", 4), ("critic rank", 4), ("rollout", 4), ("evaluation", 2)]
    reference = plan("algorithm.kl_coef=0.1", "resources.reference.gpus=1").workers[1]
    assert (reference.name, reference.count) == ("reference", 1)
    assert reference.memory.weights == pytest.approx(2 * 7.616e9, rel=1e-3)
    assert reference.memory.optimizer == 0


def test_full_training_of_72_billion_on_8_gpus_is_refused():
    text = refusal(plan("resources.rollout.gpus=0", "train.mesh.shard=8", model="qwen2.5-72b"))
    first, problem, *others = text.splitlines()
    assert first == "this does not fit on 8 x 80.0 GB:"
    assert re.match(r"  actor rank: \d{3}\.\d GB of 72\.0 GB; ", problem)
    assert others[0] == "what fits:"
    assert others[1:] == ["  train.activation_checkpointing=full train.offload=true"]


def test_offloaded_state_is_planned_for_the_host():
    savings = ["train.activation_checkpointing=full", "train.offload=true"]
    rank = plan("resources.rollout.gpus=0", "train.mesh.shard=8", *savings, model="qwen2.5-72b").workers[0]
    assert rank.memory.weights == rank.memory.gradients == rank.memory.optimizer == 0
    assert rank.remark == f"each has {gigabytes(20 / 8 * 72.706e9)} of its state in host memory"  # GAC's 4 bytes too


def test_ranks_that_split_layers_or_positions_are_planned_for_their_part():
    whole, tensor, context = (
        plan("resources.rollout.gpus=0", f"train.mesh={{shard: {shard}, {split}}}", gpus=8).workers[0].memory
        for shard, split in ((8, "tensor: 1"), (4, "tensor: 2"), (4, "context: 2"))
    )
    assert context.weights == whole.weights < tensor.weights < 1.2 * whole.weights  # embeddings are not split
    assert context.activations == pytest.approx(whole.activations / 2, rel=0.02)
    assert 0.5 * whole.activations < tensor.activations < 0.8 * whole.activations
    assert tensor.buffers < 0.8 * whole.buffers


def test_a_mesh_that_does_not_fit_the_model_is_refused_without_weights():
    with pytest.raises(ModelError, match=r"tensor: 8 does not divide the 28 attention heads of Qwen2ForCausalLM"):
        plan("train.mesh={tensor: 8}")


@pytest.mark.parametrize(
    ("overrides", "advice"),
    first_by_day(
        [
            (["train.mesh.shard=4"], "train.activation_checkpointing=selective"),
            (["rollout.replicas=6"], "train.activation_checkpointing=selective rollout.replicas=3"),
            (
                [
                    "model.dtype=float32",
                    "train.mesh.shard=4",
                    "data.max_prompt_tokens=8192",
                    "train.micro_batch_tokens=16384",
                ],
                None,
            ),
        ]
    ),
)
def test_the_advice_fits_when_it_is_taken(overrides: list[str], advice: str | None):
    planned = plan(*overrides)
    assert not planned.fits
    (nearest,) = planned.advice
    assert advice in (None, nearest)
    assert plan(*overrides, *nearest.split()).fits


def test_the_advice_changes_as_few_keys_as_it_can():
    (nearest,) = plan("train.activation_checkpointing=full", "rollout.replicas=8").advice
    assert nearest == "rollout.replicas=4"


def test_the_nearest_plan_with_an_adapter_is_found_soon():
    began_s = time.process_time()
    planned = plan("train.lora.rank=32", "train.micro_batch_tokens=262144", "rollout.slots=1024")
    assert planned.advice == ("train.micro_batch_tokens=8192",)
    assert time.process_time() - began_s < 30  # 5 on a quiet core


def test_too_few_gpus_are_named():
    text = refusal(plan("train.activation_checkpointing=full", gpus=2))
    assert "  the workers reserve 8 GPUs, and there are 2" in text.splitlines()


def test_a_rank_on_half_of_a_gpu_has_half_of_its_memory():
    ranks, _ = plan("resources.actor.gpus=0.5", "train.activation_checkpointing=full").workers
    assert ranks.limit == 36_000_000_000


def test_a_replica_on_half_of_a_gpu_has_half_of_its_memory():
    whole, half = (plan(f"resources.rollout.gpus={gpus}").workers[1] for gpus in (1, 0.5))
    assert whole.limit is not None and half.limit is not None
    assert half.limit == whole.limit / 2
    assert half.memory.total <= half.limit


def test_a_cache_without_room_for_a_sequence_does_not_fit():
    planned = plan("rollout.vllm_args={gpu_memory_utilization: 0.2}")
    assert not planned.workers[1].fits


def test_tensor_parallel_replicas_share_weights_and_cache():
    one, two = (
        plan("rollout.replicas=2", f"rollout.tensor_parallel={n}", f"resources.rollout.gpus={n}").workers[1]
        for n in (1, 2)
    )
    assert two.memory.weights == pytest.approx(one.memory.weights / 2)
    assert two.num_devices == 2
    assert int(re.findall(r"\d+", two.remark)[0]) > 2 * int(re.findall(r"\d+", one.remark)[0])


def test_workers_on_cpus_are_shown_without_a_limit():
    planned = memory_plan(config_of("resources.actor.gpus=0", "resources.rollout.gpus=0", model="qwen2.5-0.5b"))
    planned.check()
    assert [worker.limit for worker in planned.workers] == [None, None]
    assert "planned for GPUs" not in "\n".join(planned.lines())


def test_gpus_that_no_worker_reserves_are_refused():
    config = config_of("resources.actor.gpus=0", "resources.rollout.gpus=0")
    with pytest.raises(ConfigError, match=r"^--gpus 8: no worker .* reserves a GPU; set resources\.actor\.gpus"):
        memory_plan(config, gpus=8)


def test_several_policies_have_rows_of_their_own():
    policies = "policies={a: {}, b: {train: null}}"
    agents = "agents={lead: a, other: b}"
    planned = plan(policies, agents, "train.activation_checkpointing=full", "stabilizer=null")
    assert [worker.name for worker in planned.workers] == ["actor rank of a", "rollout"]
    assert planned.workers[1].memory.weights == pytest.approx(2 * 2 * 7.616e9, rel=1e-3)


@pytest.mark.parametrize("text", ["80XB", "80", "", "-80GB", "0GB", "GB", "nanGB"])
def test_a_size_that_is_none_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=r"^--gpu-memory .*: not the memory of a GPU; .* as in 80GB$"):
        parsed_size(text)


def test_sizes_are_read_with_their_unit():
    assert (parsed_size("80GB"), parsed_size("1.5 GiB")) == (80_000_000_000, 1_610_612_736)


def test_a_model_without_a_configuration_is_refused_by_name(tmp_path: Path):
    config = config_of(f"model.path={tmp_path}")
    with pytest.raises(ModelError, match=r"^model\.path "):
        memory_plan(config)


def test_a_row_has_room_for_every_sample():
    """Where a run is about to train, and not where a finished one is read."""
    config = config_of("rollout.max_new_tokens=16384")
    with pytest.raises(ConfigError, match=r"train\.micro_batch_tokens: .* 17408 tokens .* set it to 17408 or more"):
        memory_plan(config, gpus=8, gpu_memory="80GB")
    with pytest.raises(ConfigError, match=r"would not fit in a row of 8192"):
        check_rows(config)
    check_rows(config_of("rollout.max_new_tokens=16384", "train.micro_batch_tokens=17408"))
