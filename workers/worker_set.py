"""All workers of a run: one set per trained policy, and the workers that all policies share."""

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
"""Signals that the reference worker computes."""


@dataclass(frozen=True)
class PolicyWorkers:
    """The workers that train one policy, and the relays for its weights."""

    relays: RayRelays
    actor: ActorHandle
    critic: CriticHandle | None = None
    reference: ReferenceHandle | None = None

    @classmethod
    def of(cls, config: Config, policy: str = POLICY) -> PolicyWorkers:
        """Start all of them; `config` is that of this policy."""
        relays, signals = RayRelays.start(config.limits.transfer_s), config.algorithm.signals
        return cls(
            relays,
            start_actor(config, relays),
            start_critic(config) if Signal.VALUES in signals else None,
            start_reference(config, policy) if signals & REFERENCE_SIGNALS else None,
        )

    def workers(self, rollouts: Rollouts, rewards: Rewards, evaluation: PinnedRollouts | None = None) -> Workers:
        """The workers as the driver of this policy sees them."""
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
        """Handles of all workers except the relays."""
        return [handle for handle in (self.actor, self.critic, self.reference) if handle is not None]


@dataclass
class WorkerSet:
    """All workers of a run."""

    lines: Mapping[str, PolicyWorkers]
    """By name of the trained policy."""
    rollouts: RolloutPool
    rewards: RewardPool
    evaluation: PinnedRolloutPool | None = None
    partials: Remote[Partials] | None = None

    @classmethod
    def of(cls, config: Config) -> WorkerSet:
        """Start all workers; they load in parallel."""
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
        """Return once all workers are set up. Raises the first error of a worker, for example `ModelError`."""
        await asyncio.gather(*(worker.ready() for worker in self._handles()))

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
        """Call these for failures and recoveries that the pools see in the background; see `Pool`."""
        for pool in (self.rollouts, self.rewards, self.evaluation):
            if pool:
                pool.on_failure, pool.on_recovery = on_failure, on_recovery

    async def close(self) -> None:
        """End every worker, even if the cluster stays up."""
        await asyncio.gather(*(worker.close() for worker in self._handles()))
        for line in self.lines.values():
            line.relays.close()
        if self.partials is not None:
            self.partials.kill()

    def _handles(self) -> list[RanksHandle | ReferenceHandle | Pool]:
        own = [handle for line in self.lines.values() for handle in line.handles()]
        shared = [pool for pool in (self.rollouts, self.rewards, self.evaluation) if pool is not None]
        return [*own, *shared]
