"""Part of `benchmarks.trainer`: the memory that `rlsys plan` counts against that of a measured step.

The step is the backward of a second micro-batch and the update, on one rank. An error is planned / measured - 1, of all
memory (`total`) and of what comes on top of weights, gradients and moments (`beyond_state`).
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Dtype, Size, in_fresh_process, progress
from benchmarks.trainer import GROUP_SIZE, PROMPT, peak_of

if TYPE_CHECKING:
    from rlsys.batch.tensors import MicroBatch
    from rlsys.config.train_section import ActivationCheckpointing

POSITIONS = {"full": 1024, "quick": 1024, "short": 64}
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4_096, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SMALL},
    "smollm2": {"model_type": "llama", **SMOLLM2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **SMALL, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
    },
}  # fmt: skip
LAYOUTS: tuple[tuple[int, Dtype], ...] = ((1, "float32"), (2, "bfloat16"))


def plan_errors(size: Size) -> dict[str, dict[str, float]]:
    """Return the errors for every model, layout and way of checkpointing."""
    errors = {}
    models, ways = (["qwen3"], ["none"]) if size == "short" else ([*MODELS], ["none", "full"])
    for model, (num_ranks, dtype), how in product(models, LAYOUTS, ways):
        case = f"{model}, {num_ranks} x {dtype}, {how}"
        errors[case] = in_fresh_process(
            "benchmarks.planned_memory:plan_error", model, num_ranks, dtype, how, POSITIONS[size]
        )
        progress(f"{case}: {errors[case]}")
    return errors


def _group(num_positions: int, prompt: int = PROMPT) -> MicroBatch:
    """Build the micro-batch of one group, with so many completion tokens that are all trained."""
    from rlsys.batch.samples import Sample
    from rlsys.batch.tensors import MicroBatch
    from rlsys.types import VersionSpan

    length = num_positions // GROUP_SIZE
    versions = (VersionSpan(0, length),)
    return MicroBatch.of(
        [
            Sample(tuple(range(prompt)), tuple(range(i, i + length)), (True,) * length, (0.0,) * length, versions)
            for i in range(GROUP_SIZE)
        ]
    )


def plan_error(
    model: str, num_ranks: int, dtype: Dtype, how: ActivationCheckpointing, positions: int
) -> dict[str, float]:
    """Return the relative errors of the plan of one rank, `total` and `beyond_state`."""
    import torch
    from transformers import AutoConfig

    from rlsys.config.memory_plan import rank_memory
    from workers.model.memory_counts import CountedModel
    from workers.train.rank_group import in_processes

    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        AutoConfig.for_model(**MODELS[model]).save_pretrained(folder)
        counted = CountedModel(folder)
        step = counted.step(dtype, how, positions, has_head=True)
        value_bytes = getattr(torch, dtype).itemsize
        planned = rank_memory(counted.sizes, step, shards=num_ranks, positions=positions, value_bytes=value_bytes)
        work = partial(_rank_step, folder, num_ranks, dtype, how, positions)
        measured = in_processes(num_ranks, work, "measuring") if num_ranks > 1 else work(0, "")
    state, beyond = measured["state"], measured["beyond_state"]
    planned_state = planned.weights + planned.gradients + planned.optimizer
    return {
        "total": planned.total / (state + beyond) - 1,
        "beyond_state": (planned.total - planned_state) / beyond - 1,
        "measured_mb": (state + beyond) / 2**20,
    }


def _rank_step(
    folder: str, num_ranks: int, dtype: Dtype, how: ActivationCheckpointing, positions: int, rank: int, address: str
) -> dict[str, int]:
    """Measure the second micro-batch and the update of one rank; return bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlsys.config.train_section import MemorySavings
    from rlsys.types import Distribution
    from workers.model.logprobs import Scorer
    from workers.model.model_loading import CPU
    from workers.train.layout import RankLayout
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup
    from workers.train.sharded import Sharded

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    scorer, ranks = Scorer(model), RankGroup(rank, num_ranks, address=address)
    layout = RankLayout(ranks, getattr(torch, dtype), CPU, MemorySavings(how))
    layout.apply(scorer)
    settings = OptimizerSettings(lr=1e-5, total_steps=1)
    sharded = Sharded(model, scorer, settings, layout)
    batch = _group(positions, prompt=1)

    def backward() -> torch.Tensor:
        loss = -scorer(batch, Distribution())[0].mean()
        loss.backward()
        return loss.detach()

    backward()

    def step() -> None:
        sharded.update(backward(), "an update", 0)

    beyond = peak_of(step)
    weights = sum(shard.nbytes for shard in sharded.shards().values())
    return {"state": 4 * weights, "beyond_state": beyond}  # weights, gradients and two moments
