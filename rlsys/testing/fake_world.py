"""Fake cluster for tests and simulations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsys.algorithm import Algorithm, Column, LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.contracts import StepAnnotator, Tenant, Workers
from rlsys.loop.device_leases import ACTOR, EVALUATION, REFERENCE, ROLLOUT
from rlsys.testing.fake_pools import FakePinnedRollouts, FakeRewards, FakeRollouts
from rlsys.testing.fake_training import FakeActor, FakeCritic, FakeReference, FakeRelays
from rlsys.testing.world_state import WorldState
from rlsys.types import Group, Task

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RewardAsAdvantage(Algorithm):
    """Algorithm whose advantages are the rewards, for tests of other parts."""

    group_size: int = 2
    tolerates: int | None = None
    needs: frozenset[Column] = frozenset()

    @property
    def max_safe_staleness(self) -> int | None:
        return self.tolerates

    @property
    def columns(self) -> frozenset[Column]:
        return self.needs

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        for (e, t), trajectory in group.trajectories():
            if trajectory.reward is not None:
                yield TrajectoryAdvantage(e, t, trajectory.reward)

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        return LossOutput(-logprobs_N * batch.advantages_N)


class FakeWorld(WorldState):
    """One fake cluster."""

    def workers(self) -> Workers:
        reference, critic, rewards = FakeReference(self), FakeCritic(self), FakeRewards(self)
        actor, rollouts, evaluation = FakeActor(self), FakeRollouts(self), FakePinnedRollouts(self)
        of_steps: dict[Column, StepAnnotator] = {Column.REFERENCE_MISMATCHED: reference, Column.VALUES: critic}
        if REFERENCE in self.together:
            of_steps[Column.REFERENCE_LOGPROBS] = reference
        roles: dict[str, Tenant] = {
            ACTOR: actor,
            "critic": critic,
            REFERENCE: reference,
            ROLLOUT: rollouts,
            EVALUATION: evaluation,
        }
        return Workers(
            rollouts,
            rewards,
            actor,
            FakeRelays(self),
            annotators={Column.REFERENCE_LOGPROBS: reference} if REFERENCE not in self.together else {},
            evaluation=evaluation,
            step_annotators=of_steps,
            critic=critic,
            composer=rewards,
            reference=reference,
            tenants={role: worker for role, worker in roles.items() if role in self.together},
        )


def tasks(count: int) -> list[Task]:
    """Return distinct small tasks, `task-0`, `task-1`, ..."""
    return [Task(id=f"task-{i}", prompt=f"{i}?", answer=str(i)) for i in range(count)]
