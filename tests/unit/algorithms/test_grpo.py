"""GRPO: the trajectories it compares, and its loss by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from algorithms.aipo import AIPO
from algorithms.cispo import CISPO
from algorithms.corrections import Correction, IcePop, Tis
from algorithms.dapo import DAPO
from algorithms.eapo import EAPO
from algorithms.grpo import GRPO
from algorithms.m2po import LARGEST_KEPT, M2PO
from algorithms.policy_gradient import PolicyGradient
from algorithms.ppo import PPO
from algorithms.rloo import RLOO
from rlsys.algorithm import Algorithm, Column, TrajectoryAdvantage
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import OK, TRUNCATED, EpisodeMeta, Group, SampleMeta, TrajectoryMeta, failed
from tests.groups import group as grouped
from tests.tokens import F64, column, loss_of, tokens

REFERENCE = Column.REFERENCE_LOGPROBS
NONE: tuple[Correction, ...] = ()
EVERY = [(Tis(),), (IcePop(),), NONE]


def trajectory(agent: str = "lead", reward: float | None = None) -> TrajectoryMeta:
    return TrajectoryMeta(agent, None if agent == "lead" else 0, OK, reward, (SampleMeta(1, 1, 1, 0),))


def group(*episodes: EpisodeMeta) -> Group:
    return grouped(0, episodes=episodes)


def leads(*rewards: float) -> Group:
    return group(*(EpisodeMeta((trajectory(reward=r),)) for r in rewards))


def broken(episode: EpisodeMeta) -> EpisodeMeta:
    root, *others = episode.trajectories
    return EpisodeMeta((replace(root, outcome=failed("judge hung")), *others))


def by_place(assigned: list[TrajectoryAdvantage]) -> dict[tuple[int, int], float]:
    return {(a.episode, a.trajectory): a.advantage for a in assigned}


def test_advantages_by_hand_numbers() -> None:
    scale = math.sqrt(1 / 3) + 1e-6  # unbiased
    assigned = list(GRPO().advantages(leads(1, 0, 0, 1)))
    assert [a.advantage for a in assigned] == pytest.approx([0.5 / scale, -0.5 / scale, -0.5 / scale, 0.5 / scale])
    assert [(a.episode, a.trajectory) for a in assigned] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    plain = list(GRPO(std_normalize=False).advantages(leads(1, 0, 0, 0)))
    assert [a.advantage for a in plain] == [0.75, -0.25, -0.25, -0.25]


def test_failed_episodes_leave_the_statistics_and_truncated_ones_stay() -> None:
    good = leads(1, 0, 0).episodes
    cut = EpisodeMeta((replace(trajectory(reward=0.0), outcome=TRUNCATED),))
    compared = group(broken(good[0]), *good, cut)
    assigned = by_place(list(GRPO(std_normalize=False).advantages(compared)))
    assert assigned == {(1, 0): 0.75, (2, 0): -0.25, (3, 0): -0.25, (4, 0): -0.25}
    masked = by_place(list(GRPO(std_normalize=False, mask_truncated=True).advantages(compared)))
    assert masked == {(1, 0): 0.75, (2, 0): -0.25, (3, 0): -0.25}


def test_fewer_than_two_episodes_assign_nothing() -> None:
    good = leads(1, 0).episodes
    assert list(GRPO().advantages(group(good[0], broken(good[1])))) == []
    assert list(GRPO().advantages(group(broken(good[0]), broken(good[1])))) == []


def test_like_is_compared_with_like() -> None:
    """Subagents with rewards are compared with subagents, and not with leads."""
    first = EpisodeMeta((trajectory(reward=1.0), trajectory("sub", reward=1.0), trajectory("sub", reward=0.5)))
    second = EpisodeMeta((trajectory(reward=0.0), trajectory("sub", reward=0.0)))
    assigned = by_place(list(GRPO(std_normalize=False).advantages(group(first, second))))
    assert assigned == pytest.approx({(0, 0): 0.5, (1, 0): -0.5, (0, 1): 0.5, (0, 2): 0.0, (1, 1): -0.5})


def test_roots_are_compared_with_roots_regardless_of_child_names() -> None:
    first = EpisodeMeta((trajectory(reward=1.0), replace(trajectory(reward=0.2), parent=0)))
    second = EpisodeMeta((trajectory(reward=0.0), replace(trajectory(reward=0.4), parent=0)))
    assigned = by_place(list(GRPO(std_normalize=False).advantages(group(first, second))))
    assert assigned == pytest.approx({(0, 0): 0.5, (1, 0): -0.5, (0, 1): -0.1, (1, 1): 0.1})


def team(root: float, *subs: float | None) -> EpisodeMeta:
    return EpisodeMeta((trajectory(reward=root), *(trajectory("sub", reward=sub) for sub in subs)))


@pytest.mark.parametrize(
    ("share", "second", "third"), [(0.0, -0.25, 0.25), (0.2, -0.1, 0.1), (0.5, 0.125, -0.125), (1.0, 0.5, -0.5)]
)
def test_a_rewarded_agent_takes_a_share_of_its_roots_advantage(share: float, second: float, third: float) -> None:
    """Roots .5 and -.5; the two subagents with rewards of their own -.25 and .25; one has none."""
    algorithm = GRPO(std_normalize=False, team_share=share)
    assigned = by_place(list(algorithm.advantages(group(team(1.0, None, 0.0), team(0.0, 0.5)))))
    expected = {(0, 0): 0.5, (1, 0): -0.5, (0, 1): 0.5, (0, 2): second, (1, 1): third}
    assert assigned == pytest.approx(expected)


def test_the_roots_advantage_alone_needs_no_peer_of_ones_own() -> None:
    without_peer = group(team(1.0, 0.3), team(0.0))
    shares = {share: by_place(list(GRPO(team_share=share).advantages(without_peer))) for share in (0.0, 0.5, 1.0)}
    assert [(0, 1) in assigned for assigned in shares.values()] == [False, False, True]
    assert shares[1.0][0, 1] == shares[1.0][0, 0]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.floats(0, 1))
def test_team_rewards_give_the_same_advantage_at_any_share(rewards: list[float], share: float) -> None:
    scored = group(*(team(reward, reward) for reward in rewards))
    assigned = by_place(list(RLOO(team_share=share).advantages(scored)))
    for (e, _), value in assigned.items():
        assert value == pytest.approx(assigned[e, 0], abs=1e-12)


def test_ppo_mixes_rewards_as_others_mix_advantages() -> None:
    assigned = by_place(list(PPO(team_share=0.25).advantages(group(team(1.0, 0.0, None)))))
    assert assigned == {(0, 0): 1.0, (0, 1): 0.25, (0, 2): 1.0}


def test_eapo_shares_the_advantage_of_the_roots_last_round() -> None:
    """Root rounds .25 .5 1 against 0: mean .4375, last .5625; the subagents' own 1 against 0: .5."""
    three = SampleMeta(1, 1, 1, 0)
    root = replace(trajectory(reward=1.0), samples=(three,) * 3)
    scored = group(EpisodeMeta((root, trajectory("sub", reward=1.0))), team(0.0, 0.0))
    algorithm = EAPO(gamma=0.5, std_normalize=False, team_share=0.5)
    assigned = {(a.episode, a.trajectory, a.sample): a.advantage for a in algorithm.advantages(scored)}
    assert assigned[0, 1, 0] == (0.5625 + 0.5) / 2
    assert assigned[1, 1, 0] == (-0.4375 - 0.5) / 2


