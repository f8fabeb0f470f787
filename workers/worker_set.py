"""All workers of a run: one set per trained policy, and the workers that all policies share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from rlsys.algorithm import Column
from rlsys.config.memory_plan import VLLM_SHARE, vllm_share
from rlsys.config.resource_plan import part_of, plan_of, shares_of
from rlsys.config.server_section import ServerSection
from rlsys.contracts import Composer, PinnedRollouts, Rewards, Rollouts, StepAnnotator, Workers
from rlsys.errors import WorkerError
from rlsys.rewards.reward_function import RewardSpec
from rlsys.types import POLICY
from rlsys.util.event_loops import all_or_none
from rlsys.weight_sync.links import TRANSFER_S
from workers.engines.engine import EngineChoice, EngineSpec, ServerSpec, weight_bytes
from workers.ray.cluster import NO_MATHS, Resources, is_used_by_others, node_ids, short_of, totals
from workers.ray.fault_tolerant_pool import Pool, PoolSpec, Recovered
from workers.ray.placement import Places, Reservations, anywhere
from workers.ray.worker_process import Remote, place_of, start, successor_name
from workers.relay.relay_pool import RayRelays
from workers.reward.replica_rewards import ReplicaRewards
from workers.reward.reward_worker import RewardPool, RewardWorker
from workers.rollout.replica_weights import WeightChange
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.rollout_pool import ANSWER_S, PinnedRolloutPool, RolloutPool, SessionPool
from workers.rollout.rollout_worker import ReplicaSpec, RolloutSpec, RolloutWorker
from workers.rollout.session_worker import SessionWorker
from workers.train.optimizer import critic_optimizer_settings, optimizer_settings
from workers.train.ranks import ActorRank, ActorSpec, CriticRank, RankSpec
from workers.train.recorder import Recorder
from workers.train.reference_worker import ReferenceWorker
from workers.train.train_handles import ActorHandle, CriticHandle, RanksHandle, RecorderHandle, ReferenceHandle

if TYPE_CHECKING:
    from rlsys.config import Config
    from rlsys.config.run_sections import WorkerRole
    from rlsys.config.schema import Tenancy

W = TypeVar("W")
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
    columns_of_steps: frozenset[Column] = frozenset()
    """Columns of the reference, or of an actor that is its own, which are computed for whole steps."""

    @classmethod
    def of(cls, config: Config, policy: str, placement: Reservations) -> PolicyWorkers:
        """Start all of them; `config` is that of this policy."""
        relays, columns = _relays(config), config.algorithm.columns
        places = partial(placement.of_role, policy=policy)
        return cls(
            relays,
            start_actor(config, relays, places("actor rank")),
            start_critic(config, places("critic rank")) if Column.VALUES in columns else None,
            start_reference(config, policy, places("reference")) if config.has_reference else None,
            columns_of_steps=config.columns_of_steps,
        )

    def workers(
        self,
        rollouts: Rollouts,
        rewards: Rewards,
        composer: Composer | None,
        evaluation: PinnedRollouts | None = None,
    ) -> Workers:
        """The workers as the driver of this policy sees them."""
        reference, critic, actor = self.reference, self.critic, self.actor
        of_steps: dict[Column, StepAnnotator | None] = {Column.VALUES: critic}
        of_steps |= dict.fromkeys(self.columns_of_steps, reference or actor)
        of_groups = {} if Column.REFERENCE_LOGPROBS in of_steps else {Column.REFERENCE_LOGPROBS: reference}
        return Workers(
            rollouts=rollouts,
            rewards=rewards,
            actor=actor,
            relays=self.relays,
            annotators={column: worker for column, worker in of_groups.items() if worker},
            evaluation=evaluation,
            step_annotators={column: worker for column, worker in of_steps.items() if worker},
            critic=critic,
            composer=composer,
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
    placement: Reservations | None = None
    tenancies: Sequence[Tenancy] = ()
    """Roles that share devices."""

    @classmethod
    def of(cls, config: Config) -> WorkerSet:
        """Start all workers; they load in parallel."""
        placement = Reservations.of(plan_of(config).roles)
        trained = config.trained_policies or {POLICY: config}
        lines = {name: PolicyWorkers.of(own, name, placement) for name, own in trained.items()}
        relays = {name: line.relays for name, line in lines.items()}
        rewards = start_rewards(config, placement.of_role("reward"))  # placed before rollouts: a run needs each of them
        rollouts = start_rollouts(config, relays, placement.of_role("rollout"))
        places = placement.of_role("evaluation")
        evaluation = start_evaluation(config, relays[POLICY], places) if config.eval.every else None
        return cls(lines, rollouts, rewards, evaluation, placement, config.tenants)

    async def ready(self) -> None:
        """Return once all workers are set up. Raises the first error of a worker, for example `ModelError`.

        Those that share devices are set up one after the other, and sleep then; the actor is the last, and stays awake.
        """
        shared = list(self._tenants().values())

        async def take_turns() -> None:
            for worker in reversed(shared):
                await worker.ready()
                if worker is not shared[0]:
                    await worker.sleep()

        await all_or_none([take_turns(), *(each.ready() for each in self._handles() if each not in shared)])

    def _tenants(self) -> dict[Tenancy, RanksHandle | ReferenceHandle | RolloutPool]:
        """Workers that share devices, the actor first."""
        if not self.tenancies:
            return {}
        (line,) = self.lines.values()
        there: dict[Tenancy, RanksHandle | ReferenceHandle | RolloutPool | None] = {
            "actor": line.actor,
            "critic": line.critic,
            "reference": line.reference,
            "rollout": self.rollouts,
            "evaluation": self.evaluation,
        }
        return {role: worker for role, worker in there.items() if worker is not None and role in self.tenancies}

    async def engines(self) -> list[tuple[str, EngineChoice]]:
        """Engine of each replica, by name of the replica (and of the policy, if several). Call it after `ready`."""
        members = [*self.rollouts.members, *(self.evaluation.members if self.evaluation else [])]
        replicas = [member.worker.at(ReplicaWorker, "replica") for member in members]
        replies = await asyncio.gather(*(replica.call(ReplicaWorker.choices) for replica in replicas))
        return [
            (member.name + (f" ({policy})" if len(choices) > 1 else ""), choice)
            for member, choices in zip(members, replies, strict=True)
            for policy, choice in choices.items()
        ]

    def workers(self) -> Workers:
        """The workers as the driver sees them, in a run of one policy."""
        (line,) = self.lines.values()
        workers = line.workers(self.rollouts, self.rewards, self.composer, self.evaluation)
        return replace(workers, tenants={**self._tenants()})

    @property
    def composer(self) -> Composer | None:
        """The pool that changes payloads; None: replicas score, and nothing is replaced."""
        return self.rewards if isinstance(self.rewards, RewardPool) else None

    def watch(
        self,
        on_failure: Callable[[WorkerError], None],
        on_recovery: Recovered,
        on_arrival: Recovered = lambda name, seconds: None,
        on_departure: Recovered = lambda name, seconds: None,
    ) -> None:
        """Call these for failures, recoveries, arrivals and departures that the pools see in the background.

        `on_failure` is also called once for each worker that waits for a place which the cluster does not have. If that
        is no rollout or evaluation replica, and the live nodes are too small for the run, a rollout replica gives way.
        A place that this run has taken itself is not missing: its process is starting.
        """
        unplaced: set[str] = set()

        def needs() -> list[Resources]:
            return [each.resources for handle in self._handles() for each in handle.processes]

        def note(lack: WorkerError) -> None:
            if lack.worker not in unplaced and (short_of(needs(), totals()) or is_used_by_others(needs())):
                unplaced.add(lack.worker)
                on_failure(lack)

        def make_room(lack: WorkerError) -> None:
            note(lack)
            short = short_of(needs(), totals())
            replica = self.rollouts.members[0].worker.resources
            if ("CPU" in short and replica.num_cpus) or ("GPU" in short and replica.num_gpus):
                self.rollouts.give_way(lack.worker)

        rollouts = [*self.rollouts.pools, *(self.evaluation.pools if self.evaluation else [])]
        for pool in (*rollouts, self.rewards):
            if isinstance(pool, Pool):
                pool.on_failure, pool.on_recovery = on_failure, on_recovery
                pool.on_arrival, pool.on_departure = on_arrival, on_departure
        for handle in {*self._handles(), *rollouts}:
            handle.on_unplaced = note if handle in rollouts else make_room

    async def close(self) -> None:
        """End every worker, even if the cluster stays up."""
        await asyncio.gather(*(worker.close() for worker in self._handles()))
        for line in self.lines.values():
            line.relays.close()
        if self.placement:
            self.placement.close()

    def _handles(self) -> list[RanksHandle | ReferenceHandle | Pool]:
        """Handles of all workers except the relays."""
        own = [handle for line in self.lines.values() for handle in (line.actor, line.critic, line.reference)]
        rewards = self.rewards if isinstance(self.rewards, RewardPool) else None
        return [handle for handle in (*own, self.rollouts, rewards, self.evaluation) if handle is not None]


def _relays(config: Config) -> RayRelays:
    """Start the relays of a policy. Replicas that wait for the first version know its size from the model's files."""
    num_bytes = 0 if config.train.lora else weight_bytes(config.model.path)
    return RayRelays.start(TRANSFER_S, num_bytes=num_bytes)


