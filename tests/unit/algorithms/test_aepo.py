"""AEPO: the entropy stays in its band, and what is left out counts in the entropy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.aepo import AEPO
from algorithms.policy_gradient import Over
from rlsys.algorithm import TrajectoryAdvantage
from rlsys.batch.packing import plan_batch
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import OK, TRUNCATED, EpisodeMeta, Group, SampleMeta, TrajectoryMeta
from tests.groups import episode, group

HIGH = {"policy/entropy": 9.0}


def rewarded(*rewards: float | None, source: str = "") -> Group:
    return replace(group(0, episodes=[episode(reward) for reward in rewards]), source=source)


def values(settled: Sequence[Sequence[TrajectoryAdvantage]]) -> list[list[float]]:
    return [[a.advantage for a in own] for own in settled]


def test_the_entropy_stays_in_a_band_with_hysteresis() -> None:
    algorithm = AEPO(entropy_low=0.2, entropy_high=0.5, std_over="none")
    past: dict[str, float] = {}
    signs = []
    for entropy in (0.3, 0.6, 0.4, 0.1, 0.4):
        settled = algorithm.finalize_advantages([rewarded(1, 0)], past)
        signs += values(settled.groups)
        assert undocumented_names(settled.metrics) == []
        past = {**settled.metrics, "policy/entropy": entropy}
    both, positive = [0.5, -0.5], [1.0, 0.0]
    assert signs == [both, both, positive, positive, both]


def test_a_step_is_never_emptied() -> None:
    cut = EpisodeMeta((TrajectoryMeta("policy", None, TRUNCATED, 1.0, (SampleMeta(1, 2, 2, 0),)),))
    algorithm = AEPO(mask_truncated=True, std_over="none")
    settled = algorithm.finalize_advantages([group(0, episodes=[cut, episode(0.0)])], HIGH)
    assert values(settled.groups) == [[-0.5]]
    with pytest.raises(ValueError, match="entropy_low: should be less than entropy_high"):
        AEPO(entropy_low=0.5, entropy_high=0.5)


def test_the_band_includes_its_bounds_and_zero_is_not_negative() -> None:
    algorithm = AEPO(entropy_low=0.2, entropy_high=0.5, std_over="none")

    def signs(entropy: float, trains_negatives: float) -> list[float]:
        past = {"policy/entropy": entropy, "policy/trains_negatives": trains_negatives}
        return values(algorithm.finalize_advantages([rewarded(1, 0.5, 0)], past).groups)[0]

    assert signs(0.5, 1.0) == [0.5, 0.0, -0.5]
    assert signs(0.2, 0.0) == [0.75, 0.0, 0.0]
    assert signs(0.19, 0.0) == [0.5, 0.0, -0.5]


TEAM = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=3)
"""Trained tokens of the samples of each agent of an episode."""
EPISODES = st.lists(st.tuples(st.floats(0, 1), TEAM), min_size=2, max_size=5)


def team(reward: float, agents: Sequence[Sequence[int]]) -> EpisodeMeta:
    samples = [tuple(SampleMeta(2, n + 1, n, i) for i, n in enumerate(own)) for own in agents]
    return EpisodeMeta(
        tuple(TrajectoryMeta(f"a{i}", None, OK, None if i else reward, own) for i, own in enumerate(samples))
    )


@given(st.lists(EPISODES, min_size=1, max_size=4), st.sampled_from(get_args(Over)))
def test_what_is_left_out_changes_no_gradient_and_stays_in_the_step(
    episodes: list[list[tuple[float, list[list[int]]]]], over: Over
) -> None:
    """The weight of each trajectory is that of a step without those that are left out, whatever is averaged over."""
    groups = [group(i, episodes=[team(*one) for one in own]) for i, own in enumerate(episodes)]
    algorithm = AEPO(over=over, budget=7 if over == "budget" else None)
    every = algorithm.finalize_advantages(groups, {}).groups
    settled = algorithm.finalize_advantages(groups, HIGH).groups
    alone = [[a for a in own if a.advantage >= 0] for own in every]

    def weights(assigned: Sequence[Sequence[TrajectoryAdvantage]]) -> dict[tuple[int, ...], float]:
        (rank,) = plan_batch(groups, assigned, algorithm.aggregation, num_ranks=1, max_tokens=10**6)
        refs = [ref for micro_batch in rank.micro_batches for ref in micro_batch.samples]
        return {(r.group, r.episode, r.trajectory, r.sample): r.advantage * r.token_weight for r in refs}

    trajectories = [
        groups[g].episodes[a.episode].trajectories[a.trajectory] for g, own in enumerate(alone) for a in own
    ]
    if not any(sample.num_trained for meta in trajectories for sample in meta.samples):
        return
    found, expected = weights(settled), weights(alone)
    assert {place: weight for place, weight in found.items() if place in expected} == pytest.approx(expected)
    assert all(weight == 0 for place, weight in found.items() if place not in expected)
    assert found.keys() == weights(every).keys(), "their entropy counts"


def test_advantages_are_divided_by_the_standard_deviation_of_their_source() -> None:
    groups = [rewarded(1, 0, source="a"), rewarded(0, 0, source="a"), rewarded(9, 3, source="b")]
    settled = AEPO().finalize_advantages(groups, {})
    std_a, std_b = stdev([1, 0, 0, 0]), stdev([9, 3])
    assert values(settled.groups)[0] == pytest.approx([0.5 / std_a, -0.5 / std_a], rel=1e-4)
    assert values(settled.groups)[1:] == [[0, 0], pytest.approx([3 / std_b, -3 / std_b], rel=1e-4)]


def test_a_group_of_one_success_weighs_less_than_in_grpo() -> None:
    """The group's own deviation makes rare successes of hard tasks large; that of the source does not."""
    hard, easy = rewarded(1, 0, 0, 0, 0, 0, 0, 0), rewarded(1, 0, 1, 0, 1, 0, 1, 0)
    by_source, by_group = (AEPO(std_over=o).finalize_advantages([hard, easy], {}) for o in ("source", "group"))

    def ratio(settled: Sequence[Sequence[TrajectoryAdvantage]]) -> float:
        first, second = values(settled)
        return max(first) / max(second)

    assert ratio(by_group.groups) > 2 > ratio(by_source.groups) == pytest.approx(7 / 4)
    assert fmean(values(by_source.groups)[0]) == pytest.approx(0, abs=1e-12)