@pytest.mark.parametrize("algorithm", [GRPO(), DAPO(), RLOO(), EAPO()], ids=lambda a: type(a).__name__)
def test_unrewarded_agents_have_the_advantage_of_their_episode(algorithm: Algorithm) -> None:
    """As in WideSeek-R1: three subagents of one episode do not outvote the one of another, nor change any lead."""
    subs = [trajectory("sub")] * 3
    first, second = (trajectory(reward=1.0), *subs), (trajectory(reward=0.0), subs[0])
    assigned = by_place(list(algorithm.advantages(group(EpisodeMeta(first), EpisodeMeta(second)))))
    alone = by_place(list(algorithm.advantages(leads(1.0, 0.0))))
    assert assigned == {(e, t): alone[e, 0] for e, t in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]}
    assert algorithm.can_learn_from(group(EpisodeMeta(first), EpisodeMeta(second)))


def test_inherited_equal_rewards_give_zero_advantage() -> None:
    one, other = (EpisodeMeta((trajectory(reward=1.0), trajectory("sub"))), *leads(1.0).episodes)
    assert not DAPO().can_learn_from(group(one, other))
    of_two_kinds = EpisodeMeta((trajectory(reward=1.0), trajectory("sub", reward=1.0), trajectory("sub", reward=0.0)))
    assert not DAPO().can_learn_from(group(of_two_kinds, other)), "subagents of one episode have no baseline"


