"""Seeds are stateless, stable and distinct."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.util.seeds import continuation_seed, epoch_seed, group_seed, request_seed

numbers = st.integers(0, 2**40)


def test_seeds_never_change_between_versions() -> None:
    assert group_seed(0, 0) == 5677763504452267102
    assert group_seed(0, 1) == 8094523011771137880
    assert request_seed(1, 2, 3) == 5342331682224504827
    assert epoch_seed(0, 0) == 4369773709129424035
    assert continuation_seed(1, 2) == 4190183919268239172


def test_all_requests_of_a_run_have_distinct_seeds() -> None:
    groups = [group_seed(0, group_id) for group_id in range(200)]
    requests = [request_seed(g, e, a << 20 | t) for g in groups for e in range(8) for a in range(2) for t in range(3)]
    assert len({*groups, *requests}) == len(groups) + len(requests)


@given(st.integers(-(2**63), 2**64), numbers, numbers)
def test_a_seed_fits_a_signed_64_bit_integer(run_seed: int, group_id: int, key: int) -> None:
    assert 0 <= request_seed(group_seed(run_seed, group_id), group_id, key) < 2**63


@given(numbers, numbers)
def test_seeds_for_different_purposes_differ(run_seed: int, number: int) -> None:
    assert len({group_seed(run_seed, number), epoch_seed(run_seed, number), continuation_seed(run_seed, number)}) == 3
