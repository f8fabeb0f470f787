"""The rest of the policy-gradient family: advantages and losses by hand, gradients against closed forms."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.aepo import AEPO
from algorithms.aipo import AIPO
from algorithms.cispo import CISPO
from algorithms.corrections import Tis
from algorithms.dapo import DAPO
from algorithms.dart import DART, LEAST_ENTROPY
from algorithms.dr_grpo import DrGRPO
from algorithms.eapo import EAPO
from algorithms.grpo import GRPO
from algorithms.gspo import GSPO
from algorithms.longcat import LongCat
from algorithms.m2po import LARGEST_KEPT, M2PO
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient
from algorithms.ppo import PPO
from algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from algorithms.rloo import RLOO
from rlsys.algorithm import Aggregation, Algorithm, LossInputs, Ranks
from rlsys.batch.packing import plan_batch
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import OK, TRUNCATED, EpisodeMeta, Group, SampleMeta, TrajectoryMeta
from tests.groups import episode, group
from tests.tokens import OneRank, column, loss_of, numeric_gradient, tokens


def rewarded(*rewards: float | None) -> Group:
    return group(0, episodes=[episode(reward) for reward in rewards])


def values(algorithm: Algorithm, scored: Group) -> list[float]:
    return [assigned.advantage for assigned in algorithm.advantages(scored)]


# ----------------------------------------------------------------------------------------------------- against peers


def test_dr_grpo_centres_only_and_divides_by_a_constant() -> None:
    assert values(DrGRPO(), rewarded(1, 0, 0, 0)) == [0.75, -0.25, -0.25, -0.25]
    assert DrGRPO(budget=100).aggregation == Aggregation("budget", 100)


def test_rloo_leaves_one_out() -> None:
    assert values(RLOO(), rewarded(1, 0, 0, 0)) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_dapo_drops_groups_whose_rewards_are_all_equal() -> None:
    assert DAPO().can_learn_from(rewarded(1, 0))
    assert not DAPO().can_learn_from(rewarded(1, 1))
    assert not DAPO().can_learn_from(rewarded(1, None))
    long = EpisodeMeta((TrajectoryMeta("policy", None, OK, 1.0, (SampleMeta(1, 9, 9, 0),)),))
    of_two_lengths = group(0, episodes=[long, episode(1.0)])
    assert not DAPO(max_length=8, overlong_tokens=4).can_learn_from(of_two_lengths)


def test_dapo_drops_groups_whose_rewards_differ_for_nobody_in_training() -> None:
    def team(lead: float, subagent: float) -> EpisodeMeta:
        sample = (SampleMeta(2, 3, 3, 0),)
        named = zip(("lead", "subagent"), (None, 0), (lead, subagent), strict=True)
        return EpisodeMeta(tuple(TrajectoryMeta(agent, parent, OK, reward, sample) for agent, parent, reward in named))

    of_leads = group(0, episodes=[team(1, 0.5), team(0, 0.5)])
    frozen = DAPO(frozen_agents=("lead",))
    assert DAPO().can_learn_from(of_leads)
    assert not frozen.can_learn_from(of_leads), "every subagent's advantage is 0"
    assert DAPO(frozen_agents=("lead",), team_share=0.5).can_learn_from(of_leads), "part of it is the lead's"
    assert frozen.can_learn_from(group(0, episodes=[team(1, 1), team(1, 0)]))
    assert not DAPO(frozen_agents=("subagent",)).can_learn_from(group(0, episodes=[team(1, 1), team(1, 0)]))
    assert not DAPO().can_learn_from(replace(of_leads, policy="another"))


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0), (50, 1.0)])
def test_dapo_punishes_overlong_answers_softly(length: int, penalty: float) -> None:
    algorithm = DAPO(max_length=10, overlong_tokens=4, std_normalize=False)
    scored = group(0, episodes=[episode(1.0, num_trained=length), episode(1.0, num_trained=1)])
    assert values(algorithm, scored) == pytest.approx([-penalty / 2, penalty / 2])
    assert values(DAPO(), scored) == [0.0, 0.0]


def test_dapos_length_is_of_what_the_policy_sampled() -> None:
    """Two turns of 3 tokens with 20 of a tool between them, beside an answer of 1: no penalty below 7."""
    turns = EpisodeMeta((TrajectoryMeta("policy", None, OK, 1.0, (SampleMeta(2, 26, 6, 0),)),))
    algorithm = DAPO(max_length=10, overlong_tokens=4)
    assert values(algorithm, group(0, episodes=[turns, episode(1.0, num_trained=1)])) == [0.0, 0.0]


def test_a_penalty_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="overlong_tokens: should be from 1 to max_length, 4"):
        DAPO(max_length=4, overlong_tokens=5)
    with pytest.raises(ValueError, match="max_length: required"):
        DAPO(overlong_tokens=5)


def rounds(reward: float, number: int, num_trained: int = 2) -> EpisodeMeta:
    samples = tuple(SampleMeta(1, 2, num_trained, prompt_key) for prompt_key in range(number))
    return EpisodeMeta((TrajectoryMeta("policy", None, OK, reward, samples),))


def test_eapo_discounts_by_round_with_an_advantage_for_each() -> None:
    """Rewards .25 .5 1 of the three rounds of a success, and 0 of a failure of one round; their mean is .4375."""
    scored = group(0, episodes=[rounds(1.0, 3), rounds(0.0, 1)])
    algorithm = EAPO(gamma=0.5, std_normalize=False)
    assigned = list(algorithm.advantages(scored))
    assert [(a.episode, a.sample, a.advantage) for a in assigned] == [
        (0, 0, -0.1875),
        (0, 1, 0.0625),
        (0, 2, 0.5625),
        (1, 0, -0.4375),
    ]
    plan = plan_batch([scored], [assigned], algorithm.aggregation, num_ranks=1, max_tokens=100)
    planned = {(ref.episode, ref.sample): ref.advantage for part in plan[0].updates[0] for ref in part.samples}
    assert planned == {(a.episode, a.sample): a.advantage for a in assigned}
    assert values(EAPO(), rewarded(1, 0)) == values(GSPO(), rewarded(1, 0))


def test_of_two_successes_eapo_prefers_the_shorter() -> None:
    assigned = list(EAPO(gamma=0.5).advantages(group(0, episodes=[rounds(1.0, 3), rounds(1.0, 1)])))
    assert assigned[0].advantage < assigned[1].advantage < assigned[2].advantage == assigned[3].advantage


def test_eapo_does_not_prefer_long_failures_to_short_ones() -> None:
    scored = group(0, episodes=[rounds(-1.0, 30), rounds(-1.0, 1), rounds(1.0, 2)])
    by_episode = {a.episode: a.advantage for a in EAPO(gamma=0.5).advantages(scored)}
    assert by_episode[0] == by_episode[1] < 0 < by_episode[2]


def test_eapo_counts_an_empty_trajectory_as_one_round() -> None:
    scored = group(0, episodes=[rounds(1.0, 1), rounds(0.0, 0), rounds(0.5, 1)])
    algorithm = EAPO(std_normalize=False)
    assigned = [(a.episode, a.sample, a.advantage) for a in algorithm.advantages(scored)]
    assert assigned == [(0, 0, 0.5), (2, 0, 0.0)]
    assert values(GRPO(std_normalize=False), scored) == [0.5, -0.5, 0.0]


def test_eapo_gives_unrewarded_agents_the_roots_last_advantage() -> None:
    sub = TrajectoryMeta("sub", 0, OK, None, (SampleMeta(1, 2, 2, 0),) * 2)
    with_sub = EpisodeMeta((*rounds(1.0, 3).trajectories, sub))
    assigned = list(EAPO(gamma=0.5, std_normalize=False).advantages(group(0, episodes=[with_sub, rounds(0.0, 1)])))
    by_place = {(a.episode, a.trajectory, a.sample): a.advantage for a in assigned}
    assert by_place[0, 1, 0] == by_place[0, 1, 1] == by_place[0, 0, 2] == 0.5625
    assert len(by_place) == 6


def test_eapo_masks_what_was_cut_by_length_round_by_round() -> None:
    cut = EpisodeMeta((replace(rounds(0.0, 2).trajectories[0], outcome=TRUNCATED),))
    scored = group(0, episodes=[rounds(1.0, 1), cut])
    assert [a.episode for a in EAPO().advantages(scored)] == [0, 1, 1]
    masked = list(EAPO(mask_truncated=True).advantages(scored))
    assert [(a.episode, a.sample) for a in masked] == [(0, 0)]
    assert masked[0] == next(iter(EAPO().advantages(scored))), "what is cut still counts in the baseline"


def test_eapo_trains_a_multiple_of_samples() -> None:
    scored = [group(0, episodes=[rounds(1.0, 3), rounds(0.0, 2)]), group(1, episodes=[rounds(1.0, 2), rounds(0.0, 2)])]
    settled = EAPO(samples_multiple=4).finalize_advantages(scored, {})
    assert [len(assigned) for assigned in settled.groups] == [4, 4]
    assert settled.metrics == {"batch/samples_left_out": 1.0}
    settled = EAPO(samples_multiple=6).finalize_advantages(scored, {})
    left = [[(a.episode, a.sample) for a in assigned] for assigned in settled.groups]
    assert left == [[(0, 0), (0, 2), (1, 0)], [(0, 0), (0, 1), (1, 1)]], "the second, fifth and eighth are out"
    assert settled.metrics == {"batch/samples_left_out": 3.0}
    said_nothing = group(2, episodes=[rounds(1.0, 4, num_trained=0), rounds(0.0, 1)])
    settled = EAPO(samples_multiple=5).finalize_advantages([scored[0], said_nothing], {})
    assert settled.metrics == {"batch/samples_left_out": 1.0}, "four rounds without a trained token do not count"
    assert [len(assigned) for assigned in settled.groups] == [4, 5]
    few = EAPO(samples_multiple=100).finalize_advantages(scored, {})
    assert [len(assigned) for assigned in few.groups] == [5, 4]
    assert undocumented_names(few.metrics) == []


# ------------------------------------------------------------------------------------------------------------ presets


@pytest.mark.parametrize(
    ("algorithm", "over", "clips", "dual_clip", "correction", "std_normalize"),
    [
        (GRPO(), "tokens", (0.2, 0.28), None, [], True),
        (DrGRPO(), "budget", (0.2, 0.2), None, [], False),
        (DAPO(), "tokens", (0.2, 0.28), None, [], True),
        (RLOO(), "budget", (0.2, 0.28), None, [], None),
        (ReinforcePP(), "tokens", (0.2, 0.28), None, [], None),
        (ReinforcePPBaseline(), "tokens", (0.2, 0.28), None, [], None),
        (PPO(), "tokens", (0.2, 0.2), None, [], None),
        (GSPO(), "sequences", (3e-4, 4e-4), None, [], True),
        (EAPO(), "sequences", (3e-4, 4e-4), None, [], True),
        (AEPO(), "tokens", (0.2, 0.28), None, [], None),
        (LongCat(), "budget", (0.2, 0.28), 3.0, ["tis"], True),
        (CISPO(), "tokens", (1.0, 4.0), None, [], True),
        (AIPO(), "tokens", None, None, [], None),
        (M2PO(), "tokens", None, None, [], True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_a_preset_is_what_its_paper_says(
    algorithm: PolicyGradient,
    over: Literal["tokens", "sequences", "budget"],
    clips: tuple[float, float] | None,
    dual_clip: float | None,
    correction: list[str],
    std_normalize: bool | None,
) -> None:
    """None: it has no such key."""
    assert algorithm.aggregation == Aggregation(over, None)
    low, high = getattr(algorithm, "clip_low", None), getattr(algorithm, "clip_high", None)
    assert (low, high) == (clips or (None, None))
    assert getattr(algorithm, "dual_clip", None) == dual_clip
    assert [part.type for part in algorithm.correction] == correction
    assert getattr(algorithm, "std_normalize", None) is std_normalize
    assert algorithm.mask_truncated is isinstance(algorithm, LongCat)
    assert algorithm.kl_coef == 0.0


def test_a_budget_that_is_not_named_is_the_longest_completion() -> None:
    assert DrGRPO().aggregation.with_budget(512) == Aggregation("budget", 512)
    assert DrGRPO(budget=100).aggregation.with_budget(512) == Aggregation("budget", 100)
    scored = rewarded(1, 0)
    assigned = [*GRPO().advantages(scored)]
    with pytest.raises(ValueError, match="budget of tokens, and no budget is set"):
        plan_batch([scored], [assigned], DrGRPO().aggregation, num_ranks=1, max_tokens=100)


# ------------------------------------------------------------------------------------------------------------- losses


def test_gspo_clips_the_sequence_by_hand() -> None:
    """Log-ratios .2 and .4 have the mean .3; a sample of one token has its own, -.1."""
    algorithm = GSPO(clip_low=0.2, clip_high=0.2)
    batch = tokens([-1.2, -1.4, -0.9], [-1.0, -1.0, 2.0], lengths=[2, 1])
    loss, gradient = loss_of(algorithm, [-1.0, -1.0, -1.0], batch)
    assert loss == pytest.approx([math.exp(0.3), math.exp(0.3), -2 * math.exp(-0.1)])
    assert gradient == pytest.approx(loss)  # s · A each
    clipped = tokens([-1.2, -1.4, -0.9], [1.0, 1.0, -2.0], lengths=[2, 1])
    loss, gradient = loss_of(GSPO(clip_low=0.05, clip_high=0.2), [-1.0, -1.0, -1.0], clipped)
    assert loss == pytest.approx([-1.2, -1.2, 2 * 0.95])
    assert gradient == [0.0, 0.0, 0.0]


def test_averaged_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    """(1 / |y|) sum of the token gradients is that of -s A, s = exp(mean log-ratio); the paper's eqs. 5 and 16."""
    at, behavior = [-1.0, -0.7, -2.0], column([-1.1, -0.9, -1.8])
    batch = tokens(behavior.tolist(), [1.5] * 3)
    _, gradient = loss_of(GSPO(clip_low=0.9, clip_high=0.9), at, batch)
    numeric = numeric_gradient(lambda x: -1.5 * (x - behavior).mean().exp(), at)
    assert [value / 3 for value in gradient] == pytest.approx(numeric)


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    ratios, advantages = [0.5, 1.5, 3.0], [1.0, -1.0, 2.0]
    batch = tokens([-1.0 - math.log(r) for r in ratios], advantages)
    algorithm = CISPO(clip_low=0.2, clip_high=1.0)
    loss, gradient = loss_of(algorithm, [-1.0] * 3, batch)
    assert gradient == pytest.approx([-0.8, 1.5, -4.0])
    assert loss == pytest.approx([0.8, -1.5, 4.0])  # times log p = -1
    metrics_N = algorithm.loss(column([-1.0] * 3), batch).metrics_N
    assert metrics_N["policy/clip_frac_low"].tolist() == [1.0, 0.0, 0.0]
    assert metrics_N["policy/clip_frac_high"].tolist() == [0.0, 0.0, 1.0]


