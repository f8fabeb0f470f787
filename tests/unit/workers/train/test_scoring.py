"""Shared-prefix scoring equals one plain forward per sample, in value and in gradient."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch
from rlsys.errors import ModelError
from rlsys.types import Distribution, VersionSpan
from tests.models import VOCAB, random_prompt, random_sample, tiny_llama, tiny_qwen3
from tests.training import differing
from workers.model.logprobs import score, trained_logprobs
from workers.model.row_attention import AttentionRow, row_attention

MODELS = pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])


def some_samples(seed: int = 0) -> list[Sample]:
    """Prompts of different lengths, each continued by several completions, some of two or three turns."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng) for _ in range(4)]
    return [random_sample(rng, prompt, turns) for prompt in prompts for turns in (1, 2, 1, 3)]


def micro_batch(samples: list[Sample]) -> MicroBatch:
    return MicroBatch.of(samples)


def plain(model: PreTrainedModel, samples: list[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies by a full forward over each whole sequence alone."""
    logprobs, entropies = [], []
    for sample in samples:
        ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1] / temperature
        logprobs_TV = logits_TV.log_softmax(-1)
        is_trained = torch.tensor(sample.is_trained)
        tokens_T = torch.tensor(sample.completion_ids)
        logprobs.append(logprobs_TV.gather(1, tokens_T[:, None])[is_trained, 0])
        entropies.append(torch.distributions.Categorical(logits=logits_TV).entropy()[is_trained])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: PreTrainedModel, logprobs_N: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every token has a weight of its own."""
    model.zero_grad()
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N), device=logprobs_N.device)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@MODELS
def test_values_and_gradients_equal_plain_forwards(make: Callable[[], PreTrainedModel]) -> None:
    model, samples = make().double(), some_samples()
    expected_N, entropies_N = plain(model, samples, 0.7)
    actual_N, entropy_N = trained_logprobs(model, micro_batch(samples), Distribution(0.7))
    torch.testing.assert_close(actual_N.double(), expected_N, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropy_N.double(), entropies_N, rtol=2e-6, atol=2e-6)
    assert not entropy_N.requires_grad
    expected, actual = gradients(model, expected_N), gradients(model, actual_N)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@MODELS
