"""vLLM as an engine: its synchronous `LLMEngine`, stepped by one thread in the process of the rollout replica.

The scheduler runs in this process. So a weight change is a function call between two steps, and the version of every
token is known. With `tensor_parallel` > 1, only the shards are separate processes.

With asynchronous scheduling, vLLM submits a step while the one before is computed, and returns its tokens one call
later. A pause takes the tokens of all submitted steps before it returns. So the weights change while no step is in
flight, and every token carries the version that sampled it, also with adapters and shards.
"""

from __future__ import annotations

import os
from asyncio import Future, get_running_loop
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlsys.errors import ConfigError, ModelError, WorkerDied
from rlsys.types import EngineStats, PolicyVersion
from rlsys.util.seeds import continuation_seed
from rlsys.weight_sync.manifest import TensorSpec
from workers.engines.engine import EngineSpec, ModelShapes, check_weights
from workers.engines.stepping import EngineJob, SteppingEngine
from workers.engines.stop_texts import StopTexts
from workers.engines.vllm.vllm_layout import sum_checksums
from workers.engines.vllm.vllm_lora import VllmAdapters
from workers.engines.vllm.vllm_shards import OwnShard, ShardProcesses, Shards
from workers.model.checkpoint_names import checkpoint_tensors
from workers.model.decoder_layers import num_cached_values
from workers.model.lora import add_adapter
from workers.model.model_loading import num_known_ids, outline
from workers.model.routers import Routers
from workers.transport.buckets import specs_in

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.llm_engine import LLMEngine

CPU_BLOCK_TOKENS = 32
"""Tokens of one cache block on the CPU: the unit of prefix reuse, and vLLM's minimum."""
ALWAYS: Mapping[str, Any] = {
    "worker_extension_cls": "workers.engines.vllm.vllm_weights.WeightLoading",
    "scheduling_policy": "priority",
    "pipeline_parallel_size": 1,
    "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
    "generation_config": "vllm",  # the request sets the sampling, not a file of the model
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
    "trust_remote_code": False,
}
"""Arguments of every engine.

`async_scheduling` is not among them: vLLM chooses. On a GPU it is on, which never ran, except with routing replay. On a
CPU it is off, because a lone shard computes a step in the call that submits it. `vllm_args` may turn it on there too:
the tokens are the same, and come no faster.
"""
ON_CPU: Mapping[str, Any] = {
    "enforce_eager": True,
    "block_size": CPU_BLOCK_TOKENS,
    # Prefill in chunks samples once per chunk, and vLLM cannot undo the effect on a generator on the CPU.
    "enable_chunked_prefill": False,
}
CPU_PREFILL_TOKENS = 2048
"""Prompt tokens of one step on the CPU, unless one prompt of full length needs more."""
OVERRIDABLE = {"enforce_eager", "block_size", "kv_cache_memory_bytes", "max_num_batched_tokens"}
"""Keys that `vllm_args` may override although rlsys sets them."""
SCORING_FIRST = -1
"""vLLM's priority of scoring requests; others have 0, and the lowest goes first."""

OTHERWISE = {"cohere2"}
"""Types of models whose logprobs in vLLM 0.32 differ from those of the Transformers library, as `benchmarks.families`
shows."""


