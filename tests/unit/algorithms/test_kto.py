"""KTO: the paper's loss on labels, its reference point from mismatched pairs, and the balance of the two labels."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.kto import KTO
from rlsys.algorithm import Column, LossInputs, LossOutput
from rlsys.batch.packing import plan_batch
from rlsys.batch.samples import samples_in
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import OK, Distribution, EpisodeMeta, Group, SampleMeta, TrajectoryMeta, failed
from tests.groups import episode, group
from tests.models import random_group, random_prompt, random_sample, save_model, tiny_qwen3
from tests.training import group_of
from workers.model.logprobs import Scorer, score
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup
from workers.train.step_data import mismatched_column

Sample = tuple[list[float], float]
"""The log-ratio to the reference of each token, and the weight: negative for an undesirable sample."""


class Alone:
    """One rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, values_N: Tensor) -> Tensor:
        return values_N


class Among(Alone):
    """One rank of several, of which the others have summed to `others`."""

    def __init__(self, others: Tensor | float = 0.0) -> None:
        self.others, self.own = others, torch.zeros(())

    def sum(self, tensor: Tensor) -> Tensor:
        self.own = tensor
        return tensor + self.others


def inputs(samples: list[Sample], mismatches: list[list[float]] | None = None, **facts: float) -> LossInputs:
    """Samples whose reference logprobs are -1, and of the mismatched pairs -2."""
    lengths_S = torch.tensor([len(ratios) for ratios, _ in samples], dtype=torch.int64)
    ratios_N = torch.tensor([ratio for ratios, _ in samples for ratio in ratios], dtype=torch.float64)
    mismatches_N = torch.tensor([x for xs in mismatches or [r for r, _ in samples] for x in xs], dtype=torch.float64)
    weights_S = torch.tensor([weight for _, weight in samples], dtype=torch.float64)
    return LossInputs(
        behavior_logprobs_N=ratios_N - 1,
        proximal_logprobs_N=ratios_N - 1,
        advantages_N=weights_S.repeat_interleave(lengths_S),
        staleness_N=torch.zeros(len(ratios_N), dtype=torch.int64),
        lengths_S=lengths_S,
        groups_S=torch.arange(len(samples)),
        columns_N={
            Column.REFERENCE_LOGPROBS: torch.full_like(ratios_N, -1.0),
            Column.REFERENCE_MISMATCHED: torch.full_like(ratios_N, -2.0),
            Column.POLICY_MISMATCHED: mismatches_N - 2,
        },
        facts=facts,
    )


def output(kto: KTO, samples: list[Sample], **facts: float) -> LossOutput:
    batch = inputs(samples, None, **facts)
    return kto.loss(batch.proximal_logprobs_N, batch)


def mean_loss(kto: KTO, logprobs_N: Tensor, batch: LossInputs, num_samples: int) -> Tensor:
    """As the framework averages it: every sample the same, its tokens sharing its weight."""
    weights_N = 1 / (num_samples * batch.lengths_S.double()).repeat_interleave(batch.lengths_S)
    return (kto.loss(logprobs_N, batch).loss_N * weights_N).sum()


# ------------------------------------------------------------------------------------------------------------ the loss


def test_the_loss_is_that_of_the_paper() -> None:
    wanted, unwanted = ([1.5, 0.5], 1.0), ([-3.0], -0.5)
    # 1 - sigmoid(0.1 (2 - 0.5)) and 0.5 (1 - sigmoid(0.1 (0.5 + 3)))
    golden = torch.tensor([0.462570154656, 0.462570154656, 0.5 * 0.413382421083], dtype=torch.float64)
    loss_N = output(KTO(beta=0.1), [wanted, unwanted], z0=0.5).loss_N
    torch.testing.assert_close(loss_N, golden, atol=1e-11, rtol=0)


