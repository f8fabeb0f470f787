"""Adapters in training: what is trained, published, saved, exported and refused."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlsys.algorithm import Algorithm, Column
from rlsys.config.lora_section import LoraSection
from rlsys.errors import CheckpointError, ModelError
from rlsys.types import Distribution
from tests.training import (
    PLAIN,
    SETTINGS,
    JoinedRanks,
    Surrogate,
    data_of,
    differing,
    everything_in,
    planned,
)
from workers.model.adapter_files import base_hash
from workers.model.logprobs import trained_logprobs
from workers.model.lora import A, adapter_of, add_adapter
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import learning_rate
from workers.train.rank_group import RankGroup
from workers.train.step_data import RankStep

SAMPLED = Distribution(0.9)

LORA = LoraSection(rank=4, alpha=8.0)
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of some steps that train an adapter."""

    model_path: str
    lora: LoraSection = LORA
    num_steps: int = 3
    num_updates: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    algorithm: Algorithm = PLAIN
    load: Path | None = None
    save: Path | None = None


def do(job: Job, ranks: RankGroup) -> tuple[Weights, list[dict[str, float]]]:
    """Published tensors after the steps, and the metrics of each step."""
    backend = FsdpBackend(job.model_path, SETTINGS, ranks, dtype=job.dtype, lora=job.lora)
    if job.load:
        backend.load(job.load)
    metrics = [trained(backend, ranks, job.algorithm, job.num_updates) for _ in range(job.num_steps)]
    if job.save:
        backend.save(job.save).wait()
    return backend.full_weights(torch.float32), metrics


def trained(
    backend: FsdpBackend, ranks: RankGroup, algorithm: Algorithm = PLAIN, num_updates: int = 1
) -> dict[str, float]:
    plan, payloads = planned(backend.step, ranks.num_ranks, algorithm, num_updates)
    return backend.train_step(plan[ranks.rank], data_of(payloads), algorithm, distribution=SAMPLED)


def one_rank(job: Job) -> Weights:
    return do(job, RankGroup())[0]


def backend_of(model_path: str, lora: LoraSection | None = LORA, **choices: Any) -> FsdpBackend:
    return FsdpBackend(model_path, SETTINGS, RankGroup(), lora=lora, **choices)


def base_of(backend: FsdpBackend) -> Weights:
    return {name: p.detach().clone() for name, p in backend._model.named_parameters() if not p.requires_grad}


def test_steps_equal_those_of_plain_peft_and_torch(model_path: str) -> None:
    algorithm = Surrogate(over="tokens")
    actual = one_rank(Job(model_path=model_path, algorithm=algorithm))
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    named = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert named.keys() == actual.keys()
    untrained = one_rank(Job(model_path=model_path, num_steps=0))
    for name, parameter in named.items():
        parameter.data.copy_(untrained[name])
    optimizer = torch.optim.AdamW(named.values(), betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=0.1)
    for step in range(3):
        plan, payloads = planned(step, 1, algorithm)
        rank_step = RankStep(
            plan=plan[0], data=data_of(payloads), algorithm=algorithm, version=step, device=torch.device("cpu")
        )
        optimizer.zero_grad()

        def score(batch: Any) -> tuple[Tensor, Tensor]:
            return trained_logprobs(cast("Any", model).base_model.model, batch, SAMPLED)

        for parts in rank_step.whole(torch.no_grad()(score), RankGroup()):
            for part in parts:
                logprobs_N, _ = score(part.batch)
                inputs = replace(part.inputs, proximal_logprobs_N=logprobs_N.detach())
                part.loss(algorithm.loss(logprobs_N, inputs)).backward()
        nn.utils.clip_grad_norm_(named.values(), SETTINGS.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, SETTINGS)
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(actual[name], parameter.detach(), rtol=1e-4, atol=5e-3 * SETTINGS.lr)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_two_ranks_arrive_at_the_adapter_of_one(num_updates: int, two_ranks: JoinedRanks, model_path: str) -> None:
    job = Job(model_path=model_path, num_updates=num_updates)
    one = one_rank(job)
    (two, _), (nothing, _) = two_ranks(do, job)
    assert nothing == {}
    assert two.keys() == one.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=5e-3 * SETTINGS.lr)


def test_two_ranks_train_an_adapter_of_a_bfloat16_base(two_ranks: JoinedRanks, model_path: str) -> None:
    one, one_metrics = do(Job(model_path=model_path, dtype="bfloat16"), RankGroup())
    (two, two_metrics), _ = two_ranks(do, Job(model_path=model_path, dtype="bfloat16"))
    for a, b in zip(one_metrics, two_metrics, strict=True):
        assert b["optim/grad_norm"] == pytest.approx(a["optim/grad_norm"], rel=0.05)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=0.02)
        assert not torch.equal(one[name], one[name].bfloat16().float())  # the optimizer's are fp32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_is_trained_and_has_state(dtype: Literal["float32", "bfloat16"], model_path: str) -> None:
    backend = backend_of(model_path, dtype=dtype)
    before = base_of(backend)
    started = backend.full_weights(torch.float32)
    for _ in range(3):
        trained(backend, RankGroup())
    assert differing(base_of(backend), before) == []
    assert len(differing(backend.full_weights(torch.float32), started)) == len(started)
    assert {name.split(".")[-3] for name in backend.parameters()} == {"lora_A", "lora_B"}
    assert len(backend._optimizer.state) == len(started)
    frozen = [p for p in backend._model.parameters() if not p.requires_grad]
    assert all(p.grad is None for p in frozen)
    assert {p.dtype for p in frozen} == {getattr(torch, dtype)}