def test_an_agent_without_peers_in_another_episode_has_no_baseline() -> None:
    subs = (trajectory("critic", reward=1.0), trajectory("critic", reward=0.0))
    first = EpisodeMeta((trajectory(reward=1.0), *subs))
    assert by_place(list(GRPO().advantages(group(first, *leads(0.0).episodes)))).keys() == {(0, 0), (1, 0)}
    assert list(GRPO().advantages(group(first, broken(leads(0.0).episodes[0])))) == []


def test_agents_of_a_root_without_a_reward_get_nothing() -> None:
    lost = EpisodeMeta((trajectory(reward=math.nan), trajectory("sub")))
    unjudged = EpisodeMeta((trajectory(), trajectory("sub")))
    assert by_place(list(GRPO().advantages(group(lost, unjudged, *leads(1, 0).episodes)))).keys() == {(2, 0), (3, 0)}
    own = EpisodeMeta((trajectory(reward=1.0), trajectory("sub", reward=math.nan)))
    assert by_place(list(GRPO().advantages(group(own, *leads(0.0).episodes)))).keys() == {(0, 0), (1, 0)}


def test_a_masked_truncated_root_still_passes_its_advantage_on() -> None:
    cut = EpisodeMeta((replace(trajectory(reward=0.0), outcome=TRUNCATED), trajectory("sub")))
    algorithm = GRPO(std_normalize=False, mask_truncated=True)
    assert by_place(list(algorithm.advantages(group(cut, *leads(1.0).episodes)))) == {(0, 1): -0.5, (1, 0): 0.5}


def test_a_reward_that_is_not_a_number_counts_as_none() -> None:
    assigned = by_place(list(GRPO(std_normalize=False).advantages(leads(1, math.nan, 0))))
    assert assigned == {(0, 0): 0.5, (2, 0): -0.5}


def logs(probabilities: list[float]) -> list[float]:
    return [math.log(p) for p in probabilities]


@pytest.mark.parametrize("correction", EVERY)
def test_loss_and_metrics_at_a_later_update_match_known_values(correction: tuple[Correction, ...]) -> None:
    """At a later update than the first, where the sampler is the proximal policy: all corrections are plain PPO."""
    logprobs_N = column(logs([0.3, 0.2, 0.5])).requires_grad_()
    output = GRPO(correction=correction).loss(logprobs_N, tokens(logs([0.2, 0.4, 0.5]), [1.0, -1.0, 2.0]))
    assert output.loss_N.tolist() == pytest.approx([-1.28, 0.8, -2.0])
    metrics = {name: value.tolist() for name, value in output.metrics_N.items()}
    assert metrics["policy/ratio_mean"] == pytest.approx([1.5, 0.5, 1.0])
    assert metrics["policy/clip_frac_low"] == [0.0, 1.0, 0.0]
    assert metrics["policy/clip_frac_high"] == [1.0, 0.0, 0.0]
    assert "policy/kl_ref" not in metrics
    assert not any(value.requires_grad for value in output.metrics_N.values())
    assert undocumented_names(metrics) == []


PROXIMAL = logs([0.2, 0.2, 0.2, 0.2])
BEHAVIOR = logs([0.2, 0.05, 0.5, 0.025])
"""Importance weights 1, 4, 0.4 and 8."""


@pytest.mark.parametrize(
    ("correction", "expected"), [(Tis(cap=5.0), [-1.1, -4.0, 0.4, -5 * 1.28]), (IcePop(), [-1.1, -4.0, 0.0, 0.0])]
)
def test_with_several_updates_weights_multiply_the_clipped_surrogate(
    correction: Correction, expected: list[float]
) -> None:
    batch = tokens(BEHAVIOR, [1.0, 1.0, -1.0, 1.0], proximal=PROXIMAL)
    output = GRPO(correction=(correction,)).loss(column(logs([0.22, 0.2, 0.2, 0.4])), batch)
    assert output.loss_N.tolist() == pytest.approx(expected)
    assert output.metrics_N["policy/ratio_mean"].tolist() == pytest.approx([1.1, 1.0, 1.0, 2.0])


