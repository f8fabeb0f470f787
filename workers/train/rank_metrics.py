"""Metrics of a step, accumulated over micro-batches and ranks; the split of the step does not change them.

Shape suffixes: `N` trained tokens of a micro-batch, `B` staleness buckets (in reports, their total comes first), `K`
bins of a histogram, `Q` percentiles.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsys.monitoring.metric_catalog import STALENESS_BUCKETS
from workers.train.rank_group import RankGroup

MAX_LOG_RATIO = 20.0
"""Clamp for log-ratios: larger ratios than e^20 carry no more information."""
BIN_WIDTH = 0.005
"""Bin width of the histogram of log-ratios. Percentiles read from it are off by at most 0.25 %."""
HALF = round(MAX_LOG_RATIO / BIN_WIDTH)
"""Bin number of ratio 1. Like every value, it is the middle of its bin."""
PERCENTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


class StepMetrics:
    """Sums over the micro-batches of one rank, on the device; nothing waits for them until `reduce_over`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics_N: Mapping[str, Tensor], weight: float) -> None:
        """Add per-token values of one micro-batch."""
        for name, value_N in metrics_N.items():
            value = value_N.sum() * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduce_over(self, ranks: RankGroup, num_tokens: int) -> dict[str, float]:
        """Means over the step's tokens (`num_tokens` on all ranks together); equal on all ranks."""
        if not self._sums:
            return {}
        means = ranks.sum(torch.stack([*self._sums.values()])) / num_tokens
        return dict(zip(self._sums, means.tolist(), strict=True))


class Mismatch:
    """Distance between the trainer's and the sampler's distributions, by the staleness of the token.

    With x = log(trainer / sampler) of a token and w = e^x: means of |x| and of k3, e^x - 1 - x, which estimates
    KL(sampler || trainer) (http://joschu.net/blog/kl-approx.html); percentiles and maximum of w; and the effective
    sample size as a share, (sum w)² / (n sum w²), 1 if all tokens weigh the same, 1/n if one outweighs all others.

    Only sums, counts and maxima are kept, in fp64, so that the split into micro-batches and ranks changes nothing.
    """

    def __init__(self, device: torch.device) -> None:
        num_buckets = len(STALENESS_BUCKETS)
        self._sums_B5 = torch.zeros(num_buckets, 5, dtype=torch.float64, device=device)
        self._max_B2 = torch.full((num_buckets, 2), -torch.inf, dtype=torch.float64, device=device)
        self._counts_BK = torch.zeros(num_buckets, 2 * HALF + 1, dtype=torch.float64, device=device)

    def add(self, logprobs_N: Tensor, behavior_logprobs_N: Tensor, staleness_N: Tensor) -> None:
        """Add tokens with their logprobs under trainer and sampler, and their staleness in versions."""
        x_N = (logprobs_N - behavior_logprobs_N).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_N = x_N.exp()
        bucket_N = staleness_N.clamp(0, len(self._sums_B5) - 1)
        is_in_BN = bucket_N == torch.arange(len(self._sums_B5), device=bucket_N.device)[:, None]
        terms_5N = torch.stack([torch.ones_like(x_N), x_N.abs(), x_N.expm1() - x_N, ratio_N, ratio_N.square()])
        self._sums_B5 += is_in_BN.double() @ terms_5N.T
        extremes_B2N = torch.stack([x_N.abs(), x_N]).where(is_in_BN[:, None], -torch.inf)
        self._max_B2 = self._max_B2.maximum(extremes_B2N.amax(-1))
        # A NaN, which the step's loss reports, must not become an index.
        bin_N = (x_N / BIN_WIDTH).round().nan_to_num().long() + HALF
        flat_N = bucket_N * self._counts_BK.shape[1] + bin_N
        self._counts_BK.view(-1).index_add_(0, flat_N, torch.ones_like(x_N))

    def reduce_over(self, ranks: RankGroup) -> dict[str, float]:
        """`sampler/*` over all ranks: for all tokens, and for each non-empty bucket."""
        sums_B5, counts_BK = ranks.sum(self._sums_B5), ranks.sum(self._counts_BK)
        max_B2 = ranks.max(self._max_B2)
        sums_B5 = torch.cat([sums_B5.sum(0, keepdim=True), sums_B5])
        max_B2 = torch.cat([max_B2.amax(0, keepdim=True), max_B2])
        counts_BK = torch.cat([counts_BK.sum(0, keepdim=True), counts_BK])
        num_B, diff_B, kl_B, ratio_B, square_B = sums_B5.unbind(1)
        figures_B = {
            "logp_diff_mean": diff_B / num_B,
            "logp_diff_max": max_B2[:, 0],
            "mismatch_kl": kl_B / num_B,
            **dict(zip(PERCENTILES, _percentiles(counts_BK, num_B).unbind(1), strict=True)),
            "ratio_max": max_B2[:, 1].exp(),
            "ess": ratio_B.square() / (num_B * square_B),
        }
        prefixes = ["sampler", *(f"sampler/{bucket}" for bucket in STALENESS_BUCKETS)]
        rows = torch.stack([num_B, *figures_B.values()], dim=1).tolist()
        return {
            f"{prefix}/{name}": figure
            for prefix, (num, *figures) in zip(prefixes, rows, strict=True)
            if num
            for name, figure in zip(figures_B, figures, strict=True)
        }


def _percentiles(counts_BK: Tensor, num_B: Tensor) -> Tensor:
    """`(B, Q)`: the ratio at rank floor(q (n - 1)), counted from 0, rounded to the middle of its bin."""
    shares_Q = torch.tensor(list(PERCENTILES.values()), dtype=torch.float64, device=num_B.device)
    ranks_BQ = (shares_Q * (num_B[:, None] - 1)).floor()
    bins_BQ = torch.searchsorted(counts_BK.cumsum(1), ranks_BQ, right=True)
    return ((bins_BQ - HALF).double() * BIN_WIDTH).exp()
