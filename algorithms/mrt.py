"""Meta reinforcement fine-tuning: a reward for the progress of each segment of a reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import ClassVar

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.grpo import GRPO
from algorithms.policy_gradient import Place, centre_rewards, peer_advantages
from rlsys.algorithm import TrajectoryAdvantage
from rlsys.types import EpisodeMeta, Group

PROBE = "probe"


@dataclass(frozen=True, kw_only=True, config=RULES)
class MRT(GRPO):
    """MRT (arXiv:2503.07572): GRPO, and for each segment of a reply a bonus for the progress that it makes.

    For the workflow `segments`. J_j is the mean reward of the probes at cut j: agents called `probe` that answer at
    once, as many at each cut. The bonus of segment j is J_j - J_(j-1), and that of the answer R - J_K with the reward R
    of the reply, so that the bonuses of a reply sum to R - J_0. The tokens of a segment have the advantage

        A + alpha · (bonus - mean bonus of the segments with this number in the group)

    with the A of GRPO. Probes that failed count at no cut; where none is left, the cut takes the value before it.
    """

    allows_early_ends: ClassVar[bool] = False

    frozen_agents: tuple[str, ...] = (PROBE,)
    alpha: NonNegativeFloat = 1.0
    """Weight of the bonus. The default is our choice, because the paper's value is not known to us; 0 is GRPO."""

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        statistic = partial(centre_rewards, std_normalize=self.std_normalize)
        outcome = peer_advantages(group, statistic)
        bonuses = {place[0]: bonuses_of(group.episodes[place[0]]) for place in outcome if not place[1]}
        known: set[Place] = {*outcome}
        for place, _, shares in self.credits(group, known):
            advantage = sum(outcome[source] * share for source, share in shares.items())
            own = bonuses.get(place[0], []) if not place[1] else []
            turns = [
                advantage + self.alpha * (bonus - fmean(each[j] for each in bonuses.values() if j < len(each)))
                for j, bonus in enumerate(own)
            ]
            yield TrajectoryAdvantage(*place, advantage, turns=tuple(turns))


def bonuses_of(episode: EpisodeMeta) -> list[float]:
    """Progress of each turn of the root: of its segments, then of its answer; empty without probes or a reward."""
    root = episode.trajectories[0]
    probes = [t for t in episode.trajectories if t.agent == PROBE]
    if root.reward is None or not probes or len(probes) % root.num_turns:
        return []
    per_cut = len(probes) // root.num_turns
    values: list[float] = []
    for cut in range(root.num_turns):
        at_cut = [t.reward for t in probes[cut * per_cut : (cut + 1) * per_cut]]
        values.append(_mean([r for r in at_cut if r is not None], values))
    values.append(root.reward)
    return [after - before for before, after in pairwise(values)]


def _mean(rewards: Sequence[float], before: Sequence[float]) -> float:
    """Return the mean; without a reward, the value before, or 0 at the first cut."""
    return fmean(rewards) if rewards else before[-1] if before else 0.0
