"""Resources and memory of a configuration, and the nearest configuration that fits: `rlsys plan`.

Models are counted from their configurations, and no weights are read. Which settings fit is then arithmetic. So the
search looks at all values of the few keys that change memory, and takes the smallest change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from rlsys.config import Config
from rlsys.config.memory_plan import WorkerMemory, gigabytes, table_of
from rlsys.config.resource_plan import Plan, plan_of
from rlsys.config.train_section import ActivationCheckpointing
from rlsys.errors import ConfigError
from rlsys.launch.device_defaults import filled_keys, num_local_gpus, with_device_defaults, with_gpus
from rlsys.launch.planned_workers import MemorySettings, PlannedWorkers, engine_of
from rlsys.launch.preflight import check_architectures, check_rows

USUAL_GPU = 80 * 10**9
"""Memory of a GPU where none is given and this machine has none."""
MOST_RANKS = 4096
MOST_SHARDS = 8
"""Of one replica: the GPUs of one machine."""
NUMBERS = ("micro_batch_tokens", "slots", "replicas", "tensor_parallel", "shard")
KEYS = {
    "activation_checkpointing": "train.activation_checkpointing",
    "micro_batch_tokens": "train.micro_batch_tokens",
    "slots": "rollout.slots",
    "dtype": "model.dtype",
    "replicas": "rollout.replicas",
    "tensor_parallel": "rollout.tensor_parallel",
    "offload": "train.offload",
    "shard": "train.mesh.shard",
}
"""Key in the configuration of each setting; the sooner one of two equal changes is preferred."""


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


@dataclass(frozen=True, slots=True)
class PublishedBytes:
    """Host memory of the weights on their way to the replicas."""

    version_bytes: int
    """Bytes of one version."""
    at_actor: int
    """Most versions on the machine of the actor's ranks: those that relays keep, and one that is being written."""
    elsewhere: int
    """Most versions on another machine with replicas."""

    @classmethod
    def of(cls, config: Config, version_bytes: int) -> PublishedBytes:
        """Two complete versions and one on its way, and that of a running evaluation."""
        kept = 4 if config.eval.every else 3
        return cls(version_bytes, kept + 1, kept)

    def __str__(self) -> str:
        actor, other = (gigabytes(count * self.version_bytes) for count in (self.at_actor, self.elsewhere))
        return (
            f"at most {actor} on the actor's machine, {other} on each other "
            f"({self.at_actor} and {self.elsewhere} versions of {gigabytes(self.version_bytes)})"
        )