def start_actor(config: Config, relays: RayRelays, places: Places = anywhere) -> ActorHandle:
    """Start all ranks of the actor."""
    train = config.train
    spec = ActorSpec(
        model_path=config.model.path,
        dtype=config.dtype,
        mesh=train.mesh,
        optimizer=optimizer_settings(config),
        savings=train.savings,
        lora=train.lora,
        sync=config.reference.sync,
        replays_routing=train.routing_replay,
        algorithm=config.algorithm,
        stabilizer=config.stabilizer,
        distribution=config.rollout.distribution,
        probe_length=_probe_length(config),
        resources=_trainer_resources(config, "actor"),
    )
    ranks = _ranks(config, "actor", ActorRank, spec.resources, places, spec, relays.route)
    columns = config.algorithm.columns
    has_pairs = Column.POLICY_MISMATCHED in columns or (
        config.is_own_reference and Column.REFERENCE_MISMATCHED in columns
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


def start_critic(config: Config, places: Places = anywhere) -> CriticHandle:
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
        resources=_trainer_resources(config, "critic"),
    )
    ranks = _ranks(config, "critic", CriticRank, spec.resources, places, spec, config.model.path)
    return CriticHandle(ranks, _silence_s(config), config.train.mesh.num_peers)


def _ranks(
    config: Config, name: str, kind: type[W], resources: Resources, places: Places, *arguments: object
) -> Callable[[int], list[Remote[W]]]:
    """Return what starts the ranks of the actor or the critic, after so many others of each; `arguments` follow the
    number of the rank."""
    deadline_s, num_ranks = config.limits.no_progress_s, config.train.mesh.num_ranks

    def one(rank: int, num_before: int) -> Remote[W]:
        worker, build = successor_name(f"{name}-{rank}", num_before), partial(kind, rank, *arguments)
        return start(kind, worker, build, resources, deadline_s, bundle=places(rank))

    return lambda num_before: [one(rank, num_before) for rank in range(num_ranks)]


