"""Training back-ends: ranks, precision, checkpoints. Two ranks are two processes over gloo."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorithms.grpo import GRPO
from rlsys.algorithm import Algorithm, LossInputs, LossOutput
from rlsys.batch.plan import BatchPlan, plan_batch
from rlsys.batch.samples import meta_of
from rlsys.batch.tensors import StepData
from rlsys.errors import CheckpointError, ModelError, TrainingError
from rlsys.events import undocumented
from rlsys.types import Episode, Group
from tests.models import random_group, save_model, tiny_llama, tiny_qwen3
from workers.train.fsdp import FsdpBackend
from workers.train.metrics import BIN_WIDTH
from workers.train.model import load_model
from workers.train.ranks import Ranks
from workers.train.settings import OptimizerSettings, learning_rate
from workers.transport.tensors import Snapshot, specs_of

if TYPE_CHECKING:
    from rlsys.algorithm import Gradients

SETTINGS = OptimizerSettings(lr=1e-2, weight_decay=0.1, warmup_steps=2, total_steps=10, final_lr_fraction=0.1)
Outcome = tuple[dict[str, Tensor], list[dict[str, float]], int]
"""Weights, metrics of each step, and the step arrived at."""
PLAIN = GRPO(group_size=4)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank does: load, train, save, export."""

    model_path: str
    num_steps: int = 3
    dtype: Literal["float32", "bfloat16"] = "float32"
    algorithm: Algorithm = PLAIN
    probes: bool = False
    """Is the model asked for a probe before every step, and before it is saved?"""
    load: Path | None = None
    save: Path | None = None
    export: Path | None = None


@dataclass(frozen=True, kw_only=True)
class NanOnce(GRPO):
    """NaN where the advantage is the lowest of the batch: in one micro-batch of one rank."""

    lowest: float

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        output = super().loss(logprobs_N, batch)
        is_lowest_N = batch.advantages_N <= self.lowest + 1e-6
        return replace(output, loss_N=output.loss_N.masked_fill(is_lowest_N, float("nan")))


