"""From a configuration to Ray actors and their handles: what `rlsys.launch` starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlsys.types import Sampling
from workers.actor import ActorRank, ActorSpec
from workers.cluster import Resources, node_ids, spawn
from workers.handles import ActorHandle, ReferenceHandle, RewardPool, RolloutPool
from workers.remote import ReferenceActor, RelayActor, RewardActor, RolloutActor, RolloutSpec
from workers.train.settings import OptimizerSettings
from workers.transport.object_store import ObjectStorePublisher

if TYPE_CHECKING:
    from rlsys.config import Config

NO_MATHS = Resources(num_cpus=0.0)
"""A relay only keeps references."""


def start_relays() -> dict[str, Any]:
    """One relay per node, by node id."""
    return {node: spawn(RelayActor, NO_MATHS, node=node) for node in node_ids()}


def start_actor(config: Config, relays: Mapping[str, Any]) -> ActorHandle:
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


def start_rollouts(config: Config, model_path: str, sampling: Sampling, relays: Mapping[str, Any]) -> RolloutPool:
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
    reward = config.reward

    def start(name: str) -> Any:
        return spawn(RewardActor, Resources(reward.num_cpus), name, reward.fn, reward.processes, reward.timeout_s)

    return RewardPool(reward.workers, start, config.limits.lease_s)


def start_reference(config: Config) -> ReferenceHandle:
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
    return ReferenceHandle(actor, config.limits.lease_s)