@given(ratio=st.floats(0.01, 50), advantage=st.floats(-3, 3), rho=st.floats(1, 10))
def test_aipo_is_one_sided(ratio: float, advantage: float, rho: float) -> None:
    batch = tokens([-1.0 - math.log(ratio)], [advantage])
    (loss,), (gradient,) = loss_of(AIPO(rho=rho), [-1.0], batch)
    assert gradient == pytest.approx(-min(ratio, rho) * advantage)
    assert loss == pytest.approx(min(ratio, rho) * advantage)
    same, _ = loss_of(CISPO(clip_high=rho - 1), [-1.0], batch)
    assert same == pytest.approx([loss])


def test_aipo_compares_with_the_mean_only() -> None:
    assert values(AIPO(), rewarded(1, 0, 0, 0)) == [0.75, -0.25, -0.25, -0.25]
    batch = tokens([-1.0 - math.log(8)], [1.0])
    assert AIPO().loss(column([-1.0]), batch).metrics_N["policy/aipo_truncated_frac"].item() == 1.0


def test_longcat_clips_three_times() -> None:
    """Engine weight 4, truncated to 2; ratio 8 against the proximal policy, for either sign."""
    algorithm = LongCat(dual_clip=3.0, correction=(Tis(cap=2.0),))
    proximal = -1.0 - math.log(8)
    batch = tokens([proximal - math.log(4)] * 2, [1.0, -1.0], proximal=[proximal] * 2)
    loss, gradient = loss_of(algorithm, [-1.0, -1.0], batch)
    assert loss == pytest.approx([-2 * 1.28, 2 * 3.0])
    assert gradient == [0.0, 0.0]
    assert algorithm.aggregation.over == "budget"


