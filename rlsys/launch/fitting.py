"""Memory plan of a configuration, and the nearest configuration that fits: `rlsys plan`, `rlsys train --dry-run`.

Models are counted from their configurations, and no weights are read. Which settings fit is then arithmetic. So the
search looks at all values of the few keys that change memory, and takes the smallest change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ByteSize, TypeAdapter, ValidationError

from rlsys.algorithm import Signal
from rlsys.config import Config
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
    table_of,
)
from rlsys.config.resource_plan import plan_of
from rlsys.config.schema import ActivationCheckpointing
from rlsys.errors import ConfigError

if TYPE_CHECKING:
    from workers.train.memory_counts import CountedModel

USUAL_GPU = 80 * 10**9
"""Memory of a GPU where none is given and this machine has none."""
USABLE = 0.9
"""Part of a GPU's memory for the tensors of a rank. The rest is for CUDA's context, NCCL, and fragmentation."""
VLLM_SHARE = 0.92
"""Part of a GPU's memory that one vLLM takes by default (`gpu_memory_utilization`)."""
VLLM_MEMORY = 0.9
"""Part that several vLLMs of a replica take together by default."""
VLLM_POSITIONS = 8192
"""Positions of one step of vLLM on a large GPU by default (`max_num_batched_tokens`)."""
PREFILL_POSITIONS = 4096
"""Positions of one prefill of the engine `local`."""
MOST_RANKS = 4096
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
REFERENCE_SIGNALS = {Signal.REFERENCE_LOGPROBS, Signal.REFERENCE_MISMATCHED}


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs to plan for."""

    count: int
    memory: int
    """Bytes of each."""
    is_assumed: bool = False
    """True if neither an option nor a GPU of this machine gave the memory."""

    def __str__(self) -> str:
        return f"{self.count} x {gigabytes(self.memory)}" + (" (assumed: give --gpu-memory)" if self.is_assumed else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Keys that change memory, with values of a configuration."""

    activation_checkpointing: ActivationCheckpointing
    micro_batch_tokens: int
    dtype: Literal["float32", "bfloat16"]
    ranks: int
    tensor_parallel: int
    slots: int
    replicas: int

    @classmethod
    def of(cls, config: Config) -> MemorySettings:
        return cls(
            activation_checkpointing=config.train.activation_checkpointing,
            micro_batch_tokens=config.train.micro_batch_tokens,
            dtype=config.model.dtype,
            ranks=config.train.ranks,
            tensor_parallel=config.rollout.tensor_parallel,
            slots=config.rollout.slots,
            replicas=config.rollout.replicas,
        )


NUMBERS = ("micro_batch_tokens", "slots", "replicas", "tensor_parallel", "ranks")
KEYS = {
    "activation_checkpointing": "train.activation_checkpointing",
    "micro_batch_tokens": "train.micro_batch_tokens",
    "slots": "rollout.slots",
    "dtype": "model.dtype",
    "replicas": "rollout.replicas",
    "tensor_parallel": "rollout.tensor_parallel",
    "ranks": "train.ranks",
}
"""Key in the configuration of each setting; the sooner one of two equal changes is preferred."""


@dataclass(frozen=True, slots=True)
class FittedPlan:
    """Memory of every worker of a configuration, and what to change if it does not fit."""

    gpus: Gpus
    num_reserved: float
    """GPUs that the workers reserve."""
    workers: tuple[WorkerMemory, ...]
    advice: tuple[str, ...] = ()
    """Changes that make it fit, as overrides; the nearest first."""

    @property
    def fits(self) -> bool:
        return self.num_reserved <= self.gpus.count and all(worker.fits for worker in self.workers)

    def lines(self) -> Iterator[str]:
        """Plan as text."""
        yield from table_of(self.workers)
        if any(worker.num_gpus for worker in self.workers):
            yield f"planned for GPUs: {self.gpus}; {self.num_reserved:g} reserved"

    def as_json(self) -> dict[str, Any]:
        workers = [{**asdict(w), "total": w.memory.total, "fits": w.fits} for w in self.workers]
        return {
            "fits": self.fits,
            "gpus": self.gpus.count,
            "gpu_memory": self.gpus.memory,
            "num_reserved": self.num_reserved,
            "workers": workers,
            "advice": list(self.advice),
        }

    def check(self) -> None:
        """Raise `ConfigError` with the nearest plan that fits, if this one does not."""
        if self.fits:
            return
        problems = [worker.shortage() for worker in self.workers if not worker.fits]
        if self.num_reserved > self.gpus.count:
            problems.append(f"the workers reserve {self.num_reserved:g} GPUs, and there are {self.gpus.count}")
        advice = self.advice or ("no value of the keys that are searched: take larger GPUs or a smaller model",)
        raise ConfigError(
            "\n".join([f"this does not fit on {self.gpus}:", *(f"  {p}" for p in problems), "what fits:"])
            + "".join(f"\n  {line}" for line in advice)
        )


