"""Difference between sampler and trainer: SmolLM2, both engines, both types, two temperatures.

    python -m benchmarks.agreement [--quick | --short]

Each engine answers chat prompts. The trainer, built as in a run, makes one step on those tokens and reports its
`sampler/*` metrics: |difference| of logprobs, KL, percentiles of the importance ratio, effective sample size. Nothing
was trained in between, so rounding and kernels cause all of it. `--short` is the tiny sorter in float32 on the local
engine. One JSON object to the last line of stdout: `agreement`, by engine, type and temperature.
"""

from __future__ import annotations

import asyncio
import os
from itertools import product
from pathlib import Path

import torch

from algorithms.grpo import GRPO
from benchmarks.measure import Dtype, Size, engine_spec, group_of, parser_of, print_result, progress, smollm, sorter
from rlsys.algorithm import Aggregation, TrajectoryAdvantage
from rlsys.batch.packing import plan_batch
from rlsys.batch.tensors import StepData
from rlsys.data.task_file import load_tasks
from rlsys.types import Episode, Sampling, Trajectory, Turn
from workers.engines.engine import EngineName, Request
from workers.engines.engine_choice import start_engine
from workers.text.tokenizer import TextTokenizer
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup


def main() -> None:
    """Measure every combination and print the result line."""
    size: Size = parser_of(__doc__, quick="fewer prompts and tokens; about 2 minutes").parse_args().size
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    folder = sorter(size) if size == "short" else smollm()
    num_prompts, num_tokens = {"full": (24, 64), "quick": (8, 24), "short": (2, 4)}[size]
    rows: dict[str, dict[str, float]] = {}
    engines: tuple[EngineName, ...] = ("local",) if size == "short" else ("vllm", "local")
    dtypes: tuple[Dtype, ...] = ("float32",) if size == "short" else ("float32", "bfloat16")
    for engine, dtype in product(engines, dtypes):
        for temperature, episodes in asyncio.run(sampled(folder, engine, dtype, num_prompts, num_tokens)).items():
            name = f"{engine} {dtype} T={temperature:g}"
            rows[name] = compared(folder, episodes, dtype, temperature)
            progress(f"{name}: {rows[name]}")
    print_result({"agreement": rows})


async def sampled(
    folder: Path, engine: EngineName, dtype: Dtype, num_prompts: int, num_tokens: int
) -> dict[float, tuple[Episode, ...]]:
    """Sample one answer to each prompt, by temperature."""
    path = str(folder / "model")
    codec = TextTokenizer.load(path)
    spec = engine_spec(engine, path, dtype, slots=num_prompts, max_context=256)
    prompts = [codec.encode(task.prompt) for task in load_tasks(folder / "eval.jsonl")[:num_prompts]]
    loaded = await start_engine(spec, engine, stop_token_ids=frozenset(), device=torch.device("cpu"), worker=engine)
    answers: dict[float, tuple[Episode, ...]] = {}
    for temperature in (1.0, 0.7):
        sampling = Sampling(temperature=temperature, max_new_tokens=num_tokens)
        requests = [Request(f"{i}", ids, sampling, i) for i, ids in enumerate(prompts)]
        done = await asyncio.gather(*(loaded.generate(request) for request in requests))
        answers[temperature] = tuple(
            Episode((Trajectory("policy", (Turn(r.prompt_ids, d.output_ids, d.logprobs, d.versions, "length", ""),)),))
            for r, d in zip(requests, done, strict=True)
        )
    await loaded.close()
    return answers


def compared(folder: Path, episodes: tuple[Episode, ...], dtype: Dtype, temperature: float) -> dict[str, float]:
    """Return the sampler metrics of the trainer's first step on these tokens."""
    assigned = [TrajectoryAdvantage(e, 0, 1.0) for e in range(len(episodes))]
    plan = plan_batch([group_of(0, episodes)], [assigned], Aggregation(), num_ranks=1, max_tokens=2048)
    backend = FsdpBackend(str(folder / "model"), OptimizerSettings(lr=1e-6, total_steps=1), RankGroup(), dtype=dtype)
    data = StepData([episodes], [{}])
    metrics = backend.train_step(plan[0], data, GRPO(), temperature=temperature)
    return {
        name.removeprefix("sampler/"): float(f"{value:.3g}")
        for name, value in metrics.items()
        if name.startswith("sampler/") and "/s0/" not in name
    }


if __name__ == "__main__":
    main()
