"""Decoupled clip and dynamic sampling."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.grpo import GRPO
from rlsys.types import Group, TrajectoryMeta


@dataclass(frozen=True, kw_only=True, config=RULES)
class DAPO(GRPO):
    """DAPO (arXiv:2503.14476): clip-higher, the mean over tokens, no KL, dynamic sampling, soft overlong punishment.

    Dynamic sampling: a group whose rewards are all equal, agent by agent, teaches nothing; it is dropped, and another
    one is rolled out in its place. Rewards count that an agent in training is compared by, or takes a share of.

    The paper takes 16 updates per step (`train.updates_per_step`), its ratio being against the policy before the first.
    """

    max_length: NonNegativeInt = 0
    """Tokens of a trajectory, as sampled by the policy, at which the overlong penalty is largest (the paper: 20480).
    0: no penalty."""
    overlong_tokens: NonNegativeInt = 0
    """Tokens before `max_length` over which the penalty rises from 0 to 1 (the paper: 4096)."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.max_length and not 1 <= self.overlong_tokens <= self.max_length:
            yield f"overlong_tokens: should be from 1 to max_length, {self.max_length} (got {self.overlong_tokens})"
        if self.overlong_tokens and not self.max_length:
            yield "max_length: required with overlong_tokens"

    def has_signal(self, group: Group) -> bool:
        """Do rewards differ, before any penalty for length, that something trained goes by?"""
        differ = {
            (peer.episode, peer.trajectory)
            for peers in self.peers(group)
            if len({peer.reward for peer in peers}) > 1
            for peer in peers
        }
        trained = dict(group.trajectories())
        places = {(a.episode, a.trajectory) for a in self.assign(group)}
        return any(of in differ for place in places for of, _ in self.credit(*place, trained[place]))

    def reward(self, meta: TrajectoryMeta, reward: float) -> float:
        """With the penalty of eq. 13: 0 up to `max_length - overlong_tokens` tokens, then linear to -1 at
        `max_length`."""
        if self.max_length == 0:
            return reward
        excess = sum(sample.num_trained for sample in meta.samples) - (self.max_length - self.overlong_tokens)
        return reward - min(1.0, max(0.0, excess / self.overlong_tokens))
