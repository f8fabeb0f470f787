"""Micro-batch tensors by hand, and the gradient of a step: equal to the paper's averages under any split."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithm import Aggregation, Column
from rlsys.batch.packing import MicroBatchPlan, SampleRef, plan_batch
from rlsys.batch.samples import Sample, samples_of
from rlsys.batch.tensors import MicroBatch, StepData, pack_for_scoring
from rlsys.types import Distribution, Episode, VersionSpan
from tests.models import episode_of, tiny_qwen3
from tests.training import PLAIN, data_of, group_of, random_team
from workers.model.logprobs import trained_logprobs

REFERENCE = Column.REFERENCE_LOGPROBS
SHORT = Sample((1, 2), (3,), (True,), (-1.0,), (VersionSpan(0, 1),))
LONG = Sample((1, 2), (4, 5, 6), (True, False, True), (-2.0, 0.0, -3.0), (VersionSpan(1, 1), VersionSpan(3, 1)))
OTHER = Sample((7, 8, 9), (1, 2), (True, True), (-4.0, -5.0), (VersionSpan(2, 2),))


def test_the_tensors_by_hand() -> None:
    columns = {REFERENCE: [[0.1], [0.2, 9.0, 0.3], [0.4, 0.5]]}
    batch = MicroBatch.of([SHORT, LONG, OTHER], [1.0, -1.0, 0.5], columns, [0.25, 0.5, 0.125])
    assert batch.tokens_R.tolist() == [1, 2, 4, 5, 7, 8, 9, 1]
    assert batch.positions_R.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.until_R.tolist() == [4, 4, 4, 4, 8, 8, 8, 8]
    assert batch.before_N.tolist() == [1, 1, 3, 6, 7]
    assert batch.targets_N.tolist() == [3, 4, 6, 1, 2]
    assert batch.num_trained_S.tolist() == [1, 2, 2]
    assert batch.versions_N.tolist() == [0, 1, 3, 2, 2]
    assert batch.weights_N.tolist() == [0.25, 0.5, 0.5, 0.125, 0.125]
    inputs = batch.loss_inputs(4, torch.arange(5.0))
    assert inputs.proximal_logprobs_N.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert inputs.behavior_logprobs_N.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert inputs.advantages_N.tolist() == [1.0, -1.0, -1.0, 0.5, 0.5]
    assert inputs.staleness_N.tolist() == [4, 3, 1, 2, 2]
    assert inputs.lengths_S.tolist() == [1, 2, 2]
    assert inputs.columns_N[REFERENCE].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_what_is_only_scored_weighs_nothing() -> None:
    batch = MicroBatch.of([SHORT, LONG])
    assert batch.advantages_N.tolist() == batch.weights_N.tolist() == [0.0] * 3
    assert batch.columns_N == {}


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a column has 2 entries for a completion of 1 tokens"):
        MicroBatch.of([SHORT], [1.0], {REFERENCE: [[0.1, 0.2]]})


def test_versions_that_do_not_fit_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="1 tokens have a version in a sample with 2 trained ones"):
        MicroBatch.of([replace(LONG, versions=(VersionSpan(1, 1),))])


PAYLOADS: list[tuple[Episode, ...]] = [(episode_of(SHORT), episode_of(LONG)), (episode_of(OTHER),)]
PLAN = MicroBatchPlan((SampleRef(1, 0, 0, 0, 0.5, 0.25), SampleRef(0, 1, 0, 0, -1.0, 0.125)))


def test_a_plan_finds_its_samples_and_their_columns() -> None:
    columns = [{REFERENCE: [[0.1], [0.2, 9.0, 0.3]]}, {REFERENCE: [[0.4, 0.5]]}]
    batch = StepData(PAYLOADS, columns).micro_batch(PLAN)
    assert batch.tokens_R.tolist() == [7, 8, 9, 1, 1, 2, 4, 5]
    assert batch.advantages_N.tolist() == [0.5, 0.5, -1.0, -1.0]
    assert batch.weights_N.tolist() == [0.25, 0.25, 0.125, 0.125]
    assert batch.columns_N[REFERENCE].tolist() == pytest.approx([0.4, 0.5, 0.2, 0.3])


def test_step_columns_are_found_by_micro_batch_number() -> None:
    values = [torch.tensor(column).numpy() for column in ([9.0], [1.0, 2.0, 3.0, 4.0])]
    data = data_of(PAYLOADS).with_columns({Column.VALUES: values})
    assert data.micro_batch(PLAN, 1).columns_N[Column.VALUES].tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="values has 1 entries for 4 trained tokens"):
        data.micro_batch(PLAN, 0)


def test_a_micro_batch_is_built_once_for_all_its_columns() -> None:
    """A critic values its micro-batches, then trains on them."""
    data = data_of(PAYLOADS)
    valued = data.micro_batch(PLAN)
    trained = data.with_columns({Column.VALUES: [torch.ones(4).numpy()]}).micro_batch(PLAN)
    assert trained.tokens_R is valued.tokens_R
    assert Column.VALUES not in valued.columns_N
    assert trained.columns_N[Column.VALUES].tolist() == [1.0] * 4


def test_mismatched_pairs_have_the_first_prompt_of_the_partner() -> None:
    batch = data_of(PAYLOADS).mismatched_batch(PLAN, [1, 0])
    assert batch is not None
    assert batch.tokens_R.tolist() == [1, 2, 1, 7, 8, 9, 4, 5]
    assert batch.targets_N.tolist() == [1, 2, 4, 6]
    assert batch.num_trained_S.tolist() == [2, 2]
    assert data_of(PAYLOADS).mismatched_batch(PLAN, [None, None]) is None


@pytest.mark.parametrize(("max_tokens", "sizes"), [(1, [1, 1, 1]), (3, [1, 1, 1]), (4, [2, 1]), (7, [2, 1]), (8, [3])])
def test_packing_for_scoring_counts_a_shared_prompt_once(max_tokens: int, sizes: list[int]) -> None:
    assert [len(indices) for indices, _ in pack_for_scoring([SHORT, LONG, OTHER], max_tokens)] == sizes


AGGREGATIONS = [Aggregation("tokens"), Aggregation("sequences"), Aggregation("budget", 7), Aggregation("agents")]
MODEL = tiny_qwen3(num_hidden_layers=1, hidden_size=16, intermediate_size=16).double()


def gradient_of(losses: Iterable[Tensor]) -> Tensor:
    MODEL.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in MODEL.parameters() if p.grad is not None])


def planned_gradient(
    payloads: list[tuple[Episode, ...]], aggregation: Aggregation, num_ranks: int, max_tokens: int
) -> Tensor:
    """Of one update: of every rank's micro-batches, summed."""
    groups = [group_of(group_id, payload) for group_id, payload in enumerate(payloads)]
    assigned = [list(PLAIN.advantages(g)) for g in groups]
    plan = plan_batch(groups, assigned, aggregation, num_ranks=num_ranks, max_tokens=max_tokens)
    data = data_of(payloads)

    def loss(micro_batch_plan: MicroBatchPlan) -> Tensor:
        batch = data.micro_batch(micro_batch_plan)
        logprobs_N, _ = trained_logprobs(MODEL, batch, Distribution(1.0))
        output = PLAIN.loss(logprobs_N, batch.loss_inputs(0, logprobs_N.detach()))
        return micro_batch_plan.weight * (output.loss_N * batch.weights_N).sum()

    return gradient_of(loss(micro_batch) for rank in plan for micro_batch in rank.micro_batches)


