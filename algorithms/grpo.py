"""Group-relative policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from algorithms.functional import centred, clipped, kl_penalty, log_ratio
from rlsys.algorithm import Algorithm, Assigned, LossInputs, LossOutput, Signal
from rlsys.types import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Group-relative policy optimisation (arXiv:2402.03300) with clip-higher and token mean (DAPO, arXiv:2503.14476).

    A trajectory's advantage is its reward against the mean of its peers: same task, same agent name, so leads are
    compared with leads and subagents with subagents. One without a reward of its own takes its episode's, the root's.
    """

    group_size: int = 8
    """Episodes per task; their mean reward is the baseline. At least 2."""
    clip_low: float = 0.2
    """A token's probability ratio may fall to 1 - this before its gradient stops. Between 0 and 1."""
    clip_high: float = 0.28
    """A token's probability ratio may rise to 1 + this before its gradient stops. At least 0."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference model; 0 starts no reference worker."""
    std_normalize: bool = True
    """Divide advantages by the group's standard deviation; false as in Dr. GRPO (arXiv:2503.20783)."""
    over: Literal["tokens", "sequences"] = "tokens"
    """What the loss is averaged over: every token weighs the same, or every sequence does as in the original paper."""

    def __post_init__(self) -> None:
        allowed = {
            "group_size": (self.group_size >= 2, "at least 2, because the group is its own baseline"),
            "clip_low": (0 <= self.clip_low < 1, "at least 0 and less than 1"),
            "clip_high": (0 <= self.clip_high < float("inf"), "finite and at least 0"),
            "kl_coef": (0 <= self.kl_coef < float("inf"), "finite and at least 0"),
            "over": (self.over in ("tokens", "sequences"), '"tokens" or "sequences"'),
        }
        for name, (is_allowed, what) in allowed.items():
            if not is_allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed is {what}")

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE_LOGPROBS}) if self.kl_coef > 0 else frozenset()

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: the ratio is taken against the logprobs recorded at sampling, whichever version sampled the token, and
        the clip bounds what a token that has drifted since can do."""
        return None

    def advantages(self, group: Group) -> Iterator[Assigned]:
        """Advantages by agent name; an agent with fewer than two rewarded trajectories in the group has no baseline and
        is assigned nothing, and neither is a group with fewer than two episodes that did not fail."""
        if group.num_ok < 2:
            return
        rewarded = sorted(_rewarded(group), key=lambda r: r[0])
        for _, peers in groupby(rewarded, key=lambda r: r[0]):
            _, places, rewards = zip(*peers, strict=True)
            if len(rewards) >= 2:
                values = centred(rewards, std_normalize=self.std_normalize)
                yield from (Assigned(e, t, value) for (e, t), value in zip(places, values, strict=True))

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """The clipped surrogate (eq. 3 of the paper), plus the KL term if weighted."""
        ratio_N = log_ratio(logprobs_N, batch.behavior_logprobs_N).exp()
        surrogate = clipped(ratio_N, batch.advantages_N, self.clip_low, self.clip_high)
        loss_N = -surrogate.objective_N
        metrics_N = {
            "policy/ratio_mean": ratio_N.detach(),
            "policy/clip_frac_low": surrogate.is_low_N.float(),
            "policy/clip_frac_high": surrogate.is_high_N.float(),
        }
        if self.kl_coef > 0:
            kl_N = kl_penalty(logprobs_N, batch.columns_N[Signal.REFERENCE_LOGPROBS])
            loss_N = loss_N + self.kl_coef * kl_N
            metrics_N["policy/kl_ref"] = kl_N.detach()
        return LossOutput(loss_N, over=self.over, metrics_N=metrics_N)


def _rewarded(group: Group) -> Iterator[tuple[str, tuple[int, int], float]]:
    """Agent name, place and reward of every trajectory that has a reward, its own or its root's."""
    for place, trajectory in group.trajectories():
        root = group.episodes[place[0]].trajectories[0]
        reward = root.reward if trajectory.reward is None else trajectory.reward
        if reward is not None:
            yield trajectory.agent, place, reward
