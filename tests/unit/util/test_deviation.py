"""The standard deviation agrees with the exact one of the standard library."""

from __future__ import annotations

import random
from statistics import pstdev, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.util.deviation import deviation

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40)


@given(values=values, shift=st.sampled_from([0.0, 1e6]), seed=st.integers(0, 9))
def test_it_is_that_of_the_standard_library_in_any_order(values: list[float], shift: float, seed: int) -> None:
    shifted = [shift + value for value in values]
    assert deviation(shifted) == pytest.approx(stdev(shifted), rel=1e-9, abs=1e-9)
    assert deviation(shifted, is_sample=False) == pytest.approx(pstdev(shifted), rel=1e-9, abs=1e-9)
    assert deviation(random.Random(seed).sample(shifted, len(shifted))) == deviation(shifted)


def test_equal_values_deviate_by_exactly_nothing_and_huge_ones_overflow_nothing() -> None:
    assert deviation([0.0, 1e200]) == pytest.approx(stdev([0.0, 1e200]), rel=1e-9)
    assert deviation([0.1] * 7) == deviation([0.1] * 7, is_sample=False) == 0.0
