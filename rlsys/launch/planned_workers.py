"""Memory of every worker of a configuration under any values of the keys that change it.

Models are counted from their configurations, once for each way of computing; the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rlsys.algorithm import Column
from rlsys.config import Config
from rlsys.config.lora_section import LoraSection
from rlsys.config.memory_plan import (
    ForwardBytes,
    Memory,
    ModelSizes,
    StepBytes,
    WorkerMemory,
    blocks_memory,
    frozen_memory,
    gigabytes,
    rank_memory,
    slots_memory,
    vllm_share,
)
from rlsys.config.mesh_section import MeshSection
from rlsys.config.schema import Tenancy
from rlsys.config.train_section import ActivationCheckpointing

if TYPE_CHECKING:
    from workers.model.memory_counts import CountedModel

USABLE = 0.9
"""Part of a GPU's memory for the tensors of a rank. The rest is for CUDA's context, NCCL, and fragmentation."""
VLLM_POSITIONS = 8192
"""Positions of one step of vLLM on a large GPU by default (`max_num_batched_tokens`)."""
PREFILL_POSITIONS = 4096
"""Positions of one prefill of the engine `local`."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
WORKERS_OF: Mapping[Tenancy, str] = {
    "actor": "actor rank",
    "critic": "critic rank",
    "reference": "reference",
    "rollout": "rollout",
    "evaluation": "evaluation",
}
"""Name of the workers of each role that can share devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Keys that change memory, with values of a configuration."""

    activation_checkpointing: ActivationCheckpointing
    micro_batch_tokens: int
    offload: bool
    dtype: Literal["float32", "bfloat16"]
    mesh: MeshSection
    tensor_parallel: int
    slots: int
    replicas: int

    @classmethod
    def of(cls, config: Config) -> MemorySettings:
        return cls(
            activation_checkpointing=config.train.activation_checkpointing,
            micro_batch_tokens=config.micro_batch_tokens,
            offload=config.train.offload,
            dtype=config.dtype,
            mesh=config.train.mesh,
            tensor_parallel=config.rollout.tensor_parallel,
            slots=config.slots,
            replicas=config.rollout.replicas,
        )

    @property
    def shard(self) -> int:
        return self.mesh.shard


