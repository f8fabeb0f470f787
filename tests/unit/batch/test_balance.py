"""Balanced distribution of work: complete, never worse than greedy, and nearly equal on real lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.batch.packing import balance, greedy, largest_differencing


def sums(sizes: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(sizes[i] for i in part) for part in parts]


@given(sizes=st.lists(st.integers(1, 1000), max_size=60), num_parts=st.integers(1, 9))
def test_parts_partition_the_sizes_no_worse_than_greedy(sizes, num_parts):
    parts = balance(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert max(sums(sizes, parts)) <= max(sums(sizes, greedy(sizes, num_parts)))


def test_differencing_finds_what_greedy_does_not():
    sizes = [8, 7, 6, 5, 4]
    assert sums(sizes, greedy(sizes, 2)) == [17, 13]
    assert sorted(sums(sizes, largest_differencing(sizes, 2))) == [14, 16]


@pytest.mark.parametrize("seed", range(20))
def test_lognormal_groups_differ_below_five_percent_over_eight_ranks(seed):
    chance = random.Random(seed)
    lengths = [min(int(chance.lognormvariate(6, 1)), 4096) for _ in range(64)]
    loads = sums(lengths, balance(lengths, 8))
    assert (max(loads) - min(loads)) / (sum(loads) / 8) < 0.05