def test_apo_zero_needs_neither_reference_point_nor_mismatched_pairs() -> None:
    apo = KTO(beta=0.1, variant="apo_zero_unpaired")
    loss_N = output(apo, [([2.0], 1.0), ([2.0], -1.0)]).loss_N
    # 1 - sigmoid(0.2) and sigmoid(0.2)
    golden = torch.tensor([0.450166002688, 0.549833997312], dtype=torch.float64)
    torch.testing.assert_close(loss_N, golden, atol=1e-11, rtol=0)
    assert (apo.columns, apo.has_step_statistics) == ({Column.REFERENCE_LOGPROBS}, False)
    mismatches = {Column.REFERENCE_MISMATCHED, Column.POLICY_MISMATCHED}
    assert (KTO().columns, KTO().has_step_statistics) == ({Column.REFERENCE_LOGPROBS} | mismatches, True)


@pytest.mark.parametrize("full_length", [None, 1, 2])
def test_the_gradient_is_that_of_the_loss(full_length: int | None) -> None:
    batch = inputs([([0.3, -0.2, 4.0], 0.7), ([1.0], -1.0), ([-2.0, 0.1], -1.0)], z0=0.4)
    logprobs_N = batch.proximal_logprobs_N.clone().requires_grad_()
    kto = KTO(full_length=full_length)
    assert torch.autograd.gradcheck(lambda x_N: mean_loss(kto, x_N, batch, 3), logprobs_N)


def test_at_the_reference_the_gradient_is_that_of_reinforce() -> None:
    batch = inputs([([0.0, 0.0], 0.5), ([0.0], -1.0)])
    logprobs_N = batch.proximal_logprobs_N.clone().requires_grad_()
    mean_loss(KTO(beta=0.2), logprobs_N, batch, 2).backward()
    # beta / 4 times the weight, with its sign, of every token; over two samples
    torch.testing.assert_close(logprobs_N.grad, -0.2 / 4 * batch.advantages_N / 2)


def test_samples_that_already_moved_as_labelled_have_no_gradient() -> None:
    batch = inputs([([0.0, 0.0], -1.0), ([0.0, 0.0], -1.0), ([0.0], 1.0), ([0.0], 1.0), ([0.0], 1.0)])
    drift_N = torch.tensor([-0.2, -0.2, 0.9, 0.9, 0.3, 0.2, -3.0], dtype=torch.float64)  # of trainer from sampler
    stale = replace(batch, behavior_logprobs_N=batch.proximal_logprobs_N - drift_N)

    def taught(kto: KTO) -> tuple[list[bool], Tensor]:
        logprobs_N = batch.proximal_logprobs_N.clone().requires_grad_()
        result = kto.loss(logprobs_N, stale)
        result.loss_N.sum().backward()
        assert logprobs_N.grad is not None
        torch.testing.assert_close(result.loss_N, torch.full_like(drift_N, 0.5))  # the value stays
        return (logprobs_N.grad != 0).tolist(), result.metrics_N.get("kto/clip_frac", torch.zeros(0))

    is_taught, clip_frac_N = taught(KTO(clip=0.25))
    assert is_taught == [False, False, True, True, False, True, True]
    assert clip_frac_N.tolist() == [1, 1, 0, 0, 1, 0, 0]
    assert taught(KTO(clip=None)) == ([True] * 7, pytest.approx(torch.zeros(0)))


def test_the_clip_scales_with_length_as_the_loss_does() -> None:
    """Noise of a thousandth of a nat per token sums to more than the clip over 4,000 tokens: they still teach."""
    batch = inputs([([0.0] * 4000, 1.0)])
    noisy = replace(batch, behavior_logprobs_N=batch.proximal_logprobs_N - 1e-4)
    assert KTO().loss(batch.proximal_logprobs_N, noisy).metrics_N["kto/clip_frac"].sum() == 0
    whole = KTO(full_length=None).loss(batch.proximal_logprobs_N, noisy)
    assert whole.metrics_N["kto/clip_frac"].mean() == 1


SAMPLES = st.lists(
    st.tuples(st.lists(st.floats(-3, 3), min_size=1, max_size=5), st.sampled_from([0.25, 1.0, -0.5, -1.0])),
    min_size=1,
    max_size=6,
)


