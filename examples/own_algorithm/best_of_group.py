"""Example of a new algorithm: imitate the best of each group. The whole plug-in is this class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsys import Algorithm, LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.types import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BestOfGroup(Algorithm):
    """Imitate the best members of each group, ignore the others (RAFT, arXiv:2304.06767)."""

    at_least: float = 0.5
    """A group whose best reward is below this has zero advantage, and is replaced by another group."""

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: correct samples stay correct, however old the weights that sampled them."""
        return None

    def can_learn_from(self, group: Group) -> bool:
        return max(rewards_of(group).values()) >= self.at_least

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        rewards = rewards_of(group)
        for place, reward in rewards.items():
            if reward == max(rewards.values()):
                yield TrajectoryAdvantage(*place, advantage=1.0)

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        return LossOutput(-batch.advantages_N * logprobs_N)


def rewards_of(group: Group) -> dict[tuple[int, int], float]:
    """Rewards by (episode, trajectory), without failed ones."""
    return {place: t.reward for place, t in group.trajectories() if t.reward is not None}