class Halve:
    """A stabilizer that halves gradients, and counts their elements over all ranks."""

    def __call__(self, gradients: Gradients, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        for gradient in gradients.values():
            gradient.mul_(0.5)
        return {"stabilizer/elements": all_reduce(torch.tensor(sum(g.numel() for g in gradients.values()))).item()}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert not state


def batch(step: int, num_ranks: int, algorithm: Algorithm) -> tuple[BatchPlan, list[tuple[Episode, ...]]]:
    """Three groups of random samples, in micro-batches so small that ranks differ in number and one runs fillers."""
    rng = random.Random(step)
    payloads = [random_group(rng, 4) for _ in range(3)]
    groups = [group_of(serial, payload) for serial, payload in enumerate(payloads)]
    assigned = [list(algorithm.advantages(g)) for g in groups]
    return plan_batch(groups, assigned, num_ranks=num_ranks, max_tokens=40), payloads


def group_of(serial: int, payload: tuple[Episode, ...]) -> Group:
    return Group(
        serial=serial,
        task_id=str(serial),
        permit_version=0,
        replica="r0",
        episodes=meta_of(payload),
        versions=(),
        weights=(),
        payload=payload,
    )


WORST = sorted((r.advantage,) for micro_batch in batch(0, 1, PLAIN)[0].ranks[0] for r in micro_batch.samples)


def nan_once() -> NanOnce:
    micro_batches = batch(0, 1, PLAIN)[0].ranks[0]
    return NanOnce(group_size=4, lowest=min(sample.advantage for m in micro_batches for sample in m.samples))


def train_step(
    backend: FsdpBackend, ranks: Ranks, algorithm: Algorithm, halve: Halve | None = None
) -> dict[str, float]:
    plan, payloads = batch(backend.step, ranks.num_ranks, algorithm)
    data = StepData(payloads, [{} for _ in payloads])
    mine = plan.ranks[ranks.rank]
    return backend.train_step(mine, plan.denominators, data, algorithm, temperature=0.9, stabilizer=halve)


def do(job: Job, ranks: Ranks) -> Outcome:
    torch.set_num_threads(1)
    backend = FsdpBackend(job.model_path, SETTINGS, ranks, dtype=job.dtype, probe_length=8 if job.probes else 0)
    if job.load:
        backend.load(job.load)
    metrics = []
    for _ in range(job.num_steps):
        backend.probe()
        metrics.append(train_step(backend, ranks, job.algorithm))
    backend.probe()
    if job.save:
        backend.save(job.save)
    if job.export:
        backend.export(job.export)
    return backend.full_weights(torch.float32), metrics, backend.step


def on_one_rank(job: Job) -> Outcome:
    return do(job, Ranks())


class TwoRanks:
    """Two processes that have joined each other, and stay for the whole module: starting one costs seconds."""

    def __init__(self, folder: Path) -> None:
        self._pools = [
            ProcessPoolExecutor(1, get_context("spawn"), initializer=_join, initargs=(rank, f"file://{folder}/ranks"))
            for rank in range(2)
        ]

    def __call__(self, function: Callable[[Job], Outcome], job: Job) -> list[Outcome]:
        """What `function` returned on each rank."""
        return [f.result(timeout=100) for f in [pool.submit(function, job) for pool in self._pools]]

    def close(self) -> None:
        for pool in self._pools:
            pool.submit(_leave)
        for pool in self._pools:
            pool.shutdown()


_joined: list[Ranks] = []


def _join(rank: int, address: str) -> None:
    _joined.append(Ranks(rank, 2, address=address, timeout_s=90))


def _leave() -> None:
    _joined.pop().close()


def do_joined(job: Job) -> Outcome:
    return do(job, _joined[0])


def fail_joined(job: Job) -> Outcome:
    """A step that fails on both ranks, and the weights afterwards."""
    backend = FsdpBackend(job.model_path, SETTINGS, _joined[0])
    with pytest.raises(TrainingError, match="loss is nan"):
        train_step(backend, _joined[0], job.algorithm)
    return backend.full_weights(torch.float32), [], backend.step


def halve_joined(job: Job) -> Outcome:
    backend = FsdpBackend(job.model_path, SETTINGS, _joined[0])
    metrics = train_step(backend, _joined[0], job.algorithm, Halve())
    return backend.full_weights(torch.float32), [metrics], backend.step


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("qwen3"), tiny_qwen3())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    ranks = TwoRanks(tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.close()


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("over", ["tokens", "sequences"])
@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_two_ranks_arrive_at_the_weights_of_one(
    make: Callable[[], torch.nn.Module], over: Literal["tokens", "sequences"], two_ranks: TwoRanks, tmp_path: Path
) -> None:
    job = Job(model_path=save_model(tmp_path, make()), algorithm=GRPO(group_size=4, over=over))
    one, one_metrics, _ = on_one_rank(job)
    (two, two_metrics, _), (nothing, other_metrics, _) = two_ranks(do_joined, job)
    assert nothing == {}
    assert one.keys() == two.keys()
    # AdamW divides a gradient by its size, so that rounding of one near 0 becomes a share of the learning rate.
    atol = 5e-3 * SETTINGS.lr
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    for a, b, c in zip(one_metrics, two_metrics, other_metrics, strict=True):
        assert exact(b) == pytest.approx(exact(a), rel=1e-4, abs=1e-5)
        assert b == pytest.approx(a, rel=1.01 * BIN_WIDTH, abs=1e-5)
        assert c == b


def exact(metrics: dict[str, float]) -> dict[str, float]:
    """All but percentiles: rounding may move a token to the next bin."""
    return {name: value for name, value in metrics.items() if "ratio_p" not in name}


def test_tokens_are_reported_by_the_versions_between_their_sampling_and_the_step(model_path: str) -> None:
    """All were sampled from version 0, and the three steps train versions 0, 1 and 2."""
    _, metrics, _ = on_one_rank(Job(model_path=model_path))
    for staleness, of_step in enumerate(metrics):
        buckets = {name.split("/")[1] for name in of_step if name.count("/") == 2}
        assert buckets == {f"s{staleness}"}
        assert of_step[f"sampler/s{staleness}/mismatch_kl"] == of_step["sampler/mismatch_kl"]
        assert 0 < of_step["sampler/ess"] < 1
        assert undocumented(of_step) == []


@pytest.mark.parametrize("correction", ["tis", "none"])
def test_the_trainer_starts_a_step_from_its_own_logprobs(model_path: str, correction: Literal["tis", "none"]) -> None:
    """Against them its ratio is 1, however far it is from the engine."""
    _, metrics, _ = on_one_rank(Job(model_path=model_path, algorithm=GRPO(group_size=4, correction=correction)))
    is_one = [of_step["policy/ratio_mean"] == pytest.approx(1, abs=1e-6) for of_step in metrics]
    assert is_one == [correction == "tis"] * 3


@pytest.mark.parametrize(("dtype", "num_ranks"), [("float32", 1), ("bfloat16", 1), ("float32", 2)])
def test_a_probe_changes_neither_training_nor_what_is_saved(
    dtype: Literal["float32", "bfloat16"], num_ranks: int, model_path: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    def run(job: Job) -> Outcome:
        return on_one_rank(job) if num_ranks == 1 else two_ranks(do_joined, job)[0]

    plain, plain_metrics, _ = run(Job(model_path=model_path, dtype=dtype))
    probed, probed_metrics, _ = run(Job(model_path=model_path, dtype=dtype, probes=True, save=tmp_path / "a"))
    assert_same(probed, plain)
    assert probed_metrics == plain_metrics
    job = Job(model_path=model_path, dtype=dtype, load=tmp_path / "a", num_steps=1)
    again, _, step = run(job)
    straight, _, _ = run(Job(model_path=model_path, dtype=dtype, num_steps=4))
    assert step == 4
    assert_same(again, straight)


def test_a_probe_is_the_models_own_opinion_of_a_text_it_finds_likely(model_path: str) -> None:
    probe = FsdpBackend(model_path, SETTINGS, Ranks(), probe_length=12).probe()
    assert probe is not None
    model = load_model(model_path, torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([probe.token_ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(probe.token_ids[1:])[:, None])[:, 0]
    assert probe.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(probe.token_ids) == 12
    assert FsdpBackend(model_path, SETTINGS, Ranks()).probe() is None


def test_a_checkpoint_moves_between_numbers_of_ranks_bit_for_bit(
    model_path: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    """Two ranks save; one loads and saves; two load and save: the same bytes each time, optimizer included."""
    saved, _, _ = two_ranks(do_joined, Job(model_path=model_path, save=tmp_path / "a"))[0]
    loaded, _, step = on_one_rank(Job(model_path=model_path, num_steps=0, load=tmp_path / "a", save=tmp_path / "b"))
    again, _, _ = two_ranks(
        do_joined, Job(model_path=model_path, num_steps=0, load=tmp_path / "b", save=tmp_path / "c")
    )[0]
    assert step == 3
    assert_same(saved, loaded)
    assert_same(saved, again)
    a, b, c = (everything_in(tmp_path / name) for name in "abc")
    assert len(a) == 4 * len(saved) + 1  # a weight, its two moments and its count of steps; the step
    assert_same(a, b)
    assert_same(a, c)


def everything_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their path in it."""
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    return {f"{part}.{name}": t for part, tensors in torch.load(file).items() for name, t in tensors.items()}


def test_resuming_equals_never_having_stopped(model_path: str, tmp_path: Path) -> None:
    whole, _, _ = on_one_rank(Job(model_path=model_path, num_steps=4))
    on_one_rank(Job(model_path=model_path, num_steps=2, save=tmp_path))
    resumed, _, step = on_one_rank(Job(model_path=model_path, num_steps=2, load=tmp_path))
    assert step == 4
    assert_same(whole, resumed)


def test_nan_on_one_rank_fails_all_and_steps_none(model_path: str, two_ranks: TwoRanks) -> None:
    before, _, _ = on_one_rank(Job(model_path=model_path, num_steps=0))
    (after, _, step), _ = two_ranks(fail_joined, Job(model_path=model_path, algorithm=nan_once()))
    assert step == 0
    assert_same(before, after)


def test_a_failed_step_leaves_no_trace_in_the_next(model_path: str) -> None:
    ranks = Ranks()
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    with pytest.raises(TrainingError, match="nothing was stepped"):
        train_step(backend, ranks, nan_once())
    train_step(backend, ranks, PLAIN)
    once, _, _ = on_one_rank(Job(model_path=model_path, num_steps=1))
    assert_same(backend.full_weights(torch.float32), once)


def test_a_stabilizer_edits_every_shard_before_clipping(model_path: str, two_ranks: TwoRanks) -> None:
    weights, plain, _ = on_one_rank(Job(model_path=model_path, num_steps=1))
    (_, halved, _), _ = two_ranks(halve_joined, Job(model_path=model_path))
    assert halved[0]["optim/grad_norm"] == pytest.approx(plain[0]["optim/grad_norm"] / 2, rel=1e-4)
    assert halved[0]["stabilizer/elements"] == sum(w.numel() for w in weights.values())


def test_bfloat16_computes_in_bfloat16_and_keeps_fp32_masters(
    model_path: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    exact, exact_metrics, _ = on_one_rank(Job(model_path=model_path))
    one, one_metrics, _ = on_one_rank(Job(model_path=model_path, dtype="bfloat16", save=tmp_path))
    (two, two_metrics, _), _ = two_ranks(do_joined, Job(model_path=model_path, dtype="bfloat16"))
    for weights, metrics in ((one, one_metrics), (two, two_metrics)):
        assert metrics[0]["policy/entropy"] == pytest.approx(exact_metrics[0]["policy/entropy"], rel=0.02)
        assert metrics[0]["policy/entropy"] != exact_metrics[0]["policy/entropy"]
        name = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(weights[name], weights[name].bfloat16().float())
        torch.testing.assert_close(weights[name], exact[name], rtol=0, atol=0.05)
    assert_same(one, on_one_rank(Job(model_path=model_path, num_steps=0, load=tmp_path))[0])


def test_an_export_loads_as_a_hugging_face_model(model_path: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    weights, _, _ = two_ranks(do_joined, Job(model_path=model_path, export=tmp_path / "hf"))[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert_same(weights, dict(model.named_parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("012").input_ids != []


def test_full_weights_are_copies_without_tied_duplicates(model_path: str) -> None:
    ranks = Ranks()
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    weights = backend.full_weights(torch.bfloat16)
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    kept = backend.full_weights(torch.float32)
    train_step(backend, ranks, PLAIN)
    untrained, _, _ = on_one_rank(Job(model_path=model_path, num_steps=0))
    assert_same(kept, untrained)


def test_weights_are_copied_into_the_memory_they_are_published_from(model_path: str) -> None:
    backend = FsdpBackend(model_path, SETTINGS, Ranks())
    specs = backend.specs(torch.bfloat16)
    snapshot = Snapshot(specs, bucket_bytes=4096)
    backend.copy_weights(snapshot.tensors)
    assert_same(snapshot.tensors, backend.full_weights(torch.bfloat16))
    assert set(specs_of(snapshot.tensors)) == set(specs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_copies_them_into_page_locked_memory(model_path: str) -> None:
    on_cpu = FsdpBackend(model_path, SETTINGS, Ranks())
    on_gpu = FsdpBackend(model_path, SETTINGS, Ranks(), device=torch.device("cuda"))
    snapshot = Snapshot(on_gpu.specs(torch.bfloat16), bucket_bytes=4096, pin=True)
    on_gpu.copy_weights(snapshot.tensors)
    assert_same(snapshot.tensors, on_cpu.full_weights(torch.bfloat16))


def test_what_cannot_be_saved_or_loaded_says_where(model_path: str, tmp_path: Path) -> None:
    backend = FsdpBackend(model_path, SETTINGS, Ranks())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file"):
        backend.save(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere"):
        backend.load(tmp_path / "nowhere")


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


def test_the_learning_rate_warms_up_then_falls_to_its_final_fraction() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4, total_steps=14, final_lr_fraction=0.2)
    rates = [learning_rate(step, settings) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.6)
    assert rates[14:] == pytest.approx([0.2] * 6)
