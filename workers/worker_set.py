"""All workers of a run: one set per trained policy, and the workers that all policies share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from rlsys.algorithm import REFERENCE_SIGNALS, Signal
from rlsys.config.server_section import ServerSection
from rlsys.contracts import PinnedRollouts, Rewards, Rollouts, StepAnnotator, Workers
from rlsys.errors import WorkerError
from rlsys.rewards.reward_function import RewardSpec
from rlsys.types import POLICY
from workers.engines.engine import EngineChoice, EngineSpec, ServerSpec, weight_bytes
from workers.ray.cluster import NO_MATHS, Resources, node_ids, short_of, totals
from workers.ray.pool import Pool, PoolSpec
from workers.ray.remote_proxy import Remote, place_of, start, successor_name
from workers.relay.relay_pool import RayRelays
from workers.reward.replica_rewards import ReplicaRewards
from workers.reward.reward_worker import RewardPool, RewardWorker
from workers.rollout.generator import WeightChange
from workers.rollout.partial_responses import Partials, PartialsRelay
from workers.rollout.rollout_pool import ANSWER_S, PinnedRolloutPool, RolloutPool
from workers.rollout.rollout_worker import GeneratorSpec, RolloutSpec, RolloutWorker
from workers.rollout.session_host import SessionHost
from workers.train.optimizer import critic_optimizer_settings, optimizer_settings
from workers.train.ranks import ActorRank, ActorSpec, CriticRank, RankSpec
from workers.train.recorder import Recorder
from workers.train.reference_worker import ReferenceWorker
from workers.train.train_handles import ActorHandle, CriticHandle, RanksHandle, RecorderHandle, ReferenceHandle

if TYPE_CHECKING:
    from rlsys.config import Config

W = TypeVar("W")
VLLM_MEMORY = 0.9
"""Share of a GPU's memory that all engines of a replica use together, unless `rollout.vllm_args` sets one per
engine."""
PROBE_TOKENS = 32
MODEL_PATIENCE = 5
"""Multiple of `limits.silence_s` that actor, critic and reference may be silent."""


@dataclass(frozen=True)
class PolicyWorkers:
    """The workers that train one policy, and the relays for its weights."""

    relays: RayRelays
    actor: ActorHandle
    critic: CriticHandle | None = None
    reference: ReferenceHandle | None = None
    is_own_reference: bool = False
    """True if the actor computes the columns of the reference."""

    @classmethod
    def of(cls, config: Config, policy: str = POLICY) -> PolicyWorkers:
        """Start all of them; `config` is that of this policy."""
        relays, signals = _relays(config), config.algorithm.signals
        return cls(
            relays,
            start_actor(config, relays),
            start_critic(config) if Signal.VALUES in signals else None,
            start_reference(config, policy) if config.has_reference else None,
            is_own_reference=config.train.lora is not None and config.reference.path is None,
        )

    def workers(self, rollouts: Rollouts, rewards: Rewards, evaluation: PinnedRollouts | None = None) -> Workers:
        """The workers as the driver of this policy sees them.

        An actor that trains an adapter is its own reference: its ranks compute the columns of whole steps.
        """
        reference, critic, actor = self.reference, self.critic, self.actor
        of_steps: dict[Signal, StepAnnotator | None] = {Signal.VALUES: critic}
        if self.is_own_reference:
            of_steps |= dict.fromkeys(REFERENCE_SIGNALS, actor)
        else:
            of_steps[Signal.REFERENCE_MISMATCHED] = reference
        return Workers(
            rollouts=rollouts,
            rewards=rewards,
            actor=actor,
            relays=self.relays,
            annotators={Signal.REFERENCE_LOGPROBS: reference} if reference else {},
            evaluation=evaluation,
            step_annotators={signal: worker for signal, worker in of_steps.items() if worker},
            critic=critic,
            reference=reference,
        )


@dataclass
class WorkerSet:
    """All workers of a run."""

    lines: Mapping[str, PolicyWorkers]
    """By name of the trained policy."""
    rollouts: RolloutPool
    rewards: RewardPool | ReplicaRewards
    evaluation: PinnedRolloutPool | None = None
    hosts: Sequence[Remote[SessionHost]] = ()

    @classmethod
    def of(cls, config: Config) -> WorkerSet:
        """Start all workers; they load in parallel."""
        lines = {name: PolicyWorkers.of(own, name) for name, own in (config.trained or {POLICY: config}).items()}
        relays = {name: line.relays for name, line in lines.items()}
        partials = partials_of(config, relays)
        rewards = start_rewards(config)  # placed before rollouts: a run needs each of them
        hosts = start_hosts(config)
        return cls(
            lines,
            start_rollouts(config, relays, partials, hosts),
            rewards,
            start_evaluation(config, relays[POLICY]) if config.eval.every else None,
            hosts,
        )

    async def ready(self) -> None:
        """Return once all workers are set up. Raises the first error of a worker, for example `ModelError`."""
        hosts = (host.setup() for host in self.hosts)
        await asyncio.gather(*(worker.ready() for worker in self._handles()), *hosts)

    async def engines(self) -> list[tuple[str, EngineChoice]]:
        """Engine of each replica, by name of the replica (and of the policy, if several). Call it after `ready`."""
        members = [*self.rollouts.members, *(self.evaluation.members if self.evaluation else [])]
        told = await asyncio.gather(*(member.worker.call(RolloutWorker.choices) for member in members))
        return [
            (member.name + (f" ({policy})" if len(choices) > 1 else ""), choice)
            for member, choices in zip(members, told, strict=True)
            for policy, choice in choices.items()
        ]

    def workers(self) -> Workers:
        """The workers as the driver sees them, in a run of one policy."""
        (line,) = self.lines.values()
        return line.workers(self.rollouts, self.rewards, self.evaluation)

    def watch(self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]) -> None:
        """Call these for failures and recoveries that the pools see in the background; see `Pool`.

        `on_failure` is also called once for each worker that waits for a place which the cluster does not have. If that
        is no rollout or evaluation replica, and the live nodes are too small for the run, a rollout replica gives way.
        """
        unplaced: set[str] = set()

        def note(lack: WorkerError) -> None:
            if lack.worker not in unplaced:
                unplaced.add(lack.worker)
                on_failure(lack)

        def make_room(lack: WorkerError) -> None:
            note(lack)
            short = short_of((each.resources for handle in self._handles() for each in handle.processes), totals())
            replica = self.rollouts.members[0].worker.resources
            if ("CPU" in short and replica.num_cpus) or ("GPU" in short and replica.num_gpus):
                self.rollouts.give_way(lack.worker)

        for pool in (self.rollouts, self.rewards, self.evaluation):
            if isinstance(pool, Pool):
                pool.on_failure, pool.on_recovery = on_failure, on_recovery
        for handle in self._handles():
            handle.on_unplaced = note if handle in (self.rollouts, self.evaluation) else make_room

    async def close(self) -> None:
        """End every worker, even if the cluster stays up."""
        await asyncio.gather(*(worker.close() for worker in self._handles()))
        for line in self.lines.values():
            line.relays.close()
        await asyncio.gather(*(host.end() for host in self.hosts))

    def _handles(self) -> list[RanksHandle | ReferenceHandle | Pool]:
        """Handles of all workers except the relays."""
        own = [handle for line in self.lines.values() for handle in (line.actor, line.critic, line.reference)]
        rewards = self.rewards if isinstance(self.rewards, RewardPool) else None
        return [handle for handle in (*own, self.rollouts, rewards, self.evaluation) if handle is not None]


def _relays(config: Config) -> RayRelays:
    """Start the relays of a policy. Replicas that wait for the first version know its size from the model's files."""
    num_bytes = 0 if config.train.lora else weight_bytes(config.model.path)
    return RayRelays.start(config.limits.transfer_s, PartialsRelay, num_bytes=num_bytes)


