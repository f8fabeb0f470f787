"""Discounted sums and GAE against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from algorithms.sample_math import ROW, discounted_sums, gae
from tests.tokens import column

DECAYS = st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]) | st.floats(0, 1)


def looped_sums(values: list[float], lengths: list[int], decay: float) -> list[float]:
    sums, start = [], 0
    for length in lengths:
        total, of_sample = 0.0, []
        for value in reversed(values[start : start + length]):
            total = value + decay * total
            of_sample.append(total)
        sums += reversed(of_sample)
        start += length
    return sums


def looped_gae(rewards: list[float], values: list[float], lengths: list[int], gamma: float, lam: float) -> list[float]:
    advantages, start = [], 0
    for length in lengths:
        advantage, next_value, of_sample = 0.0, 0.0, []
        for t in reversed(range(start, start + length)):
            advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * advantage
            next_value = values[t]
            of_sample.append(advantage)
        advantages += reversed(of_sample)
        start += length
    return advantages


def test_gae_by_hand() -> None:
    """Two samples. deltas: 0 + .5 · 2 - 1 = 0, 1 - 2 = -1, and 3 - 1 = 2; gamma lambda = 0.25."""
    advantages_N = gae(column([0, 1, 3]), column([1, 2, 1]), tensor([2, 1]), gamma=0.5, lam=0.5)
    assert advantages_N.tolist() == [-0.25, -1.0, 2.0]


def test_lambda_one_is_monte_carlo_and_zero_the_td_error() -> None:
    rewards_N, values_N, lengths_S = column([0, 0, 1]), column([0.25, 0.5, 0.75]), tensor([3])
    assert gae(rewards_N, values_N, lengths_S, 1.0, 1.0).tolist() == [0.75, 0.5, 0.25]
    assert gae(rewards_N, values_N, lengths_S, 1.0, 0.0).tolist() == [0.25, 0.25, 0.25]


@given(
    lengths=st.lists(st.integers(0, 3 * ROW + 1) | st.sampled_from([ROW - 1, ROW, ROW + 1]), min_size=1, max_size=5),
    decay=DECAYS,
    seed=st.integers(0, 1000),
)
def test_sums_equal_a_loop_whatever_the_lengths(lengths: list[int], decay: float, seed: int) -> None:
    values_N = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = looped_sums(values_N.tolist(), lengths, decay)
    assert discounted_sums(values_N, tensor(lengths), decay).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5), gamma=DECAYS, lam=DECAYS, seed=st.integers(0, 99))
def test_gae_equals_a_loop(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    both = torch.randn(2, sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rewards_N, values_N = both
    expected = looped_gae(rewards_N.tolist(), values_N.tolist(), lengths, gamma, lam)
    actual = gae(rewards_N, values_N, tensor(lengths), gamma, lam)
    assert actual.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def relative_error(actual_N: Tensor, expected: list[float]) -> float:
    expected_N = column(expected)
    return ((actual_N.double() - expected_N).abs().max() / expected_N.abs().max()).item()


@pytest.mark.parametrize("decay", [0.0, 0.95, 0.9999, 1.0])
def test_32k_tokens_in_fp32_are_exact_to_1e_6(decay: float) -> None:
    rewards_N, values_N = torch.randn(2, 32_768, generator=torch.Generator().manual_seed(0))
    advantages_N = gae(rewards_N, values_N, tensor([32_768]), 1.0, decay)
    assert advantages_N.dtype == torch.float32
    expected = looped_gae(rewards_N.tolist(), values_N.tolist(), [32_768], 1.0, decay)
    assert relative_error(advantages_N, expected) < 1e-6


def test_neighbouring_samples_do_not_touch_each_other() -> None:
    values_N = column([1.0] * 200)
    alone = discounted_sums(values_N[:70], tensor([70]), 0.9).tolist()
    beside = discounted_sums(values_N, tensor([70, 0, 130]), 0.9).tolist()
    assert beside[:70] == alone


def test_nothing_sums_to_nothing() -> None:
    assert discounted_sums(column([]), tensor([0]), 0.9).tolist() == []
    assert discounted_sums(column([]), torch.zeros(0, dtype=torch.int64), 0.9).tolist() == []
