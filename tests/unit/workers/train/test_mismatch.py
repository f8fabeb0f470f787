"""Mismatch of trainer and engine: figures by hand, and independence from the split of a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, tensor

from rlsys.monitoring.metric_catalog import undocumented_names
from workers.train.rank_group import RankGroup
from workers.train.rank_metrics import BIN_WIDTH, MAX_LOG_RATIO, Mismatch, StepMetrics

CPU, META = torch.device("cpu"), torch.device("meta")
tokens = st.lists(st.tuples(st.floats(-25, 25), st.integers(0, 7)), min_size=1, max_size=60)
"""Log-ratio and staleness of each token."""


def mismatch(*micro_batches: list[tuple[float, int]]) -> Mismatch:
    result = Mismatch(CPU)
    for micro_batch in micro_batches:
        log_ratios, staleness = zip(*micro_batch, strict=True)
        result.add(tensor(log_ratios, dtype=torch.float64) - 1, tensor(-1.0), tensor(staleness))
    return result


class RecordedSteps(RankGroup):
    """Keeps what a rank brings to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[Tensor] = []

    def sum(self, tensor: Tensor) -> Tensor:
        self.brought.append(tensor.clone())
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return self.sum(tensor)


class Joined(RankGroup):
    """The last of several ranks, when the others have been recorded."""

    def __init__(self, others: list[RecordedSteps]) -> None:
        super().__init__()
        self._brought = zip(*(other.brought for other in others), strict=True)

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, *next(self._brought)]).sum(0)

    def max(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, *next(self._brought)]).amax(0)


def test_the_figures_by_hand() -> None:
    figures = mismatch([(math.log(2), 0), (math.log(0.5), 0), (0.0, 3)]).reduce_over(RankGroup())
    assert figures["sampler/logp_diff_mean"] == pytest.approx(2 * math.log(2) / 3)
    assert figures["sampler/logp_diff_max"] == pytest.approx(math.log(2))
    kl = (2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))
    assert figures["sampler/mismatch_kl"] == pytest.approx(kl / 3)
    assert figures["sampler/s0/mismatch_kl"] == pytest.approx(kl / 2)
    assert figures["sampler/s3/mismatch_kl"] == 0.0
    assert figures["sampler/ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert figures["sampler/s0/ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert figures["sampler/ratio_max"] == pytest.approx(2.0)
    assert figures["sampler/ratio_p50"] == 1.0
    assert figures["sampler/ratio_p01"] == pytest.approx(0.5, rel=BIN_WIDTH / 2)


def test_only_buckets_with_tokens_are_reported_and_documented() -> None:
    few = mismatch([(0.1, 1), (0.2, 9), (0.3, 4)]).reduce_over(RankGroup())
    assert {name.split("/")[1] for name in few if name.count("/") == 2} == {"s1", "s4plus"}
    assert few["sampler/s4plus/ratio_max"] == pytest.approx(math.exp(0.3))
    every = mismatch([(0.0, staleness) for staleness in range(6)]).reduce_over(RankGroup())
    assert len(every) == 6 * 8
    assert undocumented_names(every) == []


@given(tokens, st.data())
def test_no_split_into_micro_batches_or_ranks_changes_a_figure(step: list[tuple[float, int]], data) -> None:
    whole = mismatch(step).reduce_over(RankGroup())
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(step) - 1)), max_size=6)))
    micro_batches = [part for a, b in zip([0, *cuts], [*cuts, len(step)], strict=True) if (part := step[a:b])]
    others = [RecordedSteps() for _ in range(data.draw(st.integers(0, 3)))]
    for place, other in enumerate(others):
        mismatch(*micro_batches[place + 1 :: len(others) + 1]).reduce_over(other)
    split = mismatch(*micro_batches[0 :: len(others) + 1]).reduce_over(Joined(others) if others else RankGroup())
    assert split.keys() == whole.keys()
    assert split == pytest.approx(whole, rel=1e-12, abs=1e-12)


@given(tokens)
@example([(16.9375, 0)])  # as far from the middle of its bin as can be
def test_percentiles_are_those_of_all_tokens_within_the_resolution(step: list[tuple[float, int]]) -> None:
    figures = mismatch(step).reduce_over(RankGroup())
    log_ratios = tensor([x for x, _ in step], dtype=torch.float64).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = log_ratios.quantile(share, interpolation="lower").item()
        assert math.log(figures[f"sampler/ratio_{name}"]) == pytest.approx(exact, abs=BIN_WIDTH / 2 + 1e-9)


@given(tokens, st.floats(-20, 20))
def test_the_effective_sample_size_lies_between_one_token_and_all(
    step: list[tuple[float, int]], log_ratio: float
) -> None:
    equal = mismatch([(log_ratio, staleness) for _, staleness in step]).reduce_over(RankGroup())
    assert [value for name, value in equal.items() if name.endswith("ess")] == pytest.approx([1.0] * (len(equal) // 8))
    assert 1 / len(step) - 1e-9 <= mismatch(step).reduce_over(RankGroup())["sampler/ess"] <= 1 + 1e-9


def test_one_token_that_outweighs_all_others_is_all_that_counts() -> None:
    assert mismatch([(20.0, 0), *[(-20.0, 0)] * 9]).reduce_over(RankGroup())["sampler/ess"] == pytest.approx(0.1)


def test_logprobs_that_are_not_numbers_are_reported_not_raised() -> None:
    figures = mismatch([(math.nan, 0), (math.inf, 0)]).reduce_over(RankGroup())
    assert math.isnan(figures["sampler/mismatch_kl"])


def test_a_micro_batch_is_added_without_a_wait_for_the_device() -> None:
    """Tensors of the meta device have no values: what reads one fails."""
    column_N, staleness_N = torch.empty(5, device=META), torch.empty(5, dtype=torch.int64, device=META)
    result, totals = Mismatch(META), StepMetrics()
    for _ in range(2):
        result.add(column_N, column_N, staleness_N)
        totals.add({"policy/entropy": column_N}, 0.5)