def test_longcat_masks_what_was_cut_by_length() -> None:
    cut = EpisodeMeta((TrajectoryMeta("policy", None, TRUNCATED, 0.0, (SampleMeta(1, 2, 2, 0),)),))
    assert values(LongCat(std_normalize=False), group(0, episodes=[episode(1.0), cut])) == [0.5]


# --------------------------------------------------------------------------------------------------------------- m2po


def drifted(log_ratios: Sequence[float], advantages: Sequence[float]) -> LossInputs:
    """Tokens with these log(p / mu) at the start of the step."""
    return tokens([0.0] * len(log_ratios), advantages, proximal=log_ratios)


def trust_region(squares: list[float]) -> LossInputs:
    """Trust-region tokens of these (log r)², both kinds in turn."""
    signs = [(-1.0) ** place for place in range(len(squares))]
    return drifted([sign * math.sqrt(s) for sign, s in zip(signs, squares, strict=True)], signs)


def largest_kept(batch: LossInputs, tau: float, ranks: Ranks | None = None) -> float:
    return M2PO(tau=tau).step_statistics(batch, ranks or OneRank())[LARGEST_KEPT]


def masked_by(batch: LossInputs, tau: float) -> list[bool]:
    """Which tokens have no gradient after `step_statistics`."""
    facts = {LARGEST_KEPT: largest_kept(batch, tau)}
    _, gradient = loss_of(M2PO(tau=tau), batch.proximal_logprobs_N.tolist(), replace(batch, facts=facts))
    return [a != 0 and slope == 0 for a, slope in zip(batch.advantages_N.tolist(), gradient, strict=True)]