def test_the_reference_is_the_base_without_the_adapter(two_ranks: JoinedRanks, model_path: str) -> None:
    plan, payloads = planned(0, 2, PLAIN)
    model = load_model(model_path, torch.float32)
    for rank, columns in enumerate(two_ranks(reference_after_steps, model_path)):
        data = data_of(payloads)
        for micro_batch, (before, after) in zip(plan[rank].micro_batches, zip(*columns, strict=True), strict=True):
            with torch.no_grad():
                expected = trained_logprobs(model, data.micro_batch(micro_batch), SAMPLED)[0]
            torch.testing.assert_close(torch.tensor(before), expected, rtol=0, atol=1e-5)
            assert (before == after).all()


def reference_after_steps(model_path: str, ranks: RankGroup) -> Any:
    """The reference column before and after two steps, as FSDP decides at its first forward what has a gradient."""
    backend = FsdpBackend(model_path, SETTINGS, ranks, lora=LORA)
    plan, payloads = planned(0, ranks.num_ranks, PLAIN)
    columns = []
    for num_steps in (0, 2):
        started = backend.full_weights(torch.float32)
        for _ in range(num_steps):
            trained(backend, ranks)
        assert len(differing(backend.full_weights(torch.float32), started)) == len(started) * bool(num_steps)
        columns.append(
            backend.reference(plan[ranks.rank], data_of(payloads), Column.REFERENCE_LOGPROBS, distribution=SAMPLED)
        )
    return columns


def test_the_probe_sees_the_adapter(model_path: str) -> None:
    backend = backend_of(model_path, probe_length=8)
    before, started = backend.probe(), load_model(model_path, torch.float32)
    trained(backend, RankGroup())
    after = backend.probe()
    assert before is not None
    assert after is not None
    with torch.no_grad():
        logprobs = started(torch.tensor([before.token_ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(before.token_ids[1:])[:, None])[:, 0]
    assert before.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert before.difference(after.logprobs) > 1e-3


def test_an_adapter_is_a_small_part_of_what_is_published() -> None:
    """SmolLM2-135M's sizes, on the meta device: attention 1.4 % of all bytes, all linear layers 3.6 %."""
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for targets, share in ((attention, 0.0137), (None, 0.0363)):
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        whole = sum(p.numel() for p in model.parameters())
        add_adapter(model, LoraSection(targets=targets), "smollm2")
        assert sum(p.numel() for p in adapter_of(model).values()) / whole == pytest.approx(share, abs=1e-4)


# -------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_has_the_adapter_and_its_optimizer_state_alone(model_path: str, tmp_path: Path) -> None:
    weights = one_rank(Job(model_path=model_path, save=tmp_path))
    saved = everything_in(tmp_path)
    assert len(saved) == 4 * len(weights) + 3  # the step; the scale, and the hash of the base
    assert not [name for name in saved if "base_layer" in name or "embed" in name]


def test_resuming_equals_never_having_stopped(model_path: str, tmp_path: Path) -> None:
    whole = one_rank(Job(model_path=model_path, num_steps=4, num_updates=2))
    one_rank(Job(model_path=model_path, num_steps=2, num_updates=2, save=tmp_path))
    resumed = one_rank(Job(model_path=model_path, num_steps=2, num_updates=2, load=tmp_path))
    assert differing(whole, resumed) == []


def test_a_checkpoint_moves_between_numbers_of_ranks_bit_for_bit(
    model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    saved, _ = two_ranks(do, Job(model_path=model_path, save=tmp_path / "a"))[0]
    loaded = one_rank(Job(model_path=model_path, num_steps=0, load=tmp_path / "a", save=tmp_path / "b"))
    assert differing(saved, loaded) == []
    assert differing(everything_in(tmp_path / "a"), everything_in(tmp_path / "b")) == []


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "was saved with train.lora, and this run has no adapter"),
        (LoraSection(rank=8, alpha=8.0), "another train.lora.rank"),
        (LoraSection(rank=4, alpha=9.0), "train.lora.alpha 8, and this run has 9"),
        (LoraSection(rank=4, alpha=8.0, targets=["q_proj"]), r"other train.lora.targets"),
    ],
)
def test_a_resume_with_other_settings_is_refused(
    lora: LoraSection | None, message: str, model_path: str, tmp_path: Path
) -> None:
    one_rank(Job(model_path=model_path, num_steps=1, save=tmp_path))
    other = backend_of(model_path, lora=lora)
    before = other.full_weights(torch.float32)
    with pytest.raises(CheckpointError, match=message):
        other.load(tmp_path)
    assert differing(before, other.full_weights(torch.float32)) == []