@given(SAMPLES, st.integers(0, 6), st.floats(0, 2))
def test_splitting_a_batch_changes_no_gradient(samples: list[Sample], cut: int, z0: float) -> None:
    def gradient(part: list[Sample]) -> Tensor:
        batch = inputs(part, None, z0=z0)
        logprobs_N = batch.proximal_logprobs_N.clone().requires_grad_()
        mean_loss(KTO(), logprobs_N, batch, len(samples)).backward()
        assert logprobs_N.grad is not None
        return logprobs_N.grad

    split = torch.cat([gradient(samples[:cut]), gradient(samples[cut:])])
    torch.testing.assert_close(split, gradient(samples))


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(samples: list[Sample], rng: random.Random) -> None:
    order = list(range(len(samples)))
    rng.shuffle(order)
    before = output(KTO(), samples, z0=0.3).loss_N.split([len(ratios) for ratios, _ in samples])
    shuffled = [samples[i] for i in order]
    after = output(KTO(), shuffled, z0=0.3).loss_N.split([len(ratios) for ratios, _ in shuffled])
    for place, i in enumerate(order):
        torch.testing.assert_close(after[place], before[i])


def test_what_is_not_trained_has_no_influence() -> None:
    """Observations between turns have a reference logprob too, and none of them is seen."""
    rng = random.Random(0)
    sample = random_sample(rng, random_prompt(rng), num_turns=3)
    assert not all(sample.is_trained)

    def loss_of(unseen: float) -> Tensor:
        column = [-1.0 if on else unseen for on in sample.is_trained]
        batch = MicroBatch.of([sample], [1.0], {Column.REFERENCE_LOGPROBS: [column]}, [1.0])
        behavior_N = batch.behavior_logprobs_N
        return KTO(variant="apo_zero_unpaired").loss(behavior_N, batch.loss_inputs(0, behavior_N)).loss_N

    torch.testing.assert_close(loss_of(0.0), loss_of(99.0))


def test_a_long_sample_counts_as_one_of_full_length() -> None:
    long = [([1.0] * 40, 1.0)]
    mismatches = [[0.5] * 40]
    for full_length, ratio in [(None, 40.0), (512, 40.0), (10, 10.0), (1, 1.0)]:
        kto = KTO(beta=0.1, full_length=full_length)
        margin_N = output(kto, long).metrics_N["kto/margin"]
        torch.testing.assert_close(margin_N, torch.full_like(margin_N, 0.1 * ratio))
        assert kto.step_statistics(inputs(long, mismatches), Alone())["z0"] == pytest.approx(ratio / 2)


def test_the_plain_sum_saturates_where_the_default_does_not() -> None:
    long = [([0.05] * 4000, 1.0)]
    share = "kto/saturated_frac"
    assert output(KTO(full_length=None), long).metrics_N[share].mean() == 1
    assert output(KTO(), long).metrics_N[share].mean() == 0


# ------------------------------------------------------------------------------------------------- the reference point


def test_the_reference_point_is_the_mean_over_mismatched_pairs() -> None:
    batch = inputs([([1.0, 1.0], 1.0), ([-4.0], -1.0)], mismatches=[[0.6, 0.2], [-0.2]])
    facts = KTO(beta=0.1).step_statistics(batch, Alone())
    assert facts == pytest.approx({"z0": 0.3, "reward_desirable": 0.2, "reward_undesirable": -0.4})


def test_it_is_never_negative_and_hides_no_nan() -> None:
    samples = [([0.0], 1.0), ([0.0], 1.0)]
    assert KTO().step_statistics(inputs(samples, mismatches=[[-3.0], [1.0]]), Alone())["z0"] == 0
    assert math.isnan(KTO().step_statistics(inputs(samples, mismatches=[[math.nan], [1.0]]), Alone())["z0"])


@given(SAMPLES, st.integers(0, 6))
def test_ranks_agree_on_it_however_samples_are_spread(samples: list[Sample], cut: int) -> None:
    whole = KTO().step_statistics(inputs(samples), Alone())
    first, second = Among(), Among()
    KTO().step_statistics(inputs(samples[:cut]), first)
    KTO().step_statistics(inputs(samples[cut:]), second)
    for part, others in [(samples[:cut], second.own), (samples[cut:], first.own)]:
        assert KTO().step_statistics(inputs(part), Among(others)) == pytest.approx(whole, abs=1e-12)


