"""Layouts of ranks (`train.mesh`): every one trains as a single rank does, and loads what any other has saved."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from transformers import GPT2Config, GPT2LMHeadModel

from algorithms.gac import GAC
from algorithms.grpo import GRPO
from algorithms.kto import KTO
from algorithms.ppo import PPO
from rlsys.algorithm import Algorithm, Column
from rlsys.batch.packing import plan_batch
from rlsys.batch.samples import Sample, samples_in
from rlsys.batch.tensors import StepData
from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
from rlsys.config.train_section import NO_SAVINGS, MemorySavings
from rlsys.errors import ModelError
from rlsys.types import Distribution
from tests.by_day import first_by_day
from tests.families import SPLIT_FAMILIES, tiny
from tests.models import save_model
from tests.training import (
    SETTINGS,
    JoinedRanks,
    Outcome,
    Surrogate,
    assert_alike,
    data_of,
    differing,
    everything_in,
    group_of,
    planned,
    random_team,
)
from workers.model.split_layers import check_splits
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup

SAMPLED = Distribution(0.9)

ONE = MeshSection()


@dataclass(frozen=True, kw_only=True)
class Job:
    model_path: str
    mesh: MeshSection = ONE
    num_steps: int = 2
    max_tokens: int = 40
    dtype: Literal["float32", "bfloat16"] = "float32"
    savings: MemorySavings = NO_SAVINGS
    lora: LoraSection | None = None
    load: Path | None = None
    save: Path | None = None


def do(job: Job, ranks: RankGroup) -> Outcome:
    arranged = ranks.with_mesh(job.mesh)
    backend = FsdpBackend(
        job.model_path, SETTINGS, arranged, dtype=job.dtype, probe_length=8,
        savings=job.savings, lora=job.lora,
    )  # fmt: skip
    stabilizer = GAC(c_low=0.01, c_high=1.0).start(backend.shards())
    if job.load:
        backend.load(job.load, stabilizer)
    metrics = []
    algorithm = Surrogate()
    for _ in range(job.num_steps):
        plan, payloads = planned(backend.step, job.mesh.num_batches, algorithm, 2, job.max_tokens)
        metrics.append(
            backend.train_step(
                plan[arranged.batch],
                data_of(payloads),
                algorithm,
                distribution=SAMPLED,
                stabilizer=stabilizer,
            )
        )
    if job.save:
        backend.save(job.save, stabilizer).wait()
    return backend.full_weights(torch.float32), metrics


@dataclass(frozen=True, kw_only=True)
class RandomStep:
    """Steps of an algorithm on random trees of samples, with columns of random numbers."""

    model_path: str
    algorithm: Algorithm
    seed: int
    max_tokens: int = 1
    mesh: MeshSection = ONE
    savings: MemorySavings = NO_SAVINGS


def take(job: RandomStep, ranks: RankGroup) -> Outcome:
    ranks, algorithm = ranks.with_mesh(job.mesh), job.algorithm
    backend = FsdpBackend(job.model_path, SETTINGS, ranks, savings=job.savings)
    metrics = []
    for step in range(2):
        rng = random.Random(f"{job.seed} {step}")
        payloads = [random_team(rng, 4) for _ in range(4)]
        groups = [group_of(i, payload) for i, payload in enumerate(payloads)]
        plan = plan_batch(
            groups,
            algorithm.finalize_advantages(groups, {}).groups,
            algorithm.aggregation.with_budget(7),
            num_ranks=job.mesh.num_batches,
            max_tokens=job.max_tokens,
            num_updates=2,
            has_pairs=True,
        )
        given = sorted(algorithm.columns - {Column.POLICY_MISMATCHED})
        columns = [{kind: [_row(rng, sample) for _, sample in samples_in(p)] for kind in given} for p in payloads]
        data = StepData(payloads, columns)
        metrics.append(backend.train_step(plan[ranks.batch], data, algorithm, distribution=SAMPLED))
    return backend.full_weights(torch.float32), metrics


def _row(rng: random.Random, sample: Sample) -> tuple[float, ...]:
    return tuple(logprob + rng.gauss(0, 0.3) for logprob in sample.logprobs)


TWO = [MeshSection(shard=2), MeshSection(replicate=2), MeshSection(tensor=2), MeshSection(context=2)]
FOUR = [
    MeshSection(replicate=2, shard=2),
    MeshSection(shard=2, tensor=2),
    MeshSection(shard=2, context=2),
    MeshSection(context=2, tensor=2),
    MeshSection(replicate=2, tensor=2),
    MeshSection(replicate=2, context=2),
]


@pytest.fixture(scope="module")
def one(model_path: str) -> Outcome:
    """One rank."""
    return do(Job(model_path=model_path), RankGroup())


@pytest.mark.parametrize("mesh", first_by_day([*TWO, *FOUR], 5), ids=str)
def test_a_layout_arrives_at_the_weights_of_one_rank(
    mesh: MeshSection, model_path: str, one: Outcome, two_ranks: JoinedRanks, four_ranks: JoinedRanks
) -> None:
    told = (two_ranks if mesh.num_ranks == 2 else four_ranks)(do, Job(model_path=model_path, mesh=mesh))
    assert_alike(told[0], one)
    assert all(of_rank[1] == told[0][1] for of_rank in told)


@pytest.mark.parametrize(
    "savings",
    first_by_day([MemorySavings("selective", "update"), MemorySavings("full", offload=True)]),
    ids=["gathered", "offloaded"],
)
@pytest.mark.parametrize(
    "mesh", first_by_day([MeshSection(shard=2, tensor=2), MeshSection(context=2, tensor=2)]), ids=str
)
def test_savings_of_memory_change_nothing(
    mesh: MeshSection, savings: MemorySavings, model_path: str, one: Outcome, four_ranks: JoinedRanks
) -> None:
    assert_alike(four_ranks(do, Job(model_path=model_path, mesh=mesh, savings=savings))[0], one)


@pytest.mark.parametrize("mesh", [MeshSection(replicate=2), MeshSection(context=2)], ids=str)
def test_an_adapter_is_trained_in_other_layouts(mesh: MeshSection, model_path: str, two_ranks: JoinedRanks) -> None:
    job = Job(model_path=model_path, lora=LoraSection(rank=4))
    assert_alike(two_ranks(do, replace(job, mesh=mesh))[0], do(job, RankGroup()))


@pytest.mark.parametrize("family", first_by_day(SPLIT_FAMILIES, 2))
def test_every_family_is_split(family: str, two_ranks: JoinedRanks, four_ranks: JoinedRanks, tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny(family))
    job = Job(model_path=path, num_steps=1, max_tokens=400)
    expected = do(job, RankGroup())
    has_experts = family in ("gpt_oss", "mixtral", "qwen3_moe")
    meshes = [MeshSection(context=2)]
    if has_experts:
        meshes += [MeshSection(shard=2, expert=2)]
    if family != "gpt_oss":  # has no plan for tensor
        meshes += [MeshSection(tensor=2, expert=2 if has_experts else 1)]
        meshes += [MeshSection(shard=2, tensor=2, expert=4)] * has_experts
    if family == "qwen3_moe":
        meshes += [MeshSection(shard=2, tensor=2, expert=2), MeshSection(replicate=2, shard=2, expert=2)]
        meshes += [MeshSection(context=2, tensor=2, expert=4), MeshSection(shard=2, context=2, expert=2)]
    for mesh in meshes:
        told = (two_ranks if mesh.num_ranks == 2 else four_ranks)(do, replace(job, mesh=mesh))
        assert_alike(told[0], expected)


def test_a_checkpoint_moves_between_layouts_bit_for_bit(
    two_ranks: JoinedRanks, four_ranks: JoinedRanks, tmp_path: Path
) -> None:
    """Weights, moments and the stabilizer, of a dense model and of one with experts."""
    for family in ("qwen3", "qwen3_moe"):
        expert = 2 if family == "qwen3_moe" else 1
        path = save_model(tmp_path / family, tiny(family))
        first = tmp_path / f"{family}-first"
        do(Job(model_path=path, save=first), RankGroup())
        expected = everything_in(first)
        before = first
        for mesh in (*TWO, *FOUR, ONE):
            of_mesh = mesh.model_copy(update={"expert": expert if mesh.tensor > 1 else 1})
            folder = tmp_path / f"{family}-{mesh}"
            job = Job(model_path=path, mesh=of_mesh, num_steps=0, load=before, save=folder)
            match mesh.num_ranks:
                case 1:
                    do(job, RankGroup())
                case 2:
                    two_ranks(do, job)
                case 4:
                    four_ranks(do, job)
            assert differing(everything_in(folder), expected) == []
            before = folder


@pytest.mark.parametrize(
    ("make", "mesh", "message"),
    [
        ("qwen3", MeshSection(tensor=3), r"tensor: 3 does not divide the 4 attention heads of Qwen3ForCausalLM"),
        ("qwen3", MeshSection(tensor=4), r"tensor: 4 does not divide the 2 key-value heads"),
        ("qwen3", MeshSection(context=3), r"context: 3 does not divide the 4 attention heads and 2 key-value heads"),
        ("qwen3", MeshSection(tensor=2, context=4), r"and 1 key-value heads of \w+ that tensor: 2 leaves to a rank"),
        ("qwen3", MeshSection(shard=2, expert=2), r"expert: 2 needs a plan for experts, and Qwen3ForCausalLM has none"),
        ("qwen3_moe", MeshSection(shard=3, expert=3), r"expert: 3 does not divide the 4 experts"),
        ("qwen3_moe", MeshSection(tensor=2), r"tensor: 2 needs train\.mesh\.expert, because \w+ has experts"),
    ],
)
def test_a_mesh_that_cannot_split_a_model_is_refused_by_name(make: str, mesh: MeshSection, message: str) -> None:
    with pytest.raises(ModelError, match=rf"train\.mesh does not fit the model: .*{message}"):
        check_splits(tiny(make), mesh)


def test_a_plan_with_unknown_styles_is_refused() -> None:
    model = tiny("qwen3")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "moe_tp_experts"}
    with pytest.raises(ModelError, match=r"not supported with the plan of Qwen3ForCausalLM: moe_tp_experts"):
        check_splits(model, MeshSection(tensor=2))


def test_a_model_without_a_plan_is_not_split() -> None:
    sizes: dict[str, Any] = {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
    with pytest.raises(ModelError, match=r"needs a tensor-parallel plan, and GPT2LMHeadModel has none"):
        check_splits(GPT2LMHeadModel(GPT2Config(**sizes)), MeshSection(tensor=2))


@pytest.mark.parametrize("sizes", [{"shard": 4, "expert": 3}, {"tensor": 2, "context": 3, "expert": 3}, {"expert": 2}])
def test_experts_are_split_over_ranks_of_one_copy(sizes: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"should divide the \d ranks of one copy"):
        MeshSection(**sizes)


@pytest.mark.parametrize("algorithm", first_by_day([GRPO(), PPO(), KTO()]), ids=["grpo", "ppo", "kto"])
@pytest.mark.parametrize("seed", first_by_day(range(3)))
def test_any_layout_of_random_trees_trains_as_one_rank_that_shares_nothing(
    algorithm: Algorithm, seed: int, model_path: str, two_ranks: JoinedRanks, four_ranks: JoinedRanks
) -> None:
    rng = random.Random(f"{seed} {type(algorithm).__name__}")
    alone = RandomStep(model_path=model_path, algorithm=algorithm, seed=seed)
    mesh = rng.choice([*TWO, *FOUR])
    job = replace(
        alone,
        mesh=mesh,
        max_tokens=rng.choice([20, 60, 200]),
        savings=MemorySavings(
            rng.choice(["none", "selective", "full"]),
            rng.choice(["micro_batch", "update"]),
            offload=rng.choice([True, False]),
        ),
    )
    told = (two_ranks if mesh.num_ranks == 2 else four_ranks)(take, job)
    assert_alike(told[0], take(alone, RankGroup()))


@pytest.mark.parametrize(
    "savings", first_by_day([NO_SAVINGS, MemorySavings("full", "update", offload=True)]), ids=["plain", "saving"]
)
@pytest.mark.parametrize(
    ("family", "mesh"),
    first_by_day(
        [("qwen3_moe", MeshSection(shard=2, tensor=2, expert=4)), ("qwen3", MeshSection(context=2, tensor=2))]
    ),
)
def test_bfloat16_computes_alike_in_split_layers(
    family: str, mesh: MeshSection, savings: MemorySavings, four_ranks: JoinedRanks, tmp_path: Path
) -> None:
    job = Job(model_path=save_model(tmp_path, tiny(family)), dtype="bfloat16", num_steps=1, max_tokens=400)
    weights, metrics = do(job, RankGroup())
    split, split_metrics = four_ranks(do, replace(job, mesh=mesh, savings=savings))[0]
    for name, weight in weights.items():
        torch.testing.assert_close(split[name], weight, rtol=0, atol=0.05, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(split_metrics, metrics, strict=True):
        assert a["policy/entropy"] == pytest.approx(b["policy/entropy"], rel=0.02)
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=0.1)