@pytest.mark.parametrize("distribution", [Distribution(0.7), Distribution(0.7, top_k=5)], ids=["all", "truncated"])
def test_the_gradient_of_the_entropy_equals_that_of_plain_forwards(
    make: Callable[[], PreTrainedModel], distribution: Distribution
) -> None:
    model, samples = make().double(), some_samples()
    batch = micro_batch(samples)
    _, whole_N = trained_logprobs(model, batch, distribution, entropy_has_gradient=True)
    _, detached_N = trained_logprobs(model, batch, distribution)
    _, chunked_N = trained_logprobs(model, batch, distribution, max_logits=21 * VOCAB, entropy_has_gradient=True)
    torch.testing.assert_close(whole_N, detached_N)
    whole, chunked = gradients(model, whole_N), gradients(model, chunked_N)
    if not distribution.is_truncated:
        for name, gradient in gradients(model, plain(model, samples, 0.7)[1]).items():
            assert (whole[name] - gradient).norm() <= 2e-6 * gradient.norm(), name
    for name, gradient in whole.items():
        assert gradient.isfinite().all() and (chunked[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@MODELS
def test_in_fp32_the_difference_is_rounding(make: Callable[[], PreTrainedModel]) -> None:
    model, samples = make(), some_samples(1)
    expected_N, _ = plain(model, samples, 1.0)
    actual_N, _ = trained_logprobs(model, micro_batch(samples), Distribution(1.0))
    assert (actual_N - expected_N).norm() <= 2e-6 * expected_N.norm()
    expected, actual = gradients(model, expected_N), gradients(model, actual_N)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 5e-6 * gradient.norm(), name


def test_chunks_of_logits_change_nothing() -> None:
    model, batch = tiny_qwen3(), micro_batch(some_samples(2))
    whole_N, _ = trained_logprobs(model, batch, Distribution(1.0))
    whole = gradients(model, whole_N)
    chunked_N, _ = trained_logprobs(model, batch, Distribution(1.0), max_logits=7 * VOCAB)
    torch.testing.assert_close(chunked_N, whole_N)
    for name, gradient in gradients(model, chunked_N).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-6)


def test_untrained_tokens_reach_the_loss_only_as_context() -> None:
    """The last observation influences what follows it, and its own logprob is not among the results."""
    model = tiny_llama()
    sample = Sample((1, 2), (3, 4, 5, 6), (True, False, False, True), (-1.0, 0.0, 0.0, -1.0), (VersionSpan(0, 2),))
    changed = Sample((1, 2), (3, 4, 7, 6), sample.is_trained, sample.logprobs, sample.versions)
    before_N, _ = trained_logprobs(model, micro_batch([sample]), Distribution(1.0))
    after_N, _ = trained_logprobs(model, micro_batch([changed]), Distribution(1.0))
    assert before_N.shape == (2,)
    assert before_N[0] == after_N[0]
    assert before_N[1] != after_N[1]


def test_completions_of_one_token_need_no_other() -> None:
    model = tiny_qwen3()
    samples = [Sample((1, 2, 3), (t,), (True,), (-1.0,), (VersionSpan(0, 1),)) for t in range(3)]
    logprobs_N, _ = trained_logprobs(model, micro_batch(samples), Distribution(1.0))
    torch.testing.assert_close(logprobs_N, plain(model, samples, 1.0)[0])


@pytest.mark.parametrize("max_tokens", [1, 30, 10_000])
def test_scores_come_back_per_sample_whatever_the_packing(max_tokens: int) -> None:
    model, samples = tiny_llama(), some_samples(3)
    rows = score(model, samples, Distribution(0.9), max_tokens=max_tokens)
    assert [len(row) for row in rows] == [len(s.completion_ids) for s in samples]
    for row, sample in zip(rows, samples, strict=True):
        expected = iter(plain(model, [sample], 0.9)[0].tolist())
        assert row == pytest.approx([next(expected) if on else 0.0 for on in sample.is_trained], rel=1e-4, abs=1e-5)


def test_bfloat16_gives_fp32_logprobs_that_are_close() -> None:
    model, batch = tiny_qwen3(initializer_range=0.05), micro_batch(some_samples(4))
    exact_N, _ = trained_logprobs(model, batch, Distribution(1.0))
    rough_N, _ = trained_logprobs(model.bfloat16(), batch, Distribution(1.0))
    assert rough_N.dtype is torch.float32
    torch.testing.assert_close(rough_N, exact_N, rtol=0, atol=0.05)


@pytest.mark.parametrize("window", [2, 4, 20])
def test_a_sliding_window_sees_the_same_tokens_as_a_plain_forward(window: int) -> None:
    model = tiny_qwen3(use_sliding_window=True, sliding_window=window, max_window_layers=1).double()
    samples = some_samples()
    expected_N, _ = plain(model, samples, 1.0)
    actual_N, _ = trained_logprobs(model, micro_batch(samples), Distribution(1.0))
    torch.testing.assert_close(actual_N.double(), expected_N, rtol=2e-6, atol=2e-6)
    expected = gradients(model, expected_N)
    for name, gradient in gradients(model, actual_N).items():
        assert (expected[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


def test_attention_with_unknown_parts_is_refused() -> None:
    row = AttentionRow.of(torch.tensor([1]), torch.tensor([0]))
    one = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelError, match="Identity asks for attention with position_bias, which is not supported"):
        row_attention(torch.nn.Identity(), one, one, one, None, scaling=1.0, row=row, position_bias=one)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_it_equals_the_cpu() -> None:
    model, batch, device = tiny_qwen3(), micro_batch(some_samples(5)), torch.device("cuda")
    expected_N, _ = trained_logprobs(model, batch, Distribution(1.0))
    torch.nn.Module.to(model, device)
    actual_N, _ = trained_logprobs(model, batch.to(device), Distribution(1.0))
    torch.testing.assert_close(actual_N.cpu(), expected_N, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_gradient_of_a_shared_prompt_has_the_same_bits_every_time() -> None:
    device = torch.device("cuda")
    model = tiny_qwen3()
    torch.nn.Module.to(model, device)
    rng = random.Random(0)
    batch = micro_batch([random_sample(rng, (1, 2, 3)) for _ in range(32)]).to(device)

    def computed() -> dict[str, Tensor]:
        return gradients(model, trained_logprobs(model, batch, Distribution(1.0))[0])

    first = computed()
    for _ in range(10):
        assert differing(computed(), first) == []