def memory_plan(config: Config, *, gpus: int | None = None, gpu_memory: str | None = None) -> FittedPlan:
    """Plan the memory of every worker, and search for the nearest plan that fits.

    `gpus` is the number of GPUs of the cluster; None: as many as the workers reserve. `gpu_memory` is the memory of
    each, such as `80GB`; None: that of this machine's GPU, else 80 GB. Raises `ConfigError` for a size that is none,
    `ModelError` for a model whose configuration cannot be read.
    """
    memory = parsed_size(gpu_memory) if gpu_memory is not None else None
    reserved = plan_of(config).num_gpus
    if gpus is not None and not reserved:
        raise ConfigError(
            f"--gpus {gpus}: no worker of this configuration reserves a GPU; set train.num_gpus and rollout.num_gpus"
        )
    from workers.train.memory_counts import memory_of_gpu

    own = memory_of_gpu() if memory is None else None
    planned = Gpus(gpus or ceil(reserved), memory or own or USUAL_GPU, is_assumed=not (memory or own))
    return MemoryPlanner(config, planned).plan()


def parsed_size(text: str) -> int:
    """Bytes of a size such as `80GB` or `79.6 GiB`. Raises `ConfigError`."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = 0
    if size < 1_000_000:
        raise ConfigError(f"--gpu-memory {text}: not the memory of a GPU; give a number and a unit, as in 80GB")
    return size


def has_folders(config: Config) -> bool:
    """Return True if the configurations of all models are in folders of this machine."""
    own = [config.of(name) for name in config.policies] or [config]
    paths = {path for one in own for path in (one.model.path, one.critic.path) if path is not None}
    return all(Path(path, "config.json").is_file() for path in paths)


class MemoryPlanner:
    """Memory of the workers of one configuration under any settings."""

    def __init__(self, config: Config, gpus: Gpus) -> None:
        self._config, self._gpus = config, gpus
        self._counted: dict[str, CountedModel] = {}
        self._steps: dict[tuple[object, ...], StepBytes] = {}
        self._forwards: dict[tuple[object, ...], ForwardBytes] = {}
        """What was counted, by model and settings."""
        reward = config.reward
        self._num_others = reward.workers * reward.worker_gpus
        """GPUs of workers whose memory is not planned."""

    def plan(self) -> FittedPlan:
        """Plan the configuration as it is, and search if it does not fit."""
        settings = MemorySettings.of(self._config)
        workers = (*self._training(settings), *self._sampling(settings))
        plan = FittedPlan(self._gpus, self._num_gpus(workers), workers)
        if plan.fits or self._config.policies:
            return plan
        return replace(plan, advice=tuple(self._advice(settings)))

    def _num_gpus(self, workers: Iterable[WorkerMemory]) -> float:
        return self._num_others + sum(worker.count * worker.num_gpus for worker in workers)

    # ------------------------------------------------------------------------------------------------------- the search

    def _advice(self, settings: MemorySettings) -> Iterator[str]:
        """Yield the nearest settings that fit on these GPUs, or else those that need the fewest GPUs."""
        fitting = [*self._fitting(settings)]
        within = [one for one in fitting if one[0] <= self._gpus.count]
        if within:
            _, nearest = min(within, key=lambda one: _distance(settings, one[1]))
            yield self._changes(settings, nearest)
        elif fitting:
            count, nearest = min(fitting, key=lambda one: (one[0], _distance(settings, one[1])))
            yield f"on {count:g} GPUs: {self._changes(settings, nearest) or 'as it is'}"

    def _fitting(self, settings: MemorySettings) -> Iterator[tuple[float, MemorySettings]]:
        """Yield the number of GPUs and the settings of everything that fits, as if there were any number of GPUs."""
        for of_type in dict.fromkeys((settings, replace(settings, dtype="bfloat16"))):
            training = [*_fitting_only(self._training, self._training_choices(of_type))]
            sampling = [*_fitting_only(self._sampling, self._sampling_choices(of_type))]
            for (trained, ranks), (sampled, replicas) in product(training, sampling):
                both = replace(
                    trained,
                    slots=sampled.slots,
                    tensor_parallel=sampled.tensor_parallel,
                    replicas=sampled.replicas,
                )
                yield self._num_gpus([*ranks, *replicas]), both

    def _training_choices(self, settings: MemorySettings) -> Iterator[MemorySettings]:
        kinds: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
        tokens = _halved(settings.micro_batch_tokens, least=_context(self._config))
        ranks = {*_halved(settings.ranks), *_doubled(settings.ranks, MOST_RANKS)}
        for how, positions, count in product(kinds[kinds.index(settings.activation_checkpointing) :], tokens, ranks):
            yield replace(settings, activation_checkpointing=how, micro_batch_tokens=positions, ranks=count)

    def _sampling_choices(self, settings: MemorySettings) -> Iterator[MemorySettings]:
        is_sharded = self._config.rollout.num_gpus >= 1 and _engine(self._config) == "vllm"
        shards = _doubled(settings.tensor_parallel, 8) if is_sharded else [settings.tensor_parallel]
        for count, slots, replicas in product(shards, _halved(settings.slots), _halved(settings.replicas)):
            yield replace(settings, tensor_parallel=count, slots=slots, replicas=replicas)

    def _changes(self, before: MemorySettings, after: MemorySettings) -> str:
        """Write the differences as overrides."""
        found = [f"{KEYS[name]}={getattr(after, name)}" for name in _changed(before, after)]
        if after.tensor_parallel != before.tensor_parallel:
            found.append(f"rollout.num_gpus={self._replica_gpus(after):g}")
        return " ".join(found)

    # ------------------------------------------------------------------------------------------------------ the workers

    def _training(self, settings: MemorySettings) -> tuple[WorkerMemory, ...]:
        """Ranks of actor and critic, and the reference."""
        if not self._config.policies:
            return tuple(self._learning(self._config, settings))
        found: list[WorkerMemory] = []
        for name, own in self._config.trained.items():
            workers = self._learning(own, MemorySettings.of(own))
            found += (replace(worker, name=f"{worker.name} of {name}") for worker in workers)
        return tuple(found)

    def _learning(self, config: Config, settings: MemorySettings) -> Iterator[WorkerMemory]:
        train, critic, reference = config.train, config.critic, config.reference
        signals = config.algorithm.signals
        yield self._worker("actor rank", settings.ranks, train.num_gpus, self._rank(config, settings, is_critic=False))
        if config.has_reference:
            memory = frozen_memory(
                self._sizes(config.model.path),
                self._forward(config.model.path, settings),
                positions=_positions(config, settings),
                value_bytes=VALUE_BYTES[settings.dtype],
            )
            yield self._worker("reference", 1, reference.num_gpus, memory)
        if Signal.VALUES in signals:
            memory = self._rank(config, settings, is_critic=True)
            yield self._worker("critic rank", settings.ranks, critic.num_gpus, memory)

    def _rank(self, config: Config, settings: MemorySettings, *, is_critic: bool) -> Memory:
        from workers.train.memory_counts import adapter_parameters, stabilizer_bytes

        path, key = config.model.path, "model.path"
        if is_critic and config.critic.path is not None:
            path, key = config.critic.path, "critic.path"
        sizes = self._sizes(path, key)
        return rank_memory(
            sizes.without_head() if is_critic else sizes,
            self._step(path, settings, has_head=not is_critic),
            shards=settings.ranks,
            positions=_positions(config, settings),
            value_bytes=VALUE_BYTES[settings.dtype],
            stabilizer_bytes=0.0 if is_critic else stabilizer_bytes(config.stabilizer),
            adapter=adapter_parameters(path, config.train.lora) if config.train.lora else None,
        )

    def _sampling(self, settings: MemorySettings) -> tuple[WorkerMemory, ...]:
        """Replicas that sample for training and for evaluation."""
        config = self._config
        own = [config.of(name) for name in config.policies] or [config]
        memories = [self._generator(one, settings, len(own)) for one in own]
        memory = sum(memories[1:], memories[0])
        one = replace(
            self._worker("rollout", settings.replicas, self._replica_gpus(settings), memory),
            num_devices=settings.tensor_parallel,
            remark=self._sequences(settings, memory) if len(own) == 1 else "",
        )
        if _engine(config) == "vllm" and one.limit is not None:
            one = replace(one, limit=round(self._gpus.memory * min(1.0, self._share(config, len(own)) * len(own))))
        if not config.eval.every:
            return (one,)
        return one, replace(one, name="evaluation", count=config.eval.replicas, remark="")

    def _generator(self, config: Config, settings: MemorySettings, num_engines: int) -> Memory:
        """Memory of one engine of a replica, on each of its devices."""
        sizes, value_bytes = self._sizes(config.model.path), VALUE_BYTES[settings.dtype]
        forward, context = self._forward(config.model.path, settings), _context(config)
        if _engine(config) == "vllm" and config.rollout.num_gpus:
            return blocks_memory(
                sizes,
                forward,
                positions=config.rollout.vllm_args.get("max_num_batched_tokens", max(VLLM_POSITIONS, context)),
                slots=settings.slots,
                context=context,
                value_bytes=value_bytes,
                shards=settings.tensor_parallel,
                granted=round(self._gpus.memory * self._share(config, num_engines)),
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
        default = VLLM_SHARE if num_engines == 1 else VLLM_MEMORY / num_engines
        return config.rollout.vllm_args.get("gpu_memory_utilization", default)

    def _sequences(self, settings: MemorySettings, memory: Memory) -> str:
        """Say how many sequences a replica's cache has room for."""
        of_token = VALUE_BYTES[settings.dtype] * self._sizes(self._config.model.path).cached
        context = _context(self._config)
        count = memory.kv_cache * settings.tensor_parallel // (of_token * context)
        return f"its cache has room for {count} sequences of {context} tokens"

    def _replica_gpus(self, settings: MemorySettings) -> float:
        rollout = self._config.rollout
        return rollout.num_gpus * settings.tensor_parallel / rollout.tensor_parallel

    def _worker(self, name: str, count: int, num_gpus: float, memory: Memory) -> WorkerMemory:
        limit = round(USABLE * self._gpus.memory * min(1.0, num_gpus)) if num_gpus else None
        return WorkerMemory(name=name, count=count, num_gpus=num_gpus, memory=memory, limit=limit)

    # ------------------------------------------------------------------------------------------------------- the counts

    def _model(self, path: str, key: str = "model.path") -> CountedModel:
        from workers.train.memory_counts import CountedModel

        if path not in self._counted:
            self._counted[path] = CountedModel(path, key)
        return self._counted[path]

    def _sizes(self, path: str, key: str = "model.path") -> ModelSizes:
        return self._model(path, key).sizes

    def _step(self, path: str, settings: MemorySettings, *, has_head: bool) -> StepBytes:
        dtype, how = settings.dtype, settings.activation_checkpointing
        key = (path, dtype, how, has_head)
        if key not in self._steps:
            positions = max(self._config.train.micro_batch_tokens, _context(self._config))
            self._steps[key] = self._model(path).step(dtype, how, positions, has_head=has_head)
        return self._steps[key]

    def _forward(self, path: str, settings: MemorySettings) -> ForwardBytes:
        key = (path, settings.dtype)
        if key not in self._forwards:
            self._forwards[key] = self._model(path).forward(settings.dtype, self._config.train.micro_batch_tokens)
        return self._forwards[key]