def test_m2po_masks_the_largest_until_the_remaining_mean_is_small() -> None:
    assert largest_kept(trust_region([0.01, 0.09, 0.25, 0.04]), tau=1.0) == pytest.approx(0.25)
    assert largest_kept(trust_region([0.01, 0.09, 0.25, 0.04]), tau=0.05) == pytest.approx(0.09)  # .14 / 3
    assert largest_kept(trust_region([0.01, 0.09, 0.25, 0.04]), tau=0.03) == pytest.approx(0.04)
    assert largest_kept(trust_region([0.25, 0.25]), tau=0.04) == -1.0
    assert largest_kept(trust_region([0.01, 0.25, 0.25]), tau=0.15) == pytest.approx(0.01)  # a tie is masked together
    assert largest_kept(trust_region([]), tau=0.04) == -1.0


def test_m2po_masks_trust_region_tokens_alone() -> None:
    log_ratios, advantages = [0.9, -0.9, 0.9, -0.9, 0.9, 0.0], [1.0, -1.0, -1.0, 1.0, 0.0, 1.0]
    assert masked_by(drifted(log_ratios, advantages), tau=0.04) == [True, True, False, False, False, False]


def test_correcting_tokens_do_not_count_in_m2pos_mean() -> None:
    """Six tokens on policy or correcting would bring the mean down to .09, and keep all."""
    log_ratios, advantages = [0.2, 0.8] + [0.0] * 3 + [-0.1] * 3, [1.0] * 8
    assert masked_by(drifted(log_ratios, advantages), tau=0.1) == [False, True] + [False] * 6


