"""Attention of a row equals attention with the whole matrix masked, in value and in gradient."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch
from rlsys.types import VersionSpan
from tests.trees import trees
from workers.train.row_attention import AttentionRow, row_attention


def masked(query: Tensor, key: Tensor, value: Tensor, is_seen_RR: Tensor) -> Tensor:
    """Attention as one matrix."""
    result = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=is_seen_RR, scale=0.3, enable_gqa=True
    )
    return result.transpose(1, 2)


def check(samples: list[Sample], window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    batch = MicroBatch.of(samples)
    size = len(batch.tokens_R)
    rng = torch.Generator().manual_seed(size)
    made = [torch.randn(1, heads, size, 8, generator=rng, dtype=torch.float64) for heads in (4, 2, 2)]
    towards = torch.randn(1, size, 4, 8, generator=rng, dtype=torch.float64)
    at = torch.arange(size)
    is_seen_RR = (at <= at[:, None]) & (at[:, None] < batch.until_R)
    if window is not None:
        is_seen_RR &= batch.positions_R[:, None] - batch.positions_R < window
    exact = query, key, value = [x.clone().requires_grad_() for x in made]
    expected = masked(query, key, value, is_seen_RR)
    own = query, key, value = [x.to(dtype).requires_grad_() for x in made]
    row = AttentionRow.of(batch.until_R, batch.positions_R)
    actual, _ = row_attention(nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, row=row)
    (expected * towards).sum().backward()
    (actual * towards.to(dtype)).sum().backward()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(own, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=60)
@given(samples=trees(), window=st.sampled_from([None, 1, 2, 5, 30]))
def test_it_equals_the_masked_matrix_on_any_tree(samples: list[Sample], window: int | None) -> None:
    check(samples, window, torch.float64, 1e-9)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_long_runs_are_equal_too(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    """Prompts of 200 and 20 tokens, completions of 1 to 300."""
    rng = random.Random(0)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(90) for _ in range(size))

    samples = [
        Sample(prompt, ids(size), (True,) * size, (0.0,) * size, (VersionSpan(0, size),))
        for prompt in (ids(200), ids(20), ids(21))
        for size in (1, 7, 60, 150, 300)
    ]
    check(samples, window, dtype, tolerance)
