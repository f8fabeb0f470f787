"""Training back-ends: ranks, precision, checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from benchmarks.measure import in_fresh_process
from rlsys.algorithm import Algorithm
from rlsys.config import Config
from rlsys.config.train_section import ActivationCheckpointing, GatherWeights, MemorySavings
from rlsys.errors import CheckpointError, ModelError
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import Distribution
from rlsys.weight_sync.manifest import Manifest, VersionPart
from tests.by_day import first_by_day
from tests.models import save_model, tiny_llama, tiny_qwen3
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
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings, critic_optimizer_settings, learning_rate, optimizer_settings
from workers.train.rank_group import RankGroup
from workers.train.rank_metrics import BIN_WIDTH
from workers.transport.buckets import PartLayout, ReceivedWeights

Outcome = tuple[dict[str, Tensor], list[dict[str, float]], int]
"""Weights, metrics of each step, and the step arrived at."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank does: load, train, save, export."""

    model_path: str
    num_steps: int = 3
    num_updates: int = 1
    max_tokens: int = 40
    dtype: Literal["float32", "bfloat16"] = "float32"
    algorithm: Algorithm = PLAIN
    checkpointing: ActivationCheckpointing = "none"
    gather: GatherWeights = "micro_batch"
    probes: bool = False
    """Is the model asked for a probe before every step, and before it is saved?"""
    load: Path | None = None
    save: Path | None = None
    export: Path | None = None


def train_step(backend: FsdpBackend, ranks: RankGroup, job: Job) -> dict[str, float]:
    plan, payloads = planned(backend.step, ranks.num_ranks, job.algorithm, job.num_updates, job.max_tokens)
    return backend.train_step(plan[ranks.rank], data_of(payloads), job.algorithm, distribution=Distribution(0.9))


def do(job: Job, ranks: RankGroup) -> Outcome:
    backend = FsdpBackend(
        job.model_path, SETTINGS, ranks, dtype=job.dtype, probe_length=8 if job.probes else 0,
        savings=MemorySavings(job.checkpointing, job.gather),
    )  # fmt: skip
    if job.load:
        backend.load(job.load)
    metrics = []
    for _ in range(job.num_steps):
        backend.probe()
        metrics.append(train_step(backend, ranks, job))
    backend.probe()
    if job.save:
        backend.save(job.save).wait()
    if job.export:
        backend.export(job.export)
    return backend.full_weights(torch.float32), metrics, backend.step


