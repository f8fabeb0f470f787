"""One step of training: updates, what depends on the whole of it, and what is not finite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from algorithms.dart import DART
from rlsys.algorithm import Algorithm, Column, LossInputs, LossOutput
from rlsys.batch.packing import BatchPlan, MicroBatchPlan
from rlsys.batch.tensors import StepData
from rlsys.errors import OutOfMemory, TrainingError
from rlsys.types import Distribution, PolicyVersion
from tests.models import tiny_qwen3
from tests.training import (
    PLAIN,
    SETTINGS,
    JoinedRanks,
    Measuring,
    Surrogate,
    data_of,
    differing,
    everything_in,
    planned,
)
from workers.model.logprobs import trained_logprobs
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import learning_rate
from workers.train.rank_group import RankGroup
from workers.train.step_data import Part, RankStep

CPU = torch.device("cpu")
MODEL = tiny_qwen3()


@dataclass(frozen=True, kw_only=True)
class NanAtLowest(Surrogate):
    """NaN where the advantage is the lowest: in one micro-batch of one rank."""

    lowest: float

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        output = super().loss(logprobs_N, batch)
        is_lowest_N = batch.advantages_N <= self.lowest + 1e-6
        return replace(output, loss_N=output.loss_N.masked_fill(is_lowest_N, float("nan")))


@dataclass(frozen=True, kw_only=True)
class Undecided(Surrogate):
    """With a bonus for entropy."""

    @property
    def differentiates_entropy(self) -> bool:
        return True

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        assert batch.entropies_N is not None
        output = super().loss(logprobs_N, batch)
        return replace(output, loss_N=output.loss_N - 0.05 * batch.entropies_N)


@dataclass(frozen=True, kw_only=True)
class WarmingUp(Surrogate):
    """The policy is trained from version 2 on."""

    def trains_policy(self, version: PolicyVersion) -> bool:
        return version >= 2


@dataclass(frozen=True, kw_only=True)
class Paired(Surrogate):
    """Shows the mean of a column of mismatched pairs."""

    @property
    def columns(self) -> frozenset[Column]:
        return frozenset({Column.POLICY_MISMATCHED})

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        output = super().loss(logprobs_N, batch)
        return replace(output, metrics_N={"mismatched": batch.columns_N[Column.POLICY_MISMATCHED]})


def trained(
    model_path: str, algorithm: Surrogate, num_updates: int, ranks: RankGroup, num_steps: int = 1
) -> tuple[FsdpBackend, dict[str, float]]:
    backend, metrics = FsdpBackend(model_path, SETTINGS, ranks), {}
    for _ in range(num_steps):
        plan, payloads = planned(0, ranks.num_ranks, algorithm, num_updates)
        mine = plan[ranks.rank]
        metrics = backend.train_step(mine, data_of(payloads), algorithm, distribution=Distribution(0.9))
    return backend, metrics


def step_of(plan: BatchPlan, data: StepData, algorithm: Surrogate, rank: int = 0) -> RankStep:
    return RankStep(plan=plan[rank], data=data, algorithm=algorithm, version=3, device=CPU)


def score(batch) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return trained_logprobs(MODEL, batch, Distribution(0.9))


def parts_of(step: RankStep, ranks: RankGroup | None = None) -> list[Part]:
    return [part for update in step.whole(score, ranks or RankGroup()) for part in update]


def test_updates_match_adamw_by_hand_with_ratios_against_step_start(model_path: str) -> None:
    """By hand: every ratio is against the logprobs at the start, each update has denominators of its own."""
    backend, metrics = trained(model_path, PLAIN, 2, RankGroup())
    plan, payloads = planned(0, 1, PLAIN, 2, max_tokens=10_000)
    model, data = load_model(model_path, torch.float32), data_of(payloads)
    s = SETTINGS
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate(0, s), betas=s.betas, eps=s.eps, weight_decay=s.weight_decay
    )
    batches = [data.micro_batch(micro_batch) for micro_batch in plan[0].micro_batches]
    assert len(batches) == len(plan[0].updates) == 2
    proximal = [trained_logprobs(model, batch, Distribution(0.9))[0].detach() for batch in batches]
    losses = []
    for batch, proximal_N in zip(batches, proximal, strict=True):
        optimizer.zero_grad()
        logprobs_N, _ = trained_logprobs(model, batch, Distribution(0.9))
        loss = PLAIN.loss(logprobs_N, batch.loss_inputs(0, proximal_N)).loss_N.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    assert metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert metrics["policy/ratio_mean"] != pytest.approx(1, abs=1e-3)
    weights = backend.full_weights(torch.float32)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=5e-3 * SETTINGS.lr)


def test_passes_train_the_same_updates_again_with_ratios_against_step_start(model_path: str) -> None:
    """By hand: two passes of two updates, with the logprobs and the entropies of the policy as it is in each."""
    algorithm = Undecided(passes=2)
    backend, metrics = trained(model_path, algorithm, 2, RankGroup())
    plan, payloads = planned(0, 1, algorithm, 2, max_tokens=10_000)
    model, data, s = load_model(model_path, torch.float32), data_of(payloads), SETTINGS
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate(0, s), betas=s.betas, eps=s.eps, weight_decay=s.weight_decay
    )
    batches = [data.micro_batch(micro_batch) for micro_batch in plan[0].micro_batches]
    proximal = [trained_logprobs(model, batch, Distribution(0.9))[0].detach() for batch in batches]
    losses = []
    for batch, proximal_N in [*zip(batches, proximal, strict=True)] * 2:
        optimizer.zero_grad()
        logprobs_N, entropies_N = trained_logprobs(model, batch, Distribution(0.9), entropy_has_gradient=True)
        inputs = replace(batch.loss_inputs(0, proximal_N), entropies_N=entropies_N)
        loss = PLAIN.loss(logprobs_N, inputs).loss_N.mean() - 0.05 * entropies_N.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    assert metrics["loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    num_samples = sum(len(micro_batch.samples) for micro_batch in plan[0].micro_batches)
    assert sum(len(column.samples) for column in backend.columns()) == num_samples, "each once"
    weights = backend.full_weights(torch.float32)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=5e-3 * SETTINGS.lr)


def test_the_ratio_of_a_single_update_is_one(model_path: str) -> None:
    _, metrics = trained(model_path, PLAIN, 1, RankGroup(), num_steps=2)
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)


def test_skipping_zero_advantages_saves_forwards_and_changes_no_weight(model_path: str) -> None:
    plan, payloads = planned(0, 1, PLAIN, max_tokens=1)
    is_trained = [micro_batch.samples[0].group < 2 for micro_batch in plan[0].micro_batches]

    def left(micro_batch: MicroBatchPlan) -> MicroBatchPlan:
        (ref,) = micro_batch.samples
        return replace(micro_batch, samples=(replace(ref, advantage=ref.advantage if ref.group < 2 else 0.0),))

    whole = replace(plan[0], updates=(tuple(map(left, plan[0].updates[0])),))
    kept = tuple(m for m, is_kept in zip(whole.updates[0], is_trained, strict=True) if is_kept)
    num_kept = sum(data_of(payloads).num_trained(m) for m in kept)
    skipping = replace(whole, updates=(kept,), num_tokens=num_kept, num_skipped=plan[0].num_tokens - num_kept)
    backends, forwards, metrics = [], [], []
    for of_rank in (whole, skipping):
        backend = FsdpBackend(model_path, SETTINGS, RankGroup())
        backend._scorer.register_forward_hook(lambda *_: forwards.append(1))
        metrics.append(backend.train_step(of_rank, data_of(payloads), PLAIN, distribution=Distribution(0.9)))
        backends.append(backend.full_weights(torch.float32))
    assert len(forwards) == len(is_trained) + sum(is_trained)
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-6)
    assert metrics[1]["batch/skipped_frac"] == skipping.num_skipped / plan[0].num_tokens > 0.3
    for name, weight in backends[0].items():
        torch.testing.assert_close(backends[1][name], weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("algorithm", "num_updates", "passes"),
    [(PLAIN, 1, 1), (PLAIN, 2, 2), (Measuring(), 1, 2), (Paired(), 1, 2), (DART(group_size=4), 1, 1)],
)
def test_an_extra_pass_runs_only_where_it_is_needed(
    algorithm: Algorithm, num_updates: int, passes: int, model_path: str
) -> None:
    backend, forwards = FsdpBackend(model_path, SETTINGS, RankGroup()), []
    backend._scorer.register_forward_hook(lambda *_: forwards.append(1))
    plan, payloads = planned(0, 1, algorithm, num_updates)
    backend.train_step(plan[0], data_of(payloads), algorithm, distribution=Distribution(0.9))
    assert len(forwards) == passes * len(plan[0].micro_batches)


def test_advantages_are_whitened_over_the_step_without_fillers() -> None:
    algorithm = Measuring()
    plan, payloads = planned(0, 2, algorithm, 2)
    parts = parts_of(step_of(plan, data_of(payloads), algorithm, 0)) + parts_of(
        step_of(plan, data_of(payloads), algorithm, 1)
    )
    assert any(not part.weight for part in parts), "no filler to leave out"
    one, payloads = planned(0, 1, algorithm, 2)
    whole = [part for part in parts_of(step_of(one, data_of(payloads), algorithm)) if part.weight]
    white_N = torch.cat([part.inputs.advantages_N for part in whole]).double()
    assert len(white_N) == one[0].num_tokens
    assert white_N.mean().item() == pytest.approx(0, abs=1e-6)
    assert white_N.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_equal_advantages_are_whitened_to_zero() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Equal(Measuring):
        def advantages(self, group):
            yield from (replace(assigned, advantage=0.1) for assigned in super().advantages(group))

    plan, payloads = planned(0, 1, Equal())
    parts = parts_of(step_of(plan, data_of(payloads), Equal()))
    assert torch.cat([part.inputs.advantages_N for part in parts]).abs().max() < 1e-6


def test_measurements_cover_every_sample_once_and_reach_every_loss(model_path: str, two_ranks: JoinedRanks) -> None:
    _, metrics = trained(model_path, Measuring(), 2, RankGroup())
    plan, _ = planned(0, 1, Measuring(), 2)
    num_samples = sum(len(m.samples) for m in plan[0].micro_batches)
    assert metrics["num_samples"] == pytest.approx(num_samples)
    assert metrics["kept"] == pytest.approx(0.5, abs=1 / plan[0].num_tokens)
    assert two_ranks(measured, model_path) == [pytest.approx(metrics["num_samples"])] * 2


def measured(model_path: str, ranks: RankGroup) -> float:
    return trained(model_path, Measuring(), 2, ranks)[1]["num_samples"]


def test_unequal_numbers_of_values_per_rank_are_gathered_in_order(two_ranks: JoinedRanks) -> None:
    assert two_ranks(gathered, 3) == [[0.0, 0.0, 0.0, 1.0]] * 2
    assert two_ranks(gathered, 0) == [[1.0]] * 2
    assert gathered(2, RankGroup()) == [0.0, 0.0]


def gathered(num_first: int, ranks: RankGroup) -> list[float]:
    return ranks.gather(torch.full((1 if ranks.rank else num_first,), float(ranks.rank))).tolist()


def test_only_the_loss_gets_proximal_logprobs() -> None:
    seen: dict[str, LossInputs] = {}

    @dataclass(frozen=True, kw_only=True)
    class Looking(Surrogate):
        def token_advantages(self, inputs):
            seen["shape"] = inputs
            shaped = super().token_advantages(inputs)
            return replace(shaped, advantages_N=shaped.advantages_N + 1, returns_N=shaped.advantages_N)

    plan, payloads = planned(0, 1, Looking(), 2)
    part = parts_of(step_of(plan, data_of(payloads), Looking()))[-1]
    before, after = seen["shape"], part.inputs
    assert before.proximal_logprobs_N.isnan().all()
    torch.testing.assert_close(after.proximal_logprobs_N, score(part.batch)[0])
    torch.testing.assert_close(after.advantages_N, before.advantages_N + 1)
    assert after.returns_N is not None and torch.equal(after.returns_N, before.advantages_N)
    assert after.staleness_N.tolist() == [3] * len(before.advantages_N)
    assert int(after.lengths_S.sum()) == len(before.advantages_N)


def test_a_step_without_policy_training_only_advances_the_count(model_path: str, tmp_path: Path) -> None:
    fresh, _ = trained(model_path, WarmingUp(), 2, RankGroup(), num_steps=0)
    fresh.save(tmp_path / "fresh").wait()
    backend, metrics = trained(model_path, WarmingUp(), 2, RankGroup(), num_steps=2)
    backend.save(tmp_path / "warm").wait()
    assert metrics == {}
    assert backend.step == 2
    assert differing(everything_in(tmp_path / "fresh"), everything_in(tmp_path / "warm")) == ["progress.step"]
    backend, metrics = trained(model_path, WarmingUp(), 2, RankGroup(), num_steps=3)
    assert metrics["optim/lr"] == SETTINGS.lr
    assert differing(fresh.full_weights(torch.float32), backend.full_weights(torch.float32)) != []


def test_nan_on_one_rank_fails_all_and_steps_none(model_path: str, two_ranks: JoinedRanks) -> None:
    plan, _ = planned(0, 1, PLAIN)
    lowest = min(ref.advantage for m in plan[0].updates[0] for ref in m.samples)
    fresh = FsdpBackend(model_path, SETTINGS, RankGroup()).full_weights(torch.float32)
    (after, step), _ = two_ranks(failed, model_path, NanAtLowest(lowest=lowest))
    assert step == 0
    assert differing(fresh, after) == []


@dataclass(frozen=True, kw_only=True)
class Hungry(Surrogate):
    """Runs out of memory in the second update."""

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        if not torch.equal(logprobs_N, batch.proximal_logprobs_N):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(logprobs_N, batch)


def test_a_lack_of_memory_tells_what_did_not_fit_and_steps_nothing_of_the_update(model_path: str) -> None:
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    algorithm = Hungry()
    plan, payloads = planned(0, 1, algorithm, 2)
    with pytest.raises(
        OutOfMemory, match=r"step 1, update 2 of 2: out of memory in or after a row of \d+ positions"
    ) as lack:
        backend.train_step(plan[0], data_of(payloads), algorithm, distribution=Distribution(0.9))
    assert "train.micro_batch_tokens" in str(lack.value) and "Tried to allocate 2.00 GiB" in str(lack.value)
    assert lack.value.update == 1
    assert backend.step == 0


def failed(model_path: str, algorithm: NanAtLowest, ranks: RankGroup) -> tuple[dict[str, Tensor], int]:
    """A step that fails on both ranks; the weights afterwards."""
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    plan, payloads = planned(0, ranks.num_ranks, algorithm)
    with pytest.raises(TrainingError, match="step 1: loss is nan, and nothing of it was stepped"):
        backend.train_step(plan[ranks.rank], data_of(payloads), algorithm, distribution=Distribution(0.9))
    return backend.full_weights(torch.float32), backend.step


def test_nan_in_a_later_update_keeps_the_earlier_ones(model_path: str) -> None:
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    plan, payloads = planned(0, 1, PLAIN, 2)
    updates = plan[0].updates
    lowest = [min(ref.advantage for m in update for ref in m.samples) for update in updates]
    later = replace(plan[0], updates=tuple(sorted(updates, key=lambda u: -lowest[updates.index(u)])))
    algorithm = NanAtLowest(lowest=min(lowest))
    with pytest.raises(TrainingError, match="step 1, update 2 of 2: loss is nan, and nothing of it was stepped"):
        backend.train_step(later, data_of(payloads), algorithm, distribution=Distribution(0.9))
    assert backend.step == 0
    fresh = FsdpBackend(model_path, SETTINGS, RankGroup())
    assert differing(fresh.full_weights(torch.float32), backend.full_weights(torch.float32)) != []


def test_a_failed_step_leaves_no_trace_in_the_next(model_path: str) -> None:
    plan, payloads = planned(0, 1, PLAIN)
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    with pytest.raises(TrainingError, match="loss is nan"):
        backend.train_step(plan[0], data_of(payloads), NanAtLowest(lowest=9.0), distribution=Distribution(0.9))
    backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(0.9))
    once, _ = trained(model_path, PLAIN, 1, RankGroup())
    assert differing(backend.full_weights(torch.float32), once.full_weights(torch.float32)) == []


def test_mismatched_pairs_are_scored_by_the_policy_before_the_step(model_path: str, two_ranks: JoinedRanks) -> None:
    """Each completion after the first prompt of the next group, by whole sequences; with one rank or two."""
    plan, payloads = planned(0, 1, Paired(), 2)
    data, model = data_of(payloads), load_model(model_path, torch.float32)
    total = 0.0
    for micro_batch in plan[0].micro_batches:
        pairs = data.mismatched_batch(micro_batch, plan[0].partners)
        assert pairs is not None
        with torch.no_grad():
            total += float(trained_logprobs(model, pairs, Distribution(0.9))[0].sum())
    _, metrics = trained(model_path, Paired(), 2, RankGroup())
    assert metrics["mismatched"] == pytest.approx(total / plan[0].num_tokens, rel=1e-4)
    assert two_ranks(paired, model_path) == [pytest.approx(metrics["mismatched"], rel=1e-4)] * 2


def paired(model_path: str, ranks: RankGroup) -> float:
    return trained(model_path, Paired(), 2, ranks)[1]["mismatched"]


def test_without_another_prompt_in_the_step_no_pair_differs(model_path: str) -> None:
    plan, payloads = planned(0, 1, Paired())
    alone = replace(plan[0], partners=(None,) * len(payloads))
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    metrics = backend.train_step(alone, data_of(payloads), Paired(), distribution=Distribution(0.9))
    assert metrics["mismatched"] == 0.0


def test_step_columns_reach_the_loss_beside_those_of_groups() -> None:
    plan, payloads = planned(0, 1, PLAIN, 2)
    columns = []
    for place, micro_batch in enumerate(plan[0].micro_batches):
        num = data_of(payloads).num_trained(micro_batch)
        columns.append(torch.full((num,), float(place)).numpy())
    data = data_of(payloads).with_columns({Column.VALUES: columns})
    for place, part in enumerate(parts_of(step_of(plan, data, PLAIN))):
        assert part.inputs.columns_N[Column.VALUES].unique().tolist() == [place]
