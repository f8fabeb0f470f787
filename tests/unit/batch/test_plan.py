"""Plan of a step: every sample once, equal depth on all ranks, and weights independent of the layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlsys.algorithm import Aggregation, TrajectoryAdvantage
from rlsys.batch.packing import BatchPlan, MicroBatchPlan, SampleRef, num_trained, plan_batch
from rlsys.types import OK, EpisodeMeta, Group, GroupKey, SampleMeta, TrajectoryMeta, VersionSpan, failed

TOKENS = Aggregation()

sample_metas = st.builds(
    lambda prompt, completion, untrained: SampleMeta(prompt, completion, max(0, completion - untrained), prompt),
    prompt=st.integers(1, 9),
    completion=st.integers(1, 9),
    untrained=st.integers(0, 6),
)
trajectories = st.builds(
    lambda samples, ok: TrajectoryMeta("a", None, OK if ok else failed("x"), 0.0, tuple(samples)),
    samples=st.lists(sample_metas, min_size=0, max_size=3),
    ok=st.sampled_from([True, True, True, False]),
)
episodes = st.lists(trajectories, min_size=1, max_size=2).map(lambda ts: EpisodeMeta(tuple(ts)))
group_lists = (
    st.lists(st.lists(episodes, min_size=1, max_size=4), min_size=1, max_size=5)
    .map(lambda rows: [group(i, *row) for i, row in enumerate(rows)])
    .filter(lambda groups: any(num_trained(g, assign(g)) for g in groups))
)
aggregations = st.sampled_from(
    [Aggregation("tokens"), Aggregation("sequences"), Aggregation("agents"), Aggregation("budget", 7)]
)


def group(group_id: int, *members: EpisodeMeta) -> Group:
    return Group(
        key=GroupKey(group_id, 1),
        task_id=str(group_id),
        permit_version=0,
        replica="r",
        episodes=members,
        versions=(),
        weights=(),
        payload=None,
    )


def one(*samples: SampleMeta) -> EpisodeMeta:
    return EpisodeMeta((TrajectoryMeta("a", None, OK, 0.0, samples),))


def assign(group: Group) -> list[TrajectoryAdvantage]:
    return [TrajectoryAdvantage(e, t, e + t / 10) for (e, t), _ in group.trajectories()]


def meta(groups: Sequence[Group], ref: SampleRef) -> SampleMeta:
    return groups[ref.group].episodes[ref.episode].trajectories[ref.trajectory].samples[ref.sample]


def plan_of(
    groups: list[Group], aggregation: Aggregation = TOKENS, num_ranks: int = 1, max_tokens: int = 40, **limits: Any
) -> BatchPlan:
    assigned = [assign(g) for g in groups]
    return plan_batch(groups, assigned, aggregation, num_ranks=num_ranks, max_tokens=max_tokens, **limits)


def micro_batches(plan: BatchPlan) -> list[MicroBatchPlan]:
    return [batch for rank in plan for batch in rank.micro_batches]


def by_update(plan: BatchPlan) -> list[list[SampleRef]]:
    """The samples of each update, fillers left out."""
    return [
        [ref for batches in update for batch in batches if batch.weight for ref in batch.samples]
        for update in zip(*(rank.updates for rank in plan), strict=True)
    ]


def place(ref: SampleRef) -> tuple[int, int, int, int]:
    return ref.group, ref.episode, ref.trajectory, ref.sample


@given(
    groups=group_lists,
    aggregation=aggregations,
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 60),
    num_updates=st.integers(1, 5),
)
def test_a_plan_partitions_the_trained_samples_with_advantages(
    groups: list[Group], aggregation: Aggregation, num_ranks: int, max_tokens: int, num_updates: int
) -> None:
    expected = {
        (g, a.episode, a.trajectory, s): (a.advantage, sample.num_trained)
        for g, members in enumerate(groups)
        for a in assign(members)
        for s, sample in enumerate(members.episodes[a.episode].trajectories[a.trajectory].samples)
        if sample.num_trained
    }
    assume(num_updates <= len(groups))
    plan = plan_of(groups, aggregation, num_ranks, max_tokens, num_updates=num_updates)
    updates = by_update(plan)
    assert Counter(place(ref) for update in updates for ref in update) == Counter(expected.keys())
    assert all(ref.advantage == expected[place(ref)][0] for update in updates for ref in update)
    assert len(plan) == num_ranks
    assert {rank.num_tokens for rank in plan} == {sum(tokens for _, tokens in expected.values())}
    assert len({rank.partners for rank in plan}) == 1
    assert len({tuple(map(len, rank.updates)) for rank in plan}) == 1


@given(
    groups=group_lists,
    aggregation=aggregations,
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 60),
    num_updates=st.integers(1, 3),
)
def test_samples_of_zero_advantage_are_skipped_and_count_in_the_weights(
    groups: list[Group], aggregation: Aggregation, num_ranks: int, max_tokens: int, num_updates: int
) -> None:
    assume(num_updates <= len(groups))
    whole = plan_of(groups, aggregation, num_ranks, max_tokens, num_updates=num_updates)
    plan = plan_of(groups, aggregation, num_ranks, max_tokens, num_updates=num_updates, skips_zeros=True)
    for every, kept in zip(by_update(whole), by_update(plan), strict=True):
        weights = {place(ref): ref.token_weight for ref in every if ref.advantage}
        if weights:
            assert {place(ref): ref.token_weight for ref in kept} == weights
        else:
            assert len(kept) == 1, "an update has at least one sample"
    num_kept = sum(meta(groups, ref).num_trained for update in by_update(plan) for ref in update)
    assert {(rank.num_tokens, rank.num_skipped) for rank in plan} == {(num_kept, whole[0].num_tokens - num_kept)}


def test_a_sample_shares_its_prefix_with_the_one_before_it_that_runs() -> None:
    lengths = [(62, 0), (62, 30), (62, 60)]  # of the samples in order, and what each shares with the one before it
    samples = [SampleMeta(4, n - 4, n - 4, 1, i, num_shared) for i, (n, num_shared) in enumerate(lengths)]
    members = group(0, *(one(sample) for sample in samples))
    assigned = [TrajectoryAdvantage(e, 0, advantage) for e, advantage in enumerate((1.0, 0.0, -1.0))]
    room = 61 + 61 - 30  # inputs of the first, and of the third behind the 30 tokens that both have

    def rows(max_tokens: int) -> int:
        plan = plan_batch([members], [assigned], TOKENS, num_ranks=1, max_tokens=max_tokens, skips_zeros=True)
        return len(plan[0].micro_batches)

    assert (rows(room), rows(room - 1)) == (1, 2)


@given(groups=group_lists, num_updates=st.integers(1, 5))
def test_updates_are_consecutive_runs_of_nearly_equal_length(groups: list[Group], num_updates: int) -> None:
    assume(num_updates <= len(groups))
    trained = [i for i, g in enumerate(groups) if num_trained(g, assign(g))]
    plan = plan_of(groups, num_updates=num_updates)
    runs = [sorted({ref.group for ref in update}) for update in by_update(plan)]
    assert [i for run in runs for i in run] == trained
    assert len(runs) == min(num_updates, len(trained))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(groups=group_lists, aggregation=aggregations, num_updates=st.integers(1, 3))
def test_token_weights_sum_to_one_over_an_update(
    groups: list[Group], aggregation: Aggregation, num_updates: int
) -> None:
    assume(num_updates <= len(groups))
    for update in by_update(plan_of(groups, aggregation, num_updates=num_updates)):
        total = sum(ref.token_weight * meta(groups, ref).num_trained for ref in update)
        if aggregation.over == "budget":
            num_tokens = sum(meta(groups, ref).num_trained for ref in update)
            assert total == pytest.approx(num_tokens / (len(update) * 7))
        else:
            assert total == pytest.approx(1.0)


@given(
    groups=group_lists,
    aggregation=aggregations,
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 60),
    pair_cost=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_ranks_and_micro_batches_change_no_weight(
    groups: list[Group], aggregation: Aggregation, num_ranks: int, max_tokens: int, pair_cost: float
) -> None:
    def weights(plan: BatchPlan) -> dict[tuple[int, ...], float]:
        return {place(ref): ref.token_weight for update in by_update(plan) for ref in update}

    whole = plan_of(groups, aggregation, num_ranks=1, max_tokens=10**6)
    assert weights(plan_of(groups, aggregation, num_ranks, max_tokens, pair_cost=pair_cost)) == weights(whole)


@given(groups=group_lists)
def test_a_partner_is_the_next_group_with_another_prompt(groups: list[Group]) -> None:
    def first(g: Group) -> int | None:
        return next((s.prompt_key for e in g.episodes for t in e.trajectories for s in t.samples), None)

    plan = plan_of(groups)
    prompts = [first(g) for g in groups]
    for i, partner in enumerate(plan[0].partners):
        between = [*range(i + 1, len(groups)), *range(i)]
        if partner is None:
            assert {prompts[j] for j in between} <= {prompts[i], None} or len({*prompts} - {None}) < 2
        else:
            assert prompts[partner] not in (prompts[i], None)
            assert {prompts[j] for j in between[: between.index(partner)]} <= {prompts[i], None}


def test_partners_are_the_next_group_with_another_prompt() -> None:
    groups = [group(i, one(SampleMeta(2, 3, 3, prompt))) for i, prompt in enumerate((5, 5, 6, 7))]
    assert plan_of(groups)[0].partners == (2, 2, 3, 0)
    assert plan_of(groups[:2])[0].partners == (None, None)


@given(groups=group_lists, num_ranks=st.integers(1, 4), max_tokens=st.integers(1, 60))
def test_a_micro_batch_respects_max_tokens_or_has_one_sample(
    groups: list[Group], num_ranks: int, max_tokens: int
) -> None:
    for batch in micro_batches(plan_of(groups, TOKENS, num_ranks, max_tokens)):
        prompts = {(ref.group, meta(groups, ref).prompt_key): meta(groups, ref).num_prompt for ref in batch.samples}
        num_tokens = sum(prompts.values()) + sum(meta(groups, ref).num_completion - 1 for ref in batch.samples)
        assert num_tokens <= max_tokens or len(batch.samples) == 1


def test_samples_of_one_prompt_stay_together_while_they_fit() -> None:
    members = [one(SampleMeta(10, 5, 5, 1)) for _ in range(4)]
    plan = plan_of([group(0, *members), group(1, *members)], TOKENS, num_ranks=2, max_tokens=30)
    assert [[ref.group for ref in batch.samples] for batch in micro_batches(plan)] == [[0] * 4, [1] * 4]


def test_ranks_get_about_equally_many_tokens() -> None:
    groups = [group(i, one(SampleMeta(4, n, n, 1))) for i, n in enumerate((60, 20, 20, 20))]
    plan = plan_of(groups, TOKENS, num_ranks=2, max_tokens=1000)
    assert [[ref.group for batch in rank.micro_batches for ref in batch.samples] for rank in plan] == [
        [0],
        [1, 2, 3],
    ]


def cost(tokens: Sequence[int], pair_cost: float) -> float:
    """Of plain sequences."""
    return sum(n + pair_cost * n * (n + 1) / 2 for n in tokens)


def test_ranks_get_about_equal_costs_where_attention_is_dear() -> None:
    """A row of 60 tokens attends as often as nine of 20; prompts of one token, so that nothing is shared."""
    lengths = (60, *[20] * 12)
    groups = [group(i, one(SampleMeta(1, n, n, i))) for i, n in enumerate(lengths)]

    def shares(pair_cost: float) -> list[list[int]]:
        plan = plan_of(groups, TOKENS, num_ranks=2, max_tokens=1000, pair_cost=pair_cost)
        return [[lengths[ref.group] for batch in rank.micro_batches for ref in batch.samples] for rank in plan]

    cheap, dear = shares(0.0), shares(1.0)
    assert sorted(map(sum, cheap)) == [140, 160]
    assert max(cost(share, 1.0) for share in dear) < max(cost(share, 1.0) for share in cheap)
    assert sorted(map(len, dear)) == [3, 10]


def test_what_is_shared_attends_once() -> None:
    """A group of four long prompts with short answers costs less than four of them apart."""
    together = group(0, *[one(SampleMeta(40, 5, 5, 1)) for _ in range(4)])
    apart = [group(i, one(SampleMeta(40, 5, 5, i))) for i in range(1, 5)]
    plan = plan_of([together, *apart], TOKENS, num_ranks=2, max_tokens=1000, pair_cost=1.0)
    of_groups = [{ref.group for batch in rank.micro_batches for ref in batch.samples} for rank in plan]
    assert sorted(map(len, of_groups)) == [2, 3]


def test_a_rank_without_work_runs_a_filler_that_weighs_nothing() -> None:
    plan = plan_of([group(0, one(SampleMeta(3, 2, 2, 1)))], TOKENS, num_ranks=2, max_tokens=10)
    assert [batch.weight for batch in micro_batches(plan)] == [1.0, 0.0]
    assert plan[0].num_tokens == 2


def test_a_trajectory_that_nobody_assigned_is_neither_trained_nor_counted() -> None:
    groups = [group(0, one(SampleMeta(3, 2, 2, 1)), one(SampleMeta(3, 4, 4, 1)))]
    plan = plan_batch(groups, [[TrajectoryAdvantage(1, 0, 0.0)]], TOKENS, num_ranks=1, max_tokens=10)
    assert by_update(plan) == [[SampleRef(0, 1, 0, 0, 0.0, token_weight=1 / 4)]]
    assert plan[0].num_tokens == 4


def test_groups_without_advantages_take_no_place_in_updates() -> None:
    groups = [group(i, one(SampleMeta(3, 2, 2, i))) for i in range(4)]
    assigned = [
        [TrajectoryAdvantage(0, 0, 1.0)],
        [],
        [TrajectoryAdvantage(0, 0, 1.0)],
        [TrajectoryAdvantage(0, 0, 1.0)],
    ]
    plan = plan_batch(groups, assigned, TOKENS, num_ranks=1, max_tokens=100, num_updates=3)
    assert [[ref.group for ref in update] for update in by_update(plan)] == [[0], [2], [3]]
    fewer = plan_batch(groups, [[], [], *assigned[2:]], TOKENS, num_ranks=1, max_tokens=100, num_updates=3)
    assert [[ref.group for ref in update] for update in by_update(fewer)] == [[2], [3]]


def test_agents_of_an_episode_share_its_weight_equally() -> None:
    def trajectory(*num_tokens: int) -> TrajectoryMeta:
        return TrajectoryMeta("a", None, OK, 0.0, tuple(SampleMeta(1, n, n, 0) for n in num_tokens))

    groups = [group(0, EpisodeMeta((trajectory(4), trajectory(1, 1))), EpisodeMeta((trajectory(5),)))]
    (refs,) = by_update(plan_of(groups, Aggregation("agents")))
    weights = {place(ref)[1:]: ref.token_weight for ref in refs}
    expected = {(0, 0, 0): 1 / 2 / 2 / 4, (0, 1, 0): 1 / 2 / 2 / 2, (0, 1, 1): 1 / 2 / 2 / 2, (1, 0, 0): 1 / 2 / 5}
    assert weights == pytest.approx(expected)


def test_what_cannot_be_planned_is_refused() -> None:
    groups = [group(0, one(SampleMeta(3, 2, 2, 1))), group(1, one(SampleMeta(3, 2, 0, 1)))]
    with pytest.raises(ValueError, match="nothing to train"):
        plan_batch(groups, [[], [TrajectoryAdvantage(0, 0, 1.0)]], TOKENS, num_ranks=1, max_tokens=10)
    with pytest.raises(ValueError, match="a step of 2 groups cannot be cut into 3 updates"):
        plan_batch(groups, [assign(g) for g in groups], TOKENS, num_ranks=1, max_tokens=10, num_updates=3)


def test_what_assigned_trajectories_train_is_counted_in_tokens() -> None:
    members = group(0, one(SampleMeta(3, 2, 2, 1), SampleMeta(3, 9, 5, 1)), one(SampleMeta(3, 4, 4, 1)))
    assert num_trained(members, [TrajectoryAdvantage(0, 0, math.nan)]) == 7
    assert num_trained(members, []) == 0


@given(groups=group_lists, num_ranks=st.integers(1, 3), max_tokens=st.integers(1, 60))
def test_micro_batches_of_pairs_have_no_more_tokens_than_others(
    groups: list[Group], num_ranks: int, max_tokens: int
) -> None:
    """Of several samples; one alone may have more."""
    plan = plan_of(groups, num_ranks=num_ranks, max_tokens=max_tokens, has_pairs=True)
    first = [next((s for e in g.episodes for t in e.trajectories for s in t.samples), None) for g in groups]
    for batch in micro_batches(plan):
        metas = [meta(groups, ref) for ref in batch.samples]
        partners = {plan[0].partners[ref.group] for ref in batch.samples} - {None}
        prompts = [sample.num_prompt for p in partners if p is not None and (sample := first[p])]
        assert len(metas) == 1 or not prompts or sum(m.num_completion for m in metas) + sum(prompts) <= max_tokens


def test_the_plan_tells_the_mean_age_of_the_tokens() -> None:
    members = one(SampleMeta(3, 2, 2, 1))
    groups = [
        replace(group(0, members), versions=(VersionSpan(4, 1), VersionSpan(6, 3))),
        replace(group(1, members), versions=(VersionSpan(7, 4),)),
    ]
    assert plan_of(groups, version=7)[0].staleness == (3 * 1 + 1 * 3 + 0 * 4) / 8
    assert plan_of([group(0, members)], version=7)[0].staleness == 0.0
