"""Start the Ray actors of a configuration and return their handles, for `rlsys.launch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlsys.algorithm import Signal
from rlsys.types import POLICY, Sampling
from rlsys.weight_sync.relay import Relay
from workers.engines.engine import EngineSpec
from workers.ray.cluster import NO_MATHS, Resources, node_ids
from workers.ray.pool import PoolSpec
from workers.ray.remote_proxy import Remote, start
from workers.relay.relay_pool import RayRelays
from workers.reward.reward_pool import RewardPool
from workers.reward.reward_worker import RewardModelSpec, RewardWorker
from workers.rollout.generator import WeightChange
from workers.rollout.partial_responses import Partials
from workers.rollout.replica_spec import GeneratorSpec, RolloutSpec
from workers.rollout.rollout_pool import ANSWER_S, PinnedRolloutPool, RolloutPool
from workers.rollout.rollout_worker import RolloutWorker
from workers.train.optimizer import critic_optimizer_settings, optimizer_settings
from workers.train.ranks import ActorRank, ActorSpec, CriticRank, CriticSpec
from workers.train.reference_worker import ReferenceWorker
from workers.train.train_handles import ActorHandle, CriticHandle, ReferenceHandle
from workers.transport.object_store import ObjectStorePublisher

if TYPE_CHECKING:
    from rlsys.config import Config

VLLM_MEMORY = 0.9
"""Share of a GPU's memory that all engines of a replica use together, unless `rollout.vllm_args` sets one per
engine."""
PROBE_TOKENS = 32


def start_partials() -> Remote[Partials]:
    """Start the partial response pool on the driver's node. Ray restarts it if it dies, and its content is lost."""
    here, *_ = node_ids()
    return start(Partials, "partials", Partials, NO_MATHS, ANSWER_S, place=here, restarts=True)


def start_actor(config: Config, relays: RayRelays) -> ActorHandle:
    """Start all ranks of the actor."""
    train, limits = config.train, config.limits
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
    publisher = ObjectStorePublisher(relays.members, limits.transfer_s)
    ranks = [
        start(ActorRank, f"actor-{r}", partial(ActorRank, r, spec, publisher), spec.resources, limits.no_progress_s)
        for r in range(train.ranks)
    ]
    return ActorHandle(ranks, has_pairs=Signal.POLICY_MISMATCHED in config.algorithm.signals)


def start_critic(config: Config) -> CriticHandle:
    """Start all ranks of the critic: one per rank of the actor, with the same samples."""
    section, train = config.critic, config.train
    spec = CriticSpec(
        model_path=section.path or config.model.path,
        policy_path=config.model.path,
        dtype=config.model.dtype,
        num_ranks=train.ranks,
        optimizer=critic_optimizer_settings(config),
        algorithm=config.algorithm,
        resources=Resources(section.num_cpus, section.num_gpus, section.threads),
    )
    deadline_s = config.limits.no_progress_s
    ranks = [
        start(CriticRank, f"critic-{r}", partial(CriticRank, r, spec), spec.resources, deadline_s)
        for r in range(train.ranks)
    ]
    return CriticHandle(ranks)


