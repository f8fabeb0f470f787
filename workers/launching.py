"""From a configuration to Ray actors and their handles: what `rlsys.launch` starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from rlsys.algorithm import Signal
from rlsys.contracts import Workers
from rlsys.types import Sampling
from workers.actor import ActorRank, ActorSpec
from workers.cluster import RayActor, Resources, node_ids, spawn
from workers.handles import ActorHandle, Pool, ReferenceHandle, RewardPool, RolloutPool
from workers.remote import ReferenceActor, RelayActor, RewardActor, RolloutActor, RolloutSpec
from workers.train.settings import OptimizerSettings
from workers.transport.object_store import ObjectStorePublisher

if TYPE_CHECKING:
    from rlsys.config import Config

NO_MATHS = Resources(num_cpus=0.0)
"""A relay only keeps references."""


@dataclass
class Crew:
    """Every worker of a run."""

    relays: dict[str, RayActor]
    actor: ActorHandle
    rollouts: RolloutPool
    rewards: RewardPool
    reference: ReferenceHandle | None

    @classmethod
    def of(cls, config: Config) -> Crew:
        """Start all of them; each loads while the others do."""
        relays = start_relays()
        sampling = Sampling(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)
        needs_reference = Signal.REFERENCE_LOGPROBS in config.algorithm.signals
        return cls(
            relays,
            start_actor(config, relays),
            start_rollouts(config, config.model.path, sampling, relays),
            start_rewards(config),
            start_reference(config) if needs_reference else None,
        )

    async def ready(self) -> None:
        """Return once all are set up. Raises what the first to fail raised, `ModelError` for instance."""
        await asyncio.gather(*(worker.ready() for worker in self._handles()))

    def workers(self) -> Workers:
        """What the driver talks to."""
        annotators = {Signal.REFERENCE_LOGPROBS: self.reference} if self.reference else {}
        return Workers(self.rollouts, self.rewards, self.actor, annotators)

    async def close(self) -> None:
        """End every worker, in a cluster that goes on without them too."""
        await asyncio.gather(*(worker.close() for worker in self._handles()))
        for relay in self.relays.values():
            ray.kill(relay)

    def _handles(self) -> list[ActorHandle | Pool | ReferenceHandle]:
        return [self.actor, self.rollouts, self.rewards, *([self.reference] if self.reference else [])]


def start_relays() -> dict[str, RayActor]:
    """One relay per node, by node id."""
    return {node: spawn(RelayActor, NO_MATHS, node=node) for node in node_ids()}


def start_actor(config: Config, relays: Mapping[str, RayActor]) -> ActorHandle:
    """All ranks of the actor."""
    train = config.train
    spec = ActorSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        num_ranks=train.ranks,
        optimizer=optimizer_settings(config),
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        resources=Resources(train.num_cpus, train.num_gpus, train.threads),
    )
    publisher = ObjectStorePublisher(relays, config.limits.transfer_s)
    ranks = [spawn(ActorRank, spec.resources, rank, spec, publisher) for rank in range(train.ranks)]
    return ActorHandle(ranks, config.limits.no_progress_s)


def optimizer_settings(config: Config) -> OptimizerSettings:
    """The optimizer of this configuration."""
    train = config.train
    return OptimizerSettings(
        lr=train.lr,
        betas=train.betas,
        weight_decay=train.weight_decay,
        clip_norm=train.clip_norm,
        warmup_steps=train.warmup_steps,
        total_steps=config.run.steps,
        final_lr_fraction=train.final_lr_fraction,
    )


def export_checkpoint(config: Config, folder: Path, to: Path) -> None:
    """Write what the ranks saved in `folder` as a model folder. Raises `CheckpointError`."""
    from workers.train.fsdp import FsdpBackend
    from workers.train.ranks import Ranks

    backend = FsdpBackend(config.model.path, optimizer_settings(config), Ranks(), dtype=config.model.dtype)
    backend.load(folder)
    backend.export(to)


def start_rollouts(config: Config, model_path: str, sampling: Sampling, relays: Mapping[str, RayActor]) -> RolloutPool:
    """Replicas of `model_path`; without relays they keep its weights."""
    rollout = config.rollout
    spec = RolloutSpec(
        model_path=model_path,
        dtype=config.model.dtype,
        slots=rollout.slots,
        sampling=sampling,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_context=config.data.max_prompt_tokens + sampling.max_new_tokens,
        workflow=rollout.workflow,
        weight_change=rollout.weight_change,
        transfer_s=config.limits.transfer_s,
        pulls_weights=bool(relays),
        resources=Resources(rollout.num_cpus, rollout.num_gpus, rollout.threads),
    )
    return RolloutPool(
        rollout.replicas, lambda name: spawn(RolloutActor, spec.resources, name, spec, relays), config.limits.lease_s
    )


def start_rewards(config: Config) -> RewardPool:
    """The reward workers."""
    reward = config.reward

    def start(name: str) -> RayActor:
        return spawn(RewardActor, Resources(reward.num_cpus), name, reward.fn, reward.processes, reward.timeout_s)

    return RewardPool(reward.workers, start, config.limits.lease_s)


def start_reference(config: Config) -> ReferenceHandle:
    """The frozen initial model."""
    section = config.reference
    resources = Resources(section.num_cpus, section.num_gpus, section.threads)
    actor = spawn(
        ReferenceActor,
        resources,
        config.model.path,
        config.model.dtype,
        config.rollout.temperature,
        config.train.micro_batch_tokens,
        resources,
    )
    return ReferenceHandle(actor, config.limits.no_progress_s)
