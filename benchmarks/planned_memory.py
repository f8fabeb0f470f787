"""Part of `benchmarks.trainer`: planned memory of a rank against measured training steps."""

from __future__ import annotations

from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from benchmarks.measure import Size, in_fresh_process, progress

if TYPE_CHECKING:
    from rlsys.batch.tensors import MicroBatch
    from rlsys.config.schema import ActivationCheckpointing

    Dtype: TypeAlias = Literal["float32", "bfloat16"]

POSITIONS = {"full": 1024, "quick": 1024, "short": 64}
GROUP_SIZE = 8
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4_096, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SMALL},
    "smollm2": {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", **SMALL, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
    },
}  # fmt: skip
LAYOUTS = ((1, "float32"), (2, "bfloat16"))
"""Ranks that shard a model, and the type that it computes in."""


def plan_errors(size: Size) -> dict[str, dict[str, float]]:
    """Return the errors of each model, layout and way of checkpointing; a short run has one model."""
    models, errors = [*MODELS][: 1 if size == "short" else None], {}
    for model, (num_ranks, dtype), how in product(models, LAYOUTS, ("none", "full")):
        case = f"{model}, {num_ranks} x {dtype}, {how}"
        arguments = model, num_ranks, dtype, how, POSITIONS[size]
        errors[case] = in_fresh_process("benchmarks.planned_memory:plan_error", *arguments)
        progress(f"{case}: {errors[case]}")
    return errors


def plan_error(
    model: str, num_ranks: int, dtype: Dtype, how: ActivationCheckpointing, positions: int
) -> dict[str, float]:
    """Return (planned - measured) / measured of one rank, in all (`total`) and beyond its state (`beyond_state`)."""
    import torch
    from transformers import AutoConfig

    from rlsys.config.memory_plan import rank_memory
    from workers.train.memory_counts import CountedModel
    from workers.train.rank_group import in_processes

    with TemporaryDirectory() as folder:
        AutoConfig.for_model(**MODELS[model]).save_pretrained(folder)
        counted = CountedModel(folder)
        step = counted.step(dtype, how, positions, has_head=True)
        value_bytes = getattr(torch, dtype).itemsize
        planned = rank_memory(counted.sizes, step, shards=num_ranks, positions=positions, value_bytes=value_bytes)
        work = partial(_rank_step, folder, num_ranks, dtype, how, positions)
        state, beyond = in_processes(num_ranks, work, "measuring") if num_ranks > 1 else work(0, "")
    planned_state = planned.weights + planned.gradients + planned.optimizer
    return {
        "total": planned.total / (state + beyond) - 1,
        "beyond_state": (planned.total - planned_state) / beyond - 1,
        "measured_mb": (state + beyond) / 2**20,
    }


def _rank_step(
    folder: str, num_ranks: int, dtype: Dtype, how: ActivationCheckpointing, positions: int, rank: int, address: str
) -> tuple[int, int]:
    """Measure the second micro-batch and the update of one rank. Return the bytes of its weights, gradients and
    moments, and the most beyond these."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.trainer import peak_of
    from workers.train.layout import Layout
    from workers.train.logprobs import Scorer
    from workers.train.model_loading import CPU
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup
    from workers.train.sharded import Sharded

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    scorer, ranks = Scorer(model), RankGroup(rank, num_ranks, address=address)
    layout = Layout(ranks, getattr(torch, dtype), CPU, how)
    layout.apply(scorer)
    sharded = Sharded(model, scorer, OptimizerSettings(lr=1e-5, total_steps=1), layout)
    batch = _group(positions)

    def backward() -> torch.Tensor:
        loss = -scorer(batch, 1.0)[0].mean()
        loss.backward()
        return loss.detach()

    def step() -> None:
        sharded.update(backward(), "the update", 0)

    backward()
    beyond = peak_of(step)
    return 4 * sum(shard.nbytes for shard in sharded.shards().values()), beyond


def _group(positions: int) -> MicroBatch:
    """Build a group of samples with a prompt of one token, all of whose other tokens are trained."""
    from rlsys.batch.samples import Sample
    from rlsys.batch.tensors import MicroBatch
    from rlsys.types import VersionSpan

    length = positions // GROUP_SIZE
    rest = (True,) * length, (0.0,) * length, (VersionSpan(0, length),)
    return MicroBatch.of([Sample((1,), tuple(range(i, i + length)), *rest) for i in range(GROUP_SIZE)])
