"""Efficiency-aware policy optimisation: rewards discounted by round, each round a sample of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES, AtMostOne
from algorithms.gspo import GSPO
from algorithms.policy_gradient import Rewarded
from rlsys.algorithm import Assigned, Settled
from rlsys.types import Group


@dataclass(frozen=True, kw_only=True, config=RULES)
class EAPO(GSPO):
    """EAPO (IterResearch, arXiv:2511.07327): GSPO on rounds, with the reward gamma^(T - t) R at round t of T.

    A round is a sample: a workflow that rewrites its context at every round gives one sample per round. Its reward is
    compared with those of all rounds of all peers, so that of two successes the shorter one is better, and of one
    success the later rounds. A trajectory that said nothing counts as one round. Of its root a trajectory takes, in all
    its rounds, the advantage of the root's last.

    Only a reward above 0 is discounted. A penalty, which the paper does not have, is the same for every round:
    discounted it would be less, and the longest failure the best.
    """

    gamma: AtMostOne = 0.995
    """Discount per round. More than 0, at most 1. The paper's own value is not known to us."""
    samples_multiple: PositiveInt = 1
    """Train a multiple of this many samples, leaving out some, evenly over the step; the paper takes the data-parallel
    size and keeps more than 99 %. Our trainer needs no multiple, so that 1, all samples, is the default."""

    def advantages(self, group: Group) -> Iterator[Assigned]:
        """One advantage per sample."""
        found: dict[tuple[int, int], list[float]] = {}
        for peers in self.peers(group):
            rewards = [self._by_round(peer) for peer in peers]
            values = iter(self.compare([reward for rounds in rewards for reward in rounds]))
            for peer, rounds in zip(peers, rewards, strict=True):
                found[peer.episode, peer.trajectory] = [next(values) for _ in rounds]
        for (e, t), meta in group.trajectories():
            parts = [(found.get(place, []), share, place == (e, t)) for place, share in self.credit(e, t, meta)]
            if not self.trains(meta) or not all(values_R for values_R, _, _ in parts):
                continue
            for s in range(len(meta.samples)):
                value = sum(share * (values_R[s] if is_own else values_R[-1]) for values_R, share, is_own in parts)
                yield Assigned(e, t, value, s)

    def _by_round(self, peer: Rewarded) -> list[float]:
        """The reward of each round."""
        last, num_rounds = self.reward(peer.meta, peer.reward), max(1, len(peer.meta.samples))
        return [last * self.gamma**left if last > 0 else last for left in reversed(range(num_rounds))]

    def settle(self, groups: Sequence[Group], past: Mapping[str, float]) -> Settled:
        """The largest multiple of `samples_multiple` of those with a trained token; everything if there are fewer."""
        every = super().settle(groups, past).groups
        trained = [(g, a) for g, assigned in enumerate(every) for a in assigned if _is_trained(a, groups[g])]
        num = len(trained)
        num_left_out = num % self.samples_multiple if num >= self.samples_multiple else 0
        left_out = {trained[(2 * i + 1) * num // (2 * num_left_out)] for i in range(num_left_out)}
        kept = (tuple(a for a in assigned if (g, a) not in left_out) for g, assigned in enumerate(every))
        return Settled(tuple(kept), {"batch/samples_left_out": float(num_left_out)})


def _is_trained(assigned: Assigned, group: Group) -> bool:
    """Has the sample a trained token?"""
    samples = group.episodes[assigned.episode].trajectories[assigned.trajectory].samples
    return samples[assigned.sample or 0].num_trained > 0
