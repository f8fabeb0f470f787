"""Defaults that follow from the device: GPUs of workers, `model.dtype`, `rollout.slots` and `train.micro_batch_tokens`.

On CPUs they are constants. On GPUs they come from the model and the memory plan when a run is started. Its
`config.resolved.yaml` has them. A resume takes all but the GPUs from there, which are counted again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.algorithm import Column
from rlsys.config import Config
from rlsys.config.loader import tree_in
from rlsys.config.resource_plan import plan_of
from rlsys.config.run_sections import WorkerRole
from rlsys.config.schema import ON_CPU_SLOTS
from rlsys.config.server_section import ServerSection
from rlsys.launch.doctor import has_nvidia_driver
from rlsys.launch.planned_workers import MemorySettings, PlannedWorkers
from rlsys.launch.preflight import check_architectures
from rlsys.util.files import CONFIG

MOST_SLOTS = 256
MOST_MICRO_BATCH_TOKENS = 2**15
_SECTIONS = {"dtype": "model", "slots": "rollout", "micro_batch_tokens": "train"}
"""Section of each key."""


def with_device_defaults(config: Config, gpu_memory: int | None = None) -> Config:
    """Return the configuration with a value for each of these keys; those that are set stay.

    Workers of a local cluster take the GPUs of this machine: see `with_gpus`. `gpu_memory` is that of each GPU, in
    bytes; None: that of this machine's. Where it is not known, where the model is not here, and for several policies,
    the values are those of CPUs. Raises `ModelError` for a model that is neither a folder nor on the hub, or of a kind
    that cannot be trained.
    """
    config = with_gpus(config, num_local_gpus(config))
    has_gpus = bool(config.resources["actor"].num_gpus or config.resources["rollout"].num_gpus)
    if not config.policies:
        config = _with(config, _resumed_values(config))
    if has_gpus and not config.policies and (missing := _missing(config)) and _has_model(config):
        check_architectures(config)
        config = _with(config, _of_gpus(config, missing, gpu_memory))
    return as_in(config, config)


def with_gpus(config: Config, num_gpus: int) -> Config:
    """Return the configuration with a GPU for each rank, for the reference, and for each shard of a replica.

    It stays as it is if `num_gpus` are too few for all of them, if a key says how many one of them takes, and for
    several policies.
    """
    shards = 0 if isinstance(config.rollout.engine, ServerSection) else config.rollout.tensor_parallel
    gpus: dict[WorkerRole, int] = {"actor": 1, "critic": 1, "reference": 1, "rollout": shards}
    if config.policies or any(config.resources[role].gpus is not None for role in gpus):
        return config
    own = {role: config.resources[role].model_copy(update={"gpus": float(count)}) for role, count in gpus.items()}
    on_gpus = config.model_copy(update={"resources": config.resources | own})
    return on_gpus if plan_of(on_gpus).num_gpus <= num_gpus else config


def num_local_gpus(config: Config) -> int:
    """Return the number of GPUs of this machine; 0 for a run that joins a cluster, which may have others."""
    if not has_nvidia_driver():
        return 0
    from workers.model.memory_counts import num_gpus
    from workers.ray.cluster import starts_local

    return num_gpus() if starts_local(config.ray_address) else 0


def as_in(other: Config, config: Config) -> Config:
    """Fill in these keys as in another configuration."""
    return _with(config, {key: getattr(other, key) for key in _SECTIONS})


def _has_model(config: Config) -> bool:
    """Return True if the model's configuration can be read; workers refuse a folder without one. A folder that is not
    on this machine may be on another one of a cluster."""
    folder = Path(config.model.path)
    return (folder / "config.json").is_file() or (config.ray_address is None and not folder.is_dir())


def filled_keys(given: Config, config: Config) -> Iterator[str]:
    """Yield the keys that `with_device_defaults` filled in, as overrides: `rollout.slots=64`."""
    yield from (f"{_SECTIONS[key]}.{key}={getattr(config, key)}" for key in _SECTIONS if key in _missing(given))


def _missing(config: Config) -> set[str]:
    return {key for key, section in _SECTIONS.items() if getattr(getattr(config, section), key) is None}


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    """Fill in these keys where they are not set."""
    missing = _missing(config) & values.keys()
    filled = {s: getattr(config, s).model_copy(update={k: values[k]}) for k, s in _SECTIONS.items() if k in missing}
    return config.model_copy(update=filled)


def _resumed_values(config: Config) -> dict[str, Any]:
    """Values of the run that is resumed; empty if there is none."""
    path = config.run_dir / CONFIG
    if config.run.resume not in ("auto", "must") or not path.is_file():
        return {}
    tree = tree_in(path)
    return {key: tree[section][key] for key, section in _SECTIONS.items() if tree.get(section, {}).get(key) is not None}


def _of_gpus(config: Config, missing: set[str], gpu_memory: int | None) -> dict[str, Any]:
    """Values of these keys on GPUs."""
    from workers.model.memory_counts import memory_of_gpu

    gpus = {role: own.num_gpus for role, own in config.resources.items()}
    memory = gpu_memory or memory_of_gpu()
    longest = max(MOST_MICRO_BATCH_TOKENS, config.max_context_tokens)
    counted = _with(config, {"micro_batch_tokens": longest})  # counts are exact at these positions
    workers, settings = PlannedWorkers(counted, memory or 0), MemorySettings.of(config)
    found: dict[str, Any] = {}
    on_gpus = [gpus["actor"], gpus["rollout"] or isinstance(config.rollout.engine, ServerSection)]
    on_gpus += [gpus["reference"]] if config.has_reference else []
    on_gpus += [gpus["critic"]] if Column.VALUES in config.algorithm.columns else []
    if "dtype" in missing and all(on_gpus) and workers.is_stored_in_bfloat16:
        found["dtype"] = "bfloat16"
        settings = replace(settings, dtype="bfloat16")
    if memory is not None and "micro_batch_tokens" in missing and gpus["actor"]:
        found["micro_batch_tokens"] = _most_tokens(workers, settings, config.max_context_tokens)
        settings = replace(settings, micro_batch_tokens=found["micro_batch_tokens"])
    if memory is not None and "slots" in missing and gpus["rollout"]:
        found["slots"] = _most_slots(workers, settings)
    return found


def _most_tokens(workers: PlannedWorkers, settings: MemorySettings, longest: int) -> int:
    """Most tokens with which ranks and reference fit: a power of two, or else those of the longest sample."""
    choices = [2**n for n in range(MOST_MICRO_BATCH_TOKENS.bit_length() - 1, -1, -1) if 2**n > longest]
    fits = (n for n in choices if all(w.fits for w in workers.training(replace(settings, micro_batch_tokens=n))))
    return next(fits, longest)


def _most_slots(workers: PlannedWorkers, settings: MemorySettings) -> int:
    """Most slots, a power of two, with which the replicas fit; beyond those of a CPU, only with a cache that has room
    for as many whole conversations."""
    for slots in (2**n for n in range(MOST_SLOTS.bit_length() - 1, -1, -1)):
        choice = replace(settings, slots=slots)
        replicas = workers.sampling(choice)
        has_room = slots <= ON_CPU_SLOTS or workers.num_cached(choice, replicas[0].memory) >= slots
        if has_room and all(one.fits for one in replicas):
            return slots
    return 1