def partials_of(config: Config, relays: Mapping[str, RayRelays]) -> dict[str, Remote[Partials]]:
    """Return the pool of partial responses of each policy, by its name: at its relay on the driver's node, without
    which a run ends anyway. None if they are off."""
    if not config.rollout.partial_responses:
        return {}
    return {name: of.members[0].at(Partials, "partials").within(ANSWER_S) for name, of in relays.items()}


def start_actor(config: Config, relays: RayRelays) -> ActorHandle:
    """Start all ranks of the actor."""
    train = config.train
    spec = ActorSpec(
        model_path=config.model.path,
        dtype=config.dtype,
        mesh=train.mesh,
        optimizer=optimizer_settings(config),
        savings=train.savings,
        lora=train.lora,
        replays_routing=train.routing_replay,
        algorithm=config.algorithm,
        stabilizer=config.stabilizer,
        distribution=config.rollout.distribution,
        probe_length=_probe_length(config),
        resources=Resources(train.num_cpus, train.num_gpus, train.threads),
    )
    ranks = _ranks(config, "actor", ActorRank, spec.resources, spec, relays.route)
    signals = config.algorithm.signals
    has_pairs = Signal.POLICY_MISMATCHED in signals or (
        train.lora is not None and Signal.REFERENCE_MISMATCHED in signals
    )
    actor = ActorHandle(ranks, _silence_s(config), train.mesh.num_peers, has_pairs=has_pairs)
    if config.record.rollouts_every:
        actor.recorder = start_recorder(config, config.model.path)
    return actor