# ------------------------------------------------------------------------------------------------------------- labels


def agents(*rewards: float | None) -> EpisodeMeta:
    """A root and its helpers, of two samples each."""
    sample = SampleMeta(2, 3, 3, 0)
    return EpisodeMeta(
        tuple(TrajectoryMeta(f"a{i}", None, OK, reward, (sample, sample)) for i, reward in enumerate(rewards))
    )


def assigned(kto: KTO, *episodes: EpisodeMeta) -> list[tuple[int, int, float]]:
    return [(a.episode, a.trajectory, a.advantage) for a in kto.advantages(group(0, episodes=episodes))]


def test_a_reward_above_the_threshold_is_wanted() -> None:
    kto = KTO(desirable_above=0.7, desirable_weight=2.0, undesirable_weight=3.0)
    rewards = [1.0, 0.7, 0.71, -1.0]
    assert [a for *_, a in assigned(kto, *map(episode, rewards))] == [2.0, -3.0, 2.0, -3.0]


def test_agents_share_the_episode_label_unless_rewarded_themselves() -> None:
    assert assigned(KTO(), agents(1.0, None, None), agents(0.0, None, 1.0)) == [
        (0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0), (1, 0, -1.0), (1, 1, -1.0), (1, 2, 1.0),
    ]  # fmt: skip


def test_what_failed_or_was_not_scored_has_no_label() -> None:
    episodes = [episode(1.0, failed("died")), episode(None), episode(math.nan), episode(math.inf), episode(0.0)]
    assert assigned(KTO(), *episodes) == [(4, 0, -1.0)]


def test_a_group_of_one_or_of_equal_rewards_teaches_too() -> None:
    alike = group(0, episodes=[episode(1.0), episode(1.0)])
    assert KTO(group_size=1).can_learn_from(alike) and assigned(KTO(), episode(1.0)) == [(0, 0, 1.0)]


@given(st.permutations(range(5)))
def test_the_order_of_members_does_not_matter(order: list[int]) -> None:
    episodes = [episode(reward) for reward in (0.0, 1.0, 0.4, 0.6, 1.0)]
    before, after = assigned(KTO(), *episodes), assigned(KTO(), *(episodes[i] for i in order))
    assert [a for *_, a in after] == [before[i][2] for i in order]


# ------------------------------------------------------------------------------------------------------------ balance


def step_of(num_desirable: int, num_undesirable: int) -> list[Group]:
    rewards = [1.0] * num_desirable + [0.0] * num_undesirable
    return [group(i, episodes=[episode(reward)]) for i, reward in enumerate(rewards)]


WEIGHTS = st.floats(0.1, 10)


@given(st.integers(1, 40), st.integers(1, 40), WEIGHTS, WEIGHTS)
def test_both_labels_are_balanced_and_keep_the_total_weight(
    num_desirable: int, num_undesirable: int, desirable: float, undesirable: float
) -> None:
    kto = KTO(desirable_weight=desirable, undesirable_weight=undesirable)
    settled = kto.finalize_advantages(step_of(num_desirable, num_undesirable), {})
    weights = [a.advantage for (a,) in settled.groups]
    wanted, unwanted = weights[0], -weights[-1]
    assert 1 - 1e-9 <= wanted * num_desirable / (unwanted * num_undesirable) <= 4 / 3 + 1e-9
    total = desirable * num_desirable + undesirable * num_undesirable
    assert sum(map(abs, weights)) == pytest.approx(total)
    balanced = desirable * num_desirable / (undesirable * num_undesirable)
    if 1 <= balanced <= 4 / 3:
        assert (wanted, unwanted) == (pytest.approx(desirable), pytest.approx(undesirable))
    assert len({w for w in weights if w > 0}) == len({w for w in weights if w < 0}) == 1
    share = num_desirable / (num_desirable + num_undesirable)
    assert settled.metrics == {"kto/desirable_frac": pytest.approx(share)}


