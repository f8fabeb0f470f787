"""From a configuration to Ray actors and their handles: what `rlsys.launch` starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ray

from rlsys.algorithm import Signal
from rlsys.contracts import StepAnnotator, Workers
from rlsys.errors import WorkerError
from rlsys.types import Sampling
from workers.actor import ActorRank, ActorSpec
from workers.cluster import RayActor, Resources, node_ids, spawn
from workers.critic import CriticRank, CriticSpec
from workers.engines.base import EngineChoice, EngineSpec
from workers.handles import ActorHandle, CriticHandle, RanksHandle, ReferenceHandle
from workers.peers import RayPartials
from workers.pools import Pool, RewardPool, Supply
from workers.relays import NO_MATHS, RayRelays, RelayHandle
from workers.remote import (
    PartialsActor,
    ReferenceActor,
    RewardActor,
    RewardModelSpec,
    RewardWorkerSpec,
    RolloutActor,
    RolloutSpec,
)
from workers.rollout import WeightChange
from workers.rollouts import PinnedRolloutPool, RolloutPool
from workers.train.settings import OptimizerSettings
from workers.transport.object_store import ObjectStorePublisher

if TYPE_CHECKING:
    from rlsys.config import Config

PROBE_TOKENS = 32
"""Tokens on which replicas and trainer compare logprobs after every weight change."""
REFERENCE_SIGNALS = {Signal.REFERENCE_LOGPROBS, Signal.REFERENCE_MISMATCHED}
"""What the reference worker makes."""


@dataclass
class Crew:
    """Every worker of a run."""

    relays: RayRelays
    partials: RayPartials
    actor: ActorHandle
    critic: CriticHandle | None
    rollouts: RolloutPool
    rewards: RewardPool
    reference: ReferenceHandle | None
    evaluation: PinnedRolloutPool | None

    @classmethod
    def of(cls, config: Config) -> Crew:
        """Start all of them; each loads while the others do."""
        relays, partials = RayRelays.start(config.limits.transfer_s), start_partials()
        signals = config.algorithm.signals
        return cls(
            relays,
            partials,
            start_actor(config, relays),
            start_critic(config) if Signal.VALUES in signals else None,
            start_rollouts(config, relays, partials),
            start_rewards(config),
            start_reference(config) if signals & REFERENCE_SIGNALS else None,
            start_evaluation(config, relays) if config.eval.every else None,
        )

    async def ready(self) -> None:
        """Return once all are set up. Raises what the first to fail raised, `ModelError` for instance."""
        await asyncio.gather(*(worker.ready() for worker in self._handles()))

    def engines(self) -> Iterator[tuple[str, EngineChoice]]:
        """What each replica generates with, by its name; once all are ready."""
        for member in [*self.rollouts.members, *(self.evaluation.members if self.evaluation else [])]:
            assert isinstance(member.ready, EngineChoice)
            yield member.name, member.ready

    def workers(self) -> Workers:
        """What the driver talks to."""
        reference, critic = self.reference, self.critic
        step_annotators: dict[Signal, StepAnnotator] = {}
        if reference:
            step_annotators[Signal.REFERENCE_MISMATCHED] = reference
        if critic:
            step_annotators[Signal.VALUES] = critic
        return Workers(
            rollouts=self.rollouts,
            rewards=self.rewards,
            actor=self.actor,
            relays=self.relays,
            annotators={Signal.REFERENCE_LOGPROBS: reference} if reference else {},
            evaluation=self.evaluation,
            step_annotators=step_annotators,
            critic=critic,
        )

    def watch(self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]) -> None:
        """Have these called with what the pools meet with in the background: see `Pool`."""
        for pool in (self.rollouts, self.rewards, self.evaluation):
            if pool:
                pool.on_failure, pool.on_recovery = on_failure, on_recovery

    async def close(self) -> None:
        """End every worker, in a cluster that goes on without them too."""
        await asyncio.gather(*(worker.close() for worker in self._handles()))
        self.relays.close()
        ray.kill(self.partials.actor)

    def _handles(self) -> list[RanksHandle | Pool | ReferenceHandle]:
        handles = (self.actor, self.critic, self.rollouts, self.rewards, self.reference, self.evaluation)
        return [handle for handle in handles if handle is not None]


def start_partials() -> RayPartials:
    """The partial response pool, on the driver's node. Ray starts it again where it dies; what it held is lost then."""
    here, *_ = node_ids()
    return RayPartials(spawn(PartialsActor, NO_MATHS, node=here, max_restarts=-1))


def start_actor(config: Config, relays: RayRelays) -> ActorHandle:
    """All ranks of the actor."""
    train = config.train
    spec = ActorSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        num_ranks=train.ranks,
        optimizer=optimizer_settings(config),
        algorithm=config.algorithm,
        stabilizer=config.stabilizer,
        temperature=config.rollout.temperature,
        probe_length=_probe_length(config),
        resources=Resources(train.num_cpus, train.num_gpus, train.threads),
    )
    publisher = ObjectStorePublisher(relays.members, config.limits.transfer_s)
    ranks = [spawn(ActorRank, spec.resources, rank, spec, publisher) for rank in range(train.ranks)]
    has_pairs = Signal.POLICY_MISMATCHED in config.algorithm.signals
    return ActorHandle(ranks, config.limits.no_progress_s, has_pairs=has_pairs)