def token_losses(sample: Sample, advantage: float) -> Tensor:
    """By a plain forward over the whole sequence."""
    ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
    logits_TV = MODEL(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    logprobs_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
    logprobs_N = logprobs_T[torch.tensor(sample.is_trained)]
    (inputs,) = [MicroBatch.of([sample], [advantage]).loss_inputs(0, logprobs_N.detach())]
    return PLAIN.loss(logprobs_N, inputs).loss_N


def by_hand(payloads: list[tuple[Episode, ...]], aggregation: Aggregation) -> Tensor:
    """The loss of the update as a mean of means, or sums over a constant, over plain forwards."""
    episodes: list[list[list[Tensor]]] = []
    for group_id, payload in enumerate(payloads):
        advantages = {(a.episode, a.trajectory): a.advantage for a in PLAIN.advantages(group_of(group_id, payload))}
        episodes += [
            [
                [token_losses(sample, advantages[e, t]) for sample in samples_of(trajectory)]
                for t, trajectory in enumerate(episode.trajectories)
            ]
            for e, episode in enumerate(payload)
        ]
    trajectories = [trajectory for episode in episodes for trajectory in episode]
    samples = [sample for trajectory in trajectories for sample in trajectory]
    match aggregation.over:
        case "tokens":
            return torch.cat(samples).mean()
        case "sequences":
            return mean(sample.mean() for sample in samples)
        case "budget":
            assert aggregation.budget is not None
            return mean(sample.sum() / aggregation.budget for sample in samples)
        case "agents":
            return mean(mean(torch.cat(trajectory).mean() for trajectory in episode) for episode in episodes)


def mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def teams(seed: int) -> list[tuple[Episode, ...]]:
    rng = random.Random(seed)
    return [random_team(rng, 3) for _ in range(3)]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a.over)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_gradient_is_that_of_the_declared_average(aggregation: Aggregation, seed: int) -> None:
    payloads = teams(seed)
    expected = gradient_of([by_hand(payloads, aggregation)])
    assert_same(planned_gradient(payloads, aggregation, num_ranks=2, max_tokens=30), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a.over)
@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 3), max_tokens=st.integers(1, 120))
def test_no_split_changes_the_gradient(aggregation: Aggregation, seed: int, num_ranks: int, max_tokens: int) -> None:
    payloads = teams(seed)
    whole = planned_gradient(payloads, aggregation, 1, 10_000)
    assert_same(planned_gradient(payloads, aggregation, num_ranks, max_tokens), whole)
