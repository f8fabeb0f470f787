"""Parts of `benchmarks.trainer`: rows of a prefix tree against padded matrices, and the trainer against a bare loop."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING, Literal

from benchmarks.measure import group_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from rlsys.batch.packing import BatchPlan
    from rlsys.batch.samples import Sample
    from rlsys.types import Episode

MIXES = {"300/.7": (300, 0.7), "1000/.9": (1000, 0.9), "2600/1.0": (2600, 1.0), "9270/.8": (9270, 0.8)}
"""Mean and sigma of log-normal lengths of completions."""
MICRO_BATCH = 8192
GROUP_SIZE, PROMPT = 8, 100
SMALL_MIX = 60, 0.9
"""Lengths for computed steps."""
SMALL_MICRO_BATCH = 1024


def positions_per_token(seed: int = 0, num_groups: int = 16) -> dict[str, float]:
    """Return, for each mix of lengths, the positions of the planned rows per distinct token of their groups."""
    from rlsys.batch.tensors import MicroBatch, StepData

    rng, found = random.Random(seed), {}
    for name, mix in MIXES.items():
        samples = [log_normal_samples(rng, *mix) for _ in range(num_groups)]
        payloads = [payload_of(of_group) for of_group in samples]
        data = StepData(payloads, [{}] * num_groups)
        rows = [m for rank in plan_step(payloads, 2, MICRO_BATCH) for m in rank.micro_batches if m.weight]
        positions = sum(len(data.micro_batch(row).tokens_R) for row in rows)
        found[name] = positions / sum(len(MicroBatch.of(of_group).tokens_R) for of_group in samples)
    return found


def forward_seconds(how: Literal["packed", "padded"], num_groups: int, num_layers: int, seed: int = 0) -> float:
    """Return the CPU seconds of forward and backward over all samples, as rows or as padded matrices.

    The matrices are filled up to as many positions, in the order of the samples, and repeat the prompt of each.
    """
    import torch

    from rlsys.batch.tensors import pack_for_scoring
    from rlsys.types import Distribution
    from workers.model.logprobs import trained_logprobs

    torch.set_num_threads(1)
    model, rng = random_model(num_layers), random.Random(seed)
    samples = [sample for _ in range(num_groups) for sample in log_normal_samples(rng, *SMALL_MIX)]
    began = time.process_time()
    if how == "packed":
        for _, batch in pack_for_scoring(samples, SMALL_MICRO_BATCH):
            trained_logprobs(model, batch, Distribution(1.0))[0].sum().backward()
        return time.process_time() - began
    for batch in _padded(samples):
        ids_ST = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor((*s.prompt_ids, *s.completion_ids)) for s in batch], True
        )
        lengths_S = torch.tensor([len(s.prompt_ids) + len(s.completion_ids) for s in batch])
        is_real_ST = torch.arange(ids_ST.shape[1]) < lengths_S[:, None]
        hidden_STH = model.base_model(input_ids=ids_ST, attention_mask=is_real_ST, use_cache=False).last_hidden_state
        is_trained_ST = is_real_ST[:, 1:] & (torch.arange(1, ids_ST.shape[1]) >= PROMPT)
        logprobs_NV = model.lm_head(hidden_STH[:, :-1][is_trained_ST]).log_softmax(-1)
        logprobs_NV.gather(1, ids_ST[:, 1:][is_trained_ST][:, None]).sum().backward()
    return time.process_time() - began


def step_seconds(who: Literal["rlsys", "bare"], num_groups: int, num_layers: int, seed: int = 0) -> float:
    """Return the CPU seconds of a training step on the same rows: of the trainer, or of a bare loop in PyTorch."""
    import torch

    from algorithms.grpo import GRPO
    from rlsys.batch.tensors import StepData
    from rlsys.types import Distribution
    from workers.model.logprobs import trained_logprobs
    from workers.train.fsdp import FsdpBackend
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup

    torch.set_num_threads(1)
    rng = random.Random(seed)
    payloads = [payload_of(log_normal_samples(rng, *SMALL_MIX)) for _ in range(num_groups)]
    (plan,) = plan_step(payloads, 1, SMALL_MICRO_BATCH)
    algorithm = GRPO()
    with tempfile.TemporaryDirectory() as folder:
        random_model(num_layers).save_pretrained(folder)
        if who == "rlsys":
            trainer = FsdpBackend(folder, OptimizerSettings(lr=1e-5, total_steps=9), RankGroup())
            began = time.process_time()
            trainer.train_step(plan, StepData(payloads, [{}] * num_groups), algorithm, distribution=Distribution(1.0))
            return time.process_time() - began
        model = random_model(num_layers).eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
        data, began = StepData(payloads, [{}] * num_groups), time.process_time()
        for micro_batch in plan.micro_batches:
            batch = data.micro_batch(micro_batch)
            logprobs_N, _ = trained_logprobs(model, batch, Distribution(1.0))
            ratio_N = (logprobs_N - batch.behavior_logprobs_N).exp()
            clipped_N = ratio_N.clamp(0.8, 1.28)
            loss_N = -torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
            (loss_N * batch.weights_N).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.process_time() - began


def random_model(num_layers: int) -> LlamaForCausalLM:
    """Build a model with SmolLM2-135M's sizes and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=num_layers,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _padded(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Cut samples into matrices of at most `SMALL_MICRO_BATCH` positions."""
    batches: list[list[Sample]] = []
    widest = 0
    for sample in samples:
        widest = max(widest, PROMPT + len(sample.completion_ids))
        if not batches or (len(batches[-1]) + 1) * widest > SMALL_MICRO_BATCH:
            batches.append([])
            widest = PROMPT + len(sample.completion_ids)
        batches[-1].append(sample)
    return batches


def log_normal_samples(rng: random.Random, mean: float, sigma: float) -> list[Sample]:
    """Build samples of one prompt."""
    from rlsys.batch.samples import Sample
    from rlsys.types import VersionSpan

    prompt = tuple(rng.randrange(3, 40_000) for _ in range(PROMPT))
    samples = []
    for _ in range(GROUP_SIZE):
        size = max(1, round(rng.lognormvariate(log(mean) - sigma**2 / 2, sigma)))
        ids = tuple(rng.randrange(3, 40_000) for _ in range(size))
        samples.append(Sample(prompt, ids, (True,) * size, (-11.0,) * size, (VersionSpan(0, size),)))
    return samples


def payload_of(samples: Sequence[Sample]) -> tuple[Episode, ...]:
    """Build the episodes of a group, one for each sample."""
    from rlsys.types import Episode, Trajectory, Turn

    turns = [Turn(s.prompt_ids, s.completion_ids, s.logprobs, s.versions, "stop", "") for s in samples]
    return tuple(Episode((Trajectory("policy", (turn,), reward=1.0),)) for turn in turns)


def plan_step(payloads: Sequence[tuple[Episode, ...]], num_ranks: int, max_tokens: int) -> BatchPlan:
    """Plan a step in which every episode has an advantage."""
    from rlsys.algorithm import Aggregation, TrajectoryAdvantage
    from rlsys.batch.packing import plan_batch

    groups = [group_of(number, payload) for number, payload in enumerate(payloads)]
    assigned = [[TrajectoryAdvantage(e, 0, 1.0 - e % 2 * 2) for e in range(GROUP_SIZE)]] * len(groups)
    return plan_batch(groups, assigned, Aggregation(), num_ranks=num_ranks, max_tokens=max_tokens)