def start_recorder(config: Config, model_path: str) -> RecorderHandle:
    """Return the recorder of rollouts, which starts on the driver's node, where the run's folder is. `model_path` has
    the tokenizer."""
    build, deadline_s = partial(Recorder, model_path), config.limits.no_progress_s / 4

    def begin(num_before: int) -> Remote[Recorder]:
        here, *_ = node_ids()
        name = successor_name("recorder", num_before)
        return start(Recorder, name, build, NO_MATHS, deadline_s, place=here)

    return RecorderHandle(begin, _silence_s(config))


def start_critic(config: Config) -> CriticHandle:
    """Start all ranks of the critic: one per rank of the actor, with the same samples."""
    section = config.critic
    spec = RankSpec(
        model_path=section.path or config.model.path,
        dtype=config.dtype,
        mesh=config.train.mesh,
        optimizer=critic_optimizer_settings(config),
        savings=config.train.savings,
        lora=config.critic_lora,
        algorithm=config.algorithm,
        resources=Resources(section.num_cpus, section.num_gpus, section.threads),
    )
    ranks = _ranks(config, "critic", CriticRank, spec.resources, spec, config.model.path)
    return CriticHandle(ranks, _silence_s(config), config.train.mesh.num_peers)


def _ranks(
    config: Config, name: str, kind: type[W], resources: Resources, *arguments: object
) -> Callable[[int], list[Remote[W]]]:
    """Return what starts the ranks of the actor or the critic, after so many others of each; `arguments` follow the
    number of the rank."""
    deadline_s, num_ranks = config.limits.no_progress_s, config.train.mesh.num_ranks

    def all_ranks(num_before: int) -> list[Remote[W]]:
        return [
            start(kind, successor_name(f"{name}-{r}", num_before), partial(kind, r, *arguments), resources, deadline_s)
            for r in range(num_ranks)
        ]

    return all_ranks


def _silence_s(config: Config) -> float:
    """Seconds without a heartbeat after which actor, critic and reference are replaced: longer than for a replica,
    because a false alarm costs the steps since the last checkpoint."""
    return MODEL_PATIENCE * config.limits.silence_s


def _probe_length(config: Config) -> int:
    """Tokens of the probe: less than the context, because a scoring request needs one token. 0 means no probe."""
    length = min(PROBE_TOKENS, EngineSpec.of(config).max_context - 1)
    return length if length > 1 else 0