def _resources(config: Config, role: WorkerRole) -> Resources:
    own, network = config.resources[role], config.train.network
    labels, shares = tuple(own.labels.items()), shares_of(config, role)
    num_cpus, num_gpus = part_of(own.cpus, shares), part_of(own.num_gpus, shares)
    return Resources(num_cpus, num_gpus, own.threads, network.interface or "", network.ports, labels)


def _trainer_resources(config: Config, role: WorkerRole) -> Resources:
    return replace(_resources(config, role), has_growing_segments=True)


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


def start_rollouts(config: Config, relays: Mapping[str, RayRelays], places: Places = anywhere) -> RolloutPool:
    """Start the rollout replicas for training, and session workers; `relays` are those of the trained policies."""
    own = {name: config.of(name) for name in config.policies} or {POLICY: config}
    trained = config.trained_policies if config.policies else own
    replicas = {
        name: _replica_spec(of, of.model.path, "newest" if name in trained else "never", len(own))
        for name, of in own.items()
    }
    supply, sessions = _replicas(config, replicas, relays, places)
    return RolloutPool(supply, policies=list(replicas), sessions=sessions)


def start_evaluation(config: Config, relays: RayRelays, places: Places = anywhere) -> PinnedRolloutPool:
    """Start the replicas that evaluate."""
    replicas = {POLICY: _replica_spec(config, config.model.path, "pinned")}
    supply, sessions = _replicas(config, replicas, {POLICY: relays}, places, evaluates=True)
    return PinnedRolloutPool(supply, relays, sessions=sessions)


