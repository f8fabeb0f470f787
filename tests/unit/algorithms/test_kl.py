"""KL estimators: values by hand, and exact expected gradients as a loss over all outcomes of a policy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, tensor

from algorithms.grpo import GRPO
from algorithms.kl import Estimator, kl_estimate, penalised_rewards
from algorithms.policy_gradient import PolicyGradient
from algorithms.ppo import PPO
from algorithms.reinforce_pp import ReinforcePP
from algorithms.rloo import RLOO
from rlsys.algorithm import Column
from tests.tokens import F64, numeric_gradient, tokens

LOGITS = [0.3, -0.7, 1.1, 0.0]
REFERENCE = tensor([0.1, 0.2, -0.3, 0.5], dtype=F64).log_softmax(-1)
K3 = math.exp(-0.5) + 0.5 - 1


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", K3), ("k3+", K3)])
def test_values_by_hand(estimator: Estimator, value: float) -> None:
    assert kl_estimate(estimator, tensor([-1.0]), tensor([-1.5])).item() == pytest.approx(value)
    assert kl_estimate(estimator, tensor([-1.0]), tensor([-1.0])).item() == 0.0


def expected_gradients(estimator: Estimator) -> tuple[Tensor, Tensor, Tensor]:
    """By logits: of the loss in expectation over the policy, of KL(policy || ref), and of KL(ref || policy)."""
    logits = tensor(LOGITS, dtype=F64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.exp().detach() * kl_estimate(estimator, logprobs, REFERENCE)).sum()
    forward = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    reverse = (REFERENCE.exp() * (REFERENCE - logprobs)).sum()
    found = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, forward, reverse)]
    return found[0], found[1], found[2]


@pytest.mark.parametrize("estimator", ["k2", "k3+"])
def test_k2_and_k3_plus_as_losses_have_the_kl_gradient(estimator: Estimator) -> None:
    loss, kl, _ = expected_gradients(estimator)
    torch.testing.assert_close(loss, kl)


def test_k3_as_a_loss_has_the_reverse_kl_gradient() -> None:
    loss, kl, reverse = expected_gradients("k3")
    torch.testing.assert_close(loss, reverse)
    assert not torch.allclose(loss, kl, rtol=0.1)


def test_k1_as_a_loss_has_no_gradient_and_is_refused() -> None:
    loss, _, _ = expected_gradients("k1")
    torch.testing.assert_close(loss, torch.zeros(4, dtype=F64))
    with pytest.raises(ValueError, match=r"kl_estimator: k1 has an expected gradient of zero as a loss; choose k3\+"):
        GRPO(kl_estimator="k1")
    assert PPO().kl_estimator == "k1"


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
def test_the_value_is_in_expectation_the_kl(estimator: Estimator) -> None:
    logprobs = tensor(LOGITS, dtype=F64).log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    assert (logprobs.exp() * kl_estimate(estimator, logprobs, REFERENCE)).sum().item() == pytest.approx(kl.item())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_are_those_of_the_values_by_differences(estimator: Estimator) -> None:
    at, reference = [-0.3, -2.0, -1.0], tensor([-1.0, -0.5, -1.0], dtype=F64)
    logprobs = tensor(at, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_estimate(estimator, logprobs, reference).sum(), logprobs)
    numeric = numeric_gradient(lambda x: kl_estimate(estimator, x, reference), at)
    assert gradient.tolist() == pytest.approx(numeric, abs=1e-8)


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_extreme_ratios_stay_finite(estimator: Estimator) -> None:
    logprobs = tensor([0.0, -300.0], requires_grad=True)
    total = kl_estimate(estimator, logprobs, tensor([-300.0, 0.0])).sum()
    total.backward()
    assert total.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_k3_in_single_precision_is_accurate_and_never_negative() -> None:
    x = torch.logspace(-7, -1, 500).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(500)
    exact = (-x.double()).expm1() + x.double()
    found = kl_estimate("k3", x, torch.zeros(1000))
    assert (found >= 0).all()
    assert ((found - exact).abs() <= 1e-7 * x.abs()).all(), "exp(-x) + x - 1 would be off by 1e-7 whatever x"


@pytest.mark.parametrize("estimator", ["k2", "k3+"])
@pytest.mark.parametrize("distance", [-300.0, -25.0, 25.0, 300.0])
def test_a_policy_far_from_the_reference_is_still_pulled_back(estimator: Estimator, distance: float) -> None:
    logprobs = tensor([-301.0 + distance], dtype=F64, requires_grad=True)
    value = kl_estimate(estimator, logprobs, tensor([-301.0], dtype=F64))
    assert torch.autograd.grad(value.sum(), logprobs)[0].item() == pytest.approx(distance)


@pytest.mark.parametrize(("estimator", "slope"), [("k3", 0.0), ("k3+", -15.0)])
def test_the_estimate_of_one_distant_token_is_bounded(estimator: Estimator, slope: float) -> None:
    """Where a token is e^15 times less likely than under the reference, k3 would be three million."""
    logprobs = tensor([-16.0], dtype=F64, requires_grad=True)
    reference = tensor([-1.0], dtype=F64)
    value = kl_estimate(estimator, logprobs, reference)
    assert value.item() == 10.0
    assert torch.autograd.grad(value.sum(), logprobs)[0].item() == slope


# ------------------------------------------------------------------------------------------ a policy of two tokens

FIRST = tensor([0.3, -0.7, 1.1], dtype=F64)
SECOND = tensor([[0.2, -0.1, 0.4], [1.0, 0.0, -1.0], [-0.3, 0.6, 0.1]], dtype=F64)
"""Logits of the second token, by the first."""
REF_FIRST = tensor([0.1, 0.2, -0.3], dtype=F64).log_softmax(-1)
REF_SECOND = tensor([[0.5, 0.1, -0.4], [0.0, 0.3, 0.2], [0.9, -0.6, 0.1]], dtype=F64).log_softmax(-1)
ALL = [(a, b) for a in range(3) for b in range(3)]


def both_kls(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence's KL, and the sum of the KL of each next token with the prefixes it follows held fixed."""
    kl_first = (first.exp() * (first - REF_FIRST)).sum()
    kl_second = (second.exp() * (second - REF_SECOND)).sum(-1)
    return kl_first + (first.exp() * kl_second).sum(), kl_first + (first.exp().detach() * kl_second).sum()