class PlannedWorkers:
    """Workers of one configuration, with their memory."""

    def __init__(self, config: Config, gpu_memory: int) -> None:
        """`gpu_memory` is that of each GPU, in bytes."""
        self._config, self._gpu_memory = config, gpu_memory
        self._counted: dict[tuple[object, ...], CountedModel] = {}
        self._steps: dict[tuple[object, ...], StepBytes] = {}
        self._forwards: dict[tuple[object, ...], ForwardBytes] = {}
        self._adapters: dict[str, int] = {}
        self._stabilizers: dict[str, float] = {}
        """What was counted, by model and settings."""

    def num_gpus(self, workers: Iterable[WorkerMemory]) -> float:
        """GPUs that these workers reserve, and those of the rewards, whose memory is not planned. Those that share
        devices reserve the ones of the actor."""
        rewards = self._config.reward.workers * self._config.resources["reward"].num_gpus
        guests = {WORKERS_OF[role] for role in self._config.tenants} - {WORKERS_OF["actor"]}
        return rewards + sum(worker.count * worker.num_gpus for worker in workers if worker.name not in guests)

    def published_bytes(self, settings: MemorySettings) -> int:
        """Bytes of one version of the weights of all trained policies."""
        total = 0
        for own in self._config.trained_policies.values() or [self._config]:
            path, lora = own.model.path, own.train.lora
            count = self._adapter(path, lora) if lora else self.sizes(path).parameters
            total += VALUE_BYTES[settings.dtype] * count
        return total

    def training(self, settings: MemorySettings) -> tuple[WorkerMemory, ...]:
        """Ranks of actor and critic, and the reference."""
        if not self._config.policies:
            return tuple(self._learning(self._config, settings))
        found: list[WorkerMemory] = []
        for name, own in self._config.trained_policies.items():
            workers = self._learning(own, MemorySettings.of(own))
            found += (replace(worker, name=f"{worker.name} of {name}") for worker in workers)
        return tuple(found)

    def _learning(self, config: Config, settings: MemorySettings) -> Iterator[WorkerMemory]:
        resources, columns = config.resources, config.algorithm.columns
        num_ranks = settings.mesh.num_ranks
        memory, remark = self._rank(config, settings, is_critic=False)
        yield replace(self._worker("actor rank", num_ranks, resources["actor"].num_gpus, memory), remark=remark)
        if config.has_reference:
            memory = frozen_memory(
                self.sizes(config.reference_path),
                self._forward(config.reference_path, settings),
                positions=settings.micro_batch_tokens,
                value_bytes=VALUE_BYTES[settings.dtype],
            )
            yield self._worker("reference", 1, resources["reference"].num_gpus, memory)
        if Column.VALUES in columns:
            memory, remark = self._rank(config, settings, is_critic=True)
            yield replace(self._worker("critic rank", num_ranks, resources["critic"].num_gpus, memory), remark=remark)

    def _rank(self, config: Config, settings: MemorySettings, *, is_critic: bool) -> tuple[Memory, str]:
        """Return the memory of a rank on its device, and a remark about the host's."""
        path, key = config.model.path, "model.path"
        if is_critic and config.critic.path is not None:
            path, key = config.critic.path, "critic.path"
        mesh, sizes = settings.mesh, self._model(path, key, settings.mesh).sizes
        memory = rank_memory(
            sizes.without_head() if is_critic else sizes,
            self._step(path, settings, has_head=not is_critic),
            shards=mesh.num_shards,
            positions=-(-settings.micro_batch_tokens // mesh.context),
            value_bytes=VALUE_BYTES[settings.dtype],
            stabilizer_bytes=0.0 if is_critic else self._stabilizer(config),
            adapter=self._adapter(path, config.train.lora) if config.train.lora else None,
            keeps_reference=config.reference.sync is not None and not is_critic,
        )
        if settings.offload:
            rest = replace(memory, weights=0, gradients=0, optimizer=0)
            return rest, f"each has {gigabytes(memory.total - rest.total)} of its state in host memory"
        if ("critic" if is_critic else "actor") in config.tenants:
            moved = memory.weights + memory.optimizer
            return memory, f"each has {gigabytes(moved)} in host memory, in turns with the others of its device"
        return memory, ""

    def sampling(self, settings: MemorySettings) -> tuple[WorkerMemory, ...]:
        """Replicas that sample for training and for evaluation."""
        config = self._config
        own = [config.of(name) for name in config.policies] or [config]
        own = [one for one in own if engine_of(one) != "vllm_server"]  # which has memory elsewhere
        if not own:
            return ()
        memories = [self._generator(one, settings, len(own)) for one in own]
        memory = sum(memories[1:], memories[0])
        one = replace(
            self._worker("rollout", settings.replicas, self.replica_gpus(settings), memory),
            num_devices=settings.tensor_parallel,
            remark=self._sequences(settings, memory) if len(own) == 1 else "",
        )
        if engine_of(config) == "vllm" and one.limit is not None:
            one = replace(one, limit=round(self._gpu_memory * min(1.0, self._share(config, len(own)) * len(own))))
        if not config.eval.every:
            return (one,)
        return one, replace(one, name="evaluation", count=config.eval.replicas, remark="")

    def _generator(self, config: Config, settings: MemorySettings, num_engines: int) -> Memory:
        """Memory of one engine of a replica, on each of its devices."""
        sizes, value_bytes = self.sizes(config.model.path), VALUE_BYTES[settings.dtype]
        forward, context = self._forward(config.model.path, settings), config.max_context_tokens
        if engine_of(config) == "vllm" and config.resources["rollout"].num_gpus:
            return blocks_memory(
                sizes,
                forward,
                positions=config.rollout.vllm_args.get("max_num_batched_tokens", max(VLLM_POSITIONS, context)),
                slots=settings.slots,
                context=context,
                value_bytes=value_bytes,
                shards=settings.tensor_parallel,
                granted=round(self._gpu_memory * self._share(config, num_engines)),
            )
        return slots_memory(
            sizes,
            forward,
            positions=max(PREFILL_POSITIONS, context),
            slots=settings.slots,
            context=context,
            value_bytes=value_bytes,
            versions=1 if config.train.lora else config.resident_versions,  # adapters share one base
        )

    def _share(self, config: Config, num_engines: int) -> float:
        """Part of a GPU's memory that one engine takes."""
        num_gpus, shards = config.resources["rollout"].num_gpus, config.rollout.tensor_parallel
        default = vllm_share(num_gpus, shards, num_engines)
        return config.rollout.vllm_args.get("gpu_memory_utilization", default)

    def _sequences(self, settings: MemorySettings, memory: Memory) -> str:
        """Say how many sequences a replica's cache has room for."""
        count, context = self.num_cached(settings, memory), self._config.max_context_tokens
        return f"its cache has room for {count} {'sequence' if count == 1 else 'sequences'} of {context} tokens"

    def num_cached(self, settings: MemorySettings, memory: Memory) -> int:
        """Number of whole conversations that the cache of a replica with this memory has room for."""
        sizes = self.sizes(self._config.model.path)
        shards = min(settings.tensor_parallel, sizes.key_value_heads)
        of_one = VALUE_BYTES[settings.dtype] * sizes.cached * self._config.max_context_tokens
        return memory.kv_cache * shards // of_one

    def replica_gpus(self, settings: MemorySettings) -> float:
        config = self._config
        return config.resources["rollout"].num_gpus * settings.tensor_parallel / config.rollout.tensor_parallel

    def _worker(self, name: str, count: int, num_gpus: float, memory: Memory) -> WorkerMemory:
        limit = round(USABLE * self._gpu_memory * min(1.0, num_gpus)) if num_gpus else None
        return WorkerMemory(name=name, count=count, num_gpus=num_gpus, memory=memory, limit=limit)

    # ------------------------------------------------------------------------------------------------------- the counts

    def _model(self, path: str, key: str = "model.path", mesh: MeshSection | None = None) -> CountedModel:
        """Return the model at a path; with a mesh, the part of it that the ranks of `tensor` leave to one of them."""
        from workers.model.memory_counts import CountedModel

        one = (path, mesh.tensor, mesh.context, mesh.expert) if mesh else (path,)
        if one not in self._counted:
            self._counted[one] = CountedModel(path, key, mesh)
        return self._counted[one]

    def _adapter(self, path: str, lora: LoraSection) -> int:
        """Parameters of an adapter of the model at a path."""
        from workers.model.memory_counts import adapter_parameters

        key = f"{path}: {lora.model_dump_json()}"
        if key not in self._adapters:
            self._adapters[key] = adapter_parameters(path, lora)
        return self._adapters[key]

    def _stabilizer(self, config: Config) -> float:
        """Bytes that a stabilizer keeps for each parameter of a rank."""
        from workers.model.memory_counts import stabilizer_bytes

        key = repr(config.stabilizer)
        if key not in self._stabilizers:
            self._stabilizers[key] = stabilizer_bytes(config.stabilizer)
        return self._stabilizers[key]

    def sizes(self, path: str, key: str = "model.path") -> ModelSizes:
        """Sizes of the model at a path, the value of `key`. Raises `ModelError`."""
        return self._model(path, key).sizes

    @property
    def is_stored_in_bfloat16(self) -> bool:
        """True if the policy's files have weights in bfloat16."""
        return self._model(self._config.model.path).is_stored_in_bfloat16

    def _step(self, path: str, settings: MemorySettings, *, has_head: bool) -> StepBytes:
        dtype, how = settings.dtype, settings.activation_checkpointing
        key = (path, dtype, how, has_head, settings.mesh.tensor)
        if key not in self._steps:
            positions = self._config.micro_batch_tokens
            model = self._model(path, mesh=settings.mesh)
            self._steps[key] = model.step(dtype, how, positions, has_head=has_head)
        return self._steps[key]

    def _forward(self, path: str, settings: MemorySettings) -> ForwardBytes:
        key = (path, settings.dtype)
        if key not in self._forwards:
            self._forwards[key] = self._model(path).forward(settings.dtype, self._config.micro_batch_tokens)
        return self._forwards[key]


def engine_of(config: Config) -> Literal["local", "vllm", "vllm_server"]:
    """Engine to plan for: where the configuration leaves it open, vLLM on GPUs and `local` on CPUs."""
    rollout = config.rollout
    if rollout.engine_name != "auto":
        return rollout.engine_name
    fits_vllm = config.resident_versions == 1 or config.train.lora is not None
    return "vllm" if rollout.tensor_parallel > 1 or (config.resources["rollout"].num_gpus and fits_vllm) else "local"
