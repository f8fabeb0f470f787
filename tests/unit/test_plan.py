"""Planning a step: nothing lost, nothing twice, equal depth on all ranks, one set of denominators."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithm import Assigned
from rlsys.batch.plan import BatchPlan, SampleRef, plan_batch
from rlsys.types import OK, EpisodeMeta, Group, SampleMeta, TrajectoryMeta, failed

sample_metas = st.builds(
    lambda prompt, completion, untrained: SampleMeta(prompt, completion, max(1, completion - untrained), prompt),
    prompt=st.integers(1, 9),
    completion=st.integers(1, 9),
    untrained=st.integers(0, 4),
)
trajectories = st.builds(
    lambda samples, ok: TrajectoryMeta("a", None, OK if ok else failed("x"), 0.0, tuple(samples)),
    samples=st.lists(sample_metas, min_size=1, max_size=3),
    ok=st.sampled_from([True, True, True, False]),
)
episodes = st.lists(trajectories, min_size=1, max_size=2).map(lambda ts: EpisodeMeta(tuple(ts)))
group_lists = st.lists(st.lists(episodes, min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda rows: [group(i, *row) for i, row in enumerate(rows)]
)


def group(serial: int, *members: EpisodeMeta) -> Group:
    return Group(
        serial=serial,
        task_id=str(serial),
        permit_version=0,
        replica="r",
        episodes=members,
        versions=(),
        weights=(),
        payload=None,
    )


def one(*samples: SampleMeta) -> EpisodeMeta:
    return EpisodeMeta((TrajectoryMeta("a", None, OK, 0.0, samples),))


def assign(group: Group) -> list[Assigned]:
    return [Assigned(e, t, e + t / 10) for (e, t), _ in group.trajectories()]


def meta(groups: list[Group], ref: SampleRef) -> SampleMeta:
    return groups[ref.group].episodes[ref.episode].trajectories[ref.trajectory].samples[ref.sample]


def planned(plan: BatchPlan) -> list[SampleRef]:
    return [ref for rank in plan.ranks for batch in rank if batch.weight for ref in batch.samples]


@settings(deadline=None, max_examples=100)
@given(groups=group_lists, num_ranks=st.integers(1, 4), max_tokens=st.integers(1, 60))
def test_a_plan_is_a_partition_of_what_was_assigned(groups: list[Group], num_ranks: int, max_tokens: int) -> None:
    expected = [
        SampleRef(g, a.episode, a.trajectory, s, a.advantage)
        for g, members in enumerate(groups)
        for a in assign(members)
        for s in range(len(members.episodes[a.episode].trajectories[a.trajectory].samples))
    ]
    assigned = [assign(g) for g in groups]
    if not expected:
        with pytest.raises(ValueError, match="nothing to train"):
            plan_batch(groups, assigned, num_ranks=num_ranks, max_tokens=max_tokens)
        return
    plan = plan_batch(groups, assigned, num_ranks=num_ranks, max_tokens=max_tokens)
    assert Counter(planned(plan)) == Counter(expected)
    assert len(plan.ranks) == num_ranks
    assert len({len(rank) for rank in plan.ranks}) == 1
    assert plan.denominators.sequences == len(expected)
    assert plan.denominators.tokens == sum(meta(groups, ref).num_trained for ref in expected)


@settings(deadline=None, max_examples=100)
@given(groups=group_lists, num_ranks=st.integers(1, 4), max_tokens=st.integers(1, 60))
def test_a_micro_batch_holds_at_most_the_tokens_allowed_or_one_sample(
    groups: list[Group], num_ranks: int, max_tokens: int
) -> None:
    if not any(assign(g) for g in groups):
        return
    plan = plan_batch(groups, [assign(g) for g in groups], num_ranks=num_ranks, max_tokens=max_tokens)
    for batch in (batch for rank in plan.ranks for batch in rank):
        prompts = {(ref.group, meta(groups, ref).prompt_key): meta(groups, ref).num_prompt for ref in batch.samples}
        num_tokens = sum(prompts.values()) + sum(meta(groups, ref).num_completion for ref in batch.samples)
        assert num_tokens <= max_tokens or len(batch.samples) == 1


def test_samples_of_one_prompt_stay_together_while_they_fit() -> None:
    members = [one(SampleMeta(10, 5, 5, 1)) for _ in range(4)]
    groups = [group(0, *members), group(1, *members)]
    plan = plan_batch(groups, [assign(g) for g in groups], num_ranks=2, max_tokens=30)
    assert [[ref.group for ref in batch.samples] for rank in plan.ranks for batch in rank] == [[0] * 4, [1] * 4]


def test_ranks_get_about_equally_many_tokens() -> None:
    groups = [group(i, one(SampleMeta(4, n, n, 1))) for i, n in enumerate((60, 20, 20, 20))]
    plan = plan_batch(groups, [assign(g) for g in groups], num_ranks=2, max_tokens=1000)
    assert [[ref.group for batch in rank for ref in batch.samples] for rank in plan.ranks] == [[0], [1, 2, 3]]


def test_a_rank_without_work_runs_a_filler_that_weighs_nothing() -> None:
    plan = plan_batch([group(0, one(SampleMeta(3, 2, 2, 1)))], [[Assigned(0, 0, 1.0)]], num_ranks=2, max_tokens=10)
    assert [batch.weight for rank in plan.ranks for batch in rank] == [1.0, 0.0]


def test_a_trajectory_that_nobody_assigned_is_not_trained() -> None:
    groups = [group(0, one(SampleMeta(3, 2, 2, 1)), one(SampleMeta(3, 4, 4, 1)))]
    plan = plan_batch(groups, [[Assigned(1, 0, 0.0)]], num_ranks=1, max_tokens=10)
    assert planned(plan) == [SampleRef(0, 1, 0, 0, 0.0)]
    assert plan.denominators.tokens == 4
