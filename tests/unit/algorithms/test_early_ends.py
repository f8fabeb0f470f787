"""Episodes that are ended early bias no gradient: checked over all outcomes of the draw."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import isclose
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.dr_grpo import DrGRPO
from algorithms.grpo import GRPO
from algorithms.policy_gradient import EarlyEnds
from algorithms.rloo import RLOO
from rlsys.algorithm import Aggregation
from rlsys.batch.packing import plan_batch
from rlsys.types import Group
from tests.groups import episode, group

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=5)


def group_of(rewards: list[float], weights: list[float], num_ended: int, settled: float | None) -> Group:
    episodes = [replace(episode(reward), weight=weight) for reward, weight in zip(rewards, weights, strict=True)]
    return replace(group(0, episodes=episodes), settled_reward=settled, num_ended_early=num_ended)


@pytest.mark.parametrize("algorithm", [DrGRPO(), RLOO(), GRPO(std_normalize=False)], ids=lambda a: type(a).__name__)
@given(settled=st.sampled_from([0.0, 1.0]), others=REWARDS, keep=st.sampled_from([0.1, 0.25, 0.5]))
def test_the_mean_over_all_draws_is_the_advantage_with_every_episode(algorithm, settled, others, keep):
    """Two episodes ended with `settled`, then the draw: weight times advantage of each has the mean of no draw."""
    rewards = [settled, settled, *others]
    whole = [a.advantage for a in algorithm.assign(group_of(rewards, [1.0] * len(rewards), 0, None))]
    expected = [0.0] * len(rewards)
    for outcome in product([True, False], repeat=len(others)):
        chance = 1.0
        for is_kept in outcome:
            chance *= keep if is_kept else 1 - keep
        left = [0, 1, *(i + 2 for i, is_kept in enumerate(outcome) if is_kept)]
        weights = [1.0, 1.0, *[1 / keep] * (len(left) - 2)]
        drawn = group_of([rewards[i] for i in left], weights, outcome.count(False), settled)
        for assigned in algorithm.assign(drawn):
            index = left[assigned.episode]
            expected[index] += chance * weights[assigned.episode] * assigned.advantage
    assert all(isclose(a, b, abs_tol=1e-9) for a, b in zip(expected, whole, strict=True))


@given(settled=st.sampled_from([0.0, 1.0]), num_kept=st.integers(0, 4), num_ended=st.integers(1, 4))
def test_equal_rewards_give_no_advantage_whatever_is_drawn(settled, num_kept, num_ended):
    drawn = group_of([settled] * (2 + num_kept), [1.0, 1.0, *[4.0] * num_kept], num_ended, settled)
    assert all(a.advantage == 0.0 for a in GRPO().assign(drawn))
    assert not any(a.advantage for a in RLOO().assign(drawn))


def test_the_standard_deviation_is_that_of_all_if_the_draw_is_representative():
    """One of four episodes goes on, and stands for all four."""
    drawn = group_of([0.0] * 4 + [1.0], [1.0] * 4 + [4.0], 3, 0.0)
    whole = group_of([0.0] * 4 + [1.0] * 4, [1.0] * 8, 0, None)
    found, expected = ({a.episode: a.advantage for a in GRPO().assign(g)} for g in (drawn, whole))
    assert found[0] == pytest.approx(expected[0])
    assert EarlyEnds([1.0] * 4 + [4.0], 8, 0.0).std([0.0] * 4 + [1.0]) == pytest.approx(stdev([0.0] * 4 + [1.0] * 4))


@pytest.mark.parametrize("over", ["tokens", "sequences", "budget", "agents"])
def test_an_episode_counts_in_the_loss_as_often_as_those_it_stands_for(over):
    aggregation = Aggregation(over, 10 if over == "budget" else None)
    alone = group_of([0.0, 1.0], [1.0, 3.0], 2, 0.0)
    copies = group_of([0.0, 1.0, 1.0, 1.0], [1.0] * 4, 0, None)

    def weight_of(of: Group, reward: float) -> float:
        assigned = [tuple(GRPO().assign(of))]
        plan = plan_batch([of], assigned, aggregation, num_ranks=1, max_tokens=1000)
        refs = [ref for micro_batch in plan[0].micro_batches for ref in micro_batch.samples]
        return sum(ref.token_weight for ref in refs if of.episodes[ref.episode].trajectories[0].reward == reward)

    for reward in (0.0, 1.0):
        assert weight_of(alone, reward) == pytest.approx(weight_of(copies, reward))
