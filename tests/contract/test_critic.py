"""The critic: values of the states before trained tokens, learned over ranks, updates and micro-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, tensor
from transformers import PreTrainedTokenizerFast

from rlsys.algorithm import Column, LossInputs, LossOutput, TokenAdvantages
from rlsys.batch.packing import RankPlan
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
from rlsys.config.train_section import ActivationCheckpointing, MemorySavings
from rlsys.errors import ModelError, TrainingError
from rlsys.monitoring.metric_catalog import undocumented_names
from tests.by_day import first_by_day
from tests.models import VOCAB, random_prompt, random_sample, save_model, tiny_llama, tiny_qwen3
from tests.training import SETTINGS, JoinedRanks, Surrogate, data_of, differing, everything_in, planned
from workers.train.rank_group import RankGroup
from workers.train.value_model import CriticBackend, Fit, ValueModel, check_vocabulary

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Valued(Surrogate):
    """The return of every token is its trajectory's advantage, and 1 more where it is the last of its sample."""

    @property
    def columns(self) -> frozenset[Column]:
        return frozenset({Column.VALUES})

    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        returns_N = inputs.advantages_N.clone()
        returns_N[inputs.lengths_S.cumsum(0) - 1] += 1
        return TokenAdvantages(returns_N - inputs.columns_N[Column.VALUES], returns_N)

    def value_loss(self, values_N: Tensor, batch: LossInputs) -> LossOutput:
        assert batch.returns_N is not None
        errors_N = (values_N - batch.returns_N).square()
        return LossOutput(errors_N, {"critic/error": errors_N.detach()})


@dataclass(frozen=True, kw_only=True)
class Nan(Valued):
    def value_loss(self, values_N: Tensor, batch: LossInputs) -> LossOutput:
        return LossOutput(super().value_loss(values_N, batch).loss_N * float("nan"))


@dataclass(frozen=True, kw_only=True)
class Aimless(Valued):
    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        return TokenAdvantages(inputs.advantages_N)


def step_of(
    ranks: RankGroup, algorithm: Valued, num_updates: int = 1, max_tokens: int = 40
) -> tuple[RankPlan, StepData]:
    plan, payloads = planned(0, ranks.mesh.num_batches, algorithm, num_updates, max_tokens)
    return plan[ranks.batch], data_of(payloads)


def train_step(
    critic: CriticBackend, ranks: RankGroup, algorithm: Valued, num_updates: int = 1, max_tokens: int = 40
) -> dict[str, float]:
    plan, data = step_of(ranks, algorithm, num_updates, max_tokens)
    columns = {Column.VALUES: critic.values(plan, data)}
    return critic.train_step(plan, data.with_columns(columns), algorithm)


@dataclass(frozen=True, kw_only=True)
class Job:
    model_path: str
    folder: Path
    algorithm: Valued = Valued()
    num_steps: int = 3
    num_updates: int = 1
    max_tokens: int = 40
    dtype: Dtype = "float32"
    checkpointing: ActivationCheckpointing = "none"
    lora: LoraSection | None = None
    load: Path | None = None
    mesh: MeshSection | None = None


def do(job: Job, ranks: RankGroup) -> list[dict[str, float]]:
    ranks = ranks.with_mesh(job.mesh or ranks.mesh)
    critic = CriticBackend(
        job.model_path, SETTINGS, ranks, dtype=job.dtype, savings=MemorySavings(job.checkpointing), lora=job.lora
    )
    if job.load:
        critic.load(job.load)
    steps = range(job.num_steps)
    metrics = [train_step(critic, ranks, job.algorithm, job.num_updates, job.max_tokens) for _ in steps]
    assert job.load or critic.step == job.num_steps
    critic.save(job.folder).wait()
    return metrics


@pytest.mark.parametrize("how", first_by_day(["full", "selective"]))
def test_checkpointing_changes_no_bit_of_a_critic(
    how: ActivationCheckpointing, model_path: str, tmp_path: Path
) -> None:
    plain = Job(model_path=model_path, folder=tmp_path / "plain", num_updates=2)
    checkpointed = replace(plain, folder=tmp_path / "checkpointed", checkpointing=how)
    assert do(plain, RankGroup()) == do(checkpointed, RankGroup())
    assert differing(everything_in(plain.folder), everything_in(checkpointed.folder)) == []


