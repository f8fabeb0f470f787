"""Decoupled clip and dynamic sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.policy_gradient import ClippedSurrogate, Peer, PolicyGradient, centre_rewards, peer_advantages
from rlsys.algorithm import TrajectoryAdvantage
from rlsys.types import Group


@dataclass(frozen=True, kw_only=True, config=RULES)
class DAPO(ClippedSurrogate, PolicyGradient):
    """DAPO (arXiv:2503.14476): clip-higher, the mean over tokens, no KL, dynamic sampling, soft overlong punishment.

    Dynamic sampling: a group in which every agent's rewards are all equal has zero advantage; it is dropped, and
    another group is rolled out in its place. Only rewards that determine the advantage of a trained agent count.

    The paper takes 16 updates per step (`train.updates_per_step`); its ratio is against the policy before the first.
    """

    std_normalize: bool = True
    """Divide advantages by the group's standard deviation."""
    max_length: NonNegativeInt = 0
    """Sampled tokens of a trajectory at which the overlong penalty is largest (the paper: 20480). 0: no penalty."""
    overlong_tokens: NonNegativeInt = 0
    """Tokens before `max_length` over which the penalty rises from 0 to 1 (the paper: 4096)."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.max_length and not 1 <= self.overlong_tokens <= self.max_length:
            yield f"overlong_tokens: should be from 1 to max_length, {self.max_length} (got {self.overlong_tokens})"
        if self.overlong_tokens and not self.max_length:
            yield "max_length: required with overlong_tokens"

    def can_learn_from(self, group: Group) -> bool:
        """True if rewards that a trained trajectory depends on differ, before any length penalty."""
        differ = peer_advantages(group, lambda rewards_G, **_: [float(len(set(rewards_G)) > 1)] * len(rewards_G))
        trained = {(a.episode, a.trajectory) for a in self.assign(group)}
        return any(a.advantage > 0 and (a.episode, a.trajectory) in trained for a in self.assign_credit(group, differ))

    def overlong_reward(self, peer: Peer) -> float:
        """Reward with the penalty of eq. 13: 0 up to `max_length - overlong_tokens` tokens, then linear to -1 at
        `max_length`."""
        if self.max_length == 0:
            return peer.reward
        excess = sum(sample.num_trained for sample in peer.meta.samples) - (self.max_length - self.overlong_tokens)
        return peer.reward - min(1.0, max(0.0, excess / self.overlong_tokens))

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        statistic = partial(centre_rewards, std_normalize=self.std_normalize)
        return self.assign_credit(group, peer_advantages(group, statistic, reward=self.overlong_reward))
