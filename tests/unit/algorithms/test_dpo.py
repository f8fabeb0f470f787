"""DPO: the paper's loss on pairs, whatever their split over micro-batches, and the pairs of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid

from algorithms.dpo import DPO
from rlsys.algorithm import Column, LossInputs
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import OK, EpisodeMeta, SampleMeta, TrajectoryMeta, failed
from tests.groups import episode, group
from tests.tokens import F64, OneRank, column, tokens

SCALES = {"accuracy", "margin", "reward_chosen", "reward_rejected"}


def answers(lengths: Sequence[int], groups: Sequence[int], shares: Sequence[float], seed: int = 0) -> LossInputs:
    """Samples at the start of a step."""
    rng = torch.Generator().manual_seed(seed)
    policy_N, reference_N = -3 * torch.rand(2, sum(lengths), dtype=F64, generator=rng)
    return tokens(
        policy_N.tolist(),
        column(shares).repeat_interleave(torch.tensor(lengths)).tolist(),
        lengths=lengths,
        groups=groups,
        columns={Column.REFERENCE_LOGPROBS: reference_N.tolist()},
    )


def of_samples(batch: LossInputs, wanted: Sequence[int]) -> LossInputs:
    """A micro-batch of some samples."""
    is_in_N = torch.isin(torch.arange(len(batch.lengths_S)), torch.tensor(wanted)).repeat_interleave(batch.lengths_S)
    return replace(
        batch,
        behavior_logprobs_N=batch.behavior_logprobs_N[is_in_N],
        proximal_logprobs_N=batch.proximal_logprobs_N[is_in_N],
        advantages_N=batch.advantages_N[is_in_N],
        staleness_N=batch.staleness_N[is_in_N],
        lengths_S=batch.lengths_S[wanted],
        groups_S=batch.groups_S[wanted],
        columns_N={kind: column_N[is_in_N] for kind, column_N in batch.columns_N.items()},
    )


def mean_over_samples(dpo: DPO, logprobs_N: Tensor, batch: LossInputs, num_samples: int) -> Tensor:
    weights_N = 1 / (num_samples * batch.lengths_S.double()).repeat_interleave(batch.lengths_S)
    return (dpo.loss(logprobs_N, batch).loss_N * weights_N).sum()


def of_the_paper(dpo: DPO, logprobs_N: Tensor, batch: LossInputs) -> Tensor:
    """Mean over pairs of equation 7, and of the likelihood of the chosen answer."""
    ratios_N = logprobs_N - batch.columns_N[Column.REFERENCE_LOGPROBS]
    ratios = [part_N.sum() for part_N in ratios_N.split(batch.lengths_S.tolist())]
    means = [part_N.mean() for part_N in logprobs_N.split(batch.lengths_S.tolist())]
    shares = [part_N[0] for part_N in batch.advantages_N.split(batch.lengths_S.tolist())]
    pairs = sorted(set(batch.groups_S.tolist()))
    losses = []
    for pair in pairs:
        own = [s for s, g in enumerate(batch.groups_S.tolist()) if g == pair]
        margin = dpo.beta * sum((shares[s] * ratios[s] for s in own), torch.zeros((), dtype=F64))
        chosen = sum((shares[s] * means[s] for s in own if shares[s] > 0), torch.zeros((), dtype=F64))
        losses.append(-logsigmoid(margin) - dpo.nll_weight * chosen)
    return torch.stack(losses).mean()


def test_the_loss_of_a_pair_is_that_of_the_paper() -> None:
    columns = {Column.REFERENCE_LOGPROBS: [-1.0, -1.0, -1.0]}
    batch = tokens([-0.5, -0.25, -3.0], [1.0, 1.0, -1.0], lengths=[2, 1], groups=[0, 0], columns=columns)
    dpo = DPO(beta=0.2)
    batch = replace(batch, facts=dpo.step_statistics(batch, OneRank()))
    # r(chosen) is .5 + .75, r(rejected) is -2: -log sigmoid(0.2 * 3.25)
    golden = 0.420055335703
    torch.testing.assert_close(dpo.loss(batch.proximal_logprobs_N, batch).loss_N, column([golden] * 3))


@pytest.mark.parametrize("nll_weight", [0.0, 0.5])
@given(seed=st.integers(0, 1000), cut=st.integers(1, 5))
def test_value_and_gradient_are_those_of_the_paper_for_any_split(nll_weight: float, seed: int, cut: int) -> None:
    """Pairs whose answers have one sample or two, cut into micro-batches that part them."""
    dpo = DPO(beta=0.3, nll_weight=nll_weight)
    whole = answers([2, 5, 1, 3, 4, 2], [0, 1, 0, 1, 2, 2], [1.0, -1.0, -1.0, 1.0, 1.0, -1.0], seed)
    whole = replace(whole, facts=dpo.step_statistics(whole, OneRank()))
    logprobs_N = whole.proximal_logprobs_N.clone().requires_grad_()
    expected = of_the_paper(dpo, logprobs_N, whole)
    (their_N,) = torch.autograd.grad(expected, logprobs_N)
    parts = [[*range(cut)], [*range(cut, 6)]]
    offsets_N = torch.arange(6).repeat_interleave(whole.lengths_S)
    losses = [
        mean_over_samples(dpo, logprobs_N[torch.isin(offsets_N, torch.tensor(part))], of_samples(whole, part), 6)
        for part in parts
    ]
    (our_N,) = torch.autograd.grad(torch.stack(losses).sum(), logprobs_N)
    torch.testing.assert_close(torch.stack(losses).sum(), expected)
    torch.testing.assert_close(our_N, their_N)


def test_an_answer_of_several_samples_counts_as_one() -> None:
    """A conversation whose context was rewritten: its sum has two samples, the other answer's one."""
    dpo = DPO(beta=0.3)
    whole = answers([2, 1, 3], [4, 4, 4], [1.0, 1.0, -1.0])
    whole = replace(whole, facts=dpo.step_statistics(whole, OneRank()))
    logprobs_N = whole.proximal_logprobs_N.clone().requires_grad_()
    (our_N,) = torch.autograd.grad(mean_over_samples(dpo, logprobs_N, whole, 3), logprobs_N)
    (their_N,) = torch.autograd.grad(of_the_paper(dpo, logprobs_N, whole), logprobs_N)
    torch.testing.assert_close(our_N, their_N)