def start_fixed_rollouts(config: Config, model_path: str) -> RolloutPool:
    """Start replicas of a model that is not trained, for `rlsys eval`."""
    replicas = {POLICY: _replica_spec(config, model_path, "never")}
    supply, sessions = _replicas(config, replicas, {}, evaluates=True)
    return RolloutPool(supply, kind="eval", sessions=sessions)


def _replicas(
    config: Config,
    replicas: Mapping[str, ReplicaSpec],
    relays: Mapping[str, RayRelays],
    places: Places = anywhere,
    *,
    evaluates: bool = False,
) -> tuple[PoolSpec[RolloutWorker], SessionPool | None]:
    """Specification of the processes with these replicas, for training unless `evaluates`, and the session workers of
    their own processes, as many as there are replicas; None if sessions share the processes of the replicas."""
    rollout, limits = config.rollout, config.limits
    section = config.eval if evaluates else rollout
    spec = _rollout_spec(config, replicas, evaluates=evaluates)
    routes = {name: of_policy.route for name, of_policy in relays.items()}
    plays = plays_beside_engines(spec)
    first = rollout.replicas if evaluates and relays else 0  # the servers of evaluation come last

    def replica(name: str) -> Remote[RolloutWorker]:
        place = first + place_of(name)
        own = {policy: each.at(place) for policy, each in replicas.items()}
        build = partial(RolloutWorker.of, name, replace(spec, policies=own), routes, plays=plays)
        bundle = places(place_of(name))
        return start(RolloutWorker, name, build, spec.resources, ANSWER_S, bundle=bundle, spreads=rollout.spread)

    def session_worker(name: str) -> Remote[SessionWorker]:
        return start(SessionWorker, name, partial(spec.apart, name), NO_MATHS, ANSWER_S)

    supply = PoolSpec(section.replicas, replica, inf, limits.silence_s, limits.max_attempts)
    if plays:
        return supply, None
    kind = "eval-session" if evaluates else "session"
    players = PoolSpec(section.replicas, session_worker, inf, limits.silence_s, limits.max_attempts)
    return supply, SessionPool(kind, players, limits.group_s)


def plays_beside_engines(spec: RolloutSpec) -> bool:
    """True if sessions share the process of a replica: they run no code of users, and no GPU waits for the process."""
    return vars(type(spec.workflow)).get("is_light", False) and not spec.resources.num_gpus


def _rollout_spec(config: Config, replicas: Mapping[str, ReplicaSpec], *, evaluates: bool = False) -> RolloutSpec:
    rollout, scores = config.rollout, not config.reward.workers
    return RolloutSpec(
        policies=replicas,
        bindings=config.agents if config.policies else {},
        sampling=rollout.sampling((config.eval if evaluates else rollout).temperature),
        max_prompt_tokens=config.data.max_prompt_tokens,
        chat=rollout.chat.with_text(),
        workflow=rollout.workflow.in_evaluation() if evaluates else rollout.workflow,
        resources=_resources(config, "rollout"),
        group_s=config.limits.group_s,
        max_losses=config.limits.max_attempts,
        ends_early=rollout.early_ends and not evaluates,
        judge=_judge_of(config) if (rollout.early_ends and config.reward_functions) or scores else None,
        scores=scores,
    )