DRIFTS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, -0.1, 0.2, -0.2, 0.5, -0.5, 1.0, -2.0]), st.sampled_from([-2.0, -0.5, 0, 1])),
    min_size=1,
    max_size=30,
)


@given(drifts=DRIFTS, tau=st.floats(0, 2))
def test_m2po_keeps_the_most_tokens_whose_mean_is_within_tau(drifts: list[tuple[float, float]], tau: float) -> None:
    log_ratios, advantages = zip(*drifts, strict=True)
    masked = masked_by(drifted(log_ratios, advantages), tau)
    squares = [x * x for x, a in drifts if x * a > 0]
    out = [x * x for (x, _), is_masked in zip(drifts, masked, strict=True) if is_masked]
    kept = sorted(squares)[: len(squares) - len(out)]
    assert sorted(out) == sorted(squares)[len(kept) :], "only trust-region tokens are masked, the largest first"
    assert sum(kept) <= tau * len(kept) + 1e-12
    if out:
        taken = kept + [s for s in out if s == min(out)]
        assert sum(taken) > tau * len(taken) - 1e-12
        assert min(out) not in kept, "tokens that tie are masked together"


@dataclass
class Beside(OneRank):
    """The collectives of a rank beside another one, which brings these values."""

    others_N: Tensor

    def gather(self, values_N: Tensor) -> Tensor:
        return torch.cat([values_N, self.others_N])


