"""All the workers of a run: those that train a policy, one set for each, and those that all policies share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsys.algorithm import Signal
from rlsys.contracts import PinnedRollouts, Rewards, Rollouts, StepAnnotator, Workers
from rlsys.errors import WorkerError
from rlsys.types import POLICY
from workers.engines.engine import EngineChoice
from workers.ray.pool import Pool
from workers.ray.remote_proxy import Remote
from workers.relay.relay_pool import RayRelays
from workers.reward.reward_pool import RewardPool
from workers.rollout.partial_responses import Partials
from workers.rollout.rollout_pool import PinnedRolloutPool, RolloutPool
from workers.rollout.rollout_worker import RolloutWorker
from workers.start import (
    start_actor,
    start_critic,
    start_evaluation,
    start_joint_rollouts,
    start_partials,
    start_reference,
    start_rewards,
    start_rollouts,
)
from workers.train.train_handles import ActorHandle, CriticHandle, RanksHandle, ReferenceHandle

if TYPE_CHECKING:
    from rlsys.config import Config

REFERENCE_SIGNALS = {Signal.REFERENCE_LOGPROBS, Signal.REFERENCE_MISMATCHED}
"""What the reference worker makes."""


@dataclass(frozen=True)
class PolicyWorkers:
    """The workers that train one policy, and the relays that its weights go through."""

    relays: RayRelays
    actor: ActorHandle
    critic: CriticHandle | None = None
    reference: ReferenceHandle | None = None

    @classmethod
    def of(cls, config: Config, policy: str = POLICY) -> PolicyWorkers:
        """Start all of them; `config` is the policy's own."""
        relays, signals = RayRelays.start(config.limits.transfer_s), config.algorithm.signals
        return cls(
            relays,
            start_actor(config, relays),
            start_critic(config) if Signal.VALUES in signals else None,
            start_reference(config, policy) if signals & REFERENCE_SIGNALS else None,
        )

    def workers(self, rollouts: Rollouts, rewards: Rewards, evaluation: PinnedRollouts | None = None) -> Workers:
        """What the driver of this policy talks to."""
        reference, critic = self.reference, self.critic
        step_annotators: dict[Signal, StepAnnotator] = {}
        if reference:
            step_annotators[Signal.REFERENCE_MISMATCHED] = reference
        if critic:
            step_annotators[Signal.VALUES] = critic
        return Workers(
            rollouts=rollouts,
            rewards=rewards,
            actor=self.actor,
            relays=self.relays,
            annotators={Signal.REFERENCE_LOGPROBS: reference} if reference else {},
            evaluation=evaluation,
            step_annotators=step_annotators,
            critic=critic,
        )

    def handles(self) -> list[RanksHandle | ReferenceHandle]:
        """All but the relays."""
        return [handle for handle in (self.actor, self.critic, self.reference) if handle is not None]


@dataclass
class WorkerSet:
    """Every worker of a run."""

    lines: Mapping[str, PolicyWorkers]
    """By name of the policy that is trained."""
    rollouts: RolloutPool
    rewards: RewardPool
    evaluation: PinnedRolloutPool | None = None
    partials: Remote[Partials] | None = None

    @classmethod
    def of(cls, config: Config) -> WorkerSet:
        """Start all of them; each loads while the others do."""
        if config.policies:
            lines = {name: PolicyWorkers.of(own, name) for name, own in config.trained.items()}
            relays = {name: line.relays for name, line in lines.items()}
            return cls(lines, start_joint_rollouts(config, relays), start_rewards(config))
        line, partials = PolicyWorkers.of(config), start_partials()
        return cls(
            {POLICY: line},
            start_rollouts(config, line.relays, partials),
            start_rewards(config),
            start_evaluation(config, line.relays) if config.eval.every else None,
            partials,
        )

    async def ready(self) -> None:
        """Return once all are set up. Raises what the first to fail raised, `ModelError` for instance."""
        await asyncio.gather(*(worker.ready() for worker in self._handles()))

    async def engines(self) -> list[tuple[str, EngineChoice]]:
        """What each replica generates with, by its name and, of several, the policy's; once all are ready."""
        members = [*self.rollouts.members, *(self.evaluation.members if self.evaluation else [])]
        told = await asyncio.gather(*(member.worker.call(RolloutWorker.choices) for member in members))
        return [
            (member.name + (f" ({policy})" if len(choices) > 1 else ""), choice)
            for member, choices in zip(members, told, strict=True)
            for policy, choice in choices.items()
        ]

    def workers(self) -> Workers:
        """What the driver talks to, in a run of one policy."""
        (line,) = self.lines.values()
        return line.workers(self.rollouts, self.rewards, self.evaluation)

    def watch(self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]) -> None:
        """Have these called with what the pools meet with in the background: see `Pool`."""
        for pool in (self.rollouts, self.rewards, self.evaluation):
            if pool:
                pool.on_failure, pool.on_recovery = on_failure, on_recovery

    async def close(self) -> None:
        """End every worker, in a cluster that goes on without them too."""
        await asyncio.gather(*(worker.close() for worker in self._handles()))
        for line in self.lines.values():
            line.relays.close()
        if self.partials is not None:
            self.partials.kill()

    def _handles(self) -> list[RanksHandle | ReferenceHandle | Pool]:
        own = [handle for line in self.lines.values() for handle in line.handles()]
        shared = [pool for pool in (self.rollouts, self.rewards, self.evaluation) if pool is not None]
        return [*own, *shared]