def start_critic(config: Config) -> CriticHandle:
    """All ranks of the critic: as many as the actor has, each with the samples of one of the actor's."""
    section, train = config.critic, config.train
    spec = CriticSpec(
        model_path=section.path or config.model.path,
        policy_path=config.model.path,
        dtype=config.model.dtype,
        num_ranks=train.ranks,
        optimizer=replace(optimizer_settings(config), lr=section.lr or 10 * train.lr),
        algorithm=config.algorithm,
        resources=Resources(section.num_cpus, section.num_gpus, section.threads),
    )
    ranks = [spawn(CriticRank, spec.resources, rank, spec) for rank in range(train.ranks)]
    return CriticHandle(ranks, config.limits.no_progress_s)


def max_context(config: Config) -> int:
    """Tokens of the longest prompt and completion together."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _probe_length(config: Config) -> int:
    """One token less than the context, which a request that scores needs itself; at least two, or no probe."""
    length = min(PROBE_TOKENS, max_context(config) - 1)
    return length if length > 1 else 0


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
    backend.load_weights(folder)
    backend.export(to)


def start_rollouts(config: Config, relays: RayRelays, partials: RayPartials | None = None) -> RolloutPool:
    """The replicas that generate for training; what groups have sampled is kept in `partials`."""
    rollout = config.rollout
    sampling = Sampling(temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
    spec = _replica_spec(config, config.model.path, sampling, "newest")
    return RolloutPool(_replicas(config, rollout.replicas, spec, relays.members, partials), partials=partials)


def start_evaluation(config: Config, relays: RayRelays) -> PinnedRolloutPool:
    """The replicas of the evaluation lane."""
    spec = _replica_spec(config, config.model.path, _eval_sampling(config), "pinned")
    return PinnedRolloutPool(_replicas(config, config.eval.replicas, spec, relays.members), relays)


def start_fixed_rollouts(config: Config, model_path: str) -> RolloutPool:
    """Replicas of a model that nobody trains, for `rlsys eval`."""
    spec = _replica_spec(config, model_path, _eval_sampling(config), "never")
    return RolloutPool(_replicas(config, config.eval.replicas, spec, relays=()), kind="eval")


def _eval_sampling(config: Config) -> Sampling:
    return Sampling(temperature=config.eval.temperature, max_new_tokens=config.rollout.max_new_tokens)


def _replicas(
    config: Config,
    size: int,
    spec: RolloutSpec,
    relays: Sequence[RelayHandle],
    partials: RayPartials | None = None,
) -> Supply:
    def start(name: str) -> RayActor:
        return spawn(RolloutActor, spec.resources, name, spec, relays, partials)

    return _supply(config, size, start)


def _supply(config: Config, size: int, start: Callable[[str], RayActor]) -> Supply:
    return Supply(size, start, config.limits.lease_s, config.limits.max_attempts)


def _replica_spec(
    config: Config, model_path: str, sampling: Sampling, pulls: Literal["newest", "pinned", "never"]
) -> RolloutSpec:
    rollout = config.rollout
    is_trained = pulls == "newest"
    engine = EngineSpec(
        engine=rollout.engine,
        model_path=model_path,
        dtype=config.model.dtype,
        slots=rollout.slots,
        max_context=max_context(config),
        kv_cache=rollout.kv_cache,
        tensor_parallel=rollout.tensor_parallel,
        step_s=config.limits.step_s,
        load_s=config.limits.transfer_s,
        resident_versions=config.resident_versions if is_trained else 1,
        vllm_args=rollout.vllm_args,
    )
    return RolloutSpec(
        engine=engine,
        sampling=sampling,
        max_prompt_tokens=config.data.max_prompt_tokens,
        workflow=rollout.workflow,
        change=WeightChange(rollout.weight_change if is_trained else "between", config.probe_tolerance),
        transfer_s=config.limits.transfer_s,
        pulls=pulls,
        resources=Resources(rollout.num_cpus, rollout.num_gpus, rollout.threads),
    )


def start_rewards(config: Config) -> RewardPool:
    """The reward workers."""
    reward, model = config.reward, config.reward.model
    spec = RewardWorkerSpec(
        functions=reward.functions,
        processes=reward.processes,
        timeout_s=reward.timeout_s,
        model=model and RewardModelSpec(model.path, model.dtype, model.max_tokens, model.weight),
        resources=Resources(reward.worker_cpus, reward.worker_gpus, model.threads if model else 1),
    )
    return RewardPool(_supply(config, reward.workers, lambda name: spawn(RewardActor, spec.resources, name, spec)))


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