def _fitting_only(
    workers_of: Callable[[MemorySettings], tuple[WorkerMemory, ...]], choices: Iterable[MemorySettings]
) -> Iterator[tuple[MemorySettings, tuple[WorkerMemory, ...]]]:
    for settings in choices:
        workers = workers_of(settings)
        if all(worker.fits for worker in workers):
            yield settings, workers


def _engine(config: Config) -> Literal["local", "vllm"]:
    """Engine to plan for: where the configuration leaves it open, vLLM on GPUs and `local` on CPUs."""
    rollout = config.rollout
    if rollout.engine != "auto":
        return rollout.engine
    return "vllm" if rollout.tensor_parallel > 1 or (rollout.num_gpus and config.resident_versions == 1) else "local"


def _context(config: Config) -> int:
    """Most tokens of one sample."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _positions(config: Config, settings: MemorySettings) -> int:
    """Most positions of a micro-batch, which has one sample at the least."""
    return max(settings.micro_batch_tokens, _context(config))


def _halved(number: int, least: int = 1) -> list[int]:
    """Return a number and its halves down to `least`."""
    found = [number]
    while found[-1] // 2 >= least:
        found.append(found[-1] // 2)
    return found


def _doubled(number: int, most: int) -> list[int]:
    """Return a number and its doubles up to `most`."""
    found = [number]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _changed(before: MemorySettings, after: MemorySettings) -> list[str]:
    return [name for name in KEYS if getattr(before, name) != getattr(after, name)]


def _distance(before: MemorySettings, after: MemorySettings) -> tuple[object, ...]:
    """Order of changes: by their number, then by the keys, then by how far a number moves."""
    changed = _changed(before, after)
    order = [*KEYS]
    moves = [abs(getattr(after, name) - getattr(before, name)) for name in NUMBERS]
    kinds = ("none", "selective", "full")
    return len(changed), [order.index(name) for name in changed], kinds.index(after.activation_checkpointing), moves