@given(drifts=DRIFTS, num_own=st.integers(0, 30), tau=st.floats(0, 2))
def test_neither_ranks_nor_the_order_of_tokens_change_m2pos_mask(
    drifts: list[tuple[float, float]], num_own: int, tau: float
) -> None:
    log_ratios, advantages = zip(*drifts, strict=True)
    expected = largest_kept(drifted(log_ratios, advantages), tau)
    own = drifted(log_ratios[:num_own], advantages[:num_own])
    others_N = column([x * x for x, a in drifts[num_own:] if x * a > 0])
    assert largest_kept(own, tau, Beside(others_N)) == expected
    assert largest_kept(drifted(log_ratios[::-1], advantages[::-1]), tau) == expected


def test_m2po_applies_the_unclipped_ratio_and_the_measured_mask() -> None:
    ratio = math.exp(0.5)
    batch = drifted([0.5, 0.0, 1.0, -1.0, 1.0], [1.0, -1.0, 1.0, -1.0, -1.0])
    batch = replace(batch, facts={LARGEST_KEPT: 0.3})
    algorithm = M2PO()
    at = batch.proximal_logprobs_N.tolist()
    loss, gradient = loss_of(algorithm, at, batch)
    assert loss == pytest.approx([-ratio, 1.0, 0.0, 0.0, math.e])
    assert gradient == pytest.approx([-ratio, 1.0, 0.0, 0.0, math.e])
    metrics_N = algorithm.loss(column(at), batch).metrics_N
    assert metrics_N["policy/m2po_masked_frac"].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert undocumented_names(metrics_N) == []


def test_dart_trains_the_steps_that_the_policy_was_least_sure_of() -> None:
    surprisals = [0.1, 0.1, 2.0, 2.0, 0.5, 0.7, 3.0, 3.0, 0.2, 0.2]  # five samples of two tokens
    batch = tokens([-s for s in surprisals], [1.0] * 10, lengths=[2] * 5)
    algorithm = DART(kept=0.6)
    facts = algorithm.step_statistics(batch, OneRank())
    assert facts[LEAST_ENTROPY] == pytest.approx(0.6)
    batch = replace(batch, facts=facts)
    _, gradient = loss_of(algorithm, [-s for s in surprisals], batch)
    assert [g != 0 for g in gradient] == [False] * 2 + [True] * 6 + [False] * 2
    metrics_N = algorithm.loss(column([-s for s in surprisals]), batch).metrics_N
    assert metrics_N["policy/low_entropy_frac"].mean().item() == pytest.approx(0.4)
    assert undocumented_names(metrics_N) == []