@pytest.mark.parametrize(("counts", "share"), [((6, 0), 1.0), ((0, 6), 0.0)])
def test_in_a_step_of_one_kind_weights_stay(counts: tuple[int, int], share: float) -> None:
    kto = KTO(desirable_weight=0.5, undesirable_weight=2.0)
    settled = kto.finalize_advantages(step_of(*counts), {})
    assert {a.advantage for (a,) in settled.groups} == {0.5 if counts[0] else -2.0}
    assert settled.metrics == {"kto/desirable_frac": share}


def test_without_balance_weights_are_those_of_the_configuration() -> None:
    settled = KTO(balance=False).finalize_advantages(step_of(5, 1), {})
    assert [a.advantage for (a,) in settled.groups] == [1.0] * 5 + [-1.0]


def test_what_frozen_agents_said_is_not_counted() -> None:
    """Two agents of one success and one of a failure; without the frozen one there are as many of each."""
    kto = KTO(frozen_agents=("a1",))
    settled = kto.finalize_advantages([group(0, episodes=[agents(1.0, None), agents(0.0)])], {})
    assert [(a.episode, a.trajectory, a.advantage) for a in settled.groups[0]] == [(0, 0, 1.0), (1, 0, -1.0)]
    assert settled.metrics == {"kto/desirable_frac": 0.5}


def staged(reward: float, tokens: Sequence[int]) -> EpisodeMeta:
    """One agent in stages, each a sample with so many trained tokens."""
    samples = tuple(SampleMeta(2, num + 1, num, i) for i, num in enumerate(tokens))
    return EpisodeMeta((TrajectoryMeta("policy", None, OK, reward, samples),))


def shares_of(groups: list[Group], kto: KTO) -> dict[int, float]:
    """Part of the loss of each group's trajectory where all samples have the same distance to z0."""
    assigned = kto.finalize_advantages(groups, {}).groups
    (rank,) = plan_batch(groups, assigned, kto.aggregation, num_ranks=1, max_tokens=10**6)
    weights: defaultdict[int, float] = defaultdict(float)
    for micro_batch in rank.micro_batches:
        for ref in micro_batch.samples:
            sample = groups[ref.group].episodes[ref.episode].trajectories[ref.trajectory].samples[ref.sample]
            weights[ref.group] += abs(ref.advantage) * ref.token_weight * sample.num_trained
    total = sum(weights.values())
    return {index: weight / total for index, weight in sorted(weights.items())}


TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=10)


@given(st.lists(st.tuples(st.booleans(), TOKENS), min_size=1, max_size=8))
def test_a_trajectory_weighs_the_same_whatever_the_number_of_its_stages(
    trajectories: list[tuple[bool, list[int]]],
) -> None:
    groups = [group(i, episodes=[staged(float(label), tokens)]) for i, (label, tokens) in enumerate(trajectories)]
    assert shares_of(groups, KTO(balance=False)) == pytest.approx(dict.fromkeys(range(len(groups)), 1 / len(groups)))


def test_a_failure_in_ten_stages_weighs_as_much_as_a_success_in_one() -> None:
    groups = [group(0, episodes=[staged(0.0, [20] * 10)]), group(1, episodes=[staged(1.0, [20])])]
    assert shares_of(groups, KTO()) == {0: pytest.approx(0.5), 1: pytest.approx(0.5)}


def test_trajectories_are_balanced_instead_of_their_samples() -> None:
    """Two agents of two samples each are wanted, one sample is not, and one said nothing: 2 to 1."""
    groups = [group(0, episodes=[agents(1.0, None)]), group(1, episodes=[episode(0.0), episode(0.0, num_trained=0)])]
    settled = KTO().finalize_advantages(groups, {})
    assert settled.metrics == {"kto/desirable_frac": pytest.approx(2 / 3)}
    assert shares_of(groups, KTO()) == {0: pytest.approx(4 / 7), 1: pytest.approx(3 / 7)}


def test_a_step_in_which_nothing_was_scored_has_no_share() -> None:
    settled = KTO().finalize_advantages([group(0, episodes=[episode(None)])], {})
    assert (settled.groups, settled.metrics) == (((),), {})


