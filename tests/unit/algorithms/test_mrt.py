"""Progress rewards of MRT: the bonuses of a reply telescope, and each segment has an advantage of its own."""

from __future__ import annotations

from math import isclose

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.grpo import GRPO
from algorithms.mrt import MRT, bonuses_of
from rlsys.algorithm import Aggregation
from rlsys.batch.packing import plan_batch
from rlsys.batch.samples import meta_of
from rlsys.batch.tensors import StepData
from rlsys.types import Episode, Group, GroupKey, Score, Trajectory, Turn, VersionSpan, failed

REWARDS = st.floats(0, 1, width=32)


def turn(prompt: tuple[int, ...], output: tuple[int, ...]) -> Turn:
    return Turn(prompt, output, (-1.0,) * len(output), (VersionSpan(0, len(output)),), "stop", "")


def episode(lengths: list[int]) -> Episode:
    """A reply of so many turns of these lengths, with a probe at every cut."""
    turns, said = [], (1, 2)
    for length in lengths:
        turns.append(turn(said, tuple(range(3, 3 + length))))
        said += turns[-1].output_ids
    probes = [Trajectory("probe", (turn((1, 2), (9,)),), parent=0, is_judged=True) for _ in lengths]
    return Episode((Trajectory("policy", tuple(turns)), *probes))


def group_of(episodes: list[Episode], rewards: list[list[float | None]]) -> Group:
    """`rewards` are those of the root, then of the probes; None: the reward function failed."""
    payload = tuple(episodes)
    metas = meta_of(payload)
    group = Group(
        key=GroupKey(0, 1), task_id="t", permit_version=0, replica="r", episodes=metas, versions=(VersionSpan(0, 1),),
        weights=(), payload=payload,
    )  # fmt: skip
    scores = [
        Score(each[0], others={t: Score(r, "" if r is not None else "no") for t, r in enumerate(each) if t})
        for each in rewards
    ]
    return group.with_scores(tuple(scores))


@given(st.lists(REWARDS, min_size=2, max_size=7))
def test_the_bonuses_of_a_reply_sum_to_its_reward_less_that_of_answering_at_once(rewards):
    group = group_of([episode([2] * (len(rewards) - 1))], [rewards])
    assert isclose(sum(bonuses_of(group.episodes[0])), rewards[0] - rewards[1], abs_tol=1e-6)


def test_a_segment_is_rewarded_for_its_progress_alone():
    right_at_second: list[float | None] = [1.0, 0.0, 0.0, 1.0]
    right_at_third: list[float | None] = [1.0, 0.0, 1.0, 1.0]
    group = group_of([episode([2, 2, 2])] * 2, [right_at_second, right_at_third])
    first, second = (a.turns for a in MRT().assign(group))
    assert first == (-0.5, 0.5, 0.0)  # equal outcomes: only the bonus is left
    assert second == (0.5, -0.5, 0.0)


def test_without_a_bonus_it_is_grpo():
    group = group_of([episode([2, 3]), episode([1, 4])], [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    ours, theirs = MRT(alpha=0.0).assign(group), GRPO(frozen_agents=("probe",)).assign(group)
    assert [(a.episode, a.trajectory, a.advantage) for a in ours] == [
        (a.episode, a.trajectory, a.advantage) for a in theirs
    ]
    assert all(a.of_turn(t) == a.advantage for a in ours for t in range(3))


def test_probes_are_not_trained():
    group = group_of([episode([2, 2])] * 2, [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert {a.trajectory for a in MRT().assign(group)} == {0}


def test_a_probe_that_cannot_be_scored_counts_at_no_cut():
    group = group_of([episode([2, 2, 2])], [[1.0, 0.5, None, 1.0]])
    assert bonuses_of(group.episodes[0]) == [0.0, 0.5, 0.0]
    assert group.episodes[0].trajectories[2].outcome == failed("no")


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_tokens_have_the_advantage_of_their_segment(order):
    episodes = [episode([2, 3]), episode([4, 1])]
    group = group_of(episodes, [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assigned = [MRT().assign(group)[i] for i in order]
    plan = plan_batch([group], [assigned], Aggregation(), num_ranks=1, max_tokens=100)
    (micro_batch,) = plan[0].micro_batches
    batch = StepData([tuple(episodes)], [{}]).micro_batch(micro_batch)
    expected = {a.episode: a for a in assigned}
    found = batch.advantages_N.split(batch.num_trained_S.tolist())
    for ref, values in zip(micro_batch.samples, found, strict=True):
        first, second = expected[ref.episode].turns
        lengths = [2, 3] if ref.episode == 0 else [4, 1]
        assert torch.allclose(values, torch.tensor([first] * lengths[0] + [second] * lengths[1]))