class VllmEngine(SteppingEngine):
    """Samples from the model at `model_path`.

    A continued request gets a new generator, seeded with its seed and position. Its tokens differ from those of an
    uninterrupted request, but have the same distribution. Greedy tokens are equal.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        stop_token_ids: frozenset[int],
        decode: Callable[[tuple[int, ...]], str] | None = None,
        device: torch.device,
        version: PolicyVersion = 0,
        name: str,
    ) -> None:
        """`decode` gives the text of token ids; without it, requests must have no stop texts.

        Raises `ModelError` if vLLM does not support the model, `ConfigError` if it does not support an argument."""
        model = self._outline = outline(spec.model_path)
        self._adapters = VllmAdapters(model, spec.lora, spec.model_path, spec.resident_versions) if spec.lora else None
        self._routers = Routers(model) if spec.records_routing else None
        if self._routers and device.type == "cpu":
            raise ConfigError(
                "train.routing_replay: vLLM records no experts on a CPU; use rollout.engine: local, or a GPU"
            )
        if self._routers and "speculative_config" in spec.vllm_args:
            raise ConfigError("rollout.vllm_args: speculative_config does not go with train.routing_replay")
        kind = model.config.get_text_config().model_type
        if kind in OTHERWISE:
            raise ModelError(f"vLLM computes other logprobs than the trainer for {kind}; use rollout.engine=local")
        sequences = spec.slots + 1  # one more, for scoring
        self._sleeps = spec.shares_device and device.type == "cuda"
        ours: dict[str, Any] = {
            "model": spec.model_path,
            **({"enable_sleep_mode": True} if self._sleeps else {}),
            "dtype": spec.dtype,
            "max_model_len": spec.max_context,
            "max_num_seqs": sequences,
            "tensor_parallel_size": spec.tensor_parallel,
            "distributed_executor_backend": "uni" if spec.tensor_parallel == 1 else "mp",
            **(self._adapters.arguments if self._adapters else {}),
            **({"enable_return_routed_experts": True, "async_scheduling": False} if self._routers else {}),
        }
        if device.type == "cpu":
            ours |= ON_CPU
            ours["max_num_batched_tokens"] = max(CPU_PREFILL_TOKENS, spec.max_context)
            ours["kv_cache_memory_bytes"] = _kv_bytes(model.config.get_text_config(), spec, sequences)
        self._llm = _start(device, ours, spec.vllm_args)
        if spec.lora:
            add_adapter(model, spec.lora, spec.model_path)
        self._shapes = ModelShapes.of(model, getattr(torch, spec.dtype))
        if self._adapters:  # requests name an adapter from the first one on: it starts without effect
            zeros = {name: torch.zeros(shape) for name, shape in self._shapes.known.items()}
            self._adapters.load(self._llm, version, zeros)
        self._jobs: dict[str, EngineJob] = {}
        self._scoring: dict[str, tuple[Future[tuple[float, ...]], PolicyVersion]] = {}
        self._num_requests = self._num_tokens = self._num_cached = self._num_loads = 0
        self._loads: dict[PolicyVersion, int] = {version: 0}  # replaced, not mutated: another thread reads it
        """The loaded versions, oldest first, and the number of the load of each."""
        self._specs: tuple[TensorSpec, ...] = ()
        """Of the newest weights, as they were published."""
        self._staged: Mapping[str, Tensor] | None = None
        """The weights that are ready to be loaded."""
        self._shards: Shards = OwnShard(self._llm, name)
        if spec.tensor_parallel > 1:
            self._shards = ShardProcesses(self._llm, name, spec.tensor_parallel, spec.load_s, self._ask)
        num_vocab = model.get_input_embeddings().get_parameter("weight").shape[0]
        if (num_ids := num_known_ids(spec.model_path) or num_vocab) < num_vocab:
            self._llm.collective_rpc("rlsys_limit_ids", args=(num_ids,))
        super().__init__(
            name,
            spec,
            version=version,
            num_vocab=num_vocab,
            stop_token_ids=stop_token_ids,
            stop_texts=StopTexts(decode),
        )

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        return tuple(self._loads)

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.stage`: on a CPU, every shard lays out a second set of its weights, in a separate thread. An
        adapter, which is small, only waits for room."""
        await self._stage(weights, ends_pause=False)

    async def _stage(self, weights: Mapping[str, Tensor], *, ends_pause: bool) -> None:
        if self._staged is weights:
            return
        check_weights(self._name, weights, self._shapes)
        self._staged = None
        if self._spec.resident_versions > 1:
            await self._find_room()
        if self._adapters is None:
            if self._llm.model_config.using_transformers_backend():
                raise ModelError(
                    f"vLLM has no model of its own for {self._spec.model_path!r}, and runs it by the Transformers "
                    "library, where its weights cannot be changed; use rollout.engine=local"
                )
            specs = [TensorSpec(n, self._spec.dtype, self._shapes.known[n]) for n in sorted(self._shapes.required)]
            prepare = partial(self._llm.collective_rpc, "rlsys_prepare", args=(specs, self._outline.config))
            async with self._on_device(ends_pause=ends_pause):
                await self._ask("preparing for weights", prepare, self._spec.load_s)
                await self._shards.stage(checkpoint_tensors(self._outline, weights))
        self._staged = weights

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        self._check_open(f"loading version {version}")
        if self._spec.resident_versions == 1:
            await self._stage(weights, ends_pause=True)
        else:  # the pause is no time to wait for room
            check_weights(self._name, weights, self._shapes)
        async with self._on_device(ends_pause=True):
            await self._ask(f"loading version {version}", partial(self._load, version, weights), self._spec.load_s)

    async def checksums(self) -> Mapping[TensorSpec, int]:
        """See `Engine.checksums`. Left out are tensors that vLLM computes with while loading them, and those of layers
        that keep their weights in another form than their loader's, as experts on CUDA do: only the probe covers them.
        """
        self._check_open("computing checksums")
        if not self._specs:
            return {}
        first_names = (self._shapes.first_names[spec.name] for spec in self._specs)
        firsts = [TensorSpec(name, spec.dtype, spec.shape) for name, spec in zip(first_names, self._specs, strict=True)]
        async with self._on_device():
            if self._adapters:
                parts = await self._adapters.part_sums(self._shards, self._version)
            else:
                read_back = partial(self._llm.collective_rpc, "rlsys_read_back")
                await self._ask("reading packed weights", read_back, self._spec.load_s)
                dtypes = {spec.name: spec.dtype for spec in firsts}
                parts = await self._shards.call("computing checksums", "rlsys_checksums", dtypes)
        sums = sum_checksums(parts, firsts)
        return {spec: sums[first] for spec, first in zip(self._specs, firsts, strict=True) if first in sums}

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        future: Future[tuple[float, ...]] = get_running_loop().create_future()
        async with self._on_device():
            self._post(partial(self._add_scoring, token_ids, future), future, "scoring tokens")
            return await future

    def stats(self) -> EngineStats:
        _, num_queued = self._core.scheduler.get_request_counts()  # waiting for cache blocks, or for a first step
        num_queued = min(num_queued, len(self._jobs))
        return EngineStats(
            num_running=len(self._jobs) - num_queued,
            num_waiting=len(self._waiting) + num_queued,
            kv_used=self._core.scheduler.kv_cache_manager.usage,
            num_tokens=self._num_tokens,
            num_cached_tokens=self._num_cached,
            step_age_s=self.step_age_s,
        )

    # ------------------------------------------------------------------------------------------- on the step thread

    @property
    def _core(self) -> Any:  # noqa: ANN401  (vLLM's own type)
        return self._llm.engine_core.engine_core  # pyrefly: ignore[missing-attribute]

    def _running(self) -> Iterable[EngineJob]:
        return self._jobs.values()

    def _is_busy(self) -> bool:
        return bool(self._jobs or self._scoring)

    def _advance(self) -> None:
        while self._waiting and len(self._jobs) < self._spec.slots:
            self._add(self._waiting.popleft())
        if self._is_busy():
            self._step()

    def _step(self) -> None:
        """Submit a step unless vLLM's scheduler is paused, and take the tokens of one that has ended."""
        for output in self._llm.engine_core.get_output().outputs:
            self._take(output)

    def _set_paused(self, is_paused: bool) -> None:
        super()._set_paused(is_paused)
        self._set_held(is_held=is_paused or self._is_asleep)

    def _set_held(self, *, is_held: bool) -> None:
        """Hold vLLM's scheduler, so that it submits no step, and take the tokens of those in flight; or free it."""
        from vllm.v1.core.sched.interface import PauseState

        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL if is_held else PauseState.UNPAUSED)
        while is_held and self._core.batch_queue:
            self._step()

    def _add(self, job: EngineJob) -> None:
        from vllm import SamplingParams

        request, sampling = job.request, job.request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_new_tokens - request.num_begun,
            seed=(continuation_seed(request.seed, request.num_begun) if request.num_begun else request.seed) % 2**63,
            logprobs=0,
            stop_token_ids=sorted(self._limits.stop_token_ids),
            ignore_eos=True,  # a request ends only at the configured stop tokens, not at those of the model's files
            detokenize=False,
            routed_experts_prompt_start=len(request.prompt_ids) + request.num_begun - 1 if request.num_begun else 0,
        )
        version = request.version_among(self.versions, self._version)
        name = self._send(request.prompt_ids + request.given_ids, params, version)
        job.marks.append((0, version))
        self._jobs[name] = job

    def _add_scoring(self, token_ids: tuple[int, ...], future: Future[tuple[float, ...]]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            routed_experts_prompt_start=len(token_ids),
        )
        name = self._send(token_ids, params, self._version, priority=SCORING_FIRST)
        self._scoring[name] = future, self._version

    def _send(self, ids: tuple[int, ...], params: SamplingParams, version: PolicyVersion, priority: int = 0) -> str:
        """Send a request under the weights of `version` to vLLM. Returns its id there."""
        from vllm.inputs import TokensPrompt

        self._num_requests += 1
        name = str(self._num_requests)
        # The salt separates the prefix caches of loads: two loads may give one version different weights.
        prompt = TokensPrompt(prompt_token_ids=list(ids), cache_salt=f"load {self._loads[version]}")
        request = self._llm.input_processor.process_inputs(
            name,
            prompt,
            params,
            supported_tasks=self._llm.get_supported_tasks(),
            priority=priority,
            lora_request=self._adapters.request(version) if self._adapters else None,
        )
        self._llm.engine_core.add_request(request)
        return name

    def _take(self, output: EngineCoreOutput) -> None:
        if output.request_id in self._scoring:
            self._take_score(output)
            return
        job = self._jobs[output.request_id]
        ids = output.new_token_ids
        if ids:
            assert output.new_logprobs is not None
            # The sampled token comes first. Greedy tokens are certain.
            sampled = output.new_logprobs.logprobs[:, 0].tolist()
            job.output_ids += ids
            job.logprobs += [0.0] * len(ids) if job.request.sampling.temperature == 0 else sampled
            self._num_tokens += len(ids)
            if self._routers:
                job.routing.append(self._routing_of(output))
            if self._is_cut_at_stop_text(job, len(ids)):
                self._llm.engine_core.abort_requests([output.request_id])
                del self._jobs[output.request_id]
                self._answer(job.future, job.completion("stop"))
                self._evict()
                return
        if output.prefill_stats is not None:
            self._num_cached += output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            del self._jobs[output.request_id]
            reason = str(output.finish_reason)
            if reason == "stop" or reason == "length":
                self._answer(job.future, job.completion(reason))
            else:
                phase = f"sampling request {job.request.id} on version {job.version}"
                self._answer(job.future, WorkerDied(self._name, phase, f"vLLM ended it: {reason}"))
            self._evict()

    def _is_cut_at_stop_text(self, job: EngineJob, num_new: int) -> bool:
        """True if one of the `num_new` last tokens ends a stop text; tokens after it are removed."""
        stop, begun = job.request.sampling.stop, job.request.given_ids
        num_ids = len(job.output_ids)
        for end in range(num_ids - num_new + 1, num_ids + 1) if stop else ():
            if self._stop_texts.end(stop, [*begun, *job.output_ids[:end]]):
                del job.output_ids[end:], job.logprobs[end:]
                return True
        return False

    def _routing_of(self, output: EngineCoreOutput) -> bytes:
        """Return what vLLM recorded for a new token, as (positions, all layers, experts chosen). It never ran."""
        assert self._routers is not None and output.routed_experts is not None
        experts_PLC = torch.from_numpy(output.routed_experts[:, [*self._routers.by_layer]].astype("int64"))
        return self._routers.pack(experts_PLC).numpy().tobytes()

    def _take_score(self, output: EngineCoreOutput) -> None:
        future, _ = self._scoring[output.request_id]
        if (tensors := output.new_prompt_logprobs_tensors) is not None:
            self._answer(future, tuple(tensors.logprobs[:, 0].tolist()))
        if output.finish_reason is not None:
            del self._scoring[output.request_id]
            self._evict()

    def _cut(self, is_meant: Callable[[EngineJob], bool]) -> None:
        names = [name for name, job in self._jobs.items() if is_meant(job)]
        self._llm.engine_core.abort_requests(names)
        for name in names:
            job = self._jobs.pop(name)
            self._answer(job.future, job.completion("abort"))
        self._evict()

    def _load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        self._staged, self._num_loads = None, self._num_loads + 1
        is_alone = self._spec.resident_versions == 1
        if not is_alone:
            self._check_room(version)
        if self._adapters:
            self._adapters.load(self._llm, version, weights)
        else:
            self._llm.collective_rpc("rlsys_swap")
        self._specs = tuple(specs_in(weights).values())
        others = {} if is_alone else {held: load for held, load in self._loads.items() if held != version}
        self._loads = {**others, version: self._num_loads}
        if is_alone:
            if self._spec.kv_cache == "recompute":
                self._llm.reset_prefix_cache(reset_running_requests=True)
            self._become(version)
        else:
            self._version = version
            self._evict()

    def _evict(self) -> None:
        if self._adapters is None or self._spec.resident_versions == 1:
            return
        used = {self._version, *(job.version for job in self._jobs.values()), *(v for _, v in self._scoring.values())}
        if used != self._loads.keys():
            self._loads = {version: load for version, load in self._loads.items() if version in used}
            self._adapters.evict_all_but(self._llm, used)
        self._grant_room()

    def _move_out(self) -> None:
        """Running requests lose their keys and values, and compute them again. On a CPU vLLM cannot sleep: it keeps
        the memory. It never slept on a GPU in our tests."""
        if not self._is_paused:
            self._set_held(is_held=True)
        self._llm.reset_prefix_cache(reset_running_requests=True)
        if self._sleeps:
            self._llm.sleep(level=1)

    def _move_in(self) -> None:
        if self._sleeps:
            self._llm.wake_up()
        if not self._is_paused:
            self._set_held(is_held=False)

    def _start_up(self) -> None:
        torch.get_num_threads()  # sets OpenMP's thread count for this thread, before vLLM reads it

    def _shut_down(self) -> None:
        self._llm.engine_core.shutdown()
        self._shards.close()
        if self._adapters:
            self._adapters.close()


