"""Efficiency-aware policy optimisation: rewards discounted by round, one sample per round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import ClassVar

from pydantic.dataclasses import dataclass

from algorithms.fields import RULES, AtMostOne
from algorithms.gspo import GSPO
from algorithms.policy_gradient import Peer, Place, centre_rewards, peers
from rlsys.algorithm import StepAdvantages, TrajectoryAdvantage
from rlsys.types import Group
from rlsys.util.number_ranges import Count


@dataclass(frozen=True, kw_only=True, config=RULES)
class EAPO(GSPO):
    """EAPO (IterResearch, arXiv:2511.07327): GSPO on rounds, with the reward gamma^(T - t) R at round t of T.

    A round is a sample: a workflow that rewrites its context at every round gives one sample per round. The reward of a
    round is compared with those of all rounds of all peers. So the shorter of two successes has the larger advantage,
    and in one success the later rounds. A trajectory without samples counts as one round. A trajectory that takes its
    root's advantage takes that of the root's last round, in all its rounds.

    Only a reward above 0 is discounted. A penalty, which the paper does not have, is the same for every round: a
    discount would make the longest failure the best.
    """

    allows_early_ends: ClassVar[bool] = False

    gamma: AtMostOne = 0.995
    """Discount per round. More than 0, at most 1. The default is our choice, because the paper's value is not known to
    us."""
    samples_multiple: Count = 1
    """Train a multiple of this many samples and leave out the rest, evenly over the step. The paper takes the
    data-parallel size and keeps more than 99 %. Our trainer needs no multiple, so the default 1 trains all samples."""

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        found: dict[Place, list[float]] = {}
        for peers_G in peers(group):
            rewards = [self.by_round(peer) for peer in peers_G]
            values = iter(centre_rewards([*chain(*rewards)], std_normalize=self.std_normalize))
            found |= {peer.place: [*islice(values, len(rounds))] for peer, rounds in zip(peers_G, rewards, strict=True)}
        for place, meta, shares in self.credits(group, found):
            for s in range(len(meta.samples)):
                value = sum(share * found[source][s if source == place else -1] for source, share in shares.items())
                yield TrajectoryAdvantage(*place, value, s)

    def by_round(self, peer: Peer) -> list[float]:
        """Compute the reward of each round."""
        last, num_rounds = peer.reward, max(1, len(peer.meta.samples))
        return [last * self.gamma**left if last > 0 else last for left in reversed(range(num_rounds))]

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        """Keep the largest multiple of `samples_multiple` samples with a trained token; all if there are fewer."""
        every = super().finalize_advantages(groups, past).groups
        trained = [(g, a) for g, assigned in enumerate(every) for a in assigned if _is_trained(a, groups[g])]
        num = len(trained)
        num_left_out = num % self.samples_multiple if num >= self.samples_multiple else 0
        left_out = {trained[(2 * i + 1) * num // (2 * num_left_out)] for i in range(num_left_out)}
        kept = (tuple(a for a in assigned if (g, a) not in left_out) for g, assigned in enumerate(every))
        return StepAdvantages(tuple(kept), {"batch/samples_left_out": float(num_left_out)})


def _is_trained(assigned: TrajectoryAdvantage, group: Group) -> bool:
    """True if the sample has a trained token."""
    samples = group.episodes[assigned.episode].trajectories[assigned.trajectory].samples
    return samples[assigned.sample or 0].num_trained > 0