def test_all_steps_of_equal_entropy_are_kept_together() -> None:
    batch = tokens([-1.0] * 6, [1.0] * 6, lengths=[2] * 3)
    assert DART(kept=0.1).step_statistics(batch, OneRank()) == {LEAST_ENTROPY: 1.0}


def test_neither_ranks_nor_the_order_of_samples_change_what_dart_trains() -> None:
    whole = tokens([-0.1, -2.0, -0.5, -3.0], [1.0] * 4, lengths=[1] * 4)
    own, others_N = tokens([-0.5, -0.1], [1.0] * 2, lengths=[1] * 2), column([2.0, 3.0])
    assert DART(kept=0.5).step_statistics(own, Beside(others_N)) == DART(kept=0.5).step_statistics(whole, OneRank())


# ---------------------------------------------------------------------------------------------------- closed gradients


def expected_gradient(algorithm: Algorithm, log_ratio: float, advantage: float) -> float:
    """-A times the ratio where it counts, by the paper: a sample of one token, whose sampler the step starts from."""
    r = math.exp(log_ratio)
    match algorithm:
        case CISPO():
            return -advantage * min(max(r, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
        case AIPO():
            return -advantage * min(r, algorithm.rho)
        case M2PO():
            return -advantage * r
        case ClippedSurrogate():
            is_clipped = r > 1 + algorithm.clip_high if advantage > 0 else r < 1 - algorithm.clip_low
            is_dual = algorithm.dual_clip is not None and advantage < 0 and r > algorithm.dual_clip
            return 0.0 if is_clipped or is_dual else -advantage * r
    raise AssertionError(algorithm)


FAMILY = [GRPO(), DrGRPO(), DAPO(), GSPO(clip_low=0.3, clip_high=0.5), EAPO(), CISPO(), AIPO(), LongCat(), M2PO()]


@pytest.mark.parametrize("algorithm", FAMILY, ids=lambda algorithm: type(algorithm).__name__)
def test_gradients_equal_their_closed_form(algorithm: Algorithm) -> None:
    rng = random.Random(0)
    log_ratios = [rng.gauss(0, 0.7) for _ in range(200)]
    advantages = [rng.gauss(0, 1) for _ in log_ratios]
    sampled = tokens([-2.0] * 200, advantages, lengths=[1] * 200, facts={LARGEST_KEPT: 1.0})
    _, gradient = loss_of(algorithm, [-2.0 + x for x in log_ratios], sampled)
    expected = [expected_gradient(algorithm, x, a) for x, a in zip(log_ratios, advantages, strict=True)]
    assert gradient == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("algorithm", [GRPO(), DrGRPO(), LongCat(), M2PO()], ids=lambda a: type(a).__name__)
def test_gradients_equal_differences_where_nothing_is_held_fixed(algorithm: Algorithm) -> None:
    at = [-1.0, -2.0, -0.5, -1.3]
    sampled = tokens([-1.1, -1.2, -0.6, -1.3], [1.0, -0.5, -2.0, 0.3], facts={LARGEST_KEPT: 1.0})
    _, gradient = loss_of(algorithm, at, sampled)
    assert gradient == pytest.approx(numeric_gradient(lambda x: algorithm.loss(x, sampled), at), abs=1e-6)


def test_torch_agrees_about_the_whole_clipped_loss() -> None:
    """autograd against torch's own finite differences, at tokens away from the corners of the clip."""
    sampled = tokens([-1.1, -1.2, -0.6], [1.0, -0.5, -2.0])
    logprobs_N = column([-1.0, -2.0, -0.5]).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: GRPO(dual_clip=3.0).loss(x, sampled).loss_N, (logprobs_N,))
