"""Policy-gradient family: what a group's rewards are compared by, the base with the family's keys, and PPO's clip.

An algorithm gives `advantages` and `surrogate`; the base's `loss` adds the KL and applies the corrections.
Shape suffixes: `G` peers in a group, `N` trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import partial
from math import ceil, isfinite, sqrt
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Policies, Tis, apply_corrections, carries_ratio, problems_of
from algorithms.fields import RULES, AtMostOne, Over, ShareBelowOne
from algorithms.kl import Estimator, kl_term
from rlsys.algorithm import Aggregation, Algorithm, Column, LossInputs, LossOutput, Ranks, TrajectoryAdvantage
from rlsys.types import Group, OutcomeKind, TrajectoryMeta
from rlsys.util.deviation import deviation
from rlsys.util.number_ranges import Fraction

if TYPE_CHECKING:
    from torch import Tensor

UNCLIPPED_STALENESS = 2
"""Staleness up to which `tis` in place of the clip cost no reward that could be measured; see docs/stability.md."""
LEAST_ENTROPY = "least_entropy"
"""Fact of a step: the least entropy of a token that `top_entropy_quantile` trains."""
Place: TypeAlias = tuple[int, int]
"""Index of an episode in its group, and of a trajectory in that episode."""


@plain_dataclass(frozen=True, slots=True)
class Peer:
    """Trajectory with a finite reward, and its place in the group."""

    place: Place
    meta: TrajectoryMeta
    reward: float


def rewarded_peers(group: Group) -> Iterator[Peer]:
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
    for peer in rewarded_peers(group):
        by_kind[peer.meta.agent if peer.place[1] else None].append(peer)
    for peers_G in by_kind.values():
        if len({peer.place[0] for peer in peers_G}) >= 2:
            yield peers_G


@plain_dataclass(frozen=True, slots=True)
class EarlyEnds:
    """Peers of which some were ended early: each that was still running went on with a probability p, and then has the
    weight 1 / p.

    With all n peers, leaving one out, its baseline is b_i = mean of R_j over j != i. Here it is estimated by
    b_i = c + sum over j != i of w_j (R_j - c) / (n - 1), with the reward c of those that had ended before. The plan of
    the step weights the tokens of an episode by its w_i. Every w_j has the mean 1 and is independent of the others, so
    that the sum over peers of w_i (R_i - b_i) grad log pi_i has the mean that it has without early ends, whatever the
    episodes and the time of the decision. If all rewards are c, it is 0 with certainty.
    """

    weights_G: Sequence[float]
    size: int
    """Peers with those that were ended early: n."""
    settled: float
    """c."""

    def leave_one_out(self, rewards_G: Sequence[float]) -> list[float]:
        """R_i - b_i."""
        offs_G = [reward - self.settled for reward in rewards_G]
        total = sum(weight * off for weight, off in zip(self.weights_G, offs_G, strict=True))
        return [
            off - (total - weight * off) / (self.size - 1) for weight, off in zip(self.weights_G, offs_G, strict=True)
        ]

    def std(self, rewards_G: Sequence[float]) -> float:
        """Estimate of the standard deviation of all n rewards, from the weighted second moments."""
        offs_G = [reward - self.settled for reward in rewards_G]
        first = sum(weight * off for weight, off in zip(self.weights_G, offs_G, strict=True))
        second = sum(weight * off * off for weight, off in zip(self.weights_G, offs_G, strict=True))
        return sqrt(max(0.0, second - first * first / self.size) / (self.size - 1))


def peer_advantages(
    group: Group,
    statistic: Callable[..., Sequence[float]],
    reward: Callable[[Peer], float] = attrgetter("reward"),
) -> dict[Place, float]:
    """Compute the advantages of all peers by a statistic of their rewards, such as `leave_one_out`. In a group with
    early ends it gets those as `ends`."""
    found: dict[Place, float] = {}
    for peers_G in peers(group):
        rewards_G = [reward(peer) for peer in peers_G]
        if group.settled_reward is None:
            values_G = statistic(rewards_G)
        else:
            weights_G = [group.episodes[peer.place[0]].weight for peer in peers_G]
            ends = EarlyEnds(weights_G, len(peers_G) + group.num_ended_early, group.settled_reward)
            values_G = statistic(rewards_G, ends=ends)
        found |= {peer.place: value for peer, value in zip(peers_G, values_G, strict=True)}
    return found


def centre_rewards(rewards_G: Sequence[float], *, std_normalize: bool, ends: EarlyEnds | None = None) -> list[float]:
    """Subtract the mean; with `std_normalize`, divide by the unbiased standard deviation + 1e-6. Needs two or more.

    It averages differences from the first reward, so that equal rewards give exactly 0. With early ends, R - mean is
    (n - 1) / n times the difference to the mean of the others.
    """
    if ends is not None:
        scale = (ends.size - 1) / ends.size / (ends.std(rewards_G) + 1e-6 if std_normalize else 1.0)
        return [scale * value for value in ends.leave_one_out(rewards_G)]
    from_first_G = [reward - rewards_G[0] for reward in rewards_G]
    mean = fmean(from_first_G)
    scale = deviation(rewards_G) + 1e-6 if std_normalize else 1.0
    return [(reward - mean) / scale for reward in from_first_G]


def leave_one_out(rewards_G: Sequence[float], *, ends: EarlyEnds | None = None) -> list[float]:
    """Subtract the mean of the others, n / (n - 1) (R - mean): RLOO (arXiv:2402.14740). Needs two rewards or more."""
    if ends is not None:
        return ends.leave_one_out(rewards_G)
    scale = len(rewards_G) / (len(rewards_G) - 1)
    return [scale * value for value in centre_rewards(rewards_G, std_normalize=False)]


@dataclass(frozen=True, kw_only=True, config=RULES)
class PolicyGradient(Algorithm):
    """Base of the family: L = corrections · (surrogate + kl_coef · KL) - entropy_coef · entropy per token.

    A root's reward is compared with those of the group's other roots, any other agent's with those of the same agent
    name. An agent without a reward takes its root's advantage and is no peer. So the number of agents in an episode
    changes no baseline (WideSeek-R1, arXiv:2602.04634). An agent with a reward takes the share `team_share` of its
    root's advantage. Failed episodes are in no statistic.

    The importance ratio counts once: the surrogate's ratio is against the proximal policy where a correction carries
    it, and against the sampler where none does. The KL term takes the same ratio and the corrections too: it is an
    expectation under the policy, over tokens drawn from the sampler.
    """

    group_size: Annotated[int, Field(ge=2, le=100_000)] = 8
    """Episodes per task, compared with each other. At least 2, because the group is the baseline."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model, per nat; 0 starts no reference worker. In the loss, the KL of a token
    takes the surrogate's importance ratio, at most 2 and without gradient, and then all corrections. With a weight
    among them the ratio is against the policy at the start of the step, else against the sampler. In the reward
    (REINFORCE++, RLOO, PPO) it is the KL of the sampling policy."""
    kl_estimator: Estimator = "k3+"
    """Estimator of the KL: `k3+` has the value of k3 and the gradient of k2, and is right in both. `k2` and `k3` are
    those of the papers; the gradient of k3 is that of the reverse KL."""
    correction: Corrections = (Tis(),)
    """Corrections for tokens that another policy sampled than the one the step starts from: older weights, or an engine
    that computes differently. At most one of `tis`, `sequence_tis` and `icepop`, which weight by the importance ratio,
    and any of the masks `geometric`, `sequence_mis`, `token_mis` and `off_policy_mask`. Each is a name, or a section
    with its bounds: `{type: tis, cap: 5}`. `none` is the default of losses whose clipped ratio is against the
    sampler."""
    mask_truncated: bool = False
    """Leave trajectories cut by length out of the loss; they still count in the baseline."""
    team_share: Fraction = 0.0
    """Share of the root's advantage in the advantage of an agent with a reward; the rest is the agent's. From 0, the
    agent's alone, to 1, the root's alone."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy of each token's distribution, in nats, which is subtracted from the loss: a bonus for a
    policy that stays undecided. Corrections do not weight it."""
    top_entropy_quantile: AtMostOne = 1.0
    """Share of the step's tokens that the surrogate trains: those of the highest entropy at the start of the step,
    where a reply takes its turns (arXiv:2506.01939, which trains .2). The others stay in the denominator. Several
    updates share the threshold."""
    over: Over = "tokens"
    """Unit that the loss is averaged over. `tokens`: every token weighs the same. `sequences`: every sample. `budget`:
    every sample's sum is divided by `budget`. `agents`: every episode weighs the same, and in it every agent."""
    budget: PositiveInt | None = None
    """Constant number of tokens that a sample's sum is divided by, with `over: budget`. None: `rollout.max_new_tokens`,
    the longest completion of a turn."""

    takes_weights: ClassVar[bool] = True
    """True if the loss can leave the importance ratio to a correction."""
    allows_early_ends: ClassVar[bool] = True
    kl_in_reward: ClassVar[bool] = False
    """True if the KL is part of the reward, instead of the loss."""

    def __post_init__(self) -> None:
        problems = problems_of(self.correction, takes_weights=self.takes_weights)
        if self.kl_estimator == "k1" and not self.kl_in_reward:
            problems.append("kl_estimator: k1 has an expected gradient of zero as a loss; choose k3+, k2 or k3")
        if problems := [*problems, *self.problems()]:
            raise ValueError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield the errors in combinations of fields that are each valid."""
        yield from ()

    @property
    def columns(self) -> frozenset[Column]:
        return frozenset({Column.REFERENCE_LOGPROBS}) if self.kl_coef > 0 else frozenset()

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: a ratio is taken against the logprob recorded at sampling, whatever the age of a token, and its effect
        is bounded.

        `tis`, `sequence_tis` and `icepop` bound its weight. Without one, a ratio clipped against the sampler leaves one
        case open, as in PPO: a token of negative advantage that has become likelier, which `dual_clip` bounds. Every
        bound is a bias that grows with age; `sampler/*/ess` and the shares of tokens truncated, masked or clipped show
        how much.
        """
        return None

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(self.over, self.budget)

    @property
    def skips_zero_advantages(self) -> bool:
        """True if surrogate and corrections are the whole loss, advantages are final, and nothing is measured over all
        tokens. Metrics per token then leave out the samples without an advantage."""
        own = type(self)
        has_own_terms = own.loss is not PolicyGradient.loss or own.kl is not PolicyGradient.kl
        is_whole = not has_own_terms and own.token_advantages is Algorithm.token_advantages
        has_terms = self.kl_coef > 0 or self.entropy_coef > 0
        return is_whole and not has_terms and not (self.whitens or self.has_step_statistics)

    @property
    def leaves_out_truncated(self) -> bool:
        return self.mask_truncated

    @property
    def differentiates_entropy(self) -> bool:
        return self.entropy_coef > 0

    @property
    def has_step_statistics(self) -> bool:
        return self.top_entropy_quantile < 1

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """Compute the least entropy of a token that is trained; nothing if all are."""
        if self.top_entropy_quantile == 1:
            return {}
        assert step.entropies_N is not None, "`scores_ahead` gives it"
        entropies_N = ranks.gather(step.entropies_N).sort(descending=True).values
        least = entropies_N[ceil(self.top_entropy_quantile * len(entropies_N)) - 1].item() if len(entropies_N) else 0.0
        return {LEAST_ENTROPY: least}

    def credits(
        self, group: Group, known: Container[Place]
    ) -> Iterator[tuple[Place, TrajectoryMeta, dict[Place, float]]]:
        """Yield each trajectory in the loss, with the shares of the advantages it is trained on; the shares sum to 1.

        A trajectory is left out if one of its sources is not `known`, or with `mask_truncated` if it was cut by length.
        """
        for place, meta in group.trajectories():
            root, is_own = (place[0], 0), meta.reward is not None and place[1] > 0
            mixed = {root: self.team_share, place: 1 - self.team_share} if is_own else {root: 1.0}
            shares = {source: share for source, share in mixed.items() if share}
            is_masked = self.mask_truncated and meta.outcome.kind is OutcomeKind.TRUNCATED
            if not is_masked and all(source in known for source in shares):
                yield place, meta, shares

    def assign_credit(self, group: Group, advantages: Mapping[Place, float]) -> Iterator[TrajectoryAdvantage]:
        """Assign trajectories with a reward their advantage and others their root's, mixed by `team_share`."""
        for place, _, shares in self.credits(group, advantages):
            yield TrajectoryAdvantage(*place, sum(advantages[source] * share for source, share in shares.items()))

    def group_relative(self, group: Group, *, std_normalize: bool) -> Iterator[TrajectoryAdvantage]:
        """Assign (R - mean) over peers; with `std_normalize`, (R - mean) / (std + 1e-6)."""
        return self.assign_credit(group, peer_advantages(group, partial(centre_rewards, std_normalize=std_normalize)))

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """Corrections · (surrogate + kl_coef · KL) - entropy_coef · entropy per token."""
        policies = self.policies(logprobs_N, batch)
        surrogate = self._of_top_entropies(self.surrogate(policies), batch)
        output = apply_corrections(self.correction, policies, surrogate, self.kl(policies))
        if not self.entropy_coef:
            return output
        assert batch.entropies_N is not None, "the trainer gives it"
        return LossOutput(output.loss_N - self.entropy_coef * batch.entropies_N, output.metrics_N)

    def _of_top_entropies(self, surrogate: LossOutput, batch: LossInputs) -> LossOutput:
        """The surrogate without the tokens below `top_entropy_quantile`."""
        if self.top_entropy_quantile == 1:
            return surrogate
        assert batch.entropies_N is not None, "the trainer gives it"
        is_masked_N = batch.entropies_N.detach() < batch.facts[LEAST_ENTROPY]
        metrics_N = {**surrogate.metrics_N, "policy/low_entropy_frac": is_masked_N.float()}
        return LossOutput(surrogate.loss_N * ~is_masked_N, metrics_N)

    def surrogate(self, policies: Policies) -> LossOutput:
        """Loss of each token, whose gradient is that of the objective; before the KL term and corrections.

        It is 0 where the advantage is. A loss with other terms overrides `loss`, or `skips_zero_advantages`.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no surrogate: implement `surrogate` or `loss`")

    def proximal_logprobs(self, logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        """Logprobs under the target policy of the corrections, without gradient."""
        return batch.proximal_logprobs_N

    def policies(self, logprobs_N: Tensor, batch: LossInputs) -> Policies:
        """Collect the policies that the loss compares: current, proximal, and the base of its ratio."""
        proximal_N = self.proximal_logprobs(logprobs_N, batch)
        base_N = proximal_N if carries_ratio(self.correction) else batch.behavior_logprobs_N
        return Policies(logprobs_N, proximal_N, base_N, batch)

    def kl(self, policies: Policies) -> LossOutput | None:
        """KL term of each token: None if its weight is 0, and only its metric if the KL is in the reward."""
        if self.kl_coef == 0:
            return None
        return kl_term(0.0 if self.kl_in_reward else self.kl_coef, self.kl_estimator, policies)


@plain_dataclass(frozen=True, slots=True)
class Clipped:
    """A clipped surrogate: the objective to maximise, and masks of the tokens without gradient."""

    objective_N: Tensor
    is_low_N: Tensor
    """True where the ratio is below 1 - clip_low and the advantage negative."""
    is_high_N: Tensor
    """True where the ratio is above 1 + clip_high and the advantage positive."""


def clipped_objective(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token: PPO's objective (arXiv:1707.06347, eq. 7).

    Two bounds are DAPO's clip-higher (arXiv:2503.14476, eq. 10): a token's probability may rise by more than it may
    fall.
    """
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return Clipped(
        objective_N=(ratio_N * advantages_N).minimum(bounded_N * advantages_N),
        is_low_N=(ratio_N < 1 - clip_low) & (advantages_N < 0),
        is_high_N=(ratio_N > 1 + clip_high) & (advantages_N > 0),
    )