@pytest.mark.parametrize("dtype", first_by_day(["float32", "bfloat16"]))
def test_a_critic_with_lora_trains_its_head_and_an_adapter(
    dtype: Dtype, two_ranks: JoinedRanks, model_path: str, tmp_path: Path
) -> None:
    job = Job(model_path=model_path, folder=tmp_path / "one", dtype=dtype, lora=LoraSection(rank=4))
    metrics = do(job, RankGroup())
    two, same = two_ranks(do, replace(job, folder=tmp_path / "two"))
    assert two == same
    assert [m["critic/loss"] for m in two] == pytest.approx([m["critic/loss"] for m in metrics], rel=0.05)
    weights = weights_in(job.folder)
    assert {name for name in weights if ".lora_" not in name} == {"model.head.weight", "model.head.bias"}
    assert all(t.abs().max() > 0 for t in weights.values())
    tolerance = 1e-4 if dtype == "float32" else 0.05
    for name, other in weights_in(tmp_path / "two").items():
        torch.testing.assert_close(other, weights[name], rtol=0, atol=tolerance)
    do(replace(job, load=job.folder, folder=tmp_path / "again", num_steps=0), RankGroup())
    assert differing(everything_in(job.folder), everything_in(tmp_path / "again")) == []


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: t for name, t in everything_in(folder).items() if name.startswith("model.")}


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_a_value_is_the_head_on_the_preceding_hidden_state(make) -> None:
    """By one forward over each whole sequence alone, in value and in gradient."""
    model = ValueModel(make().base_model)
    torch.nn.init.normal_(model.head.weight)
    rng = random.Random(0)
    prompt = random_prompt(rng)
    samples = [random_sample(rng, prompt, turns) for turns in (1, 2, 3)]
    values_N = model(MicroBatch.of(samples))
    by_hand = []
    for sample in samples:
        hidden_TH = model.base(input_ids=torch.tensor(sample.run_ids)[None]).last_hidden_state[0]
        trained = [t for t, is_trained in enumerate(sample.is_trained) if is_trained]
        by_hand.append(model.head(hidden_TH[[len(prompt) + t - 1 for t in trained]])[:, 0])
    expected_N = torch.cat(by_hand)
    torch.testing.assert_close(values_N, expected_N, rtol=1e-4, atol=1e-5)
    towards_N = torch.linspace(-1, 1, len(values_N))
    gradients = [torch.autograd.grad((v_N * towards_N).sum(), model.head.weight)[0] for v_N in (values_N, expected_N)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_a_critic_that_has_learned_nothing_values_everything_at_zero(model_path: str) -> None:
    critic = CriticBackend(model_path, SETTINGS, RankGroup())
    plan, data = step_of(RankGroup(), Valued(), 2)
    columns = critic.values(plan, data)
    assert [len(c) for c in columns] == [data.num_trained(m) for m in plan.micro_batches]
    assert {str(column.dtype) for column in columns} == {"float32"}
    assert all((column == 0).all() for column in columns)


def test_it_learns_what_its_states_tell_of_the_returns(model_path: str) -> None:
    critic = CriticBackend(model_path, replace(SETTINGS, lr=3e-2, total_steps=100), RankGroup())
    metrics = [train_step(critic, RankGroup(), Valued()) for _ in range(15)]
    assert undocumented_names(metrics[0]) == ["critic/error"]
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert metrics[0]["critic/value_mean"] == 0
    assert metrics[-1]["critic/explained_variance"] > 0.5
    assert metrics[-1]["critic/loss"] < 0.5 * metrics[0]["critic/loss"]
    assert metrics[0]["critic/loss"] == pytest.approx(metrics[0]["critic/error"], rel=1e-5)
    assert metrics[2]["critic/lr"] == 3e-2


@pytest.mark.parametrize("over", first_by_day(["tokens", "sequences", "agents"]))
def test_two_ranks_and_any_micro_batches_learn_what_one_does(
    over: Literal["tokens", "sequences", "agents"], model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    job = Job(model_path=model_path, folder=tmp_path / "one", algorithm=Valued(over=over), num_updates=2)
    one = do(job, RankGroup())
    two, other = two_ranks(do, replace(job, folder=tmp_path / "two"))
    split = do(replace(job, folder=tmp_path / "split", max_tokens=1), RankGroup())
    assert two == other
    for a, b, c in zip(one, two, split, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
        assert c == pytest.approx(a, rel=1e-3, abs=1e-5)
    expected = weights_in(tmp_path / "one")
    for folder in ("two", "split"):
        for name, weight in weights_in(tmp_path / folder).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=5e-3 * SETTINGS.lr)


def test_a_checkpoint_moves_between_numbers_of_ranks_bit_for_bit(
    model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    two_ranks(do, Job(model_path=model_path, folder=a))
    do(Job(model_path=model_path, folder=b, num_steps=0, load=a), RankGroup())
    two_ranks(do, Job(model_path=model_path, folder=c, num_steps=0, load=b))
    saved = everything_in(a)
    assert saved["model.head.weight"].any()
    assert differing(saved, everything_in(b)) == differing(saved, everything_in(c)) == []


@pytest.mark.parametrize("num_ranks", first_by_day([2, 1]))
def test_in_bfloat16_head_and_values_are_float32(
    num_ranks: int, model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    exact = do(Job(model_path=model_path, folder=tmp_path / "exact"), RankGroup())
    job = Job(model_path=model_path, folder=tmp_path / "rough", dtype="bfloat16")
    rough = do(job, RankGroup()) if num_ranks == 1 else two_ranks(do, job)[0]
    assert rough[2]["critic/loss"] == pytest.approx(exact[2]["critic/loss"], rel=0.1)
    head = weights_in(tmp_path / "rough")["model.head.weight"]
    assert head.dtype is torch.float32
    assert not torch.equal(head, head.bfloat16().float())


def test_a_loss_that_is_not_finite_leaves_the_critic_unchanged(model_path: str) -> None:
    critic = CriticBackend(model_path, SETTINGS, RankGroup())
    with pytest.raises(TrainingError, match="the critic's step 1: loss is nan, and nothing of it was stepped"):
        train_step(critic, RankGroup(), Nan())
    assert critic.step == 0
    plan, data = step_of(RankGroup(), Valued())
    assert not any(column.any() for column in critic.values(plan, data))


def test_an_algorithm_without_returns_is_named(model_path: str) -> None:
    with pytest.raises(ValueError, match=r"Aimless\.token_advantages returns no targets"):
        train_step(CriticBackend(model_path, SETTINGS, RankGroup()), RankGroup(), Aimless())


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match=r"critic.path '/no/such/model' does not exist"):
        CriticBackend("/no/such/model", SETTINGS, RankGroup())


def fit(*micro_batches: Sequence[tuple[float, float]]) -> Fit:
    result = Fit(torch.device("cpu"))
    for micro_batch in micro_batches:
        returns, values = zip(*micro_batch, strict=True)
        result.add(tensor(returns), tensor(values))
    return result


def test_explained_variance_by_hand() -> None:
    """Var of 1, 2, 3, 6 is 3.5; of the errors 1, 0, 0, 1 it is 0.25."""
    figures = fit([(1.0, 0.0), (2.0, 2.0)], [(3.0, 3.0), (6.0, 5.0)]).reduce_over(RankGroup())
    assert figures["critic/explained_variance"] == pytest.approx(1 - 0.25 / 3.5)
    assert figures["critic/value_mean"] == 2.5
    assert fit([(1.0, 4.0), (2.0, 5.0)]).reduce_over(RankGroup())["critic/explained_variance"] == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_equal_returns_have_no_variance_to_explain(value: float) -> None:
    assert fit([(value, 1.0), (value, 2.0), (value, 0.5)]).reduce_over(RankGroup())["critic/explained_variance"] == 0


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=30), st.data())
def test_no_split_changes_the_fit(step: list[tuple[int, int]], data) -> None:
    cut = data.draw(st.integers(1, len(step) - 1))
    whole, split = fit(step), fit(step[:cut], step[cut:])
    assert split.reduce_over(RankGroup()) == pytest.approx(whole.reduce_over(RankGroup()), rel=1e-9, abs=1e-9)


def test_a_critic_with_another_vocabulary_is_refused(model_path: str, tmp_path: Path) -> None:
    check_vocabulary(save_model(tmp_path / "same", tiny_llama()), model_path)
    for name, words, message in (
        ("fewer", {"0": 0}, r"token '1' is 1 to the policy, and does not exist to the critic"),
        (
            "moved",
            {chr(48 + i): VOCAB - 1 - i for i in range(VOCAB)},
            rf"'0' is 0 to the policy, and is {VOCAB - 1} to",
        ),
    ):
        folder = tmp_path / name
        save_model(folder, tiny_qwen3())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")))
        tokenizer.save_pretrained(folder)
        with pytest.raises(ModelError, match=message) as refusal:
            check_vocabulary(str(folder), model_path)
        assert f"critic.path '{folder}'" in str(refusal.value)
