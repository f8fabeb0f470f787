"""Maths shared by algorithms: ratios of probabilities, sums over samples, GAE.

The functions use only methods of tensors, so that importing an algorithm does not import torch. Shape suffixes: `N`
trained tokens of a micro-batch, `S` its samples; inside `discounted_sums`, `R` rows of `C` tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this: a ratio beyond e^20 carries no information and soon overflows."""
ROW = 64
"""Tokens that `discounted_sums` sums in one product; the value does not change the sums."""


def log_ratio(logprobs_N: Tensor, base_logprobs_N: Tensor) -> Tensor:
    """log(p / q) per token, clamped to ±20; a clamped token carries no gradient."""
    return (logprobs_N - base_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sample_totals(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Sum of each sample, one entry per sample, in float64. A value that is not finite affects only its own sample."""
    import torch

    # `unsafe` skips a check that would wait for a GPU.
    totals_S = torch.segment_reduce(values_N.double(), "sum", lengths=lengths_S, unsafe=True, initial=0.0)
    return totals_S.to(values_N.dtype)


def per_sample(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Take, once per sample, the value that all its tokens share; every sample has tokens."""
    return values_N.index_select(0, lengths_S.cumsum(0) - 1)


def sample_sums(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Sum of each sample, at each of its tokens."""
    return sample_totals(values_N, lengths_S).repeat_interleave(lengths_S, output_size=len(values_N))


def sample_means(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Mean of each sample over its trained tokens, at each of them."""
    means_S = sample_totals(values_N, lengths_S) / lengths_S.clamp(min=1)
    return means_S.repeat_interleave(lengths_S, output_size=len(values_N))


def is_last(lengths_S: Tensor, num_tokens: int) -> Tensor:
    """True at the last trained token of each sample."""
    sample_N = lengths_S.new_ones(len(lengths_S)).cumsum(0).repeat_interleave(lengths_S, output_size=num_tokens)
    is_last_N = sample_N != sample_N.roll(-1)
    is_last_N[-1:] = True
    return is_last_N


def discounted_sums(values_N: Tensor, lengths_S: Tensor, decay: float) -> Tensor:
    """s_t = v_t + decay s_{t+1} within each sample, for a decay from 0 to 1.

    Computed in float64, without a loop over tokens. Every sample is laid out in rows of `ROW` tokens. One product with
    the matrix of the powers of `decay` sums within rows. The rows of a sample are then joined by doubling: a row that
    has summed 2^k rows adds the row 2^k further on, times decay^(ROW 2^k). The numbers of rows are bounds that need
    no value of a tensor, so that nothing waits for a GPU; rows beyond those of the samples are zeros.
    """
    import torch

    rows_S = (lengths_S + (ROW - 1)) // ROW
    if not len(values_N):
        return values_N
    num_rows, most_rows = len(values_N) // ROW + len(lengths_S), -(-len(values_N) // ROW)
    padding_S = (rows_S.cumsum(0) - rows_S) * ROW - (lengths_S.cumsum(0) - lengths_S)
    places_N = padding_S.repeat_interleave(lengths_S, output_size=len(values_N)) + (
        lengths_S.new_ones(len(values_N)).cumsum(0) - 1
    )
    exact_N = values_N.double()
    padded_RC = exact_N.new_zeros(num_rows * ROW).index_copy_(0, places_N, exact_N).view(-1, ROW)

    columns_C = lengths_S.new_ones(ROW).cumsum(0) - 1
    powers_CC = (decay ** (columns_C[:, None] - columns_C).clamp(min=0).double()).tril()
    sums_RC = padded_RC @ powers_CC

    places_R, ends_S = lengths_S.new_ones(num_rows).cumsum(0), rows_S.cumsum(0)
    sample_R = torch.searchsorted(ends_S, places_R).clamp(max=len(ends_S) - 1)
    after_R = ends_S[sample_R] - places_R  # negative beyond the rows of the samples
    joined_R, reach, factor = sums_RC[:, 0], 1, decay**ROW
    while reach < most_rows:
        joined_R = joined_R + factor * joined_R.roll(-reach).masked_fill(after_R < reach, 0.0)
        reach, factor = 2 * reach, factor * factor
    carried_R = joined_R.roll(-1).masked_fill(after_R < 1, 0.0)
    sums_RC = sums_RC + carried_R[:, None] * decay ** (ROW - columns_C).double()
    return sums_RC.flatten()[places_N].to(values_N.dtype)


def gae(rewards_N: Tensor, values_N: Tensor, lengths_S: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates (arXiv:1506.02438, eq. 16) over the trained tokens of each sample.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next trained token,
    and both V and A are 0 after the last. Tokens between turns that the policy did not sample are skipped: V_{t+1} and
    A_{t+1} pass over them unchanged.
    """
    values_N = values_N.double()
    next_N = values_N.roll(-1).masked_fill(is_last(lengths_S, len(values_N)), 0.0)
    deltas_N = rewards_N + gamma * next_N - values_N
    return discounted_sums(deltas_N, lengths_S, gamma * lam).to(rewards_N.dtype)