@dataclass(frozen=True, slots=True)
class FittedPlan:
    """Resources and pace of a configuration, the memory of every worker, and what to change if it does not fit."""

    resources: Plan
    gpus: Gpus
    num_reserved: float
    """GPUs that the workers reserve."""
    workers: tuple[WorkerMemory, ...]
    published: PublishedBytes
    defaults: tuple[str, ...]
    """Keys that are not set and follow from the device, with their values, as overrides."""
    advice: tuple[str, ...] = ()
    """Changes that make it fit, as overrides; the nearest first."""

    @property
    def fits(self) -> bool:
        return self.num_reserved <= self.gpus.count and all(worker.fits for worker in self.workers)

    def lines(self) -> Iterator[str]:
        """Plan as text."""
        yield from self.resources.lines()
        yield from table_of(self.workers)
        if self.defaults:
            yield f"defaults that follow from the device: {' '.join(self.defaults)}"
        if any(worker.num_gpus for worker in self.workers):
            yield f"planned for GPUs: {self.gpus}; {self.num_reserved:g} reserved"
        yield f"published weights in host memory: {self.published}"

    def as_json(self) -> dict[str, Any]:
        workers = [{**asdict(w), "total": w.memory.total, "fits": w.fits} for w in self.workers]
        return {
            "fits": self.fits,
            "resources": asdict(self.resources),
            "gpus": self.gpus.count,
            "gpu_memory": self.gpus.memory,
            "num_reserved": self.num_reserved,
            "published": asdict(self.published),
            "workers": workers,
            "defaults": list(self.defaults),
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
    if config.ray_address is None:  # a run that joins a cluster says how many its workers take
        config = with_gpus(config, num_local_gpus(config) if gpus is None else gpus)
    resources = plan_of(config)
    reserved = resources.num_gpus
    if gpus is not None and not reserved:
        raise ConfigError(
            f"--gpus {gpus}: no worker of this configuration reserves a GPU; set resources.actor.gpus and "
            "resources.rollout.gpus, or leave them out where there is a GPU for each"
        )
    from workers.model.memory_counts import check_routing, memory_of_gpu

    own = memory_of_gpu() if memory is None else None
    planned = Gpus(gpus or ceil(reserved), memory or own or USUAL_GPU, is_assumed=not (memory or own))
    for each in config.trained_policies.values() or [config]:
        check_architectures(each)
    given, config = config, with_device_defaults(config, planned.memory)
    for each in config.trained_policies.values() or [config]:
        check_rows(each)
        if each.train.routing_replay:
            check_routing(each.model.path)
    workers, settings = PlannedWorkers(config, planned.memory), MemorySettings.of(config)
    found = (*workers.training(settings), *workers.sampling(settings))
    published = PublishedBytes.of(config, workers.published_bytes(settings))
    plan = FittedPlan(resources, planned, workers.num_gpus(found), found, published, tuple(filled_keys(given, config)))
    if plan.fits or config.policies:
        return plan
    return replace(plan, advice=tuple(NearestPlan(config, workers, planned.count).advice(settings)))


def parsed_size(text: str) -> int:
    """Bytes of a size such as `80GB` or `79.6 GiB`. Raises `ConfigError`."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = 0
    if size < 1_000_000:
        raise ConfigError(f"--gpu-memory {text}: not the memory of a GPU; give a number and a unit, as in 80GB")
    return size


class NearestPlan:
    """Search for the smallest change of a configuration with which it fits."""

    def __init__(self, config: Config, workers: PlannedWorkers, num_gpus: int) -> None:
        self._config, self._workers, self._num_gpus = config, workers, num_gpus

    def advice(self, settings: MemorySettings) -> Iterator[str]:
        """Yield the nearest settings that fit on these GPUs, or else those that need the fewest GPUs."""
        fitting = [*self._fitting(settings)]
        within = [one for one in fitting if one[0] <= self._num_gpus]
        if within:
            _, nearest = min(within, key=lambda one: _distance(settings, one[1]))
            yield self._changes(settings, nearest)
        elif fitting:
            count, nearest = min(fitting, key=lambda one: (one[0], _distance(settings, one[1])))
            yield f"on {count:g} GPUs: {self._changes(settings, nearest) or 'as it is'}"

    def _fitting(self, settings: MemorySettings) -> Iterator[tuple[float, MemorySettings]]:
        """Yield the number of GPUs and the settings of everything that fits, as if there were any number of GPUs."""
        for of_type in dict.fromkeys((settings, replace(settings, dtype="bfloat16"))):
            training = [*_fitting_only(self._workers.training, self._training_choices(of_type))]
            sampling = [*_fitting_only(self._workers.sampling, self._sampling_choices(of_type))]
            for (trained, ranks), (sampled, replicas) in product(training, sampling):
                both = replace(
                    trained,
                    slots=sampled.slots,
                    tensor_parallel=sampled.tensor_parallel,
                    replicas=sampled.replicas,
                )
                yield self._workers.num_gpus([*ranks, *replicas]), both

    def _training_choices(self, settings: MemorySettings) -> Iterator[MemorySettings]:
        kinds: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
        tokens = _halvings(settings.micro_batch_tokens, least=self._config.max_context_tokens)
        mesh = settings.mesh
        counts = {*_halvings(mesh.shard), *_doublings(mesh.shard, MOST_RANKS)}
        meshes = [mesh.model_copy(update={"shard": n}) for n in counts if n * mesh.num_peers % mesh.expert == 0]
        savings = kinds[kinds.index(settings.activation_checkpointing) :], {settings.offload, True}
        for how, offload, positions, other in product(*savings, tokens, meshes):
            yield replace(
                settings, activation_checkpointing=how, offload=offload, micro_batch_tokens=positions, mesh=other
            )

    def _sampling_choices(self, settings: MemorySettings) -> Iterator[MemorySettings]:
        is_sharded = self._config.resources["rollout"].num_gpus >= 1 and engine_of(self._config) == "vllm"
        heads = self._workers.sizes(self._config.model.path).heads
        counts = _doublings(settings.tensor_parallel, MOST_SHARDS)
        shards = [n for n in counts if is_sharded and heads % n == 0] or [settings.tensor_parallel]
        for count, slots, replicas in product(shards, _halvings(settings.slots), _halvings(settings.replicas)):
            yield replace(settings, tensor_parallel=count, slots=slots, replicas=replicas)

    def _changes(self, before: MemorySettings, after: MemorySettings) -> str:
        """Write the differences as overrides."""
        found = [f"{KEYS[name]}={getattr(after, name)}".lower() for name in _changed_settings(before, after)]
        if after.tensor_parallel != before.tensor_parallel:
            found.append(f"resources.rollout.gpus={self._workers.replica_gpus(after):g}")
        return " ".join(found)


def _fitting_only(
    workers_of: Callable[[MemorySettings], tuple[WorkerMemory, ...]], choices: Iterable[MemorySettings]
) -> Iterator[tuple[MemorySettings, tuple[WorkerMemory, ...]]]:
    for settings in choices:
        workers = workers_of(settings)
        if all(worker.fits for worker in workers):
            yield settings, workers


def _halvings(number: int, least: int = 1) -> list[int]:
    """Return a number and its halves down to `least`."""
    found = [number]
    while found[-1] // 2 >= least:
        found.append(found[-1] // 2)
    return found


def _doublings(number: int, most: int) -> list[int]:
    """Return a number and its doubles up to `most`."""
    found = [number]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _changed_settings(before: MemorySettings, after: MemorySettings) -> list[str]:
    return [name for name in KEYS if getattr(before, name) != getattr(after, name)]


def _distance(before: MemorySettings, after: MemorySettings) -> tuple[object, ...]:
    """Order of changes: by their number, then by the keys, then by how far a number moves."""
    changed = _changed_settings(before, after)
    order = [*KEYS]
    moves = [abs(getattr(after, name) - getattr(before, name)) for name in NUMBERS]
    kinds = ("none", "selective", "full")
    return len(changed), [order.index(name) for name in changed], kinds.index(after.activation_checkpointing), moves
