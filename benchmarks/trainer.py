"""Memory and time of training: activation checkpointing, packed rows against padded matrices, and a bare loop.

    python -m benchmarks.trainer [--quick | --short]

A model with SmolLM2-135M's sizes and random weights, in fp32 on one thread; `seconds` are CPU time. Every measurement
has a fresh process. Ratios are those of runs that follow each other.

| figure | meaning |
| --- | --- |
| `checkpointing`, `over_none` | one micro-batch of samples with one prompt, by the way of activation checkpointing |
| `peak_mb` | bytes of tensors that are alive at once, beyond weights and gradients |
| `positions` | positions of planned rows per distinct token, by mean and sigma of log-normal lengths of completions |
| `packed_over_padded` | speed of forward and backward over the same samples: rows over padded matrices |
| `over_bare` | speed of a training step over that of a loop in PyTorch on the same rows |
| `plan_error` | memory of `rlsys plan` against that of a measured step, see `benchmarks.planned_memory` |
| `load_peak_over_shard` | peak memory of one of four ranks that loads bfloat16 files to fp32 shards, over the |
| | bytes of its shards and of the largest tensor |
| `all_gathers`, `reduce_scatters` | those of one layer and update of four micro-batches, as rank 0 of 64, counted |
| | with a process group that sends nothing, by `train.gather_weights` |
| `lora`, `lora_over_full` | a step and a publish of an adapter of rank 16, see `benchmarks.lora_step` |
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, get_args

from benchmarks.measure import Size, in_fresh_process, in_turn, parser_of, print_result, ratios, spreads
from benchmarks.packed_rows import positions_per_token, random_model
from rlsys.config.train_section import ActivationCheckpointing, GatherWeights
from rlsys.types import Distribution

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPEATS = {"full": 5, "quick": 1, "short": 1}
POSITIONS = {"full": 2048, "quick": 2048, "short": 64}
GROUP_SIZE = 8
PROMPT = 64
LOADING_RANKS = {"full": 4, "quick": 4, "short": 2}
MANY_RANKS = 64


def main() -> None:
    """Measure each way of checkpointing in turn; print the result line."""
    size: Size = parser_of(__doc__, quick="one repeat instead of five").parse_args().size

    def run(_: int, how: str) -> dict[str, float]:
        return in_fresh_process("benchmarks.trainer:measure", how, POSITIONS[size], num_layers)

    num_layers = 2 if size == "short" else 30
    runs = in_turn(REPEATS[size], get_args(ActivationCheckpointing), run)
    over = {how: {what: ratios(each, runs["none"], what) for what in each[0]} for how, each in runs.items()}
    figures = {how: spreads(each) for how, each in runs.items()}
    small = (1, 2) if size == "short" else (4, 30)
    ways = {"forward": ("packed", "padded"), "step": ("rlsys", "bare")}
    speeds: dict[str, dict[str, float | int]] = {}
    for what, both in ways.items():
        function = f"benchmarks.packed_rows:{what}_seconds"
        timed = in_turn(
            REPEATS[size], both, lambda repeat, who, f=function: {"s": in_fresh_process(f, who, *small, 1 + repeat)}
        )
        own, other = (timed[who] for who in both)
        speeds[what] = ratios(other, own, "s")
    collectives = {
        how: in_fresh_process("benchmarks.trainer:collectives_of_a_layer", how, 4) for how in get_args(GatherWeights)
    }
    print_result(
        {
            "checkpointing": figures,
            "over_none": over,
            "positions": positions_per_token(),
            "packed_over_padded": speeds["forward"],
            "over_bare": speeds["step"],
            "plan_error": in_fresh_process("benchmarks.planned_memory:plan_errors", size),
            **{name: {how: each[name] for how, each in collectives.items()} for name in collectives["update"]},
            **in_fresh_process("benchmarks.lora_step:lora_figures", size, REPEATS[size]),
            "load_peak_over_shard": in_fresh_process(
                "benchmarks.trainer:measure_load", num_layers, LOADING_RANKS[size]
            ),
        }
    )


def measure(how: ActivationCheckpointing, num_positions: int, num_layers: int) -> dict[str, float]:
    """Return `peak_mb` and `seconds` of one forward and backward over so many completion tokens."""
    import torch

    from rlsys.batch.samples import Sample
    from rlsys.batch.tensors import MicroBatch
    from rlsys.types import VersionSpan
    from workers.model.decoder_layers import checkpoint_layers
    from workers.model.logprobs import trained_logprobs

    torch.set_num_threads(1)
    model = random_model(num_layers).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    checkpoint_layers(model, how)
    length = num_positions // GROUP_SIZE
    versions = (VersionSpan(0, length),)
    samples = [
        Sample(tuple(range(PROMPT)), tuple(range(i, i + length)), (True,) * length, (0.0,) * length, versions)
        for i in range(GROUP_SIZE)
    ]
    batch, seconds = MicroBatch.of(samples), []

    def step() -> None:
        began = time.process_time()
        trained_logprobs(model, batch, Distribution(1.0))[0].sum().backward()
        seconds.append(time.process_time() - began)

    peak = peak_of(step)
    return {"peak_mb": peak / 2**20, "seconds": seconds[0]}


def measure_load(num_layers: int, num_ranks: int) -> float:
    """Return `load_peak_over_shard`."""
    from workers.train.rank_group import in_processes

    with TemporaryDirectory() as folder:
        random_model(num_layers).bfloat16().save_pretrained(folder)
        return in_processes(num_ranks, partial(_load, folder, num_ranks), "loading")


def _load(path: str, num_ranks: int, rank: int, address: str) -> float:
    """Load as one rank; return its peak over the bytes of its shards and of the largest tensor."""
    import torch
    from torch.distributed.tensor import DTensor

    from workers.model.logprobs import Scorer
    from workers.model.model_loading import CPU, load_model, outline
    from workers.train.layout import RankLayout
    from workers.train.rank_group import RankGroup

    torch.set_num_threads(1)
    ranks = RankGroup(rank, num_ranks, address=address)

    def lay_out(model: PreTrainedModel) -> None:
        RankLayout(ranks, torch.float32, CPU).apply(Scorer(model))

    lay_out(outline(path))  # imports all that loading needs
    with peak_memory() as peak:
        model = load_model(path, torch.float32, CPU, lay_out)
    weights = [weight.detach() for weight in model.parameters()]
    shards = sum(weight.to_local().nbytes for weight in weights if isinstance(weight, DTensor))
    ranks.close()
    return peak() / (shards + max(weight.nbytes for weight in weights))


def collectives_of_a_layer(gather: GatherWeights, num_micro_batches: int) -> dict[str, float]:
    """Return the all-gathers and reduce-scatters of one layer and update: what more layers add, as rank 0 of 64."""
    few, many = (_collectives(gather, num_micro_batches, num_layers) for num_layers in (1, 3))
    return {name: (many[name] - few[name]) / 2 for name in few}


def _collectives(gather: GatherWeights, num_micro_batches: int, num_layers: int) -> dict[str, int]:
    """Count the collectives of one update of a tiny model; gathered weights are not those of a model."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlsys.config.mesh_section import MeshSection
    from rlsys.config.train_section import MemorySavings
    from workers.model.model_loading import CPU
    from workers.train.layout import RankLayout
    from workers.train.rank_group import RankGroup

    found = {"all_gathers": 0, "reduce_scatters": 0}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
            found["all_gathers"] += func is torch.ops.c10d._allgather_base_.default
            found["reduce_scatters"] += func is torch.ops.c10d._reduce_scatter_base_.default
            return func(*args, **(kwargs or {}))

    ranks = RankGroup()
    ranks.num_ranks = MANY_RANKS
    dist.init_process_group("fake", rank=0, world_size=MANY_RANKS, store=FakeStore())
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=num_layers))
    ranks = ranks.with_mesh(MeshSection(shard=MANY_RANKS))
    layout = RankLayout(ranks, torch.float32, CPU, savings=MemorySavings(gather_weights=gather))
    layout.apply(model)
    with Counter():
        for place in range(num_micro_batches):
            layout.begin_pass(model, is_last=place == num_micro_batches - 1)
            model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    dist.destroy_process_group()
    return found


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Watch the process's anonymous memory; the result returns its peak in bytes beyond that at the start.

    Pages of mapped files do not count: the kernel drops them when memory is short.
    """
    start, ended = anonymous_bytes(), Event()
    found = [start]

    def watch() -> None:
        while not ended.wait(0.001):
            found.append(max(found[-1], anonymous_bytes()))

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield lambda: found[-1] - start
    finally:
        ended.set()
        watcher.join()


def anonymous_bytes() -> int:
    """Return the bytes of resident memory of this process that lie in no file."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096


def peak_of(compute: Callable[[], None]) -> int:
    """Return the most bytes of tensors on the CPU that are alive at once while `compute` runs, beyond those before."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # else what is freed meanwhile was allocated before
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
