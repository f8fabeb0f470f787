"""What the policy-gradient family shares: rewards against peers, a surrogate loss, a KL term, off-policy corrections.

An algorithm of the family says what is compared (`compare`) and what its surrogate is (`surrogate`); the rest is here.
Shape suffixes: `N` trained tokens of a micro-batch, `G` peers in a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Tis, corrected, problems_of
from algorithms.fields import RULES, Fraction, ShareBelowOne
from algorithms.functional import clipped, dual_floor, log_ratio
from algorithms.kl import Estimator, kl_estimate
from rlsys.algorithm import Aggregation, Algorithm, Assigned, LossInputs, LossOutput, Signal
from rlsys.types import Group, OutcomeKind, TrajectoryMeta

if TYPE_CHECKING:
    from torch import Tensor

MAX_KL_RATIO = 2.0
"""Largest importance ratio of a token in the KL of the loss, as the default of `tis`."""


@plain_dataclass(frozen=True, slots=True)
class Rewarded:
    """A trajectory with its own reward as judged, and its place in the group."""

    episode: int
    trajectory: int
    meta: TrajectoryMeta
    reward: float


@dataclass(frozen=True, kw_only=True, config=RULES)
class PolicyGradient(Algorithm):
    """Base of the family: L = corrections · (surrogate + kl_coef · KL) per token.

    A trajectory's reward is compared with those of its peers: a root's with those of the group's other roots, any
    other's with those of the same agent name. One without a reward of its own takes its root's advantage, and counts as
    nobody's peer, so that how many agents an episode has changes no baseline (WideSeek-R1, arXiv:2602.04634); one with
    a reward of its own takes a share of the root's, `team_share`. Failed episodes are in no statistic.

    The importance ratio counts once: the surrogate's is against the proximal policy where a correction carries it, and
    against the sampler where none does. The KL term takes the same ratio and the corrections too: it is an expectation
    under the policy, over tokens drawn from the sampler.
    """

    group_size: Annotated[int, Field(ge=2)] = 8
    """Episodes per task, compared with each other. At least 2, because the group is its own baseline."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model, per nat; 0 starts no reference worker. In the loss, the KL of a token
    takes the importance ratio that the surrogate takes, at most 2 and without gradient, and then all corrections: with
    a weight among them the ratio is against the policy the step starts from, without one against the sampler. In the
    reward (REINFORCE++, RLOO, PPO) it is the KL of the policy a token was sampled from."""
    kl_estimator: Estimator = "k3+"
    """How the KL is estimated from a token: `k3+` has the value of k3 and the gradient of k2, and is right in both.
    `k2` and `k3` are those of the papers; the gradient of k3 is that of the reverse KL."""
    correction: Corrections = (Tis(),)
    """What makes up for tokens sampled elsewhere than from the policy the step starts from: by older weights, or by an
    engine that computes differently. One or several of `tis`, `sequence_tis` and `icepop`, which weight by the
    importance ratio and of which there can be one, and `geometric`, `sequence_mis`, `token_mis` and `off_policy_mask`,
    which leave out; each also as a section with its bounds, `{type: tis, cap: 5}`. `none`, the default of a loss that
    clips: its own ratio is against the sampler."""
    mask_truncated: bool = False
    """Leave trajectories that were cut by length out of the loss; they still count in the baseline."""
    team_share: Fraction = 0.0
    """How much of its root's advantage an agent with a reward of its own is trained on; the rest is its own. From 0,
    its own alone, to 1, the root's alone."""
    over: Literal["tokens", "sequences", "budget", "agents"] = "tokens"
    """What the loss is averaged over: every token weighs the same; or every sample; or every sample's sum is divided by
    `budget`; or every episode weighs the same, and in it every agent."""
    budget: PositiveInt | None = None
    """Tokens that a sample's sum is divided by, with `over: budget`: a constant. None: `rollout.max_new_tokens`, the
    longest completion of a turn."""

    takes_weights: ClassVar[bool] = True
    """Can the loss leave the importance ratio to a correction?"""
    needs_peers: ClassVar[bool] = True
    """Is a trajectory without a peer left out?"""
    kl_in_reward: ClassVar[bool] = False
    """Is the KL part of the reward, instead of the loss?"""

    def __post_init__(self) -> None:
        if problems := list(self.problems()):
            raise ValueError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """What is wrong with fields together, each being right by itself."""
        yield from problems_of(self.correction, takes_weights=self.takes_weights)
        if self.kl_estimator == "k1" and not self.kl_in_reward:
            yield "kl_estimator: k1 has an expected gradient of zero as a loss; choose k3+, k2 or k3"

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE_LOGPROBS}) if self.kl_coef > 0 else frozenset()

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: whichever version sampled a token, a ratio is taken against the logprob recorded then, so that its age
        is accounted for, and a bound limits what a drifted token can do.

        `tis`, `sequence_tis` and `icepop` bound its weight. Without one, a ratio clipped against the sampler leaves one
        case open, as in PPO: a token of negative advantage that has become likelier, which `dual_clip` closes. Every
        bound is a bias that grows with age; `sampler/*/ess` and the shares of tokens truncated, masked or clipped show
        how much.
        """
        return None

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(self.over, self.budget)

    # ------------------------------------------------------------------------------------------------- advantages

    def compare(self, rewards_G: Sequence[float]) -> list[float]:
        """The advantages of peers with these rewards."""
        raise NotImplementedError(f"{type(self).__name__} compares nothing: implement `compare`")

    def reward(self, meta: TrajectoryMeta, reward: float) -> float:
        """The reward a trajectory is trained on, given the one it was judged with."""
        return reward

    def advantages(self, group: Group) -> Iterator[Assigned]:
        """Of those with a reward of their own by comparing peers, of the others their root's, and mixed as `team_share`
        says. Where peers are needed, what has none in another episode has no baseline, and is assigned nothing."""
        found: dict[tuple[int, int], float] = {}
        for peers in self.peers(group):
            values = self.compare([self.reward(peer.meta, peer.reward) for peer in peers])
            found |= {(peer.episode, peer.trajectory): value for peer, value in zip(peers, values, strict=True)}
        for (e, t), meta in group.trajectories():
            parts = [(found.get(place), share) for place, share in self.credit(e, t, meta)]
            if self.trains(meta) and all(value is not None for value, _ in parts):
                yield Assigned(e, t, sum(value * share for value, share in parts if value is not None))

    def credit(self, episode: int, trajectory: int, meta: TrajectoryMeta) -> list[tuple[tuple[int, int], float]]:
        """Whose advantages a trajectory is trained on, by (episode, trajectory) index, and how much of each; the shares
        sum to 1."""
        if meta.reward is None or trajectory == 0:
            return [((episode, 0), 1.0)]
        shares = [((episode, 0), self.team_share), ((episode, trajectory), 1 - self.team_share)]
        return [(place, share) for place, share in shares if share]

    def trains(self, meta: TrajectoryMeta) -> bool:
        """Is this trajectory in the loss?"""
        return not (self.mask_truncated and meta.outcome.kind is OutcomeKind.TRUNCATED)

    def peers(self, group: Group) -> Iterator[list[Rewarded]]:
        """Those with a finite reward of their own that are compared with each other: roots, and the others by agent
        name. Where peers are needed they are of two episodes at least. Those of other policies are among them: an agent
        may take the advantage of a root that another policy speaks for."""
        by_kind: defaultdict[str | None, list[Rewarded]] = defaultdict(list)
        for (e, t), meta in group.everyone():
            if meta.reward is not None and isfinite(meta.reward):
                by_kind[meta.agent if t else None].append(Rewarded(e, t, meta, meta.reward))
        for peers in by_kind.values():
            if not self.needs_peers or len({peer.episode for peer in peers}) >= 2:
                yield peers

    # ------------------------------------------------------------------------------------------------------- loss

    def surrogate(self, logprobs_N: Tensor, base_logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """The loss of each token before KL and corrections; its ratio is against `base_logprobs_N`."""
        raise NotImplementedError(f"{type(self).__name__} has no surrogate: implement `surrogate`")

    def proximal_logprobs(self, logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        """Logprobs under the policy that corrections lead up to, without gradient."""
        return batch.proximal_logprobs_N

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        proximal_N = self.proximal_logprobs(logprobs_N, batch)
        is_weighted = any(correction.is_weight for correction in self.correction)
        base_N = proximal_N if is_weighted else batch.behavior_logprobs_N
        surrogate = self.surrogate(logprobs_N, base_N, batch)
        loss_N, metrics_N = surrogate.loss_N, dict(surrogate.metrics_N)
        if self.kl_coef > 0:
            kl_N = kl_estimate(self.kl_estimator, logprobs_N, batch.columns_N[Signal.REFERENCE_LOGPROBS])
            metrics_N["policy/kl_ref"] = kl_N.detach()
            if not self.kl_in_reward:
                ratio_N = log_ratio(logprobs_N.detach(), base_N).exp().clamp(max=MAX_KL_RATIO)
                loss_N = loss_N + self.kl_coef * ratio_N * kl_N
        output = corrected(self.correction, loss_N, logprobs_N, proximal_N, batch)
        return LossOutput(output.loss_N, {**metrics_N, **output.metrics_N})


@dataclass(frozen=True, kw_only=True, config=RULES)
class ClippedPolicyGradient(PolicyGradient):
    """The family with PPO's clipped surrogate (arXiv:1707.06347, eq. 7).

    By default its ratio is against the sampler, so that the clip bounds what an old token can do. With a weight among
    its corrections it is decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5): -rho · min(u A, clip(u) A)
    with u against the proximal policy.
    """

    correction: Corrections = ()
    clip_low: ShareBelowOne = 0.2
    """A token's probability ratio may fall to 1 - this before its gradient stops. At least 0, less than 1. With a
    weight among `correction` the ratio is against the policy the step starts from, so that with one update per step it
    is 1, and nothing is clipped, unless `proximal` is `interpolated`."""
    clip_high: NonNegativeFloat = 0.28
    """A token's probability ratio may rise to 1 + this before its gradient stops. At least 0. Acts when `clip_low`
    does."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts for a token of negative advantage (arXiv:1912.09729); more than 1. None: any."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """The policy that a weight among `correction` leads up to. `recomputed`: the trainer's at the start of the step.
    `interpolated`: between sampler and current policy, by age, as AReaL's `loglinear`: a token of staleness s has
    log p_prox = log mu + s / (s + 1) (log p - log mu). Part of an old token's drift is then clipped, not weighted."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield f"dual_clip: should be more than 1 + clip_high, {1 + self.clip_high:g} (got {self.dual_clip:g})"
        if self.proximal == "interpolated" and not any(correction.is_weight for correction in self.correction):
            yield "proximal: interpolated acts only with a weight among correction, such as tis"

    def proximal_logprobs(self, logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        """Recomputed or interpolated: the version of the step is v_prox, that of the policy after it v_theta =
        v_prox + 1, so that alpha = (v_prox - v_behav) / (v_theta - v_behav) = s / (s + 1)."""
        if self.proximal == "recomputed":
            return batch.proximal_logprobs_N
        alpha_N = batch.staleness_N / (batch.staleness_N + 1)
        behavior_N = batch.behavior_logprobs_N
        return behavior_N + alpha_N * (logprobs_N.detach() - behavior_N)

    def log_ratios(self, logprobs_N: Tensor, base_logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        """The logarithm of what is clipped."""
        return log_ratio(logprobs_N, base_logprobs_N)

    def surrogate(self, logprobs_N: Tensor, base_logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """-min(r A, clip(r) A), and with `dual_clip` c, -max(min(r A, clip(r) A), c A) where A < 0."""
        ratio_N = self.log_ratios(logprobs_N, base_logprobs_N, batch).exp()
        result = clipped(ratio_N, batch.advantages_N, self.clip_low, self.clip_high)
        objective_N = result.objective_N
        metrics_N = {
            "policy/ratio_mean": ratio_N.detach(),
            "policy/clip_frac_low": result.is_low_N.float(),
            "policy/clip_frac_high": result.is_high_N.float(),
        }
        if self.dual_clip is not None:
            floor_N = dual_floor(batch.advantages_N, self.dual_clip)
            metrics_N["policy/clip_frac_dual"] = (objective_N < floor_N).float()
            objective_N = objective_N.maximum(floor_N)
        return LossOutput(-objective_N, metrics_N)
