"""Part of `benchmarks.trainer`: a training step and a publish of an adapter of rank 16 against those of all weights."""

from __future__ import annotations

import random
import tempfile
import time
from typing import Literal, TypeAlias

from benchmarks.measure import Size, in_fresh_process, in_turn, ratios, spreads
from benchmarks.packed_rows import SMALL_MICRO_BATCH, SMALL_MIX, log_normal_samples, payload_of, plan_step, random_model
from benchmarks.trainer import peak_of

Trained: TypeAlias = Literal["all weights", "attention", "all linear layers"]
RANK = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WAYS: tuple[Trained, ...] = ("all weights", "attention", "all linear layers")


def lora_figures(size: Size, num_repeats: int) -> dict[str, object]:
    """Return `lora`, the figures of each way, and `lora_over_full`, their ratios to training all weights."""
    small = (1, 2) if size == "short" else (2, 30)

    def run(_: int, way: str) -> dict[str, float]:
        return in_fresh_process("benchmarks.lora_step:measure", way, *small)

    runs = in_turn(num_repeats, WAYS, run)
    over = {way: {what: ratios(each, runs["all weights"], what) for what in each[0]} for way, each in runs.items()}
    return {"lora": {way: spreads(each) for way, each in runs.items()}, "lora_over_full": over}


def measure(way: Trained, num_groups: int, num_layers: int) -> dict[str, float]:
    """Return `step_mb`, `seconds` of CPU time and `published_mb` of the second step, in fp32 on one thread.

    `step_mb` counts weights, moments, and the most bytes of other tensors that are alive at once.
    """
    import torch

    from algorithms.grpo import GRPO
    from rlsys.batch.tensors import StepData
    from rlsys.config.lora_section import LoraSection
    from rlsys.types import Distribution
    from workers.train.fsdp import FsdpBackend
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup

    torch.set_num_threads(1)
    rng = random.Random(0)
    payloads = [payload_of(log_normal_samples(rng, *SMALL_MIX)) for _ in range(num_groups)]
    (plan,) = plan_step(payloads, 1, SMALL_MICRO_BATCH)
    targets = ATTENTION if way == "attention" else None
    lora = None if way == "all weights" else LoraSection(rank=RANK, targets=targets)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        model = random_model(num_layers)
        model.save_pretrained(folder)
        frozen = sum(weight.nbytes for weight in model.parameters()) if lora else 0
        trainer = FsdpBackend(folder, OptimizerSettings(lr=1e-5, total_steps=9), RankGroup(), lora=lora)

        def step() -> None:
            began = time.process_time()
            trainer.train_step(plan, StepData(payloads, [{}] * num_groups), GRPO(), distribution=Distribution(1.0))
            seconds.append(time.process_time() - began)

        step()
        for parameter in trainer.parameters().values():
            parameter.grad = None
        state = frozen + 3 * sum(weight.nbytes for weight in trainer.shards().values())
        peak = peak_of(step)
        published = sum(tensor.nbytes for tensor in trainer.full_weights(torch.float32).values())
    return {"step_mb": (state + peak) / 2**20, "seconds": seconds[0], "published_mb": published / 2**20}
