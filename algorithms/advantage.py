"""Advantages of a group: the trajectories to compare, and statistics of their rewards.

Shape suffix: `G` peers in a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from statistics import fmean, stdev
from typing import TypeAlias

from rlsys.types import Group, TrajectoryMeta

Place: TypeAlias = tuple[int, int]
"""Index of an episode in its group, and of a trajectory in that episode."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Trajectory with a finite reward, and its place in the group."""

    place: Place
    meta: TrajectoryMeta
    reward: float


def rewarded(group: Group) -> Iterator[Peer]:
    """Yield the trajectories with a finite reward, of any policy, from episodes that did not fail.

    An agent may take the advantage of a root that another policy samples.
    """
    for place, meta in group.everyone():
        if meta.reward is not None and isfinite(meta.reward):
            yield Peer(place, meta, meta.reward)


def peers(group: Group) -> Iterator[list[Peer]]:
    """Yield each set of trajectories to compare: roots with roots, other agents by name, from at least two episodes.

    A trajectory without a peer in another episode has no baseline.
    """
    by_kind: defaultdict[str | None, list[Peer]] = defaultdict(list)
    for peer in rewarded(group):
        by_kind[peer.meta.agent if peer.place[1] else None].append(peer)
    for peers_G in by_kind.values():
        if len({peer.place[0] for peer in peers_G}) >= 2:
            yield peers_G


def compared(
    group: Group,
    statistic: Callable[[Sequence[float]], Sequence[float]],
    reward: Callable[[Peer], float] = attrgetter("reward"),
) -> dict[Place, float]:
    """Compute the advantages of all peers by a statistic of their rewards, such as `left_out`."""
    found: dict[Place, float] = {}
    for peers_G in peers(group):
        values_G = statistic([reward(peer) for peer in peers_G])
        found |= {peer.place: value for peer, value in zip(peers_G, values_G, strict=True)}
    return found


def centred(rewards_G: Sequence[float], *, std_normalize: bool) -> list[float]:
    """Subtract the mean; with `std_normalize`, divide by the unbiased standard deviation + 1e-6. Needs two or more.

    It averages differences from the first reward, so that equal rewards give exactly 0.
    """
    from_first_G = [reward - rewards_G[0] for reward in rewards_G]
    mean = fmean(from_first_G)
    scale = stdev(rewards_G) + 1e-6 if std_normalize else 1.0
    return [(reward - mean) / scale for reward in from_first_G]


def left_out(rewards_G: Sequence[float]) -> list[float]:
    """Subtract the mean of the others, n / (n - 1) (R - mean): RLOO (arXiv:2402.14740). Needs two rewards or more."""
    scale = len(rewards_G) / (len(rewards_G) - 1)
    return [scale * value for value in centred(rewards_G, std_normalize=False)]