def export_checkpoint(config: Config, folder: Path, to: Path, *, as_adapter: bool = False) -> None:
    """Write the checkpoint in `folder` as a Hugging Face model folder, or only its adapter. Raises
    `CheckpointError`."""
    from workers.train.fsdp import FsdpBackend
    from workers.train.rank_group import RankGroup

    lora = config.train.lora
    backend = FsdpBackend(
        config.model.path, optimizer_settings(config), RankGroup(), dtype=config.dtype,
        lora=lora and lora.model_copy(update={"path": None}),
    )  # fmt: skip
    backend.load_weights(folder)
    if as_adapter:
        backend.export_adapter(to)
    else:
        backend.export(to)


def start_rollouts(
    config: Config,
    relays: Mapping[str, RayRelays],
    partials: Mapping[str, Remote[Partials]] | None = None,
    hosts: Sequence[Remote[SessionHost]] = (),
) -> RolloutPool:
    """Start the rollout replicas for training; `relays` are those of the trained policies.

    `partials` keep what each policy has sampled in unfinished groups. Without them, a group that is lost with its
    replica starts from scratch. `hosts` play the sessions, if there are any.
    """
    generators, partials = _training_generators(config), partials or {}
    supply = _replicas(config, generators, relays, partials, hosts)
    return RolloutPool(supply, partials=partials, policies=list(generators))


def start_hosts(config: Config) -> list[Remote[SessionHost]]:
    """Start the hosts of sessions. Ray restarts one that dies; until then replicas play sessions elsewhere."""
    if not config.rollout.session_hosts:
        return []
    spec = replace(_rollout_spec(config, _training_generators(config)), resources=Resources())
    names = (f"rollout-host-{number}" for number in range(config.rollout.session_hosts))
    return [
        start(SessionHost, name, partial(SessionHost.load, name, spec), spec.resources, ANSWER_S, restarts=True)
        for name in names
    ]


def _training_generators(config: Config) -> dict[str, GeneratorSpec]:
    own = {name: config.of(name) for name in config.policies} or {POLICY: config}
    trained = config.trained if config.policies else own
    return {
        name: _generator_spec(of, of.model.path, "newest" if name in trained else "never", len(own))
        for name, of in own.items()
    }


def start_evaluation(config: Config, relays: RayRelays) -> PinnedRolloutPool:
    """Start the replicas that evaluate."""
    generators = {POLICY: _generator_spec(config, config.model.path, "pinned")}
    return PinnedRolloutPool(_replicas(config, generators, {POLICY: relays}, evaluates=True), relays)


def start_fixed_rollouts(config: Config, model_path: str) -> RolloutPool:
    """Start replicas of a model that is not trained, for `rlsys eval`."""
    generators = {POLICY: _generator_spec(config, model_path, "never")}
    return RolloutPool(_replicas(config, generators, {}, evaluates=True), kind="eval")


def _replicas(
    config: Config,
    generators: Mapping[str, GeneratorSpec],
    relays: Mapping[str, RayRelays],
    partials: Mapping[str, Remote[Partials]] | None = None,
    hosts: Sequence[Remote[SessionHost]] = (),
    *,
    evaluates: bool = False,
) -> PoolSpec[RolloutWorker]:
    """Specification of the replicas with these generators, for training unless `evaluates`."""
    rollout, limits = config.rollout, config.limits
    section = config.eval if evaluates else rollout
    spec = _rollout_spec(config, generators, evaluates=evaluates)
    routes = {name: of_policy.route for name, of_policy in relays.items()}

    first = rollout.replicas if evaluates and relays else 0  # the servers of evaluation come last

    def one(name: str) -> Remote[RolloutWorker]:
        place = first + place_of(name)
        own = {policy: each.at(place) for policy, each in generators.items()}
        build = partial(RolloutWorker.of, name, replace(spec, generators=own), routes, partials or {}, hosts)
        return start(RolloutWorker, name, build, spec.resources, ANSWER_S)

    return PoolSpec(section.replicas, one, limits.lease_s, limits.silence_s, limits.max_attempts)