def _start(device: torch.device, ours: Mapping[str, Any], users: Mapping[str, Any]) -> LLMEngine:
    """Start vLLM. Raises `ModelError` with vLLM's message if it cannot serve the model, or `ConfigError`."""
    if taken := sorted(users.keys() & (ours.keys() | ALWAYS.keys()) - OVERRIDABLE):
        raise ConfigError(f"rollout.vllm_args: {', '.join(taken)} is set by rlsys itself; leave it out")
    arguments = {**ALWAYS, **ours, **users}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # schedule in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else all replicas pin themselves to the same cores
    if arguments.get("enforce_eager"):
        torch.compiler.set_stance("force_eager")  # else the sampler is compiled, which takes longer than it saves
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.abstract import Executor

    if current_platform.is_cpu() != (device.type == "cpu"):
        raise ConfigError(
            f"rollout.engine: the vLLM installed runs on {current_platform.device_type}, and the replica was given "
            f"{device.type}; set resources.rollout.gpus to match, or rollout.engine=local"
        )
    try:
        engine_args = EngineArgs(**arguments)
    except TypeError as error:
        raise ConfigError(f"rollout.vllm_args: {error}") from error
    try:
        config = engine_args.create_engine_config()
        if arguments.get("async_scheduling"):
            config.scheduler_config.async_scheduling = True  # vLLM clears it on a CPU
        return LLMEngine(config, Executor.get_class(config), log_stats=False)
    except (ValueError, OSError, NotImplementedError, KeyError) as error:
        raise ModelError(f"vLLM cannot serve {arguments['model']!r}: {error}; try rollout.engine=local") from error


def _kv_bytes(config: PreTrainedConfig, spec: EngineSpec, num_sequences: int) -> int:
    """Memory of one shard for the keys and values of this many sequences of full length, so that none waits for cache
    blocks."""
    per_token = num_cached_values(config) * getattr(torch, spec.dtype).itemsize
    num_blocks = num_sequences * -(-spec.max_context // CPU_BLOCK_TOKENS) + 1
    return per_token * num_blocks * CPU_BLOCK_TOKENS // spec.tensor_parallel
