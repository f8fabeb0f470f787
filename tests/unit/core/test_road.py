"""The road of a group stays short: few types carry its identity, and what was replaced is gone."""

from __future__ import annotations

import pytest

from benchmarks import road

pytestmark = pytest.mark.slow

ROAD = {"Permit", "InFlightGroup", "Assignment", "LiveGroup", "Group", "TrainedGroup", "RolloutRecord"}
MOST_METHODS = 16


def test_seven_types_carry_the_identity_of_a_group() -> None:
    of_road, beside = road.identity_types()
    assert set(of_road) == ROAD
    assert beside.keys() == road.BESIDE.keys()


def test_no_class_of_rollouts_has_more_than_sixteen_methods() -> None:
    counts = road.public_methods()
    assert len(counts) > 10
    assert {name: count for name, count in counts.items() if count > MOST_METHODS} == {}


def test_no_name_of_the_road_before_is_left() -> None:
    assert road.gone_names_found() == []
