"""Attention of a row equals attention with the whole matrix masked, in value and in gradient."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch
from rlsys.types import VersionSpan
from tests.trees import trees
from workers.model.attention_kernels import MAX_SCORES, attend, attend_backward
from workers.model.row_attention import AttentionRow, block_pairs, row_attention

pytestmark = pytest.mark.slow


def masked(
    query: Tensor, key: Tensor, value: Tensor, is_seen_RR: Tensor, softcap: float | None, sinks_H: Tensor | None
) -> Tensor:
    """Attention as one matrix."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * 0.3
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~is_seen_RR, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H[None, :, None, None].expand(-1, -1, scores.shape[2], -1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def check(
    samples: list[Sample],
    window: int | None,
    dtype: torch.dtype,
    tolerance: float,
    *,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> None:
    batch = MicroBatch.of(samples)
    size = len(batch.tokens_R)
    rng = torch.Generator().manual_seed(size)
    made = [torch.randn(1, heads, size, 8, generator=rng, dtype=torch.float64) for heads in (4, 2, 2)]
    made += [torch.randn(4, generator=rng, dtype=torch.float64)] * has_sinks
    towards = torch.randn(1, size, 4, 8, generator=rng, dtype=torch.float64)
    at = torch.arange(size)
    is_seen_RR = (at <= at[:, None]) & (at[:, None] < batch.until_R)
    if window is not None:
        is_seen_RR &= batch.positions_R[:, None] - batch.positions_R < window
    exact = query, key, value, *sinks = [x.clone().requires_grad_() for x in made]
    expected = masked(query, key, value, is_seen_RR, softcap, sinks[0] if sinks else None)
    own = query, key, value, *sinks = [x.to(dtype).requires_grad_() for x in made]
    row = AttentionRow.of(batch.until_R, batch.positions_R)
    actual, _ = row_attention(
        nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, softcap=softcap,
        s_aux=sinks[0] if sinks else None, row=row,
    )  # fmt: skip
    (expected * towards).sum().backward()
    (actual * towards.to(dtype)).sum().backward()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(own, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


@given(
    samples=trees(),
    window=st.sampled_from([None, 1, 2, 5, 30]),
    softcap=st.sampled_from([None, 0.5]),
    has_sinks=st.booleans(),
)
def test_it_equals_the_masked_matrix_on_any_tree(
    samples: list[Sample], window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    check(samples, window, torch.float64, 1e-9, softcap=softcap, has_sinks=has_sinks)


@pytest.mark.parametrize("window", [None, 100, 150])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_long_runs_are_equal_too(
    dtype: torch.dtype, tolerance: float, softcap: float | None, window: int | None
) -> None:
    """Prompts of 200 and 20 tokens, completions of 1 to 300."""
    rng = random.Random(0)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(90) for _ in range(size))

    samples = [
        Sample(prompt, ids(size), (True,) * size, (0.0,) * size, (VersionSpan(0, size),))
        for prompt in (ids(200), ids(20))
        for size in (1, 7, 60, 150, 300)
    ]
    check(samples, window, dtype, tolerance, softcap=softcap, has_sinks=True)


def test_scores_with_a_soft_cap_are_computed_in_pieces() -> None:
    """A causal block of more scores than `MAX_SCORES`."""
    size, generator = int(MAX_SCORES**0.5) + 100, torch.Generator().manual_seed(0)
    given = query, key, value, towards = [torch.randn(1, 1, size, 4, generator=generator) for _ in range(4)]
    query, key, value = [x.clone().requires_grad_() for x in given[:3]]
    scores = 2.0 * (query @ key.mT * 0.25).tanh()
    scores = scores.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ value
    (expected * towards).sum().backward()
    with torch.no_grad():
        result, lse = attend(query, key, value, None, is_causal=True, scale=0.5, softcap=2.0)
        shares = attend_backward(towards, query, key, value, result, lse, None, is_causal=True, scale=0.5, softcap=2.0)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    for share, x in zip(shares, (query, key, value), strict=True):
        torch.testing.assert_close(share, x.grad, rtol=1e-3, atol=1e-4)


@given(st.integers(0, 10**6), st.sampled_from([None, 40, 200]))
def test_a_mask_of_blocks_leaves_out_no_pair_and_fills_none_that_does_not_attend(seed: int, window: int | None) -> None:
    rng = random.Random(seed)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(5) for _ in range(size))

    prompts = [ids(rng.randrange(1, 300)) for _ in range(rng.randrange(1, 4))]
    sizes = [rng.randrange(1, 400) for _ in range(4)]
    samples = [Sample(p, ids(n), (True,) * n, (0.0,) * n, (VersionSpan(0, n),)) for p in prompts for n in sizes]
    batch = MicroBatch.of(samples)
    until_R, positions_R, size = batch.until_R, batch.positions_R, len(batch.until_R)
    place_R = torch.arange(size)
    attends_RR = (place_R <= place_R[:, None]) & (place_R[:, None] < until_R)
    if window is not None:
        attends_RR &= positions_R[:, None] - positions_R < window
    is_any_MM, is_all_MM = block_pairs(until_R, positions_R, window)
    for i, queries_QR in enumerate(attends_RR.split(128)):
        for j, pairs_QL in enumerate(queries_QR.split(128, dim=1)):
            assert is_any_MM[i, j] or not pairs_QL.any()
            assert not is_all_MM[i, j] or pairs_QL.all()
    if window is None:
        exact_MM = torch.stack([torch.stack([p.any() for p in q.split(128, dim=1)]) for q in attends_RR.split(128)])
        assert torch.equal(is_any_MM, exact_MM), "and without a window none is kept for nothing"