def on_one_rank(job: Job) -> Outcome:
    return do(job, RankGroup())


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To rounding."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-4, atol=5e-3 * SETTINGS.lr, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("make", "algorithm", "num_updates"),
    [
        (tiny_llama, Surrogate(over="tokens"), 1),
        (tiny_qwen3, Surrogate(over="tokens"), 1),
        (tiny_qwen3, Surrogate(over="sequences"), 2),
        (tiny_qwen3, Surrogate(over="budget"), 1),
        (tiny_qwen3, Surrogate(over="agents"), 3),
        (tiny_qwen3, Measuring(over="sequences"), 1),
        (tiny_qwen3, Measuring(over="agents"), 2),
    ],
)
def test_two_ranks_arrive_at_the_weights_of_one(
    make: Callable[[], torch.nn.Module], algorithm: Algorithm, num_updates: int, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    job = Job(model_path=save_model(tmp_path, make()), algorithm=algorithm, num_updates=num_updates)
    one, one_metrics, _ = on_one_rank(job)
    (two, two_metrics, _), (nothing, other_metrics, _) = two_ranks(do, job)
    assert nothing == {}
    assert_close(two, one)
    for a, b, c in zip(one_metrics, two_metrics, other_metrics, strict=True):
        assert exact(b) == pytest.approx(exact(a), rel=1e-4, abs=1e-5)
        assert b == pytest.approx(a, rel=1.01 * BIN_WIDTH, abs=1e-5)
        assert c == b


@pytest.mark.parametrize("how", first_by_day(["selective", "full"]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_changes_no_bit_on_two_ranks(
    how: ActivationCheckpointing, dtype: Literal["float32", "bfloat16"], two_ranks: JoinedRanks, model_path: str
) -> None:
    job = Job(model_path=model_path, dtype=dtype, num_updates=2, probes=True)
    (plain, metrics, _), _ = two_ranks(do, job)
    (checkpointed, same_metrics, _), _ = two_ranks(do, replace(job, checkpointing=how))
    assert differing(plain, checkpointed) == []
    assert metrics == same_metrics


@pytest.mark.parametrize("how", first_by_day(["none", "full"]))
@pytest.mark.parametrize("algorithm", [PLAIN, Measuring()])
def test_weights_gathered_once_an_update_arrive_at_those_of_one_rank(
    how: ActivationCheckpointing, algorithm: Algorithm, two_ranks: JoinedRanks, model_path: str
) -> None:
    job = Job(model_path=model_path, algorithm=algorithm, num_updates=2, probes=True)
    one, one_metrics, _ = on_one_rank(job)
    (two, two_metrics, _), _ = two_ranks(do, replace(job, gather="update", checkpointing=how))
    assert_close(two, one)
    for a, b in zip(one_metrics, two_metrics, strict=True):
        assert exact(b) == pytest.approx(exact(a), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("gather", "num_gathers"), first_by_day([("update", 1), ("micro_batch", 2 * 3)]))
def test_a_layer_is_gathered_and_summed_as_often_as_configured(gather: GatherWeights, num_gathers: int) -> None:
    """Of 64 ranks, with three micro-batches an update."""
    counted = in_fresh_process("benchmarks.trainer:collectives_of_a_layer", gather, 3)
    assert counted == {"all_gathers": num_gathers, "reduce_scatters": 3 if gather == "micro_batch" else 1}


def exact(metrics: dict[str, float]) -> dict[str, float]:
    """All but percentiles: rounding may move a token to the next bin."""
    return {name: value for name, value in metrics.items() if "ratio_p" not in name}


@pytest.mark.parametrize("algorithm", [Surrogate(over="agents"), Measuring()])
def test_no_split_into_micro_batches_changes_the_weights(algorithm: Algorithm, model_path: str) -> None:
    few = Job(model_path=model_path, algorithm=algorithm, num_updates=2, max_tokens=10_000)
    many = Job(model_path=model_path, algorithm=algorithm, num_updates=2, max_tokens=1)
    whole, whole_metrics, _ = on_one_rank(few)
    split, split_metrics, _ = on_one_rank(many)
    assert_close(split, whole)
    for a, b in zip(whole_metrics, split_metrics, strict=True):
        assert exact(b) == pytest.approx(exact(a), rel=1e-4, abs=1e-5)


def test_mismatch_is_reported_by_staleness_of_the_sampled_tokens(model_path: str) -> None:
    """All were sampled from version 0, and the three steps train versions 0, 1 and 2."""
    _, metrics, _ = on_one_rank(Job(model_path=model_path))
    for staleness, of_step in enumerate(metrics):
        buckets = {name.split("/")[1] for name in of_step if name.count("/") == 2}
        assert buckets == {f"s{staleness}"}
        assert of_step[f"sampler/s{staleness}/mismatch_kl"] == of_step["sampler/mismatch_kl"]
        assert 0 < of_step["sampler/ess"] < 1
        assert undocumented_names(of_step) == []


@pytest.mark.parametrize(("dtype", "num_ranks"), [("float32", 1), ("bfloat16", 1), ("float32", 2)])
def test_a_probe_changes_neither_training_nor_what_is_saved(
    dtype: Literal["float32", "bfloat16"], num_ranks: int, model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    def run(job: Job) -> Outcome:
        return on_one_rank(job) if num_ranks == 1 else two_ranks(do, job)[0]

    plain, plain_metrics, _ = run(Job(model_path=model_path, dtype=dtype))
    probed, probed_metrics, _ = run(Job(model_path=model_path, dtype=dtype, probes=True, save=tmp_path / "a"))
    assert differing(probed, plain) == []
    assert probed_metrics == plain_metrics
    job = Job(model_path=model_path, dtype=dtype, load=tmp_path / "a", num_steps=1)
    again, _, step = run(job)
    straight, _, _ = run(Job(model_path=model_path, dtype=dtype, num_steps=4))
    assert step == 4
    assert differing(again, straight) == []


def test_a_probe_has_logprobs_of_the_models_own_text(model_path: str) -> None:
    probe = FsdpBackend(model_path, SETTINGS, RankGroup(), probe_length=12).probe()
    assert probe is not None
    model = load_model(model_path, torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([probe.token_ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(probe.token_ids[1:])[:, None])[:, 0]
    assert probe.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(probe.token_ids) == 12
    assert FsdpBackend(model_path, SETTINGS, RankGroup()).probe() is None


def test_a_checkpoint_moves_between_numbers_of_ranks_bit_for_bit(
    model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    """Two ranks save; one loads and saves; two load and save: the same bytes each time, optimizer included."""
    saved, _, _ = two_ranks(do, Job(model_path=model_path, save=tmp_path / "a"))[0]
    loaded, _, step = on_one_rank(Job(model_path=model_path, num_steps=0, load=tmp_path / "a", save=tmp_path / "b"))
    again, _, _ = two_ranks(do, Job(model_path=model_path, num_steps=0, load=tmp_path / "b", save=tmp_path / "c"))[0]
    assert step == 3
    assert differing(saved, loaded) == differing(saved, again) == []
    a, b, c = (everything_in(tmp_path / name) for name in "abc")
    assert len(a) == 4 * len(saved) + 1  # a weight, its two moments and its count of steps; the step
    assert differing(a, b) == differing(a, c) == []


def test_resuming_equals_never_having_stopped(model_path: str, tmp_path: Path) -> None:
    """The version counts steps, the optimizer updates: both go on where they were."""
    whole, _, _ = on_one_rank(Job(model_path=model_path, num_steps=4, num_updates=2))
    on_one_rank(Job(model_path=model_path, num_steps=2, num_updates=2, save=tmp_path))
    resumed, _, step = on_one_rank(Job(model_path=model_path, num_steps=2, num_updates=2, load=tmp_path))
    assert step == 4
    assert differing(whole, resumed) == []


def test_bfloat16_computes_in_bfloat16_and_keeps_fp32_masters(
    model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    exact, exact_metrics, _ = on_one_rank(Job(model_path=model_path))
    one, one_metrics, _ = on_one_rank(Job(model_path=model_path, dtype="bfloat16", save=tmp_path))
    (two, two_metrics, _), _ = two_ranks(do, Job(model_path=model_path, dtype="bfloat16"))
    for weights, metrics in ((one, one_metrics), (two, two_metrics)):
        assert metrics[0]["policy/entropy"] == pytest.approx(exact_metrics[0]["policy/entropy"], rel=0.02)
        assert metrics[0]["policy/entropy"] != exact_metrics[0]["policy/entropy"]
        name = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(weights[name], weights[name].bfloat16().float())
        torch.testing.assert_close(weights[name], exact[name], rtol=0, atol=0.05)
    assert differing(one, on_one_rank(Job(model_path=model_path, num_steps=0, load=tmp_path))[0]) == []


def test_an_export_loads_as_a_hugging_face_model(model_path: str, two_ranks: JoinedRanks, tmp_path: Path) -> None:
    weights, _, _ = two_ranks(do, Job(model_path=model_path, export=tmp_path / "hf"))[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert differing(weights, dict(model.named_parameters())) == []
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    assert tokenizer("012").input_ids != []


def test_full_weights_are_copies_without_tied_duplicates(model_path: str) -> None:
    ranks = RankGroup()
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    weights = backend.full_weights(torch.bfloat16)
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    kept = backend.full_weights(torch.float32)
    train_step(backend, ranks, Job(model_path=model_path))
    untrained, _, _ = on_one_rank(Job(model_path=model_path, num_steps=0))
    assert differing(kept, untrained) == []


def written(backend: FsdpBackend, *, pin: bool = False) -> dict[str, Tensor]:
    """What a rank publishes, read from the memory it is copied into."""
    layout = PartLayout(backend.published_rectangles(), bucket_bytes=4096)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=pin).numpy()
    layout.write(memory, backend.owned_tensors())
    manifest = Manifest((layout.part(memory, VersionPart(0, 0, 1, ())),))
    buckets = [memory[start:end] for start, end in pairwise(layout.bounds)]
    return dict(ReceivedWeights(manifest, buckets, "actor-0"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_copies_them_into_page_locked_memory(model_path: str) -> None:
    on_cpu = FsdpBackend(model_path, SETTINGS, RankGroup(), dtype="bfloat16")
    on_gpu = FsdpBackend(model_path, SETTINGS, RankGroup(), dtype="bfloat16", device=torch.device("cuda"))
    assert differing(written(on_gpu, pin=True), on_cpu.full_weights(torch.bfloat16)) == []


def test_weights_change_only_once_those_of_the_last_publish_are_copied(model_path: str) -> None:
    """A step may begin beside the copy; its update, and the load of a checkpoint, wait for it."""
    ranks = RankGroup()
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    before = backend.full_weights(torch.float32)
    found: list[list[str]] = []
    backend.wait_published = lambda: found.append(differing(before, backend.full_weights(torch.float32)))
    train_step(backend, ranks, Job(model_path=model_path))
    assert found[0] == [], "nothing has changed yet"
    assert differing(before, backend.full_weights(torch.float32)) != []


def test_what_cannot_be_saved_or_loaded_says_where(model_path: str, tmp_path: Path) -> None:
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file"):
        backend.save(tmp_path / "file").wait()
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere"):
        backend.load(tmp_path / "nowhere")


class Planted:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._proof,)


def test_a_planted_pickle_in_a_checkpoint_is_never_run(model_path: str, tmp_path: Path) -> None:
    folder, proof = tmp_path / "saved", tmp_path / "ran"
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    backend.save(folder).wait()
    for name in (".metadata", "__0_0.distcp", "state.pt", "model.bin"):
        (folder / name).write_bytes(pickle.dumps(Planted(proof)))
    backend.load(folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(pickle.dumps(Planted(proof)))
    with pytest.raises(CheckpointError, match=r"cannot read training state from .*saved"):
        backend.load(folder)
    assert not proof.exists()


@pytest.mark.parametrize("path", ["/no/such/model", "./nowhere", "no-such-org/no-such-model"])
def test_a_model_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ModelError, match=path):
        load_model(path, torch.float32)


def test_a_model_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    model = tiny_qwen3()
    weights = {n: w for n, w in model.state_dict().items() if "layers.1" not in n and n != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ModelError, match="is incomplete: it lacks 11"):
        load_model(str(tmp_path), torch.float32)


def test_learning_rate_warms_up_then_decays_to_its_final_fraction() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4, total_steps=14, final_lr_fraction=0.2)
    rates = [learning_rate(step, settings) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.6)
    assert rates[14:] == pytest.approx([0.2] * 6)


@given(st.integers(0, 20), st.integers(1, 200))
def test_a_cosine_schedule_is_that_of_transformers(warmup_steps: int, decay_steps: int) -> None:
    total = warmup_steps + decay_steps
    settings = OptimizerSettings(
        lr=1.0, warmup_steps=warmup_steps, total_steps=total, final_lr_fraction=0.0, lr_schedule="cosine"
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, warmup_steps, total).lr_lambdas[0]
    ours = [learning_rate(step, settings) for step in range(warmup_steps, total)]
    assert ours == pytest.approx([theirs(step) for step in range(warmup_steps, total)])
    assert learning_rate(total, settings) == pytest.approx(0.0)


@pytest.mark.parametrize(("divisor", "by"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_samples_three_versions_old_divide_the_learning_rate(
    divisor: Literal["none", "sqrt", "linear"], by: float, model_path: str
) -> None:
    plan, payloads = planned(0, 1, PLAIN)

    def trained(settings: OptimizerSettings, staleness: float) -> tuple[float, dict[str, Tensor]]:
        backend = FsdpBackend(model_path, settings, RankGroup())
        old = replace(plan[0], staleness=staleness)
        metrics = backend.train_step(old, data_of(payloads), PLAIN, distribution=Distribution(0.9))
        return metrics["optim/lr"], backend.full_weights(torch.float32)

    lr, weights = trained(replace(SETTINGS, lr_staleness=divisor), 3.0)
    expected_lr, expected = trained(replace(SETTINGS, lr=SETTINGS.lr / by), 0.0)
    assert lr == pytest.approx(expected_lr)
    assert_close(weights, expected)


def test_the_age_of_samples_divides_the_learning_rate_of_the_policy_alone() -> None:
    config = Config.load(
        [], ["model.path=m", "data.path=d", "reward.fn=f.py:f", "run.steps=3", "train.lr_staleness=sqrt"]
    )
    assert optimizer_settings(config).lr_staleness == "sqrt"
    assert critic_optimizer_settings(config).lr_staleness == "none"