# ------------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 0}, {"beta": 0.0}, {"beta": math.inf}, {"desirable_above": math.nan}, {"desirable_weight": 0.0},
        {"undesirable_weight": -1.0}, {"full_length": 0}, {"clip": 0.0}, {"variant": "ipo"}, {"lambda_d": 1.0},
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_by_name(changes: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        KTO(**changes)


def test_any_staleness_is_safe_with_the_clip_and_none_without() -> None:
    assert (KTO().max_safe_staleness, KTO(clip=None).max_safe_staleness) == (None, 0)


# ----------------------------------------------------------------------------------------------------------- training


def test_it_trains_and_moves_wanted_from_unwanted(tmp_path: Path) -> None:
    """A real model, as a rank trains it: the reference is the model before the first step."""
    path, rng = save_model(tmp_path, tiny_qwen3()), random.Random(0)
    payloads = [random_group(rng, 4) for _ in range(3)]
    groups = [group_of(group_id, payload) for group_id, payload in enumerate(payloads)]
    kto = KTO(beta=0.5, clip=None)  # the samples are none of this model's
    settled = kto.finalize_advantages(groups, {})
    plan = plan_batch(groups, settled.groups, kto.aggregation, num_ranks=1, max_tokens=64)[0]
    reference = load_model(path, torch.float32)
    scorer = Scorer(reference)
    columns = []
    for payload in payloads:
        rows = score(reference, [sample for _, sample in samples_in(payload)], Distribution(1.0), max_tokens=64)
        columns.append({Column.REFERENCE_LOGPROBS: rows})
    data = StepData(payloads, columns)
    with torch.no_grad():
        mismatches = [
            mismatched_column(
                data, one, plan.partners, lambda b: scorer(b, Distribution()), torch.device("cpu")
            ).numpy()
            for one in plan.updates[0]
        ]
    data = data.with_columns({Column.REFERENCE_MISMATCHED: mismatches})
    backend = FsdpBackend(path, OptimizerSettings(lr=3e-3, total_steps=10), RankGroup())
    metrics = [backend.train_step(plan, data, kto, distribution=Distribution(1.0)) for _ in range(6)]
    first, last = metrics[0], metrics[-1]
    assert (first["kto/margin"], first["kto/z0"]) == (pytest.approx(0, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert last["kto/margin"] > 0.1 and last["loss"] < first["loss"]
    assert last["kto/reward_desirable"] > last["kto/reward_undesirable"]
    assert undocumented_names([*last, *settled.metrics]) == []


def test_the_reference_point_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    """One micro-batch or many: the same facts, the same loss, the same gradient norm."""
    path, rng = save_model(tmp_path, tiny_qwen3()), random.Random(1)
    payloads = [random_group(rng, 3) for _ in range(3)]
    groups = [group_of(group_id, payload) for group_id, payload in enumerate(payloads)]
    kto = KTO(clip=None)
    given_ = kto.finalize_advantages(groups, {}).groups
    zeros = [[tuple(0.0 for _ in sample.is_trained) for _, sample in samples_in(payload)] for payload in payloads]

    def metrics_of(max_tokens: int) -> dict[str, float]:
        plan = plan_batch(groups, given_, kto.aggregation, num_ranks=1, max_tokens=max_tokens)[0]
        data = StepData(payloads, [{Column.REFERENCE_LOGPROBS: rows} for rows in zeros])
        lengths = [len(data.micro_batch(one).targets_N) for one in plan.updates[0]]
        far = [torch.full((n,), -9.0).numpy() for n in lengths]
        data = data.with_columns({Column.REFERENCE_MISMATCHED: far})
        return FsdpBackend(path, OptimizerSettings(lr=1e-3, total_steps=10), RankGroup()).train_step(
            plan, data, kto, distribution=Distribution(1.0)
        )

    one, many = metrics_of(4096), metrics_of(1)
    assert one["kto/z0"] > 1
    for name in ("loss", "kto/z0", "kto/margin", "kto/reward_desirable", "optim/grad_norm"):
        assert many[name] == pytest.approx(one[name], rel=1e-4)
