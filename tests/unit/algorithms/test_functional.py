"""Shared maths of the algorithms: values by hand, and gradients."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, tensor

from algorithms.policy_gradient import centre_rewards, clipped_objective, dual_floor, leave_one_out
from algorithms.sample_math import discounted_sums, is_last, log_ratio, sample_means, sample_sums, sample_totals


def test_log_ratios_are_clamped() -> None:
    ratio_N = log_ratio(tensor([-1.0, 0.0, -50.0]), tensor([-1.5, -50.0, 0.0]))
    assert ratio_N.tolist() == [0.5, 20.0, -20.0]


def test_the_clip_takes_the_worse_of_the_two_objectives() -> None:
    ratio_N = tensor([0.5, 0.5, 1.0, 1.5, 1.5], requires_grad=True)
    result = clipped_objective(ratio_N, tensor([2.0, -2.0, 1.0, 2.0, -2.0]), clip_low=0.2, clip_high=0.28)
    assert result.objective_N.tolist() == pytest.approx([1.0, -1.6, 1.0, 2.56, -3.0])
    assert result.is_low_N.tolist() == [False, True, False, False, False]
    assert result.is_high_N.tolist() == [False, False, False, True, False]
    result.objective_N.sum().backward()
    assert ratio_N.grad is not None
    assert ratio_N.grad.tolist() == pytest.approx([2.0, 0.0, 1.0, 0.0, -2.0])  # none where clipped


def test_the_floor_of_dual_clip_is_for_negative_advantages_only() -> None:
    assert dual_floor(tensor([-2.0, 0.0, 3.0]), 3.0).tolist() == [-6.0, 0.0, 0.0]


def test_rewards_are_centred_by_hand_numbers() -> None:
    assert centre_rewards([1.0, 0.0, 0.0, 1.0], std_normalize=False) == [0.5, -0.5, -0.5, 0.5]
    normalised = centre_rewards([1.0, 0.0, 0.0, 1.0], std_normalize=True)
    assert normalised == pytest.approx([0.5 / (math.sqrt(1 / 3) + 1e-6) * sign for sign in (1, -1, -1, 1)])


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.booleans())
@example([682.8417088050353] * 3, False)
def test_centred_rewards_sum_to_nothing(rewards: list[float], std_normalize: bool) -> None:
    values = centre_rewards(rewards, std_normalize=std_normalize)
    assert sum(values) == pytest.approx(0, abs=1e-6)
    if len(set(rewards)) == 1:
        assert values == [0.0] * len(rewards)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=10))
def test_leave_one_out_subtracts_the_mean_of_the_other_rewards(rewards: list[float]) -> None:
    others = [sum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i in range(len(rewards))]
    expected = [reward - mean for reward, mean in zip(rewards, others, strict=True)]
    assert leave_one_out(rewards) == pytest.approx(expected, abs=1e-9)


def test_samples_are_summed_apart_empty_ones_included_and_with_gradient() -> None:
    values_N = tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    lengths_S = tensor([1, 0, 3])
    sums_N = sample_sums(values_N, lengths_S)
    assert sums_N.tolist() == [1.0, 9.0, 9.0, 9.0]
    assert sample_means(values_N, lengths_S).tolist() == [1.0, 3.0, 3.0, 3.0]
    (gradient_N,) = torch.autograd.grad(sums_N[1], values_N)
    assert gradient_N.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert is_last(lengths_S, 4).tolist() == [True, False, False, True]


def test_algorithms_import_without_torch() -> None:
    code = "import sys, algorithms.ppo; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sums", [sample_sums, sample_means, lambda v, n: discounted_sums(v, n, 0.9)])
def test_a_number_that_is_not_finite_stays_in_its_sample(sums: Callable[[Tensor, Tensor], Tensor], bad: float) -> None:
    """In one of several rows, too: what is beside it in memory belongs to others."""
    lengths_S = torch.tensor([70, 0, 130, 5])
    values_N = torch.arange(205.0)
    expected_N = sums(values_N, lengths_S)
    values_N[100] = bad
    found_N = sums(values_N, lengths_S)
    is_own_N = (torch.arange(205) >= 70) & (torch.arange(205) < 200)
    assert not found_N[is_own_N].isfinite().all()
    assert torch.equal(found_N[~is_own_N], expected_N[~is_own_N])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_last_tokens_are_marked_and_sample_totals_have_gradients(lengths: list[int]) -> None:
    lengths_S, num = torch.tensor(lengths), sum(lengths)
    ends = {sum(lengths[: i + 1]) - 1 for i, length in enumerate(lengths) if length}
    assert is_last(lengths_S, num).tolist() == [i in ends for i in range(num)]
    values_N = torch.ones(num, requires_grad=True)
    sample_totals(values_N, lengths_S).square().sum().backward()
    assert values_N.grad is not None
    assert values_N.grad.tolist() == [2.0 * length for length in lengths for _ in range(length)]
