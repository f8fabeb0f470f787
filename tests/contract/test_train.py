"""Training back-ends: ranks, precision, checkpoints. Two ranks are two processes over gloo."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoModelForCausalLM

from algorithms.grpo import GRPO
from rlsys.algorithm import Algorithm, Gradients, LossInputs, LossOutput
from rlsys.batch.plan import BatchPlan, plan_batch
from rlsys.batch.samples import meta_of
from rlsys.batch.tensors import StepData
from rlsys.errors import CheckpointError, TrainingError
from rlsys.types import Episode, Group
from tests.models import random_group, save_model, tiny_llama, tiny_qwen3
from workers.train.fsdp import FsdpBackend
from workers.train.optim import OptimizerSettings
from workers.train.ranks import Ranks

SETTINGS = OptimizerSettings(lr=1e-2, weight_decay=0.1, warmup_steps=2, total_steps=10, final_lr_fraction=0.1)
ALGORITHM = GRPO(group_size=4)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("qwen3"), tiny_qwen3())


def batch(step: int, num_ranks: int, algorithm: Algorithm = ALGORITHM) -> tuple[BatchPlan, list[tuple[Episode, ...]]]:
    """Three groups of random samples: rank 1 of 2 gets fewer micro-batches, so that it runs a filler."""
    rng = random.Random(step)
    payloads = [random_group(rng, 4) for _ in range(3)]
    groups = [Group(
        serial=i, task_id=str(i), permit_version=0, replica="r0", episodes=meta_of(p), versions=(), weights=(), payload=p
    ) for i, p in enumerate(payloads)]
    assigned = [list(algorithm.advantages(g)) for g in groups]
    return plan_batch(groups, assigned, num_ranks=num_ranks, max_tokens=40), payloads


def take_steps(backend: FsdpBackend, ranks: Ranks, first: int, num: int, algorithm: Algorithm = ALGORITHM) -> list[dict[str, float]]:
    metrics = []
    for step in range(first, first + num):
        plan, payloads = batch(step, ranks.num_ranks, algorithm)
        data = StepData(payloads, [{} for _ in payloads])
        mine = plan.ranks[ranks.rank]
        metrics.append(backend.train_step(mine, plan.denominators, data, algorithm, temperature=0.9))
    return metrics


@dataclass(frozen=True)
class Job:
    """What every rank does, and where rank 0 leaves what came of it."""

    model_path: str
    folder: Path
    num_steps: int = 3
    dtype: str = "float32"
    load: Path | None = None
    save: Path | None = None
    export: Path | None = None
    algorithm: Algorithm = ALGORITHM


def run_rank(rank: int, num_ranks: int, job: Job) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(rank, num_ranks, address=f"file://{job.folder}/rendezvous", timeout_s=60)
    backend = FsdpBackend(job.model_path, SETTINGS, ranks, dtype=job.dtype)  # type: ignore[arg-type]
    if job.load:
        backend.load(job.load)
    metrics = take_steps(backend, ranks, backend.step, job.num_steps, job.algorithm)
    if job.save:
        backend.save(job.save)
    if job.export:
        backend.export(job.export)
    weights = backend.full_weights(torch.float32)
    if rank == 0:
        torch.save((weights, metrics, backend.step), job.folder / "result.pt")
    ranks.close()


def run(num_ranks: int, job: Job) -> tuple[dict[str, Tensor], list[dict[str, float]], int]:
    """The weights, metrics and step that `num_ranks` ranks arrive at."""
    job.folder.mkdir(parents=True, exist_ok=True)
    if num_ranks == 1:
        run_rank(0, 1, job)
    else:
        mp.spawn(run_rank, args=(num_ranks, job), nprocs=num_ranks)
    return torch.load(job.folder / "result.pt")


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_two_ranks_arrive_at_the_weights_of_one(make: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", make())
    one, one_metrics, _ = run(1, Job(path, tmp_path / "one"))
    two, two_metrics, _ = run(2, Job(path, tmp_path / "two"))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(one_metrics, two_metrics, strict=True):
        assert a.keys() == b.keys()
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