def test_after_an_update_an_answer_counts_as_far_as_it_moved() -> None:
    columns = {Column.REFERENCE_LOGPROBS: [-1.0, -1.0]}
    batch = tokens([-1.0, -1.0], [1.0, -1.0], lengths=[1, 1], groups=[0, 0], columns=columns)
    dpo = DPO(beta=1.0)
    batch = replace(batch, facts=dpo.step_statistics(batch, OneRank()))
    moved = dpo.loss(column([-0.5, -3.0]), batch).loss_N
    torch.testing.assert_close(moved, -logsigmoid(column([0.5, 2.0])))


def test_a_margin_that_is_certain_is_no_overflow() -> None:
    columns = {Column.REFERENCE_LOGPROBS: [-1e5, 0.0]}
    for shares in ([1.0, -1.0], [-1.0, 1.0]):
        batch = tokens([0.0, -1e5], shares, lengths=[1, 1], groups=[0, 0], columns=columns)
        batch = replace(batch, facts=DPO().step_statistics(batch, OneRank()))
        logprobs_N = batch.proximal_logprobs_N.clone().requires_grad_()
        loss_N = DPO().loss(logprobs_N, batch).loss_N
        (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
        assert loss_N.isfinite().all() and gradient_N.isfinite().all()


def test_what_is_reported_is_of_the_start_of_the_step_and_documented() -> None:
    columns = {Column.REFERENCE_LOGPROBS: [-1.0] * 4}
    batch = tokens([-0.5, -2.0, -3.0, -1.0], [1.0, -1.0] * 2, lengths=[1] * 4, groups=[0, 0, 1, 1], columns=columns)
    dpo = DPO(beta=1.0)
    facts = dpo.step_statistics(batch, OneRank())
    assert {name: facts[name] for name in SCALES} == {
        "accuracy": 0.5,
        "margin": (1.5 - 2.0) / 2,
        "reward_chosen": (0.5 - 2.0) / 2,
        "reward_rejected": (-1.0 + 0.0) / 2,
    }
    metrics_N = dpo.loss(batch.proximal_logprobs_N, replace(batch, facts=facts)).metrics_N
    assert metrics_N.keys() == {f"dpo/{name}" for name in SCALES}
    assert not undocumented_names(metrics_N)


# ----------------------------------------------------------------------------------------------------------- the pairs


def pairs_of(*rewards: float | None) -> list[tuple[int, float]]:
    found = group(0, episodes=[episode(reward) for reward in rewards])
    return [(a.episode, a.advantage) for a in DPO(group_size=len(rewards)).assign(found)]


def test_the_best_answer_is_chosen_and_the_worst_rejected() -> None:
    assert pairs_of(0.5, 1.0, 0.0, None) == [(1, 1.0), (2, -1.0)]


def test_equal_answers_share_their_place() -> None:
    assert pairs_of(1.0, 0.0, 0.0, 0.5, 0.0, 0.0) == [(0, 1.0), (1, -0.25), (2, -0.25), (4, -0.25), (5, -0.25)]


def test_equal_rewards_are_no_preference() -> None:
    for rewards in [(1.0, 1.0), (math.nan, 1.0), (None, 0.0), (1.0,)]:
        found = group(0, episodes=[episode(reward) for reward in rewards])
        assert not DPO().can_learn_from(found)


def test_a_failed_answer_is_of_no_pair() -> None:
    found = group(0, episodes=[episode(1.0), episode(0.5), episode(0.0, failed("tool hung"))])
    assert [(a.episode, a.advantage) for a in DPO().assign(found)] == [(0, 1.0), (1, -1.0)]


def test_answers_to_different_prompts_are_not_compared() -> None:
    def answer(reward: float, prompt: int) -> TrajectoryMeta:
        return TrajectoryMeta("policy", None, OK, reward, (SampleMeta(2, 3, 3, prompt),))

    found = group(0, episodes=[EpisodeMeta((answer(1.0, 1), answer(0.0, 1))), EpisodeMeta((answer(0.5, 2),))])
    assert [(a.episode, a.trajectory, a.advantage) for a in DPO().assign(found)] == [(0, 0, 1.0), (0, 1, -1.0)]
