"""A row of samples: every sample is a path, shared prefixes occur once, and a plan counts the tokens of its rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithm import Aggregation, TrajectoryAdvantage
from rlsys.batch.packing import plan_batch
from rlsys.batch.prefix_tree import MIN_SHARED, PrefixRow, num_reused, token_order
from rlsys.batch.samples import Sample, samples_in
from rlsys.batch.tensors import pack_for_scoring
from rlsys.types import Episode
from tests.training import data_of, group_of
from tests.trees import payloads, trees


@given(trees())
def test_every_sample_is_a_path_of_the_row(samples: list[Sample]) -> None:
    row = PrefixRow.of([s.run_ids for s in samples], [len(s.prompt_ids) for s in samples])
    positions_R = np.arange(len(row.tokens_R))
    for sample, places in zip(samples, row.places, strict=True):
        assert (row.tokens_R[places] == sample.run_ids).all()
        assert (row.positions_R[places] == np.arange(len(sample.run_ids))).all()
        last = places[-1]
        assert positions_R[(positions_R <= last) & (last < row.until_R)].tolist() == places.tolist()


@given(trees())
def test_the_order_of_tokens_gives_what_neighbours_share(samples: list[Sample]) -> None:
    runs = [s.run_ids.tolist() for s in samples]
    places = token_order([s.run_ids for s in samples])
    order = sorted(range(len(runs)), key=lambda i: places[i][0])
    assert [runs[i] for i in order] == sorted(runs)
    assert places[order[0]][1] == 0
    for before, index in pairwise(order):
        shared = places[index][1]
        assert runs[before][:shared] == runs[index][:shared]
        assert shared == len(runs[before]) or runs[before][shared] != runs[index][shared]


def test_a_long_prefix_is_shared_and_a_short_one_only_as_a_whole_prompt() -> None:
    assert num_reused(7, 7, 7) == 7
    assert num_reused(7, 7, 8) == num_reused(6, 7, 7) == 0
    assert num_reused(MIN_SHARED, 50, 60) == MIN_SHARED
    assert num_reused(MIN_SHARED - 1, 50, 60) == 0
    assert (num_reused(10 + MIN_SHARED - 1, 10, 10), num_reused(10 + MIN_SHARED, 10, 10)) == (10, 10 + MIN_SHARED)


def test_equal_samples_are_run_once() -> None:
    row = PrefixRow.of([np.arange(40)] * 3, [10] * 3)
    assert row.tokens_R.tolist() == [*range(40)]
    assert row.until_R.tolist() == [40] * 40


@given(payload=payloads(), max_tokens=st.integers(1, 200))
def test_a_plan_counts_the_tokens_of_its_rows(payload: tuple[Episode, ...], max_tokens: int) -> None:
    group, data = group_of(0, payload), data_of([payload])
    every = [TrajectoryAdvantage(e, t, 1.0) for (e, t), _ in group.trajectories()]
    (plan,) = plan_batch([group], [every], Aggregation(), num_ranks=1, max_tokens=max_tokens)
    for one in plan.micro_batches:
        assert len(data.micro_batch(one).tokens_R) <= max_tokens or len(one.samples) == 1
    ((whole,),) = plan_batch([group], [every], Aggregation(), num_ranks=1, max_tokens=10**6)[0].updates
    ((_, scored),) = pack_for_scoring([sample for _, sample in samples_in(payload)], 10**6)
    assert len(data.micro_batch(whole).tokens_R) == len(scored.tokens_R)
