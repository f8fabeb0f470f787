"""Engine benchmarks: tokens per second, overhead of the replica around an engine, weight changes, start-up.

    python -m benchmarks.engines [--quick | --short]

For the tiny sorter (float32) and SmolLM2 (bfloat16), with 1 and 2 threads, 1 to 64 requests of one group at once:
tokens per second of both engines as a run uses them, group in, group out, through a replica's Ray actor. Bare vLLM runs
the same requests in a plain loop in the same process. Both alternate, so that `wrapper_cost`, the share of speed that
the replica costs, compares neighbours in time. Tokens end by length only. `overlapping_over_plain`: speed of a replica
with vLLM's asynchronous scheduling over one without, in turns.

`weight_change`: a change to new weights in a replica with requests in flight: the stages of the change, and the time of
one copy of as many bytes in the replica's process. One shard has SmolLM2; two have a model of its layers with 8 heads,
because its 9 heads cannot be halved. `pause_over_memcpy` and `pause_tp2_over_memcpy` are the pauses over that copy;
`checksum_s` is the time in which one shard sums its weights beside decoding. `start_up_s`: seconds from a fresh process
to the first token, by phase. `--short` is the tiny sorter with one request on one shard of vLLM, and the start-up of
the local engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from shutil import copytree, ignore_patterns
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import ray

from benchmarks.measure import (
    Dtype,
    Size,
    engine_spec,
    in_fresh_process,
    parser_of,
    print_result,
    progress,
    smollm,
    sorter,
    spread,
    timed,
)
from rlsys.agents.workflow import SingleTurn
from rlsys.routing.requests import Request
from rlsys.types import POLICY, Assignment, GroupKey, Sampling, Task
from workers.engines.engine import Engine, EngineName
from workers.ray.cluster import Resources, connect
from workers.ray.fault_tolerant_pool import PoolSpec
from workers.ray.worker_process import Remote, start
from workers.rollout.replica_weights import WeightChange
from workers.rollout.rollout_pool import RolloutPool
from workers.rollout.rollout_worker import ReplicaSpec, RolloutSpec, RolloutWorker

if TYPE_CHECKING:
    from workers.engines.vllm.vllm_engine import VllmEngine

ENGINES: tuple[EngineName, ...] = ("vllm", "local")
FOLDER = Path(".cache/engines")
DEADLINE_S = 600.0
ENDS = {"tokenizer_config.json": "eos_token", "config.json": "eos_token_id", "generation_config.json": "eos_token_id"}
"""The end token in the files of a model. A chat template has one too."""


@dataclass(frozen=True, slots=True)
class Model:
    """Model to sample from, and the length of its samples."""

    name: str
    path: str
    dtype: Dtype
    prompt: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of the measurements."""

    threads: tuple[int, ...] = (1, 2)
    requests: tuple[int, ...] = (1, 8, 32, 64)
    engines: tuple[EngineName, ...] = ENGINES
    repeats: int = 3
    overlaps: int = 9
    """Repeats of overlapping steps beside others."""
    changes: int = 15
    shards: tuple[int, ...] = (1, 2)
    """Numbers of vLLM's shards whose weights change."""
    started: tuple[EngineName, ...] = ENGINES
    starts: int = 3


SCALES: Mapping[Size, Scale] = {
    "full": Scale(),
    "quick": Scale(threads=(1,), overlaps=5, changes=5, starts=1),
    "short": Scale(
        (1,),
        requests=(1,),
        engines=("vllm",),
        repeats=1,
        overlaps=1,
        changes=1,
        shards=(1,),
        started=("local",),
        starts=1,
    ),
}


class BenchWorker(RolloutWorker):
    """Replica with extra methods to measure its engine."""

    @property
    def _engine(self) -> Engine:
        return self.replica.replicas[POLICY]._engine

    async def bare(self, size: int, seed: int, num_tokens: int, prompt: str) -> float:
        """Return tokens per second of vLLM alone: the same requests, a plain loop, whole answers only."""
        assert self.sessions is not None
        codec, engine = self.sessions._roads[POLICY].text.codec, cast("VllmEngine", self._engine)
        return await asyncio.to_thread(_step_through, engine._llm, codec.encode(prompt), size, seed, num_tokens)

    async def change(self, model_path: str, dtype: str, repeats: int) -> dict[str, object]:
        """Measure staging, the pause, the checksums, and a copy of as many bytes; requests stay in flight."""
        import torch
        from safetensors.torch import load_file

        engine = self._engine
        stored = load_file(Path(model_path, "model.safetensors"))
        weights = {n: t.to(getattr(torch, dtype)) for n, t in stored.items()}
        num_bytes = sum(t.nbytes for t in weights.values())
        source, target = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
        seconds: dict[str, list[float]] = {"stage": [], "paused": [], "checksum": [], "memcpy": []}
        ended = asyncio.Event()

        async def keep_sampling(request: Request) -> None:
            while not ended.is_set():
                await engine.generate(request)

        requests = [Request(f"{i}", (5, 6, 7), Sampling(max_new_tokens=400), i) for i in range(8)]
        running = [asyncio.create_task(keep_sampling(request)) for request in requests]
        for version in range(1, repeats + 2):
            with timed(seconds["stage"]):
                await engine.stage(weights)
            await engine.pause()
            with timed(seconds["paused"]):
                await engine.load(version, weights)
                await engine.resume()
            with timed(seconds["checksum"]):
                await engine.checksums()
            await engine.pause()
            with timed(seconds["memcpy"]):
                target.copy_(source)
            await engine.resume()
        ended.set()
        for request in requests:
            engine.abort(request.id)
        await asyncio.gather(*running)
        later = {name: times[1:] for name, times in seconds.items()}  # the first change builds objects that stay
        ratios = [paused / copy for paused, copy in zip(later["paused"], later["memcpy"], strict=True)]
        times = {f"{name}_ms": spread([1e3 * s for s in of_name]) for name, of_name in later.items()}
        return {"pause_over_memcpy": spread(ratios), **times, "megabytes": num_bytes / 1e6}


