"""Adaptive entropy-controlled policy optimisation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient, rewarded_peers
from rlsys.algorithm import StepAdvantages, TrajectoryAdvantage
from rlsys.types import Group
from rlsys.util.deviation import deviation

ENTROPY = "policy/entropy"
TRAINS_NEGATIVES = "policy/trains_negatives"
Assigned: TypeAlias = Sequence[tuple[TrajectoryAdvantage, ...]]
"""Advantages of each group of a step."""


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

    allows_early_ends: ClassVar[bool] = False

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

    @property
    def skips_zero_advantages(self) -> bool:
        """False: the entropy is that of all samples."""
        return False

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
        is_left = any(a.advantage >= 0 and _tokens(g, a) for g, own in zip(groups, every, strict=True) for a in own)
        kept = every if is_on or not is_left else self._without_negatives(groups, every)
        return StepAdvantages(tuple(kept), {TRAINS_NEGATIVES: float(is_on)})

    def _without_negatives(self, groups: Sequence[Group], every: Assigned) -> Assigned:
        """Set negative advantages to 0, and raise the others by what their weights lose to those in the averages."""
        gain = self._gain(groups, every)
        return [
            _each(own, lambda a, g=index: a.advantage * gain(g, a.episode) if a.advantage >= 0 else 0.0)
            for index, own in enumerate(every)
        ]

    def _gain(self, groups: Sequence[Group], every: Assigned) -> Callable[[int, int], float]:
        """Weight of a token among the trajectories that are kept, over its weight among all, by the index of its group
        and its episode; see `Aggregation`. Some that are kept have tokens."""
        trained = [(i, a, _tokens(groups[i], a)) for i, own in enumerate(every) for a in own]
        trained = [(i, a, tokens) for i, a, tokens in trained if tokens]
        kept = [(i, a, tokens) for i, a, tokens in trained if a.advantage >= 0]
        if self.over == "agents":
            among_all, among_kept = (Counter((i, a.episode) for i, a, _ in some) for some in (trained, kept))
            episodes = len(among_all) / len(among_kept)
            return lambda i, e: episodes * among_all[i, e] / (among_kept[i, e] or 1)
        size: Callable[[list[int]], int] = sum if self.over == "tokens" else len
        total, left = (sum(size(tokens) for _, _, tokens in some) for some in (trained, kept))
        return lambda i, e: total / left


def _tokens(group: Group, assigned: TrajectoryAdvantage) -> list[int]:
    """Trained tokens of each sample of a trajectory that has any."""
    samples = group.episodes[assigned.episode].trajectories[assigned.trajectory].samples
    return [sample.num_trained for sample in samples if sample.num_trained]


def _scales_by_source(groups: Sequence[Group]) -> Mapping[str, float]:
    """1 / (std + 1e-6) of the rewards of each source, with the unbiased standard deviation; 1 for a single reward."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards[group.source] += [peer.reward for peer in rewarded_peers(group)]
    return {source: 1 / (deviation(own) + 1e-6) if len(own) > 1 else 1.0 for source, own in rewards.items()}


def _each(
    assigned: Sequence[TrajectoryAdvantage], value: Callable[[TrajectoryAdvantage], float]
) -> tuple[TrajectoryAdvantage, ...]:
    return tuple(TrajectoryAdvantage(a.episode, a.trajectory, value(a), a.sample) for a in assigned)
