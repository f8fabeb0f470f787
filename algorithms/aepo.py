"""Adaptive entropy-controlled policy optimisation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import stdev
from typing import Literal, TypeAlias

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient, rewarded
from rlsys.algorithm import StepAdvantages, TrajectoryAdvantage
from rlsys.types import Group

ENTROPY = "policy/entropy"
TRAINS_NEGATIVES = "policy/trains_negatives"
Assigned: TypeAlias = Sequence[tuple[TrajectoryAdvantage, ...]]
"""Advantages of each group of a step."""
Episode: TypeAlias = tuple[int, int]
"""Index of a group in the step, and of an episode in the group."""


@dataclass(frozen=True, kw_only=True, config=RULES)
class AEPO(ClippedSurrogate, PolicyGradient):
    """AEPO (QwenLong-L1.5, arXiv:2512.12967): GRPO that keeps the policy's entropy in a band.

    Negative advantages raise the entropy. Once it exceeds `entropy_high`, the following steps leave out the
    trajectories with a negative advantage. Once it falls below `entropy_low`, they are trained again. In between
    nothing changes. The entropy is that of the previous step, averaged over the tokens of all its trajectories; the
    paper averages over sequences the means over tokens. The state is part of the step's metrics, and so of the
    checkpoint.

    A trajectory that is left out stays in the step with an advantage of 0, so that its entropy counts. The others then
    weigh as much as they would alone, in a step of one update. With `kl_coef` it has a KL like any other.

    The paper also draws equally many tasks of each kind: give each kind as a source of `data`, with equal weights.
    """

    std_over: Literal["source", "group", "none"] = "source"
    """Rewards whose standard deviation advantages are divided by. `source`: those of the step's tasks from the same
    source of data, as in the paper; `group`: those of the group, as in GRPO; `none`: no division."""
    entropy_low: NonNegativeFloat = 0.2
    """Nats per token below which negative advantages are trained again. The paper gives no numbers: set both bounds
    from `policy/entropy` of your run."""
    entropy_high: NonNegativeFloat = 0.5
    """Nats per token above which negative advantages are left out."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.entropy_low >= self.entropy_high:
            yield f"entropy_low: should be less than entropy_high, {self.entropy_high:g} (got {self.entropy_low:g})"

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        return self.group_relative(group, std_normalize=self.std_over == "group")

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        """Divide by the standard deviation of each source, and leave out negative advantages if the entropy requires
        it, unless nothing would be left to train."""
        every: Assigned = super().finalize_advantages(groups, past).groups
        if self.std_over == "source":
            scales = _scales_by_source(groups)
            every = [
                _each(own, lambda a, s=scales[g.source]: a.advantage * s) for g, own in zip(groups, every, strict=True)
            ]
        entropy, is_on = past.get(ENTROPY), past.get(TRAINS_NEGATIVES, 1.0) > 0
        if entropy is not None and entropy > self.entropy_high:
            is_on = False
        elif entropy is not None and entropy < self.entropy_low:
            is_on = True
        is_left = any(a.advantage >= 0 for own in every for a in own)
        kept = every if is_on or not is_left else self._without_negatives(groups, every)
        return StepAdvantages(tuple(kept), {TRAINS_NEGATIVES: float(is_on)})

    def _without_negatives(self, groups: Sequence[Group], every: Assigned) -> Assigned:
        """Set negative advantages to 0, and raise the others by what their weights lose to those in the averages."""
        gains = self._gains(groups, every)
        return [
            _each(own, lambda a, g=index: a.advantage * gains[g, a.episode] if a.advantage >= 0 else 0.0)
            for index, own in enumerate(every)
        ]

    def _gains(self, groups: Sequence[Group], every: Assigned) -> Mapping[Episode, float]:
        """Weight of a token among the trajectories that are kept, over its weight among all, by episode; see
        `Aggregation`."""
        places = [(index, a) for index, own in enumerate(every) for a in own]
        kept = [(index, a) for index, a in places if a.advantage >= 0]

        def samples(index: int, a: TrajectoryAdvantage) -> list[int]:
            """Trained tokens of each sample of a trajectory that is trained at all."""
            of = groups[index].episodes[a.episode].trajectories[a.trajectory].samples
            return [one.num_trained for one in of if one.num_trained]

        if self.over == "agents":
            agents, own = (Counter((i, a.episode) for i, a in some if samples(i, a)) for some in (places, kept))
            return {e: len(agents) * agents[e] / (len(own) * own[e]) for e in own}
        size: Callable[[list[int]], int] = sum if self.over == "tokens" else len
        total, left = (sum(size(samples(*one)) for one in some) for some in (places, kept))
        return defaultdict(lambda: total / left if left else 1.0)


def _scales_by_source(groups: Sequence[Group]) -> Mapping[str, float]:
    """1 / (std + 1e-6) of the rewards of each source, with the unbiased standard deviation; 1 for a single reward."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards[group.source] += [peer.reward for peer in rewarded(group)]
    return {source: 1 / (stdev(own) + 1e-6) if len(own) > 1 else 1.0 for source, own in rewards.items()}


def _each(
    assigned: Sequence[TrajectoryAdvantage], value: Callable[[TrajectoryAdvantage], float]
) -> tuple[TrajectoryAdvantage, ...]:
    return tuple(TrajectoryAdvantage(a.episode, a.trajectory, value(a), a.sample) for a in assigned)