def expected_by_enumeration(algorithm: PolicyGradient, first: Tensor, second: Tensor) -> Tensor:
    """Its loss over all nine sequences, on-policy, with a reward of 0; summed over tokens."""
    total = first.new_zeros(())
    for a, b in ALL:
        logprobs = torch.stack([first[a], second[a, b]])
        reference = {Column.REFERENCE_LOGPROBS: [REF_FIRST[a].item(), REF_SECOND[a, b].item()]}
        batch = tokens(logprobs.tolist(), [0.0, 0.0], columns=reference)
        batch = replace(batch, advantages_N=algorithm.token_advantages(batch).advantages_N)
        total = total + logprobs.sum().exp().detach() * algorithm.loss(logprobs, batch).loss_N.sum()
    return total


def gradients(value: Tensor, logits: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, logits, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize(
    ("algorithm", "is_of_sequence"),
    [
        (GRPO(kl_coef=1.0), False),
        (GRPO(kl_coef=1.0, kl_estimator="k2"), False),
        (RLOO(kl_coef=1.0), True),
        (ReinforcePP(kl_coef=1.0), True),
    ],
    ids=["grpo, k3+", "grpo, k2", "rloo", "reinforce_pp"],
)
def test_losses_use_the_token_kl_and_rewards_the_sequence_kl(algorithm: PolicyGradient, is_of_sequence: bool) -> None:
    logits = [FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()]
    first, second = (x.log_softmax(-1) for x in logits)
    of_sequence, of_next_tokens = (gradients(kl, logits) for kl in both_kls(first, second))
    actual = gradients(expected_by_enumeration(algorithm, first, second), logits)
    torch.testing.assert_close(actual, of_sequence if is_of_sequence else of_next_tokens)
    assert not torch.allclose(of_sequence, of_next_tokens, atol=0.01)


def test_rewards_come_at_last_tokens_and_kl_at_every_one() -> None:
    reference = {Column.REFERENCE_LOGPROBS: [-1.5, -1.0, -3.0]}
    batch = tokens([-1.0, -1.2, -2.0], [2.0, 2.0, -1.0], lengths=[2, 1], columns=reference)
    assert penalised_rewards(batch, 0.0, "k1").tolist() == [0.0, 2.0, -1.0]
    assert penalised_rewards(batch, 0.1, "k1").tolist() == pytest.approx([-0.05, 2.02, -1.1])