def gradient(correction: tuple[Correction, ...], delta: float, advantage: float = 1.0, **fields: Any) -> float:
    """What one token does to its logprob at the start of a step, `delta` above the logprob it was sampled with."""
    batch = tokens([-2.0], [advantage], proximal=[-2.0 + delta])
    algorithm = GRPO(correction=correction, **fields)
    return loss_of(algorithm, [-2.0 + delta], batch)[1][0]


@pytest.mark.parametrize("correction", EVERY)
@given(delta=st.floats(math.log(0.81), math.log(1.27)), advantage=st.floats(-3, 3))
def test_the_importance_ratio_counts_exactly_once(
    correction: tuple[Correction, ...], delta: float, advantage: float
) -> None:
    assert gradient(correction, delta, advantage) == pytest.approx(-advantage * math.exp(delta), rel=1e-6)


def test_a_token_that_drifted_far_counts_as_its_correction_says() -> None:
    up, down = math.log(8), math.log(0.1)
    assert gradient((Tis(),), up) == pytest.approx(-2.0)
    assert gradient((Tis(),), down) == pytest.approx(-0.1)
    assert gradient((IcePop(),), up) == gradient((IcePop(),), down) == 0.0
    assert gradient(NONE, up) == 0.0


def test_dual_clip_closes_the_case_that_the_clip_leaves_open() -> None:
    up = math.log(8)
    assert gradient(NONE, up, advantage=-1.0) == pytest.approx(8.0)
    assert gradient(NONE, up, advantage=-1.0, dual_clip=3.0) == 0.0
    assert gradient(NONE, math.log(2), advantage=-1.0, dual_clip=3.0) == pytest.approx(2.0)
    batch = tokens([-2.0 - up, -2.0 - up], [-1.0, 1.0], proximal=[-2.0, -2.0])
    output = GRPO(correction=NONE, dual_clip=3.0).loss(column([-2.0, -2.0]), batch)
    assert output.loss_N.tolist() == pytest.approx([3.0, -1.28])
    assert output.metrics_N["policy/clip_frac_dual"].tolist() == [1.0, 0.0]


@given(rho=st.floats(0.01, 20), advantage=st.floats(-3, 3), clip=st.floats(0, 0.9))
def test_tis_with_one_update_is_aipo_at_any_clip(rho: float, advantage: float, clip: float) -> None:
    batch = tokens([-2.0], [advantage], proximal=[-2.0 + math.log(rho)])
    algorithm = GRPO(correction=(Tis(),), clip_low=clip, clip_high=clip)
    assert loss_of(algorithm, [-2.0 + math.log(rho)], batch)[1][0] == pytest.approx(-min(rho, 2.0) * advantage)
    metrics_N = algorithm.loss(column([-2.0 + math.log(rho)]), batch).metrics_N
    assert metrics_N["policy/ratio_mean"].item() == 1.0
    assert [value.item() for name, value in metrics_N.items() if "clip_frac" in name] == [0.0, 0.0]


def test_the_kl_term_is_added_with_its_weight() -> None:
    batch = tokens([-1.0], [2.0], columns={REFERENCE: [-1.5]})
    output = GRPO(kl_coef=0.1).loss(column([-1.0]), batch)
    kl = math.exp(-0.5) + 0.5 - 1
    assert output.loss_N.item() == pytest.approx(-2.0 + 0.1 * kl)
    assert output.metrics_N["policy/kl_ref"].item() == pytest.approx(kl)
    assert GRPO(kl_coef=0.1, kl_estimator="k2").loss(column([-1.0]), batch).loss_N.item() == pytest.approx(-1.9875)