def test_an_adapter_cannot_resume_from_whole_weights_or_on_another_base(model_path: str, tmp_path: Path) -> None:
    backend_of(model_path, lora=None).save(tmp_path / "whole").wait()
    with pytest.raises(CheckpointError, match=r"was saved without train\.lora"):
        backend_of(model_path).load(tmp_path / "whole")
    one_rank(Job(model_path=model_path, num_steps=1, save=tmp_path / "adapter"))
    other = changed_copy(model_path, tmp_path / "model")
    with pytest.raises(CheckpointError, match=f"adapter of the base {base_hash(model_path)}.* are {base_hash(other)}"):
        backend_of(other).load(tmp_path / "adapter")


def changed_copy(model_path: str, folder: Path) -> str:
    """The same model, in which one number differs."""
    shutil.copytree(model_path, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(folder)
    return str(folder)


def test_the_hash_of_a_base_is_that_of_its_numbers_not_of_its_files(model_path: str, tmp_path: Path) -> None:
    shutil.copytree(model_path, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 1
    assert base_hash(str(tmp_path / "model")) == base_hash(model_path)
    assert base_hash(changed_copy(model_path, tmp_path / "other")) != base_hash(model_path)


# ------------------------------------------------------------------------------------------------------------ exports


def test_an_export_is_merged_and_an_exported_adapter_loads_in_peft(model_path: str, tmp_path: Path) -> None:
    backend = backend_of(model_path)
    for _ in range(3):
        trained(backend, RankGroup())
    backend.export(tmp_path / "merged")
    backend.export_adapter(tmp_path / "adapter")
    ids = torch.arange(10)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        expected = backend._model(ids).logits
        untrained = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(adapted, expected, rtol=0, atol=1e-5)
    assert (expected - untrained).abs().max() > 0.01


def test_training_starts_from_an_exported_adapter(model_path: str, tmp_path: Path) -> None:
    backend = backend_of(model_path)
    trained(backend, RankGroup())
    backend.export_adapter(tmp_path)
    again = backend_of(model_path, lora=LORA.model_copy(update={"path": str(tmp_path)}))
    assert differing(again.full_weights(torch.float32), backend.full_weights(torch.float32)) == []


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraSection(rank=8, alpha=8.0), r"its rank is 4, and train\.lora\.rank is 8"),
        (LoraSection(rank=4, alpha=16.0), r"its alpha is 8\.0, and train\.lora\.alpha is 16"),
        (LoraSection(rank=4, alpha=8.0, targets=["q_proj"]), r"train\.lora\.targets does not include 24 of its"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(
    lora: LoraSection, message: str, model_path: str, tmp_path: Path
) -> None:
    backend_of(model_path).export_adapter(tmp_path)
    with pytest.raises(ModelError, match=message):
        backend_of(model_path, lora=lora.model_copy(update={"path": str(tmp_path)}))


def test_an_adapter_of_another_base_is_refused_by_name(model_path: str, tmp_path: Path) -> None:
    backend_of(model_path).export_adapter(tmp_path / "adapter")
    other = changed_copy(model_path, tmp_path / "model")
    with pytest.raises(ModelError, match=f"belongs to the base {base_hash(model_path)}, .* are {base_hash(other)}"):
        backend_of(other, lora=LORA.model_copy(update={"path": str(tmp_path / "adapter")}))


def test_a_path_without_an_adapter_is_refused(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"contains no adapter: it has no adapter_config\.json and no adapter_model"):
        backend_of(model_path, lora=LORA.model_copy(update={"path": str(tmp_path)}))
    backend_of(model_path).export_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        backend_of(model_path, lora=LORA.model_copy(update={"path": str(tmp_path)}))


def test_targets_without_a_layer_are_refused_with_the_nearest_name(model_path: str) -> None:
    with pytest.raises(ModelError, match=r"'q_prj' matches no linear layer of .*; did you mean `q_proj`"):
        backend_of(model_path, lora=LoraSection(targets=["q_prj"]))
    with pytest.raises(ModelError, match=r"'lm_head' matches no linear layer of .*; its linear layers are down_proj, "):
        backend_of(model_path, lora=LoraSection(targets=["lm_head"]))


def test_an_adapter_is_the_same_in_every_process(model_path: str) -> None:
    first, second = backend_of(model_path), backend_of(model_path)
    torch.manual_seed(5)
    third = backend_of(model_path)
    random = {name: t for name, t in third.full_weights(torch.float32).items() if name.endswith(A)}
    assert differing(first.full_weights(torch.float32), second.full_weights(torch.float32)) == []
    assert differing(first.full_weights(torch.float32), third.full_weights(torch.float32)) == []
    assert all(t.abs().max() > 0 for t in random.values())
