"""Supervised fine-tuning: maximum likelihood on recorded answers, or on sampled ones with a high reward."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from rlsys.algorithm import Algorithm, LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.types import Answers, Group
from rlsys.util.number_ranges import ManyFrom1

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=RULES)
class SFT(Algorithm):
    """Supervised fine-tuning: L = -log p of each trained token, averaged over the tokens of the step.

    With the workflow `demonstrations` it trains on the answers of the data. With a workflow that samples, and
    `reward_above`, it is rejection fine-tuning (RFT, arXiv:2308.01825; RAFT, arXiv:2304.06767): likelihood of the
    policy's own answers whose reward is high enough. A trajectory without a reward takes that of its episode.
    """

    group_size: ManyFrom1 = 1
    """Episodes per task; more than 1 only makes sense where answers are sampled."""
    reward_above: float | None = None
    """Train only on trajectories with a reward above this; a group without any is dropped as `zero_advantage`. None: on
    all, whatever their reward."""

    @property
    def answers(self) -> frozenset[Answers]:
        """Both with `reward_above`; without it, sampled answers would teach the policy what it does already."""
        origins: set[Answers] = {"recorded"} if self.reward_above is None else {"sampled", "recorded"}
        return frozenset(origins)

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: the likelihood of an answer does not depend on the policy that gave it, nor on the time."""
        return None

    @property
    def uses_rewards(self) -> bool:
        return self.reward_above is not None

    def can_learn_from(self, group: Group) -> bool:
        return any(True for _ in self.advantages(group))

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """Assign 1 to each trajectory to train."""
        for (e, t), trajectory in group.trajectories():
            root = group.episodes[e].trajectories[0]
            reward = root.reward if trajectory.reward is None else trajectory.reward
            if self.reward_above is None or (reward is not None and isfinite(reward) and reward > self.reward_above):
                yield TrajectoryAdvantage(e, t, 1.0)

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """-log p of each token."""
        return LossOutput(-logprobs_N, {"policy/nll": -logprobs_N.detach()})
