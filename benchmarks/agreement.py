"""Difference between sampler and trainer: SmolLM2, both engines, both types, two temperatures; and random experts.

    python -m benchmarks.agreement [--quick | --short]

Each engine answers chat prompts. The trainer, built as in a run, makes one step on those tokens and reports its
`sampler/*` metrics: |difference| of logprobs, KL, percentiles of the importance ratio, effective sample size. Nothing
was trained in between, so rounding and kernels cause all of it. `--short` is the tiny sorter in float32 on the local
engine. `experts` is a random model whose layers choose 8 of 64 experts, on the local engine in bfloat16: the trainer
trains on the engine's experts (`train.routing_replay`) or on its own.
One JSON object to the last line of stdout: `agreement`, by engine, type and temperature, and `experts`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from algorithms.grpo import GRPO
from benchmarks.measure import Dtype, Size, engine_spec, group_of, parser_of, print_result, progress, smollm, sorter
from rlsys.algorithm import Aggregation, TrajectoryAdvantage
from rlsys.batch.packing import plan_batch
from rlsys.batch.tensors import StepData
from rlsys.data.task_file import load_tasks
from rlsys.routing.requests import Completion, Request
from rlsys.types import Distribution, Episode, Sampling, Trajectory, Turn
from workers.engines.engine import EngineName, EngineSpec
from workers.engines.engine_choice import start_engine
from workers.text.tokenizer import TextTokenizer
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup

PROMPT = 32
"""Random tokens of a prompt of `experts`."""
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "initializer_range": 0.08,
    "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    """Measure every combination and print the result line."""
    size: Size = parser_of(__doc__, quick="fewer prompts and tokens; about 2 minutes").parse_args().size
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    folder = sorter(size) if size == "short" else smollm()
    num_prompts, num_tokens = {"full": (24, 64), "quick": (8, 24), "short": (2, 4)}[size]
    path, prompts = str(folder / "model"), prompts_of(folder, num_prompts)
    rows: dict[str, dict[str, float]] = {}
    engines: tuple[EngineName, ...] = ("local",) if size == "short" else ("vllm", "local")
    dtypes: tuple[Dtype, ...] = ("float32",) if size == "short" else ("float32", "bfloat16")
    for engine, dtype in product(engines, dtypes):
        spec = engine_spec(engine, path, dtype, slots=num_prompts, max_context=256)
        for temperature, episodes in asyncio.run(sampled(spec, prompts, num_tokens, [1.0, 0.7])).items():
            name = f"{engine} {dtype} T={temperature:g}"
            rows[name] = compared(path, episodes, dtype, temperature)
            progress(f"{name}: {rows[name]}")
    print_result({"agreement": rows, "experts": with_experts(size)})


def with_experts(size: Size) -> dict[str, dict[str, float]]:
    """Compare a random model with experts, with and without replay."""
    sizes: dict[str, Any] = {**EXPERTS, **({"num_hidden_layers": 2, "num_experts": 16} if size == "short" else {})}
    num_prompts, num_tokens = {"full": (32, 128), "quick": (8, 64), "short": (2, 8)}[size]
    torch.manual_seed(0)
    random_ids = torch.randint(sizes["vocab_size"], (num_prompts, PROMPT))
    prompts = [tuple(ids) for ids in random_ids.tolist()]
    with TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder)
        spec = replace(engine_spec("local", folder, "bfloat16", slots=num_prompts), records_routing=True)
        episodes = asyncio.run(sampled(spec, prompts, num_tokens, [1.0]))[1.0]
        return {
            name: compared(folder, episodes, "bfloat16", 1.0, replays_routing=is_on)
            for name, is_on in (("replayed", True), ("own", False))
        }


def prompts_of(folder: Path, number: int) -> list[tuple[int, ...]]:
    """Encode the prompts of an example's evaluation."""
    codec = TextTokenizer.load(str(folder / "model"))
    return [codec.encode(task.prompt) for task in load_tasks(folder / "eval.jsonl")[:number]]


async def sampled(
    spec: EngineSpec, prompts: Sequence[tuple[int, ...]], num_tokens: int, temperatures: Sequence[float]
) -> dict[float, tuple[Episode, ...]]:
    """Sample one answer to each prompt, by temperature."""
    engine: EngineName = "vllm" if spec.engine == "vllm" else "local"
    loaded = await start_engine(spec, engine, stop_token_ids=frozenset(), device=torch.device("cpu"), worker=engine)
    answers: dict[float, tuple[Episode, ...]] = {}
    for temperature in temperatures:
        sampling = Sampling(temperature=temperature, max_new_tokens=num_tokens)
        requests = [Request(f"{i}", ids, sampling, i) for i, ids in enumerate(prompts)]
        done = await asyncio.gather(*(loaded.generate(request) for request in requests))
        answers[temperature] = tuple(
            Episode((Trajectory("policy", (_turn(*each),)),)) for each in zip(requests, done, strict=True)
        )
    await loaded.close()
    return answers


def _turn(request: Request, done: Completion) -> Turn:
    return Turn(request.prompt_ids, done.output_ids, done.logprobs, done.versions, "length", "", routing=done.routing)


def compared(
    path: str, episodes: tuple[Episode, ...], dtype: Dtype, temperature: float, *, replays_routing: bool = False
) -> dict[str, float]:
    """Return the sampler metrics of the trainer's first step on these tokens."""
    assigned = [TrajectoryAdvantage(e, 0, 1.0) for e in range(len(episodes))]
    plan = plan_batch([group_of(0, episodes)], [assigned], Aggregation(), num_ranks=1, max_tokens=2048)
    backend = FsdpBackend(
        path, OptimizerSettings(lr=1e-6, total_steps=1), RankGroup(), dtype=dtype, replays_routing=replays_routing
    )
    data = StepData([episodes], [{}])
    metrics = backend.train_step(plan[0], data, GRPO(), distribution=Distribution(temperature))
    return {
        name.removeprefix("sampler/"): float(f"{value:.3g}")
        for name, value in metrics.items()
        if name.startswith("sampler/") and "/s0/" not in name
    }


if __name__ == "__main__":
    main()