def _rollout_spec(config: Config, generators: Mapping[str, GeneratorSpec], *, evaluates: bool = False) -> RolloutSpec:
    rollout, scores = config.rollout, not config.reward.workers
    return RolloutSpec(
        generators=generators,
        bindings=config.agents if config.policies else {},
        sampling=rollout.sampling((config.eval if evaluates else rollout).temperature),
        max_prompt_tokens=config.data.max_prompt_tokens,
        chat=rollout.chat.with_text(),
        workflow=rollout.workflow,
        resources=Resources(rollout.num_cpus, rollout.num_gpus, rollout.threads),
        ends=rollout.early_ends,
        judge=_judge_of(config) if (rollout.early_ends and config.reward_functions) or scores else None,
        scores=scores,
    )


def _judge_of(config: Config) -> Callable[[str], RewardWorker]:
    """Return what makes the judge of a replica: the reward functions, in processes of their own."""
    reward = config.reward

    return partial(_judge, config.reward_functions, reward.processes, reward.timeout_s, reward.memory_mb)


def _judge(specs: Sequence[RewardSpec], processes: int, timeout_s: float, memory_mb: int, name: str) -> RewardWorker:
    return RewardWorker(specs, processes, timeout_s, memory_mb=memory_mb, name=name)


def _generator_spec(
    config: Config, model_path: str, pulls: Literal["newest", "pinned", "never"], num_engines: int = 1
) -> GeneratorSpec:
    """Specification of one of the `num_engines` engines that share the replica's GPUs."""
    rollout = config.rollout
    is_trained = pulls == "newest"
    # By default, each of several engines on a GPU would use nearly all of its memory.
    share_of_memory = {"gpu_memory_utilization": VLLM_MEMORY / num_engines} if num_engines > 1 else {}
    engine = replace(
        EngineSpec.of(config),
        model_path=model_path,
        resident_versions=config.resident_versions if is_trained else 1,
        vllm_args=share_of_memory | rollout.vllm_args,
        lora=None if pulls == "never" else config.train.lora,
        records_routing=is_trained and config.train.routing_replay,
        keeps_replies=not rollout.workflow.speaks_once,
    )
    servers: tuple[ServerSpec, ...] = ()
    if isinstance(section := rollout.engine, ServerSection):
        how = {"api_key_env": section.api_key_env, "folder": section.folder, "takes_weights": pulls != "never"}
        servers = tuple(ServerSpec(url=url, **how) for url in section.urls)
    change = WeightChange(rollout.weight_change if is_trained else "between", config.probe_tolerance)
    return GeneratorSpec(engine=engine, change=change, pulls=pulls, servers=servers)


def start_rewards(config: Config) -> RewardPool | ReplicaRewards:
    """Start the reward workers; without any, replicas score their groups."""
    reward, model, limits = config.reward, config.reward.model, config.limits
    if not reward.workers:
        return ReplicaRewards()
    resources = Resources(reward.worker_cpus, reward.worker_gpus, model.threads if model else 1)
    arguments = config.reward_functions, reward.processes, reward.timeout_s, reward.memory_mb, model, resources

    def one(name: str) -> Remote[RewardWorker]:
        return start(RewardWorker, name, partial(RewardWorker.of, name, *arguments), resources, limits.lease_s)

    return RewardPool(PoolSpec(reward.workers, one, limits.lease_s, limits.silence_s, limits.max_attempts))


def start_reference(config: Config, policy: str = POLICY) -> ReferenceHandle:
    """Start the worker with the frozen initial model of a policy, or another one."""
    section = config.reference
    resources = Resources(section.num_cpus, section.num_gpus, section.threads)
    arguments = config.reference_path, config.dtype, config.rollout.distribution, config.micro_batch_tokens
    build = partial(resources.build, partial(ReferenceWorker, *arguments, policy=policy))

    def one(num_before: int) -> Remote[ReferenceWorker]:
        name = successor_name("reference", num_before)
        return start(ReferenceWorker, name, build, resources, config.limits.no_progress_s)

    return ReferenceHandle(one, _silence_s(config))