def test_the_kl_term_has_an_unbiased_gradient_on_stale_tokens() -> None:
    """Exactly, over all four tokens a sampler of older weights can draw; the cap is out of reach."""
    logits = tensor([0.3, -0.7, 1.1, 0.0], dtype=F64, requires_grad=True)
    sampler = tensor([0.9, 0.4, -0.2, 0.1], dtype=F64).log_softmax(-1)
    reference = tensor([0.1, 0.2, -0.3, 0.5], dtype=F64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    batch = tokens(sampler.tolist(), [0.0] * 4, proximal=logprobs.tolist(), columns={REFERENCE: reference.tolist()})
    loss = (sampler.exp() * GRPO(kl_coef=1.0, correction=(Tis(cap=100.0),)).loss(logprobs, batch).loss_N).sum()
    (actual,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("algorithm", [GRPO(correction=NONE), CISPO(), AIPO(), M2PO()], ids=lambda a: type(a).__name__)
def test_the_kl_gradient_stays_unbiased_without_a_correction(algorithm: PolicyGradient) -> None:
    """All ratios are below 2, where the weight of the KL is truncated."""
    logits = tensor([0.3, -0.7, 1.1, 0.0], dtype=F64, requires_grad=True)
    sampler = tensor([0.5, -0.4, 0.7, 0.1], dtype=F64).log_softmax(-1)
    reference = tensor([0.1, 0.2, -0.3, 0.5], dtype=F64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    columns, facts = {REFERENCE: reference.tolist()}, {LARGEST_KEPT: 9.0}
    batch = tokens(sampler.tolist(), [0.0] * 4, proximal=logprobs.tolist(), columns=columns, facts=facts)
    loss = (sampler.exp() * replace(algorithm, kl_coef=1.0).loss(logprobs, batch).loss_N).sum()
    (actual,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("correction", [(Tis(),), NONE])
def test_later_updates_weight_the_kl_by_the_policy_ratio(
    correction: tuple[Correction, ...],
) -> None:
    """The sampler is the proximal policy, and the policy has made the token 1.5 times as likely."""
    at = -2.0 + math.log(1.5)
    batch = tokens([-2.0], [0.0], columns={REFERENCE: [at - 0.5]})
    loss, _ = loss_of(GRPO(kl_coef=1.0, correction=correction), [at], batch)
    assert loss == pytest.approx([1.5 * (math.exp(-0.5) + 0.5 - 1)])


@pytest.mark.parametrize(("correction", "weight"), [((Tis(),), 2.0), ((IcePop(),), 0.0), (NONE, 2.0)])
def test_the_kl_term_is_weighted_as_the_correction_says(correction: tuple[Correction, ...], weight: float) -> None:
    """Importance weight 8: truncated, left out, or truncated by the KL itself."""
    batch = tokens([-2.0 - math.log(8)], [0.0], proximal=[-2.0], columns={REFERENCE: [-2.5]})
    loss, _ = loss_of(GRPO(kl_coef=0.1, correction=correction), [-2.0], batch)
    assert loss == pytest.approx([weight * 0.1 * (math.exp(-0.5) + 0.5 - 1)])


def test_the_reference_is_asked_for_only_when_weighted() -> None:
    assert GRPO().columns == frozenset()
    assert GRPO(kl_coef=0.01).columns == {REFERENCE}


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"group_size": 1}, ["group_size", "greater than or equal to 2"]),
        ({"clip_low": 1.0}, ["clip_low", "less than 1"]),
        ({"clip_high": -0.1}, ["clip_high", "greater than or equal to 0"]),
        ({"clip_high": float("nan")}, ["clip_high", "finite number"]),
        ({"kl_coef": float("inf")}, ["kl_coef", "finite number"]),
        ({"correction": "mis"}, ["correction", "no correction is named 'mis'"]),
        ({"over": "samples"}, ["over", "'tokens', 'sequences', 'budget' or 'agents'"]),
        ({"over": "budget", "budget": 0}, ["budget", "greater than 0"]),
        ({"dual_clip": 1.1}, ["dual_clip: should be more than 1 + clip_high, 1.28 (got 1.1)"]),
        ({"clip_low": 2, "clip_high": -1, "group_size": 0}, ["clip_low", "clip_high", "group_size"]),
        (
            {"kl_estimator": "k1", "correction": (Tis(), IcePop())},
            ["name one of them", "k1 has an expected gradient of zero"],
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_all_at_once(fields: dict, messages: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        GRPO(**fields)
    for message in messages:
        assert message in str(caught.value)
