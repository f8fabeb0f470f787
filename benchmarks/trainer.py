"""Memory and time of a forward and backward with activation checkpointing, against one without; planned memory.

    python -m benchmarks.trainer [--quick | --short]

A model with SmolLM2-135M's sizes and random weights, in fp32 on one thread, and one micro-batch of groups that share a
prompt. `peak_mb` counts the bytes of tensors that are alive at once, beyond weights and gradients; `seconds` are CPU
time. Every measurement has a fresh process. Ratios are those of runs that follow each other.

`plan_error` compares `rlsys plan` with a measured step of a rank: backward of a second micro-batch and the update. It is
(planned - measured) / measured, of all memory (`total`) and of what comes on top of weights, gradients and moments
(`beyond_state`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from benchmarks.measure import Size, in_fresh_process, in_turn, parser_of, print_result, progress, ratios, spreads
from rlsys.config.schema import ActivationCheckpointing

if TYPE_CHECKING:
    from rlsys.batch.tensors import MicroBatch

Dtype: TypeAlias = Literal["float32", "bfloat16"]

REPEATS = {"full": 5, "quick": 1, "short": 1}
POSITIONS = {"full": 2048, "quick": 2048, "short": 64}
PLAN_POSITIONS = {"full": 1024, "quick": 1024, "short": 64}
GROUP_SIZE = 8
PROMPT = 64

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
PLANNED = tuple(MODELS)
LAYOUTS: tuple[tuple[int, Dtype], ...] = ((1, "float32"), (2, "bfloat16"))


def main() -> None:
    """Measure each way of checkpointing in turn; print the result line."""
    size: Size = parser_of(__doc__, quick="one repeat instead of five").parse_args().size

    def run(_: int, how: str) -> dict[str, float]:
        return in_fresh_process("benchmarks.trainer:measure", how, POSITIONS[size], 2 if size == "short" else 30)

    runs = in_turn(REPEATS[size], get_args(ActivationCheckpointing), run)
    over = {how: {what: ratios(each, runs["none"], what) for what in each[0]} for how, each in runs.items()}
    figures = {how: spreads(each) for how, each in runs.items()}
    errors = {}
    for model, (num_ranks, dtype), how in product(
        PLANNED[:1] if size == "short" else PLANNED, LAYOUTS, ("none", "full")
    ):
        case = f"{model}, {num_ranks} x {dtype}, {how}"
        errors[case] = in_fresh_process(
            "benchmarks.trainer:plan_error", model, num_ranks, dtype, how, PLAN_POSITIONS[size]
        )
        progress(f"{case}: {errors[case]}")
    print_result({"checkpointing": figures, "over_none": over, "positions": POSITIONS[size], "plan_error": errors})


def measure(how: ActivationCheckpointing, num_positions: int, num_layers: int) -> dict[str, float]:
    """Return `peak_mb` and `seconds` of one forward and backward over so many completion tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from workers.train.activations import checkpoint_layers
    from workers.train.logprobs import trained_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2 | {"num_hidden_layers": num_layers})).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    checkpoint_layers(model, how)
    batch, seconds = _group(num_positions), []

    def step() -> None:
        began = time.process_time()
        trained_logprobs(model, batch, 1.0)[0].sum().backward()
        seconds.append(time.process_time() - began)

    peak = peak_of(step)
    return {"peak_mb": peak / 2**20, "seconds": seconds[0]}


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
    from workers.train.memory_counts import CountedModel
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

    from workers.train.logprobs import Scorer
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup
    from workers.train.sharded import Sharded

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    scorer, ranks = Scorer(model), RankGroup(rank, num_ranks, address=address)
    settings = OptimizerSettings(lr=1e-5, total_steps=1)
    sharded = Sharded(model, scorer, settings, ranks, dtype, activation_checkpointing=how)
    batch = _group(positions, prompt=1)

    def backward() -> torch.Tensor:
        loss = -scorer(batch, 1.0)[0].mean()
        loss.backward()
        return loss.detach()

    backward()
    beyond = peak_of(lambda: sharded.update(backward(), "an update", 0) and None)
    weights = sum(shard.nbytes for shard in sharded.shards().values())
    return {"state": 4 * weights, "beyond_state": beyond}  # weights, gradients and two moments


def peak_of(compute: Callable[[], None]) -> int:
    """Return the most bytes of tensors on the CPU that are alive at once while `compute` runs, beyond those before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()  # pyrefly: ignore[missing-attribute]  (of C++)
        peak = max(peak, live)
    return peak


if __name__ == "__main__":
    main()