def max_context(config: Config) -> int:
    """Maximum tokens of prompt and completion together."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _probe_length(config: Config) -> int:
    """Tokens of the probe: less than the context, because a scoring request needs one token. 0 means no probe."""
    length = min(PROBE_TOKENS, max_context(config) - 1)
    return length if length > 1 else 0


def export_checkpoint(config: Config, folder: Path, to: Path) -> None:
    """Write the checkpoint in `folder` as a Hugging Face model folder. Raises `CheckpointError`."""
    from workers.train.fsdp import FsdpBackend
    from workers.train.rank_group import RankGroup

    backend = FsdpBackend(config.model.path, optimizer_settings(config), RankGroup(), dtype=config.model.dtype)
    backend.load_weights(folder)
    backend.export(to)


def start_rollouts(config: Config, relays: RayRelays, partials: Remote[Partials] | None = None) -> RolloutPool:
    """Start the rollout replicas for training. `partials` keeps what unfinished groups have sampled."""
    spec = _replica_spec(config, {POLICY: _generator_spec(config, config.model.path, "newest")}, _sampling(config))
    supply = _replicas(config, config.rollout.replicas, spec, {POLICY: relays.members}, partials)
    return RolloutPool(supply, partials=partials)


def start_joint_rollouts(config: Config, relays: Mapping[str, RayRelays]) -> RolloutPool:
    """Start the rollout replicas for several policies; `relays` are those of the trained policies.

    The replicas keep no partial responses: a group that is lost with its replica starts from scratch.
    """
    generators: dict[str, GeneratorSpec] = {}
    num_policies = len(config.policies)
    for name in config.policies:
        own = config.of(name)
        generators[name] = _generator_spec(own, own.model.path, "newest" if name in relays else "never", num_policies)
    spec = replace(_replica_spec(config, generators, _sampling(config)), bindings=config.agents)
    lines = {name: of_policy.members for name, of_policy in relays.items()}
    return RolloutPool(_replicas(config, config.rollout.replicas, spec, lines))


def start_evaluation(config: Config, relays: RayRelays) -> PinnedRolloutPool:
    """Start the replicas that evaluate."""
    spec = _replica_spec(config, {POLICY: _generator_spec(config, config.model.path, "pinned")}, _eval_sampling(config))
    return PinnedRolloutPool(_replicas(config, config.eval.replicas, spec, {POLICY: relays.members}), relays)


def start_fixed_rollouts(config: Config, model_path: str) -> RolloutPool:
    """Start replicas of a model that is not trained, for `rlsys eval`."""
    spec = _replica_spec(config, {POLICY: _generator_spec(config, model_path, "never")}, _eval_sampling(config))
    return RolloutPool(_replicas(config, config.eval.replicas, spec, relays={}), kind="eval")


def _sampling(config: Config) -> Sampling:
    return Sampling(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)


def _eval_sampling(config: Config) -> Sampling:
    return Sampling(temperature=config.eval.temperature, max_new_tokens=config.rollout.max_new_tokens)


def _replicas(
    config: Config,
    size: int,
    spec: RolloutSpec,
    relays: Mapping[str, Sequence[Remote[Relay]]],
    partials: Remote[Partials] | None = None,
) -> PoolSpec[RolloutWorker]:
    def one(name: str) -> Remote[RolloutWorker]:
        build = partial(RolloutWorker.of, name, spec, relays, partials)
        return start(RolloutWorker, name, build, spec.resources, ANSWER_S)

    return PoolSpec(size, one, config.limits.lease_s, config.limits.max_attempts)


def _replica_spec(config: Config, generators: Mapping[str, GeneratorSpec], sampling: Sampling) -> RolloutSpec:
    rollout = config.rollout
    return RolloutSpec(
        generators=generators,
        sampling=sampling,
        max_prompt_tokens=config.data.max_prompt_tokens,
        workflow=rollout.workflow,
        transfer_s=config.limits.transfer_s,
        resources=Resources(rollout.num_cpus, rollout.num_gpus, rollout.threads),
    )


def _generator_spec(
    config: Config, model_path: str, pulls: Literal["newest", "pinned", "never"], num_engines: int = 1
) -> GeneratorSpec:
    """Specification of one of the `num_engines` engines that share the replica's GPUs."""
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
        vllm_args=_share_of_memory(num_engines) | rollout.vllm_args,
    )
    change = WeightChange(rollout.weight_change if is_trained else "between", config.probe_tolerance)
    return GeneratorSpec(engine=engine, change=change, pulls=pulls)


def _share_of_memory(num_engines: int) -> dict[str, float]:
    """vLLM arguments for one of several engines on a GPU. By default, each would use nearly all of its memory."""
    return {"gpu_memory_utilization": VLLM_MEMORY / num_engines} if num_engines > 1 else {}


def start_rewards(config: Config) -> RewardPool:
    """Start the reward workers."""
    reward, model, limits = config.reward, config.reward.model, config.limits
    judge = model and RewardModelSpec(model.path, model.dtype, model.max_tokens, model.weight)
    resources = Resources(reward.worker_cpus, reward.worker_gpus, model.threads if model else 1)
    arguments = reward.functions, reward.processes, reward.timeout_s, judge, resources

    def one(name: str) -> Remote[RewardWorker]:
        return start(RewardWorker, name, partial(RewardWorker.of, name, *arguments), resources, limits.lease_s)

    return RewardPool(PoolSpec(reward.workers, one, limits.lease_s, limits.max_attempts))


def start_reference(config: Config, policy: str = POLICY) -> ReferenceHandle:
    """Start the worker with the frozen initial model of a policy."""
    section = config.reference
    resources = Resources(section.num_cpus, section.num_gpus, section.threads)
    arguments = config.model.path, config.model.dtype, config.rollout.temperature, config.train.micro_batch_tokens
    build = partial(resources.build, partial(ReferenceWorker, *arguments, policy=policy))
    return ReferenceHandle(start(ReferenceWorker, "reference", build, resources, config.limits.no_progress_s))