def _judge_of(config: Config) -> Callable[[str], RewardWorker]:
    """Return what makes the judge of a session worker: the reward functions, in processes of their own."""
    reward = config.reward

    return partial(_judge, config.reward_functions, reward.concurrency, reward.timeout_s)


def _judge(specs: Sequence[RewardSpec], concurrency: int | None, timeout_s: float, name: str) -> RewardWorker:
    return RewardWorker(specs, concurrency, timeout_s, name=name)


def _replica_spec(
    config: Config, model_path: str, pulls: Literal["newest", "pinned", "never"], num_engines: int = 1
) -> ReplicaSpec:
    """Specification of one of the `num_engines` engines that share the replica's GPUs."""
    rollout = config.rollout
    is_trained = pulls == "newest"
    # By default, each of several engines on a GPU, or one on a part of it, would use nearly all of its memory.
    share = vllm_share(config.resources["rollout"].num_gpus, rollout.tensor_parallel, num_engines)
    share_of_memory = {"gpu_memory_utilization": share} if share != VLLM_SHARE else {}
    engine = replace(
        EngineSpec.of(config),
        model_path=model_path,
        resident_versions=config.resident_versions if is_trained else 1,
        vllm_args=share_of_memory | rollout.vllm_args,
        lora=None if pulls == "never" else config.train.lora,
        records_routing=is_trained and config.train.routing_replay,
        keeps_replies=not rollout.workflow.speaks_once,
        shares_device="rollout" in config.tenants and config.resources["rollout"].num_gpus > 0,
    )
    servers: tuple[ServerSpec, ...] = ()
    if isinstance(section := rollout.engine, ServerSection):
        how = {"api_key_env": section.api_key_env, "folder": section.folder, "takes_weights": pulls != "never"}
        servers = tuple(ServerSpec(url=url, **how) for url in section.urls)
    change = WeightChange(rollout.change if is_trained else "between", config.probe_tolerance, rollout.verify_s)
    return ReplicaSpec(engine=engine, change=change, pulls=pulls, servers=servers)


def start_rewards(config: Config, places: Places = anywhere) -> RewardPool | ReplicaRewards:
    """Start the reward workers; without any, replicas score their groups."""
    reward, limits = config.reward, config.limits
    if not reward.workers:
        return ReplicaRewards()
    resources = _resources(config, "reward")
    arguments = config.reward_functions, reward.concurrency, reward.timeout_s, reward.model, resources

    def one(name: str) -> Remote[RewardWorker]:
        build, bundle = partial(RewardWorker.of, name, *arguments), places(place_of(name))
        return start(RewardWorker, name, build, resources, limits.group_s, bundle=bundle)

    return RewardPool(PoolSpec(reward.workers, one, limits.group_s, limits.silence_s, limits.max_attempts))


def start_reference(config: Config, policy: str = POLICY, places: Places = anywhere) -> ReferenceHandle:
    """Start the worker with the frozen initial model of a policy, or another one."""
    resources = _trainer_resources(config, "reference")
    arguments = config.reference_path, config.dtype, config.rollout.distribution, config.micro_batch_tokens
    shares = "reference" in config.tenants and resources.num_gpus > 0
    build = partial(resources.build, partial(ReferenceWorker, *arguments, policy=policy, shares_device=shares))

    def one(num_before: int) -> Remote[ReferenceWorker]:
        name = successor_name("reference", num_before)
        return start(ReferenceWorker, name, build, resources, config.limits.no_progress_s, bundle=places(0))

    return ReferenceHandle(one, _silence_s(config), is_shared="reference" in config.tenants)