def _step_through(llm: Any, ids: tuple[int, ...], size: int, seed: int, num_tokens: int) -> float:  # noqa: ANN401
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    torch.get_num_threads()  # sets OpenMP's thread count for this thread, before vLLM reads it
    began, count = time.perf_counter(), 0
    for i in range(size):
        params = SamplingParams(
            max_tokens=num_tokens, seed=seed + i, logprobs=0, detokenize=False, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        llm.add_request(f"bare {seed} {i}", {"prompt_token_ids": list(ids)}, params)
    while llm.has_unfinished_requests():
        count += sum(len(output.outputs[0].token_ids) for output in llm.step())
    return count / (time.perf_counter() - began)


def main() -> None:
    """Measure everything and print the result line."""
    size = parser_of(__doc__, quick="one thread, fewer tokens and repeats; about 5 minutes").parse_args().size
    scale, models = SCALES[size], prepared(size)
    connect(None, 4)
    figures = asyncio.run(replicas(models, scale))
    ray.shutdown()
    seconds = {f"{m.name} {e}": start_up(m, e, scale.starts) for m in models for e in scale.started}
    print_result({**figures, "start_up_s": seconds})


def prepared(size: Size) -> list[Model]:
    """Prepare the models, without an end token."""
    tokens = 64 if size == "full" else 32
    tiny = Model("tiny", _endless("tiny", sorter(size) / "model"), "float32", "493817>", tokens)
    if size == "short":
        return [tiny]
    path = _endless("smollm", smollm() / "model")
    return [tiny, Model("smollm", path, "bfloat16", "Count: 1, 2,", tokens // 2)]


def _endless(name: str, model: Path) -> str:
    folder = FOLDER / name
    copytree(model, folder, dirs_exist_ok=True, ignore=ignore_patterns("chat_template.jinja"))
    for name, key in ENDS.items():
        if (file := folder / name).exists():
            file.write_text(json.dumps({**json.loads(file.read_text()), key: None}))
    return str(folder)


def with_even_heads(model: Model) -> Model:
    """A model like SmolLM2, with random weights, 8 attention heads and 4 heads of keys."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = FOLDER / "even_heads"
    copytree(model.path, folder, dirs_exist_ok=True, ignore=ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(model.path, hidden_size=512, num_attention_heads=8, num_key_value_heads=4)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return replace(model, name="even heads", path=str(folder))


async def replicas(models: list[Model], scale: Scale) -> dict[str, object]:
    """Measure every model on every engine, and the changes of vLLM's weights for the last model."""
    rates, costs, changes = {}, {}, {}
    for model, threads, engine in product(models, scale.threads, scale.engines):
        key = f"{model.name} {engine} {threads} threads"
        async with replica(model, engine, threads) as pool:
            rates[key], cost = await speed(pool, model, engine, scale)
        costs |= {f"{key} x{size}": value for size, value in cost.items()}
        progress(f"{key}: {rates[key]}, cost {cost}")
    for shards in scale.shards:
        model = models[-1] if shards == 1 else with_even_heads(models[-1])
        async with replica(model, "vllm", 1, shards) as pool:
            changes[shards] = await _worker(pool).call(BenchWorker.change, model.path, model.dtype, scale.changes)
        progress(f"{model.name}, {shards} shards: {changes[shards]}")
    overlaps = {}
    for model in models:
        overlaps[model.name] = await overlapping(model, scale)
        progress(f"{model.name}, overlapping steps: {overlaps[model.name]}")
    one, two = changes[1], changes.get(2)
    return {
        "tokens_per_s": rates,
        "wrapper_cost": costs,
        "wrapper_cost_median": median(costs.values()),
        "overlapping_over_plain": overlaps,
        "weight_change": changes,
        "pause_over_memcpy": one["pause_over_memcpy"],
        "pause_tp2_over_memcpy": two and two["pause_over_memcpy"],
        "checksum_s": {of: ms / 1e3 if of != "repeats" else ms for of, ms in one["checksum_ms"].items()},
    }


@asynccontextmanager
async def replica(
    model: Model, engine: EngineName, threads: int, shards: int = 1, *, overlaps: bool = False
) -> AsyncIterator[RolloutPool]:
    """Start a pool of one replica, as in a run, or with vLLM's asynchronous scheduling."""
    arguments = {"async_scheduling": True} if overlaps else {}
    sampler = replace(engine_spec(engine, model.path, model.dtype), tensor_parallel=shards, vllm_args=arguments)
    own = ReplicaSpec(engine=sampler, change=WeightChange("inflight", 1.0), pulls="never")
    spec = RolloutSpec(
        policies={POLICY: own}, sampling=Sampling(max_new_tokens=model.num_tokens), max_prompt_tokens=64,
        workflow=SingleTurn(), resources=Resources(num_cpus=1, threads=threads), group_s=DEADLINE_S, max_losses=1,
    )  # fmt: skip

    def one(name: str) -> Remote[RolloutWorker]:
        return start(BenchWorker, name, partial(BenchWorker.of, name, spec, {}, plays=True), spec.resources, DEADLINE_S)

    pool = RolloutPool(PoolSpec(1, one, DEADLINE_S, DEADLINE_S, max_attempts=1))
    await pool.ready()
    yield pool
    await pool.close()


def _worker(pool: RolloutPool) -> Remote[BenchWorker]:
    return cast("Remote[BenchWorker]", pool.members[0].worker)


async def speed(
    pool: RolloutPool, model: Model, engine: EngineName, scale: Scale
) -> tuple[dict[str, dict[str, float]], dict[int, float]]:
    """Measure tokens per second by number of requests, through the actor and (vLLM) bare, and the actor's share."""
    rates: dict[str, dict[str, float]] = {"actor": {}, "bare": {}}
    costs: dict[int, float] = {}
    for size in scale.requests:
        actor, bare = [], []
        for repeat in range(scale.repeats + 1):
            seed = 1000 * size + 100 * repeat
            actor.append(await rate(pool, model, size, seed))
            if engine == "vllm":
                asked = (size, seed, model.num_tokens, model.prompt)
                bare.append(await _worker(pool).call(BenchWorker.bare, *asked))
        rates["actor"][str(size)] = round(median(actor[1:]), 1)
        if bare:
            rates["bare"][str(size)] = round(median(bare[1:]), 1)
            costs[size] = round(1 - median(a / b for a, b in zip(actor[1:], bare[1:], strict=True)), 4)
    return rates, costs


async def rate(pool: RolloutPool, model: Model, size: int, seed: int) -> float:
    """Measure tokens per second of one group through the actor."""
    began = time.perf_counter()
    done = await pool.run(Assignment(GroupKey(seed, 1), Task(id="t", prompt=model.prompt), size, 0, seed))
    num_tokens = sum(span.num_tokens for span in done[0].versions)
    assert num_tokens == size * model.num_tokens, "a sample ended early"
    return num_tokens / (time.perf_counter() - began)


async def overlapping(model: Model, scale: Scale) -> dict[str, dict[str, float | int]]:
    """Measure two replicas of vLLM in turn, by number of requests: speed with overlapping steps over that without."""
    ratios: dict[str, list[float]] = {str(size): [] for size in scale.requests}
    async with replica(model, "vllm", 1) as plain, replica(model, "vllm", 1, overlaps=True) as other:
        for size, repeat in product(scale.requests, range(-1, scale.overlaps)):
            seed = 1000 * size + 100 * repeat
            speeds = [await rate(pool, model, size, seed) for pool in (plain, other)]
            if repeat >= 0:  # the first repeat warms up
                ratios[str(size)].append(speeds[1] / speeds[0])
    return {size: spread(values) for size, values in ratios.items()}


def start_up(model: Model, engine: str, repeats: int) -> Mapping[str, float]:
    """Measure the median seconds of each phase in fresh processes."""
    function = "benchmarks.engines:start_engine_once"
    runs = [in_fresh_process(function, engine, model.path, model.dtype) for _ in range(repeats)]
    return {phase: round(median(run[phase] for run in runs), 2) for phase in runs[0]}


def start_engine_once(engine: EngineName, path: str, dtype: Dtype) -> dict[str, float]:
    """Measure the seconds of importing (from the start of this fresh process), building, and the first token."""
    import psutil
    import torch

    from workers.engines.engine_choice import start_engine

    if engine == "vllm":
        import vllm.v1.engine.llm_engine  # noqa: F401
    imported = time.perf_counter()
    began = imported - (time.time() - psutil.Process().create_time())

    async def start_and_answer() -> tuple[float, float]:
        spec, device = engine_spec(engine, path, dtype), torch.device("cpu")
        loaded = await start_engine(spec, engine, stop_token_ids=frozenset(), device=device, worker=engine)
        built = time.perf_counter()
        await loaded.generate(Request("a", (5, 6, 7), Sampling(max_new_tokens=1), 0))
        answered = time.perf_counter()
        await loaded.close()
        return built, answered

    built, first = asyncio.run(start_and_answer())
    return {"import": imported - began, "build": built - imported, "first_token": first - built, "all": first - began}


if __name__ == "__main__":
    main()