def dual_floor(advantages_N: Tensor, dual_clip: float) -> Tensor:
    """c A where A < 0, else 0: the lower bound of the objective under dual clip (arXiv:1912.09729, eq. 5).

    A clipped objective with A >= 0 is never negative, so `objective.maximum(floor)` changes only tokens with A < 0. For
    A > 0 the outer maximum would replace the objective by a constant.
    """
    return dual_clip * advantages_N.clamp(max=0)


@dataclass(frozen=True, kw_only=True, config=RULES)
class ClippedSurrogate:
    """Keys of PPO's clipped surrogate (arXiv:1707.06347, eq. 7), a base class listed before `PolicyGradient`.

    By default the ratio is against the sampler, so that the clip bounds the effect of an old token. With a weight among
    its corrections it is decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5): -rho · min(u A, clip(u) A)
    with u against the proximal policy.
    """

    correction: Corrections = ()
    clip_low: ShareBelowOne = 0.2
    """A token's probability ratio may fall to 1 - `clip_low` before its gradient stops. At least 0, less than 1. With a
    weight among `correction` the ratio is against the policy at the start of the step. With one update per step it is
    then 1, and nothing is clipped, unless `proximal` is `interpolated`."""
    clip_high: NonNegativeFloat = 0.28
    """A token's probability ratio may rise to 1 + `clip_high` before its gradient stops. At least 0. Acts when
    `clip_low` does."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts for a token of negative advantage (arXiv:1912.09729); more than 1. None: no limit."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Target policy of a weight among `correction`. `recomputed`: the trainer's at the start of the step.
    `interpolated`: between sampler and current policy, by age, as AReaL's `loglinear`: a token of staleness s has log
    p_prox = log mu + s / (s + 1) (log p - log mu). Part of an old token's drift is then clipped, not weighted."""

    def problems(self) -> Iterator[str]:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield f"dual_clip: should be more than 1 + clip_high, {1 + self.clip_high:g} (got {self.dual_clip:g})"
        if self.proximal == "interpolated" and not carries_ratio(self.correction):
            yield "proximal: interpolated acts only with a weight among correction, such as tis"

    def staleness_caution(self, staleness: int, num_updates: int) -> str:
        """Return a caution for `tis` alone, unless it is this algorithm's recipe: with one update a step the ratio is
        then 1, and nothing is clipped."""
        is_chosen = [c.type for c in self.correction] == ["tis"] and self.correction != type(self).correction
        is_unclipped = is_chosen and num_updates == 1 and self.proximal == "recomputed"
        if not is_unclipped or staleness <= UNCLIPPED_STALENESS:
            return ""
        return (
            f"asynchrony.max_staleness: {staleness} is more than {type(self).__name__} with correction tis learns as "
            f"well from ({UNCLIPPED_STALENESS}): tis takes the place of the clip, and the run may end lower; set "
            f"algorithm.correction to none, or this to {UNCLIPPED_STALENESS} or less"
        )

    def proximal_logprobs(self, logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        """Recompute or interpolate: the version of the step is v_prox, that of the policy after it v_theta = v_prox +
        1, so that alpha = (v_prox - v_behav) / (v_theta - v_behav) = s / (s + 1)."""
        if self.proximal == "recomputed":
            return batch.proximal_logprobs_N
        alpha_N = batch.staleness_N / (batch.staleness_N + 1)
        behavior_N = batch.behavior_logprobs_N
        return behavior_N + alpha_N * (logprobs_N.detach() - behavior_N)

    def surrogate(self, policies: Policies) -> LossOutput:
        return self.clipped_surrogate(policies.ratio(), policies.batch.advantages_N)

    def clipped_surrogate(self, ratio_N: Tensor, advantages_N: Tensor) -> LossOutput:
        """-min(r A, clip(r) A), and with `dual_clip` c, -max(min(r A, clip(r) A), c A) where A < 0."""
        result = clipped_objective(ratio_N, advantages_N, self.clip_low, self.clip_high)
        objective_N = result.objective_N
        metrics_N = {
            "policy/ratio_mean": ratio_N.detach(),
            "policy/clip_frac_low": result.is_low_N.float(),
            "policy/clip_frac_high": result.is_high_N.float(),
        }
        if self.dual_clip is not None:
            floor_N = dual_floor(advantages_N, self.dual_clip)
            metrics_N["policy/clip_frac_dual"] = (objective_N < floor_N).float()
            objective_N = objective_N.maximum(floor_N)
        return LossOutput(-objective_N, metrics_N)
